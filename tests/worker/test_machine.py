"""Samples of the machine: thinned without losing their ends; a GPU that cannot be asked is no reason to stop."""

from hypothesis import given
from hypothesis import strategies as st

from jobs.provenance import Sample
from worker.machine import Gpus, installed_versions, thin


@given(st.integers(0, 300), st.integers(2, 60))
def test_a_thinned_run_keeps_order_and_ends_within_its_size(num_samples: int, max_number: int) -> None:
    samples = [Sample(at_s=float(second)) for second in range(num_samples)]
    thinned = thin(samples, max_number)
    assert len(thinned) == min(num_samples, max_number)
    assert list(thinned) == sorted(set(thinned), key=lambda sample: sample.at_s)
    if samples:
        assert (thinned[0], thinned[-1]) == (samples[0], samples[-1])


def test_a_gpu_that_nvml_does_not_know_is_not_read() -> None:
    gpus = Gpus(["GPU-00000000-0000-0000-0000-000000000000"])
    assert (gpus.names, gpus.read()) == ((), {})
    gpus.close()
    assert Gpus([]).read() == {}


def test_versions_name_python_and_what_computes() -> None:
    assert {"Python", "nightmill", "torch", "pyarrow"} <= installed_versions().keys()
