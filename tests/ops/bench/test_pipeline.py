"""What the pipeline's benchmark reads of processes, and what it makes of it."""

import os
import subprocess
import sys

from ops.bench.pipeline import Memory, MemoryMeter, _memory, child_pids, resident_mib


def test_a_process_s_children_and_its_memory_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with MemoryMeter(child.pid):
            assert child.pid in child_pids(os.getpid())
            assert resident_mib(child.pid) > 0
        child.communicate(b"\n")
    assert (resident_mib(child.pid), child_pids(child.pid)) == (0.0, [])


def test_memory_is_compared_between_a_job_s_beginning_and_its_end() -> None:
    meter = MemoryMeter(0)
    meter.samples = [Memory(float(second), worker_mib=100.0 + second, engine_mib=500.0) for second in range(100)]
    found = _memory(meter, meter.begun_s + 10.0, meter.begun_s + 59.0)
    assert (found["worker_first_mib"], found["worker_last_mib"]) == (117.0, 157.0)
    assert found["engine_first_mib"] == found["engine_last_mib"] == 500.0
    assert set(_memory(meter, meter.begun_s + 200.0, meter.begun_s + 201.0).values()) == {0.0}
