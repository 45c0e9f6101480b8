"""One night under attack: a job on real workers and a real Redis, faults drawn by a seed, and what became of the rows.

A supervisor starts dead workers again, as systemd would; a person types at most one resume. Labels are compared with
those of a night without faults.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis

from jobs import api
from jobs.broker import server_binary
from jobs.job import PARTS, Job, part_key
from jobs.queue import PREFIX
from jobs.verify import verify
from schemas.errors import JobError
from schemas.records import JobState, Sampling
from tests.clock import step_clock
from tests.worker.lab import Lab, Worker, until

HOPS = ("received", "leased", "submitted", "validated", "committed", "finished")
RECOVERY_S = 90.0
TMPFS_SIZE = "48m"

Labels = dict[str, tuple[str, str]]
"""Label and status by input text."""


class RedisServer:
    """A Redis over TCP with its data on disk; dies and comes back with or without them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port)
        self.start()

    @staticmethod
    def binary() -> str:
        """Redis where it is installed, else the embedded broker's Valkey."""
        return shutil.which("redis-server") or str(server_binary())

    def start(self) -> None:
        self._directory.mkdir(exist_ok=True)
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "appendonly": "yes", "save": ""}
        command = [self.binary(), *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        until(self._answers, "Redis to answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wipe(self) -> None:
        shutil.rmtree(self._directory)

    def close(self) -> None:
        self.client.close()
        self.kill()

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False


@dataclass(frozen=True)
class Plan:
    """What a night is made of."""

    num_chunks: int = 110
    chunk_rows: int = 24
    row_steps: int = 20
    num_last_chunks: int = 16  # left alone but for the end's own fault
    step_s: float = 0.02
    visibility_s: float = 3.0
    reconcile_s: float = 1.0
    hang_s: float = 4.0
    num_ranks: int = 2  # of each engine
    app: str = "tests.worker.fake_app"
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def is_fake(self) -> bool:
        """Whether the engine is the fake one, which counts its answers and has faults at hops."""
        return self.app == "tests.worker.fake_app"


@dataclass(frozen=True)
class Strike:
    """One fault and how the system took it."""

    kind: str
    recovery_s: float
    num_recomputed: int  # rows that the engine answered again until then
    num_at_risk: int  # rows of the chunks that were in flight


@dataclass
class Outcome:
    """A finished night."""

    strikes: list[Strike]
    num_rows: int
    num_lost: int
    num_doubled: int
    num_wrong: int  # another status or label than undisturbed, or in another place
    num_resumes: int
    num_recomputed: int
    problems: list[str]


class Night:
    """Owns everything under ``path``: Redis, workers, mounts."""

    def __init__(self, path: Path, plan: Plan, prepare: Callable[[Path], object] = lambda path: None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.plan = plan
        self.answers = path / "answers"
        self.has_mounts = _mount(path / "jobs") and _mount(path / "out")
        self.redis = RedisServer(path / "redis")
        prepare(path / "model")
        self.lab = Lab(
            path,
            {"broker_url": self.redis.url, "jobs_root": str(path / "jobs")},
            visibility_timeout_s=plan.visibility_s,
            reconcile_interval_s=plan.reconcile_s,
            drain_s=20.0,
        )
        self.lab.app, self.lab.options = plan.app, ()
        self.lab.environment |= {
            "FAKE_STEP_S": str(plan.step_s),
            "FAKE_ANSWERS": str(self.answers),
            "LAB_REST_S": "2",
            "OMP_NUM_THREADS": "1",
            "NIGHTMILL_ENGINE__HANG_TIMEOUT_S": str(plan.hang_s),
            "NIGHTMILL_ENGINE__NUM_THREADS": "1",
            "NIGHTMILL_ENGINE__DATA_PARALLEL": str(plan.num_ranks),
        }
        self.out = path / "out"
        self.job: Job = self.lab.start_job(
            plan.num_chunks,
            chunk_rows=plan.chunk_rows,
            output=self.out,
            **{"sampling": Sampling(max_tokens=plan.row_steps), **plan.spec},
        )
        self._workers = {name: self.lab.worker(name, is_ready=False) for name in ("w1", "w2")}
        self._num_resumes = 0
        self._truncated: set[Path] = set()

    def close(self) -> None:
        for worker in self.lab.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.signal(signal.SIGCONT)
        self.lab.close()
        self.redis.close()
        if self.has_mounts:
            for place in ("jobs", "out"):
                subprocess.run(["umount", "-l", str(self.lab.path / place)], check=False)

    def run(self, chance: random.Random, max_faults: int, kinds: list[str] | None = None) -> list[Strike]:
        """Inject faults while enough of the job is left; each when the last one is overcome."""
        until(self._tend, "both workers to be ready", RECOVERY_S)
        until(lambda: self.job.committed(), "the first chunk", RECOVERY_S)
        strikes: list[Strike] = []
        names = kinds if kinds is not None else list(self.faults())
        while len(strikes) < max_faults and not self._is_nearly_done():
            kind = names[len(strikes) % len(names)] if kinds is not None else chance.choice(names)
            if (strike := self._strike(kind, chance)) is not None:
                strikes.append(strike)
        if self.has_mounts and len(strikes) < max_faults and (strike := self._read_only_output()):
            strikes.append(strike)
        return strikes

    def finish(self, reference: Labels | None, strikes: list[Strike]) -> Outcome:
        """Wait for the end, with at most one resume, and count what is wrong."""
        self._wait_end()
        problems = [] if self.job.state() is JobState.DONE else [f"the job ended as {self.job.state()}"]
        texts, found = self._read_output()
        expected = reference or found
        wanted = [f"row {number}" for number in range(self.job.num_rows)]
        num_wrong = sum(found[text] != expected[text] for text in found) + (
            list(found) != [t for t in wanted if t in found]
        )
        with contextlib.suppress(AssertionError):  # the message of a worker that died after its commit comes back last
            until(lambda: not any(self.lab.leftovers().values()), "no message", self.plan.visibility_s + 40)
        problems += verify(self.job).faults
        problems += [f"left in Redis: {left}" for left in [self.lab.leftovers()] if any(left.values())]
        problems += [f"left in the job: {name}" for name in self.job.store.list("_staging")]
        return Outcome(
            strikes=strikes,
            num_rows=self.job.num_rows,
            num_lost=len(set(wanted) - set(texts)),
            num_doubled=len(texts) - len(set(texts)),
            num_wrong=num_wrong,
            num_resumes=self._num_resumes,
            num_recomputed=self._num_recomputed(),
            problems=problems,
        )

    def labels(self) -> Labels:
        """The labels of a finished night."""
        return self._read_output()[1]

    def faults(self) -> dict[str, Callable[[random.Random], bool]]:
        """Every fault by name; each says whether it hit."""
        found: dict[str, Callable[[random.Random], bool]] = {
            "worker SIGKILL": self._kill_worker,
            "engine SIGKILL": lambda chance: self._signal_engine(chance, signal.SIGKILL),
            "one rank SIGKILL": lambda chance: self._signal_engine(chance, signal.SIGKILL, num_ranks=1),
            "engine hangs (SIGSTOP)": lambda chance: self._signal_engine(chance, signal.SIGSTOP),
            "worker SIGSTOP beyond its lease, SIGCONT": self._stop_worker,
            "worker SIGTERM": lambda chance: self._drain_worker(chance, 1),
            "worker SIGTERM twice": lambda chance: self._drain_worker(chance, 2),
            "Redis SIGKILL and restart": lambda chance: self._restart_redis(chance, is_lost=False),
            "Redis data lost": lambda chance: self._restart_redis(chance, is_lost=True),
            "Redis FLUSHALL": lambda chance: bool(self.redis.client.flushall()),
            "connections cut": self._cut_connections,
            "clock steps back, worker SIGKILL": self._step_back,
            "clock steps forward": lambda chance: step_clock(self.redis.client, chance.uniform(10, 7200)) is None,
            "part deleted": self._delete_part,
            "part truncated": self._truncate_part,
        }
        if self.has_mounts:
            found["disk full"] = self._fill_disk
        if self.plan.is_fake:
            found |= {f"worker SIGKILL at: {hop}": self._kill_at(hop) for hop in HOPS}
        return found

    def _strike(self, kind: str, chance: random.Random) -> Strike | None:
        until(lambda: (self._tend() and self._in_flight()) or self._is_nearly_done(), "a chunk to run", RECOVERY_S)
        if self._is_nearly_done():
            return None
        time.sleep(chance.uniform(0, 30 * self.plan.step_s))  # else all strike when a chunk was just committed
        in_flight, before = self._in_flight(), self._num_recomputed()
        if not self.faults()[kind](chance):
            return None
        in_flight |= self._in_flight() if " at: " in kind else set()  # the leases of the dead are still there
        num_at_risk, struck_s = len(in_flight) * self.plan.chunk_rows, time.monotonic()
        if kind == "disk full":  # the chunks went to the queue's end
            in_flight = set()
        num_committed = len(self.job.committed())

        def has_recovered() -> bool:
            committed = self.job.committed()
            is_moving = len(committed) > num_committed or len(committed) == self.plan.num_chunks
            return self._tend() and in_flight <= committed and is_moving

        until(has_recovered, f"recovery from: {kind}", RECOVERY_S)
        recovery_s = round(time.monotonic() - struck_s, 2)
        return Strike(kind, recovery_s, self._num_recomputed() - before, num_at_risk)

    def _is_nearly_done(self) -> bool:
        return len(self.job.pending()) <= self.plan.num_last_chunks

    def _tend(self) -> bool:
        """Start dead workers again; whether all are ready."""
        for name, worker in self._workers.items():
            if not worker.is_alive:
                self._workers[name] = self.lab.worker(name, is_ready=False)
        return all("lab ready." in worker.log for worker in self._workers.values())

    def _in_flight(self) -> set[int]:
        """Chunks that somebody has the lease of."""
        try:
            keys = self.redis.client.keys(f"{PREFIX}lease:*")
        except redis.RedisError:
            return set()
        return {int(key.rpartition(b":")[2]) for key in keys}

    def _num_recomputed(self) -> int:
        try:
            lines = self.answers.read_text().splitlines()
        except FileNotFoundError:
            return 0
        return len(lines) - len(set(lines))

    def _pick(self, chance: random.Random) -> Worker:
        return self._workers[chance.choice(list(self._workers))]

    def _kill_worker(self, chance: random.Random) -> bool:
        self._pick(chance).kill()
        return True

    def _signal_engine(self, chance: random.Random, number: int, num_ranks: int | None = None) -> bool:
        ranks = sorted(self._pick(chance).engine_pids())
        chance.shuffle(ranks)
        for pid in ranks[:num_ranks]:
            with contextlib.suppress(ProcessLookupError):  # it ended with the one before, or by itself
                os.kill(pid, number)
        return bool(ranks)

    def _stop_worker(self, chance: random.Random) -> bool:
        worker = self._pick(chance)
        worker.signal(signal.SIGSTOP)
        time.sleep(self.plan.visibility_s * chance.uniform(1.2, 1.8))
        worker.signal(signal.SIGCONT)
        return True

    def _drain_worker(self, chance: random.Random, num_signals: int) -> bool:
        worker = self._pick(chance)
        worker.signal(signal.SIGTERM)
        for _ in range(1, num_signals):
            until(lambda: "Warm shutdown" in worker.log or not worker.is_alive, "the warm shutdown", RECOVERY_S)
            with contextlib.suppress(ProcessLookupError):
                worker.signal(signal.SIGTERM)
        worker.wait(60)
        return True

    def _restart_redis(self, chance: random.Random, *, is_lost: bool) -> bool:
        self.redis.kill()
        if is_lost:
            self.redis.wipe()
        time.sleep(chance.uniform(0, 1.5))
        self.redis.start()
        return True

    def _cut_connections(self, chance: random.Random) -> bool:
        return bool(self.redis.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))

    def _step_back(self, chance: random.Random) -> bool:
        """What the dead worker held, by lease and by message, seems to be held for as long as the step."""
        self._pick(chance).kill()
        step_clock(self.redis.client, -chance.uniform(10, 7200))
        return True

    def _part(self, chance: random.Random) -> Path:
        return Path(self.job.store.locate(part_key(chance.choice(sorted(self.job.parts())), PARTS)))

    def _delete_part(self, chance: random.Random) -> bool:
        part = self._part(chance)
        part.unlink()
        self._truncated.discard(part)
        return True

    def _truncate_part(self, chance: random.Random) -> bool:
        if self._truncated:
            return False  # the message names one at a time: a resume for each
        part = self._part(chance)
        os.truncate(part, chance.randrange(part.stat().st_size))
        self._truncated.add(part)
        return True

    def _fill_disk(self, chance: random.Random) -> bool:
        postponed = self._count_in_logs("chunk_postponed")
        ballast = self.lab.path / "jobs" / ".ballast"
        try:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            with contextlib.suppress(AssertionError):
                until(lambda: self._count_in_logs("chunk_postponed") > postponed, "a commit to fail", 10)
        finally:
            ballast.unlink()
        return self._count_in_logs("chunk_postponed") > postponed

    def _count_in_logs(self, event: str) -> int:
        return sum(worker.log.count(event) for worker in self._workers.values())

    def _kill_at(self, hop: str) -> Callable[[random.Random], bool]:
        def kill(chance: random.Random) -> bool:
            chunk = chance.choice(sorted(set(self.job.pending()) - self._in_flight())[:12])
            self.lab.fault(hop, chunk, "kill")
            fault = self.lab.path / f"fault-{hop}-{chunk}"
            until(lambda: self._tend() and (not fault.exists() or self._has_passed(hop, chunk)), f"{hop} of {chunk}")
            if fault.exists():
                fault.unlink()
                return False
            return True

        return kill

    def _has_passed(self, hop: str, chunk: int) -> bool:
        return chunk in self.job.committed() and any(e["chunk"] == chunk for e in self.lab.events(hop))

    def _read_only_output(self) -> Strike | None:
        """No output can be written when the last part is committed."""
        remount = ["mount", "-o", "remount,ro", str(self.out)]
        if not self.job.pending() or subprocess.run(remount, capture_output=True, check=False).returncode:
            return None
        try:
            until(lambda: self._tend() and not self.job.pending(), "all parts", 4 * RECOVERY_S)
            if not self._truncated:
                until(lambda: self._count_in_logs("finish_failed"), "the output to be refused", RECOVERY_S)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(self.out)], check=True)
        struck_s = time.monotonic()
        self._wait_end()
        return Strike("output read-only at the end", round(time.monotonic() - struck_s, 2), 0, 0)

    def _wait_end(self) -> None:
        """A damaged part is the one thing that needs a person: the message names the file, resume does the rest."""
        until(lambda: self._tend() and not self.job.pending(), "the last part", 4 * RECOVERY_S)
        if self._truncated:
            self._repair()
        with contextlib.suppress(AssertionError):
            until(lambda: self._tend() and self.job.success(), "the job's end", RECOVERY_S)
        if self.job.success() is None:
            self._resume()
            until(lambda: self._tend() and self.job.success(), "the job's end after a resume", RECOVERY_S)

    def _repair(self) -> None:
        part = self._truncated.pop()
        with pytest.raises(JobError, match=f"{part}.*Delete it and resume"):
            api.resume(self.job, self.lab.settings)
        part.unlink()
        self._resume()

    def _resume(self) -> None:
        self._num_resumes += 1
        api.resume(self.job, self.lab.settings)

    def _read_output(self) -> tuple[list[str], Labels]:
        """As any reader of Parquet directories sees it."""
        table = pq.read_table(self.out)
        columns = (table[name].to_pylist() for name in ("text", "label", "label_status"))
        rows = list(zip(*columns, strict=True))
        return [text for text, _, _ in rows], {text: (label, status) for text, label, status in rows}


