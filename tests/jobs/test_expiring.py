"""Names held for a while: one holder at a time, and none for ever, whatever the clock does."""

import redis

from jobs.expiring import are_held, drop, take
from tests.clock import step_clock

LIFE_MS = 60_000


def test_a_name_has_one_holder_until_it_is_dropped(client: redis.Redis) -> None:
    assert [take(client, "k", token, LIFE_MS) for token in ("a", "b", "a")] == [True, False, True]
    drop(client, "k", "b", LIFE_MS)
    assert are_held(client, ["k", "other"]) == [True, False]
    drop(client, "k", "a", LIFE_MS)
    assert take(client, "k", "b", LIFE_MS)
    assert 0 < client.pttl("k") <= LIFE_MS


def test_no_keys_are_no_question(client: redis.Redis) -> None:
    assert are_held(client, []) == []


def test_after_a_step_back_the_name_of_a_dead_holder_is_free(client: redis.Redis) -> None:
    assert take(client, "k", "dead", LIFE_MS)
    step_clock(client, -3600)
    assert are_held(client, ["k"]) == [False]
    assert take(client, "k", "next", LIFE_MS)
    assert 0 < client.pttl("k") <= LIFE_MS


def test_after_a_step_back_a_living_holder_keeps_its_name_by_renewing(client: redis.Redis) -> None:
    assert take(client, "k", "alive", LIFE_MS)
    step_clock(client, -3600)
    assert take(client, "k", "alive", LIFE_MS)
    assert not take(client, "k", "next", LIFE_MS)


def test_a_small_step_back_frees_nothing(client: redis.Redis) -> None:
    assert take(client, "k", "alive", LIFE_MS)
    step_clock(client, -30)
    assert are_held(client, ["k"]) == [True]
    assert not take(client, "k", "next", LIFE_MS)


def test_after_a_step_forward_names_are_lost_and_who_renews_has_them_again(client: redis.Redis) -> None:
    assert take(client, "k", "alive", LIFE_MS)
    step_clock(client, 3600)
    assert are_held(client, ["k"]) == [False]
    assert take(client, "k", "alive", LIFE_MS)


def test_holders_with_different_lives_are_each_judged_by_their_own(client: redis.Redis) -> None:
    assert take(client, "k", "slow", 10 * LIFE_MS)
    assert not take(client, "k", "quick", LIFE_MS)
    assert are_held(client, ["k"]) == [True]
