"""Whatever kills the engine, each request is resolved once and no innocent one pays for a neighbour."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.balancer import Load
from engine.frames import AddConstraint, Cancel, Submit, decode_client_frame
from engine.pipe import FrameBuffer, pack
from engine.tracker import MAX_REQUEST_DEATHS, Resolved, Tracked, Tracker
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Request

CONSTRAINTS = [Constraint(kind=ConstraintKind.REGEX, source=source) for source in "ab"]


def track(order: int, constraint: Constraint | None = None) -> Tracked:
    key = constraint.key if constraint else None
    request = Request(request_id=str(order), text="", constraint_key=key)
    announcement = pack(AddConstraint(constraint=constraint)) if constraint else b""
    return Tracked(order, f"row {order}", pack(Submit(requests=(request,))), Load.of(request), key, announcement)


class FakeRank:
    """Checks what it is sent, forgets constraints as early as it may, dies of poison."""

    def __init__(self, num_credits: int, poison: set[int]) -> None:
        self.running: dict[int, str | None] = {}
        self._num_credits = num_credits
        self._poison = poison
        self._keys: set[str] = set()

    def receive(self, data: bytes) -> None:
        for body in FrameBuffer().feed(data):
            match decode_client_frame(body):
                case AddConstraint(constraint=constraint):
                    self._keys.add(constraint.key)
                case Submit(requests=(request,)):
                    assert request.constraint_key is None or request.constraint_key in self._keys
                    self.running[int(request.request_id)] = request.constraint_key
                case Cancel():
                    pass  # it may cross the completion
        assert len(self.running) <= self._num_credits

    def is_killed(self) -> bool:
        return bool(self._poison & set(self.running))

    def finish(self, order: int) -> list[Completion]:
        del self.running[order]
        self._keys &= set(self.running.values())
        return [Completion(request_id=str(order), finish_reason=FinishReason.STOP)]


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    num_requests=st.integers(1, 40),
    num_credits=st.integers(1, 20),
    num_poison=st.integers(0, 2),
    num_replicas=st.integers(1, 3),
)
def test_poison_alone_is_given_up_and_every_request_is_resolved_once(
    data: st.DataObject, num_requests: int, num_credits: int, num_poison: int, num_replicas: int
) -> None:
    orders = list(range(num_requests))
    poison = set(data.draw(st.lists(st.sampled_from(orders), max_size=num_poison)))
    cancelled = set(data.draw(st.lists(st.sampled_from(orders), max_size=5)))
    tracker, num_deaths, num_resolved = Tracker(num_replicas), 0, Counter[str]()
    reasons: dict[str, FinishReason] = {}

    def settle(resolved: Resolved) -> None:
        for future, completion in resolved:
            future.set_result(completion)  # raises the second time
            num_resolved[completion.request_id] += 1
            reasons[completion.request_id] = completion.finish_reason

    for order in orders:
        tracker.add(track(order, data.draw(st.sampled_from([None, *CONSTRAINTS]))))
    ranks = [FakeRank(num_credits, poison) for _ in range(num_replicas)]
    while len(tracker):
        for rank, frames in zip(ranks, tracker.admit(num_credits), strict=True):
            rank.receive(frames)
        running = {order: rank for rank in ranks for order in rank.running}
        assert tracker.num_in_flight == len(running) > 0
        if cancelled and data.draw(st.booleans()):
            settle(tracker.cancel([f"row {cancelled.pop()}"]))
        victim = data.draw(st.sampled_from(sorted(running)))
        if any(rank.is_killed() for rank in ranks) and (victim in poison or data.draw(st.booleans())):
            num_deaths += 1
            ranks = [FakeRank(num_credits, poison) for _ in range(num_replicas)]
            settle(tracker.requeue("a test"))
        elif victim not in poison:
            settle(tracker.finish(running[victim].finish(victim)))

    assert set(num_resolved) == {f"row {order}" for order in orders}
    assert set(num_resolved.values()) == {1}
    assert {name for name, reason in reasons.items() if reason == FinishReason.ERROR} <= {f"row {o}" for o in poison}
    assert num_deaths <= len(poison) * (MAX_REQUEST_DEATHS + 1)


def test_a_completion_of_nothing_in_flight_is_ignored() -> None:
    assert Tracker().finish([Completion(request_id="7", finish_reason=FinishReason.STOP)]) == []


def test_an_innocent_request_rejoins_the_crowd_only_behind_the_suspects() -> None:
    tracker = Tracker()
    for order in range(9):
        tracker.add(track(order))
    tracker.admit(9)
    tracker.requeue("a test")
    tracker.add(track(9))
    tracker.admit(9)
    assert tracker.num_in_flight == 3
    for order in range(9):
        tracker.finish([Completion(request_id=str(order), finish_reason=FinishReason.STOP)])
        tracker.admit(9)
    assert tracker.num_in_flight == 1
    assert tracker.finish([Completion(request_id="9", finish_reason=FinishReason.STOP)])[0][1].request_id == "row 9"
