"""Block pool and prefix cache against a brute-force model."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache import BlockHasher, BlockPool, extend_block_hashes

BLOCK_SIZE = 2
NUM_BLOCKS = 12


def hashes_of(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, array("q", tokens), BLOCK_SIZE)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; the model remembers for each block which prefix its content spells."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.held: list[tuple[list[int], list[int]]] = []  # (tokens, blocks)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the prefix that ends with it; only registered blocks

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, tokens: list[int]) -> None:
        hashes = hashes_of(tokens)
        prefix = self.pool.find_prefix(hashes)
        assert len(prefix) == self.longest_known(tokens)
        for index, block in enumerate(prefix):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
        num_new = self.pool.num_blocks_for(len(tokens)) - len(prefix)
        if num_new + self.pool.num_free_in(prefix) > self.pool.num_free:
            return
        self.pool.take(prefix)
        fresh = self.pool.allocate(num_new)
        for block in fresh:
            self.content.pop(block, None)
        for index in range(len(prefix), len(hashes)):
            known = self.longest_known(tokens) > index
            block = fresh[index - len(prefix)]
            self.pool.register(block, hashes[index])
            if not known:
                self.content[block] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
        self.held.append((tokens, prefix + fresh))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        _, blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        before = self.pool.num_free
        freed = self.pool.num_freed_by(blocks)
        self.pool.release(blocks)
        assert self.pool.num_free == before + freed

    def longest_known(self, tokens: list[int]) -> int:
        count = 0
        while (count + 1) * BLOCK_SIZE <= len(tokens) and tuple(
            tokens[: (count + 1) * BLOCK_SIZE]
        ) in self.content.values():
            count += 1
        return count

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = {block for _, blocks in self.held for block in blocks}
        assert 0 not in held
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(held)

    @invariant()
    def nobody_writes_where_another_reads(self) -> None:
        own = [block for tokens, blocks in self.held for block in blocks[len(tokens) // BLOCK_SIZE :]]
        assert len(own) == len(set(own)), "the unfinished block of a sequence is its own"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_hash_of_a_block_depends_on_all_tokens_before_it() -> None:
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([2, 1, 3, 4])[1]
    assert hashes_of([1, 2, 3, 4, 5])[:2] == hashes_of([1, 2, 3, 4, 9])
    assert hashes_of([1]) == []


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    chains = [hashes_of([i, i]) for i in range(3)]
    blocks = [pool.allocate(1) for _ in chains]
    for block, chain in zip(blocks, chains, strict=True):
        pool.register(block[0], chain[0])
    for block in blocks:
        pool.release(block)
    pool.take(pool.find_prefix(chains[0]))
    pool.release(blocks[0])
    pool.allocate(1)
    assert [bool(pool.find_prefix(chain)) for chain in chains] == [True, False, True]


def test_the_end_of_a_prefix_is_forgotten_before_its_start() -> None:
    pool = BlockPool(5, BLOCK_SIZE)
    chain = hashes_of([1, 2, 3, 4, 5, 6])
    blocks = pool.allocate(3)
    for block, block_hash in zip(blocks, chain, strict=True):
        pool.register(block, block_hash)
    pool.release(blocks)
    pool.allocate(2)  # the block that stores nothing, then the chain's last
    assert pool.find_prefix(chain) == blocks[:2]


def test_a_pool_without_prefix_cache_finds_nothing() -> None:
    pool = BlockPool(4, BLOCK_SIZE, prefix_cache=False)
    chain = hashes_of([1, 2])
    pool.register(pool.allocate(1)[0], chain[0])
    assert pool.find_prefix(chain) == []


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=8),
    block_size=st.integers(1, 5),
)
def test_hashes_copied_from_the_prompt_before_are_the_hashes_of_the_prompt(
    prompts: list[list[int]], block_size: int
) -> None:
    hasher = BlockHasher(block_size)
    for prompt in prompts:
        tokens = array("q", [7] * 6 + prompt)
        expected: list[bytes] = []
        extend_block_hashes(expected, tokens, block_size)
        assert hasher.hash_prompt(tokens) == expected
