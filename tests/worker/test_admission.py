import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import Interrupted
from tests.worker.lab import until
from worker.admission import Admission


def never() -> bool:
    return False


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=24))
def test_a_suspect_never_has_company_and_everybody_gets_a_turn(alone_flags: list[bool]) -> None:
    admission, lock, inside, violations = Admission(), threading.Lock(), set[int](), []

    def run(number: int, alone: bool) -> int:
        with admission.enter(alone=alone, is_cancelled=never):
            with lock:
                inside.add(number)
                if len(inside) > 1 and any(alone_flags[member] for member in inside):
                    violations.append(set(inside))
            with lock:
                inside.discard(number)
        return number

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(run, range(len(alone_flags)), alone_flags))
    assert done == list(range(len(alone_flags)))
    assert not violations


def test_others_run_side_by_side() -> None:
    admission = Admission()
    with admission.enter(alone=False, is_cancelled=never), admission.enter(alone=False, is_cancelled=never):
        pass


def test_a_waiting_suspect_goes_before_newcomers() -> None:
    admission, order = Admission(), list[str]()

    def enter(name: str, alone: bool) -> None:
        with admission.enter(alone=alone, is_cancelled=never):
            order.append(name)

    with ThreadPoolExecutor(2) as pool:
        with admission.enter(alone=False, is_cancelled=never):
            pool.submit(enter, "suspect", True)
            until(lambda: admission._num_waiting_alone, "the suspect to wait")
            pool.submit(enter, "newcomer", False)
        until(lambda: len(order) == 2, "both to have had their turn")
    assert order == ["suspect", "newcomer"]


def test_waiting_can_be_interrupted_and_leaves_no_trace() -> None:
    admission, is_stopping = Admission(), threading.Event()

    def wait() -> None:
        with admission.enter(alone=True, is_cancelled=is_stopping.is_set):
            pass

    with ThreadPoolExecutor(1) as pool, admission.enter(alone=False, is_cancelled=never):
        suspect = pool.submit(wait)
        until(lambda: admission._num_waiting_alone, "the suspect to wait")
        is_stopping.set()
        with pytest.raises(Interrupted):
            suspect.result(10)
        with admission.enter(alone=False, is_cancelled=never):
            pass
