"""Names that are held in Redis for a while: leases, turns, presence. Whoever renews keeps them, also through a flush.

Redis counts lives by its host's wall clock. After a step back the name of a dead holder would live on for as long as
the step, so a value tells its life: with far more than that left, the name is free. Knows no jobs.
"""

from collections.abc import Sequence

import redis

TAKE = """
local held = redis.call('get', KEYS[1])
if held and held ~= ARGV[1] and redis.call('pttl', KEYS[1]) <= 2 * tonumber(string.match(held, '^%d+') or 0) then
    return 0
end
redis.call('set', KEYS[1], ARGV[1], 'px', string.match(ARGV[1], '^%d+'))
return 1
"""
DROP = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


def take(client: redis.Redis, key: str, token: str, life_ms: int) -> bool:
    """Hold ``key`` for ``life_ms``, or for so long again; False: somebody else has it. May be repeated safely."""
    return bool(client.eval(TAKE, 1, key, _value(token, life_ms)))


def drop(client: redis.Redis, key: str, token: str, life_ms: int) -> None:
    """Let go of ``key``, unless somebody else has it by now."""
    client.eval(DROP, 1, key, _value(token, life_ms))


def are_held(client: redis.Redis, keys: Sequence[str]) -> list[bool]:
    """Say of each key whether somebody has it."""
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.get(key)
            pipe.pttl(key)
        answers = pipe.execute()
    return [
        value is not None and left_ms <= 2 * int(value.partition(b":")[0])
        for value, left_ms in zip(answers[::2], answers[1::2], strict=True)
    ]


def _value(token: str, life_ms: int) -> str:
    return f"{life_ms}:{token}"
