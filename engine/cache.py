"""Blocks of the paged KV cache: who holds them, which are free, and which prefix each one stores.

Knows block numbers and token ids, never tensors. Block 0 is never handed out: padding reads and writes it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16


def extend_block_hashes(hashes: list[bytes], token_ids: array[int], block_size: int) -> None:
    """Append the missing hashes of the full blocks of ``token_ids``, each over its parent's hash and its tokens."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else b""
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(blake2b(parent + tokens.tobytes(), digest_size=HASH_BYTES).digest())


class BlockHasher:
    """Hashes the blocks of prompts of which many begin alike: what a prompt shares with the one before is copied."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._previous: array[int] = array("q")
        self._hashes: list[bytes] = []

    def hash_prompt(self, token_ids: array[int]) -> list[bytes]:
        """Hashes of the full blocks of ``token_ids``, as extend_block_hashes makes them."""
        low, high = 0, min(len(self._hashes), len(token_ids) // self._block_size)
        while low < high:  # by bisection: comparing slices is fast, hashing is not
            middle = (low + high + 1) // 2
            start, end = low * self._block_size, middle * self._block_size
            if token_ids[start:end] == self._previous[start:end]:
                low = middle
            else:
                high = middle - 1
        hashes = self._hashes[:low]
        extend_block_hashes(hashes, token_ids, self._block_size)
        self._previous, self._hashes = token_ids[:], hashes
        return hashes[:]


class BlockPool:
    """Reference-counted blocks with an LRU free list. A free block keeps its content until it is allocated again."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks >= 2, "block 0 is reserved, so a pool needs at least two"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._ref_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # next to be allocated first
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those with a cached prefix included."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated when nothing is running."""
        return self.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, block_hashes: list[bytes]) -> list[int]:
        """Blocks that store the longest known prefix of the chain. Takes no reference: call ``take`` next."""
        found: list[int] = []
        for block_hash in block_hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_in(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are free, so that taking them uses up free blocks."""
        counts = self._ref_counts
        return [counts[block] for block in blocks].count(0)

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """How many blocks become free when these, of several holders and with repeats, are released."""
        return sum(self._ref_counts[block] == count for block, count in Counter(blocks).items())

    def take(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        counts = self._ref_counts
        for block in blocks:  # of each row that is admitted: no calls for blocks that are in use
            if counts[block] == 0:
                del self._free[block]
            counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, least recently used first, forgetting what they stored."""
        assert count <= len(self._free), "the scheduler plans within the free blocks"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            if (block_hash := self._hash_by_block.pop(block, None)) is not None:
                del self._block_by_hash[block_hash]
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a holder from each of a sequence's blocks, given in order; the end of a prefix is forgotten first."""
        counts = self._ref_counts
        for block in reversed(list(blocks)):
            counts[block] -= 1
            assert counts[block] >= 0, "released more often than taken"
            if counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_by_block:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block of accepted tokens findable. A prefix that is known already keeps its first block."""
        if self.prefix_cache and block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash
