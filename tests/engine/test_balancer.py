"""Requests go where they are done first: to the replica with fewest tokens, or to one that knows their beginning."""

import random
from typing import Any

from engine.balancer import MAX_PREFIXES, Balancer, Load
from schemas.records import Message, Request, Sampling


def make_load(text: str, max_tokens: int = 16) -> Load:
    return Load.of(Request(request_id="r", text=text, sampling=Sampling(max_tokens=max_tokens)))


def assign(balancer: Balancer, load: Load, num_replicas: int = 2) -> int:
    replica = balancer.choose(load, range(num_replicas))
    balancer.add(load, replica)
    return replica


def test_requests_without_a_common_beginning_are_spread_by_their_tokens() -> None:
    draw, balancer, tokens = random.Random(1), Balancer(3), [0, 0, 0]
    for number in range(300):
        num_bytes = draw.randrange(40, 4000)
        load = make_load(f"{number:08}" + "x" * num_bytes, 1)
        tokens[assign(balancer, load, 3)] += num_bytes
    assert max(tokens) - min(tokens) < 4000


def test_outputs_of_known_length_count_in_full() -> None:
    balancer = Balancer(2)
    endless = Load.of(Request(request_id="r", text="a", sampling=Sampling(max_tokens=1000, ignore_eos=True)))
    assert assign(balancer, endless) == 0
    assert [assign(balancer, make_load(str(number), 1000)) for number in range(10)] == [1] * 10


def test_requests_that_begin_alike_stay_together_until_the_others_are_idle_for_long_enough() -> None:
    balancer = Balancer(2)
    families = ["a" * 40_000, "b" * 40_000]
    assert [assign(balancer, make_load(family)) for family in families] == [0, 1]
    for number in range(20):
        assert assign(balancer, make_load(families[number % 2] + str(number))) == number % 2
    moved = [assign(balancer, make_load(families[0] + str(number), 300)) for number in range(400)]
    assert moved[0] == 0
    assert 1 in moved, "a replica that has nothing to do computes the beginning again"


def test_a_beginning_that_all_replicas_know_decides_nothing() -> None:
    balancer = Balancer(2)
    template = "t" * 5000
    replicas = [assign(balancer, make_load(template + f"{number:6}" * 10)) for number in range(101)]
    assert abs(replicas.count(0) - replicas.count(1)) <= 1


def test_a_request_that_is_done_leaves_nothing_behind() -> None:
    balancer = Balancer(2)
    sent = [(load, balancer.add(load, 0)) for load in (make_load("x" * 700), make_load("y" * 9))]
    for _, tokens in sent:
        balancer.remove(tokens, 0, 4)
    assert balancer._tokens == [0.0, 0.0]
    for number in range(MAX_PREFIXES + 10):
        balancer.add(make_load(f"{number:08}" * 32), 1)
    assert len(balancer._seen[1]) == MAX_PREFIXES
    balancer.clear()
    assert balancer.choose(make_load("x" * 700), range(2)) == 0


def test_every_kind_of_prompt_has_a_size_and_prefixes() -> None:
    kinds: list[dict[str, Any]] = [
        {"text": "x" * 600},
        {"messages": (Message(role="user", content="x" * 600),)},
        {"token_ids": tuple(range(150))},
    ]
    for kind in kinds:
        load = Load.of(Request(request_id="r", **kind))
        assert 600 <= load.num_bytes < 610
        assert load.prefixes
        assert load.prefixes[-1][0] <= load.num_bytes
    assert make_load("").prefixes == ()