@contextlib.contextmanager
def night(path: Path, plan: Plan, prepare: Callable[[Path], object] = lambda path: None) -> Iterator[Night]:
    """A night that is cleared away in any case."""
    found = Night(path, plan, prepare)
    try:
        yield found
    finally:
        found.close()


def undisturbed(path: Path, plan: Plan, prepare: Callable[[Path], object] = lambda path: None) -> Labels:
    """The labels that a night without faults gives."""
    with night(path, plan, prepare) as found:
        found.finish(None, [])
        return found.labels()


def _mount(path: Path) -> bool:
    """A small file system of its own, where this user may have one."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_SIZE}", "nightmill-faults", str(path)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def summarise(strikes: list[Strike]) -> list[dict[str, Any]]:
    """One line of the table for each kind of fault."""
    times = Counter(strike.kind for strike in strikes)
    lines = []
    for kind in sorted(times):
        group = [strike for strike in strikes if strike.kind == kind]
        lines.append(
            {
                "fault": kind,
                "times": len(group),
                "rows_recomputed": sum(strike.num_recomputed for strike in group),
                "recovery_s_median": sorted(strike.recovery_s for strike in group)[len(group) // 2],
                "recovery_s_max": max(strike.recovery_s for strike in group),
            }
        )
    return lines
