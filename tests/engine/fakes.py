"""A model and a text side small enough to predict: bytes are tokens, logits are a hash of all tokens so far."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.batch import StepBatch
from engine.draft import DraftSource
from engine.grammar import Grammars
from engine.loop import Engine
from engine.parts import Parts
from engine.states import SharedMatcher
from engine.types import Sequence
from kernels.reference import ReferenceKernels
from schemas.errors import PromptError
from schemas.records import Completion, Constraint, ModelRef, Request, Sampling
from schemas.settings import EngineSettings

END = 256
VOCAB_SIZE = 288  # padded: ids 257 and up are no tokens
MODEL = ModelRef(name="hash", digest="0" * 16, max_model_len=512)


class HashModel:
    """A Model whose next token's logits are a hash of the sequence, read back from the paged cache.

    A wrong slot, block, position or a stale block gives other tokens, so equality with ``expected_logits`` checks them.
    """

    is_recordable = False
    shares_prefixes = False
    block_size, max_mixed_rows = 16, 0
    expert_balance = None
    predictor = block_drafter = None

    def __init__(self, max_position_embeddings: int = 4096, favourites: Iterable[int] = (), boost: float = 3.0) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=max_position_embeddings, latent=None)
        self.num_rows: list[int] = []
        self.preference = torch.zeros(VOCAB_SIZE)
        self.preference[list(favourites)] = boost

    def cache_bytes_per_block(self, block_size: int) -> int:
        return 8 * block_size

    def alloc_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.full((num_blocks, block_size), -1, dtype=torch.int64)

    def forward(self, batch: StepBatch, cache: torch.Tensor) -> torch.Tensor:
        attention = batch.attention
        check_batch(batch)
        self.num_rows.append(len(batch.input_ids))
        cache.view(-1)[attention.slots] = batch.input_ids
        hidden = []
        for row in batch.logits_rows.tolist():
            sequence = int(torch.searchsorted(attention.query_starts, row, right=True)) - 1
            length = int(batch.positions[row]) + 1
            tokens = cache[attention.block_table[sequence]].flatten()[:length]
            assert (tokens >= 0).all(), "read a slot that was never written"
            hidden.append(hash_tokens(tokens.tolist()))
        return torch.tensor(hidden, dtype=torch.int64)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return torch.empty(0, VOCAB_SIZE)
        return torch.stack([noise(seed) for seed in hidden.tolist()]) + self.preference

    def expected_logits(self, token_ids: list[int]) -> torch.Tensor:
        return noise(hash_tokens(token_ids)) + self.preference


def hash_tokens(token_ids: list[int]) -> int:
    return hash(tuple(token_ids)) & (2**31 - 1)


def noise(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32))


def check_batch(batch: StepBatch) -> None:
    """The promises of StepBatch and AttentionBatch that do not depend on a model."""
    attention = batch.attention
    lens = torch.tensor(attention.query_lens)
    assert attention.query_starts.tolist() == [0, *lens.cumsum(0).tolist()]
    assert attention.seq_lens.tolist() == list(attention.host_seq_lens)
    assert all(n == 1 for n in attention.query_lens[: attention.num_decodes])
    for s, (start, n) in enumerate(zip(attention.query_starts.tolist(), attention.query_lens, strict=False)):
        end = attention.host_seq_lens[s]
        assert batch.positions[start : start + n].tolist() == list(range(end - n, end))
    assert (attention.slots > 0).all()
    assert len(set(attention.slots.tolist())) == len(attention.slots)


class ByteText:
    """The text side over bytes; the tokenizer is a real one because the grammar engine reads its vocabulary."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.eos_token_ids = frozenset({END})
        self.vocab_size = END + 1

    def encode_request(self, request: Request, max_tokens: int) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.messages is not None:
            raise PromptError("this tokenizer has no chat template")
        return list((request.text or "").encode())

    def encode_after(self, context: tuple[int, ...], text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Iterable[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    def push(self, token_id: int) -> str:
        return bytes([token_id]).decode("latin-1") if token_id < 256 else ""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is byte i; 256 ends a text. "~" is a special token, so no grammar can write it: a dead end at will."""
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in characters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "~"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def bytes_to_unicode() -> dict[int, str]:
    """The byte-level alphabet of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def make_engine(
    model: HashModel | None = None,
    *,
    max_model_len: int = 512,
    num_blocks: int = 0,
    draft_source: DraftSource | None = None,
    **settings,
) -> Engine:
    """An engine around a fake model; ``num_blocks`` limits the KV cache (block size 4 unless told)."""
    model = model or HashModel()
    settings = {"device": "cpu", "block_size": 4, "num_threads": 1, "num_draft_tokens": 0, **settings}
    if num_blocks:
        settings["kv_cache_gib"] = num_blocks * model.cache_bytes_per_block(settings["block_size"]) / 2**30
    parts = Parts(model, ByteText(), ReferenceKernels(), (), torch.device("cpu"))
    if draft_source:
        parts = replace(parts, draft_source=draft_source)
    ref = ModelRef(name="hash", digest="0" * 16, max_model_len=max_model_len)
    return Engine(ref, EngineSettings(**settings), parts)


def run_all(engine: Engine, requests: Iterable[Request], max_steps: int = 5000) -> dict[str, Completion]:
    """Add all requests, step until the engine is idle, and return the completions by id."""
    for request in requests:
        engine.add(request)
    return finish_all(engine, max_steps)


def finish_all(engine: Engine, max_steps: int = 5000) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for completion in engine.step():
            assert completion.request_id not in done, "a request ended twice"
            done[completion.request_id] = completion
    assert not engine.has_work(), "the engine does not come to an end"
    assert_no_leak(engine)
    return done


def assert_no_leak(engine: Engine) -> None:
    pool = engine._scheduler.pool
    assert pool.num_free == pool.capacity
    assert not engine._scheduler._computing


def make_sequence(token_ids: Iterable[int], *, sampling: Sampling | None = None, seed: int = 0) -> Sequence:
    tokens, sampling = array("q", token_ids), sampling or Sampling()
    request = Request(request_id="r", token_ids=tuple(tokens), sampling=sampling, seed=seed)
    return Sequence(request, tokens, len(tokens), sampling.max_tokens)


def allowed_tokens(grammars: Grammars, matchers: list[SharedMatcher | None]) -> list[set[int]]:
    """What the masks of a batch allow each row."""
    masks = grammars.fill(matchers)
    assert masks is not None
    bits = np.unpackbits(masks.bits[masks.rows].numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def start_matcher(grammars: Grammars, constraint: Constraint) -> SharedMatcher:
    """A matcher at the start of a constraint, once it is compiled."""
    grammars.add(constraint)
    while (matcher := grammars.matcher(constraint.key)) is None:
        grammars.poll()
        grammars.wait(0.1)
    return matcher
