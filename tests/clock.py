"""The clock of the Redis host steps, for tests that cannot set one: all else in Redis steps the other way."""

import redis

from jobs.queue import UNACKED_INDEX_KEY

STEP = """
for _, key in ipairs(redis.call('keys', '*')) do
    local left = redis.call('pttl', key)
    if left > 0 then redis.call('pexpire', key, math.floor(left - ARGV[1] * 1000)) end
end
local dates = redis.call('zrange', KEYS[1], 0, -1, 'withscores')
for i = 1, #dates, 2 do redis.call('zadd', KEYS[1], dates[i + 1] - ARGV[1], dates[i]) end
"""


def step_clock(client: redis.Redis, seconds: float) -> None:
    """Move the clock forward, or back, by ``seconds``: lives get so much shorter, and what was dated so much older."""
    client.eval(STEP, 1, UNACKED_INDEX_KEY, str(seconds))
