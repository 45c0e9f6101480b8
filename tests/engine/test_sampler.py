"""The sampler: a row's token depends on its own logits and parameters only."""

import pytest
import torch

from engine.masks import Masks
from engine.sampler import Sampler, apply_repetition_penalty, build_sampling_batch
from engine.types import Sequence
from kernels.reference import ReferenceKernels
from schemas.records import Sampling
from tests.engine.fakes import make_sequence

CPU = torch.device("cpu")
VOCAB_SIZE = 100
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
]


def make(sampling: Sampling, seed: int, tokens: list[int] | None = None) -> Sequence:
    return make_sequence(tokens or [1, 2, 3], sampling=sampling, seed=seed)


def test_a_row_of_a_mixed_batch_gets_what_it_gets_alone() -> None:
    sampler = Sampler(ReferenceKernels(), CPU)
    sequences = [make(SETTINGS[i % len(SETTINGS)], seed=i) for i in range(40)]
    logits = torch.randn(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    bits = torch.full((2, 4), -1, dtype=torch.int32)
    bits[1, 0] = 0b1010
    masks = Masks(bits, (torch.arange(40) % 3 == 0).int())
    together = sampler.sample(logits.clone(), sequences, masks).read()
    for i, sequence in enumerate(sequences):
        alone = sampler.sample(logits[i : i + 1].clone(), [sequence], Masks(bits, masks.rows[i : i + 1])).read()
        assert alone[0][0] == together[i][0]
        assert alone[0][1] == pytest.approx(together[i][1], abs=1e-5)


def test_log_probabilities_are_after_the_mask_and_before_temperature() -> None:
    sampler = Sampler(ReferenceKernels(), CPU)
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None] / 10
    masks = Masks(torch.tensor([[0b11000, 0, 0, 0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    ((token, logprob),) = sampler.sample(logits.clone(), [make(Sampling(temperature=5.0), seed=1)], masks).read()
    expected = torch.log_softmax(logits[0, [3, 4]], dim=0)[token - 3]
    assert logprob == pytest.approx(float(expected), abs=1e-5)


def test_a_row_that_allows_nothing_gets_minus_one_and_its_neighbours_are_unaffected() -> None:
    sampler = Sampler(ReferenceKernels(), CPU)
    logits = torch.randn(3, VOCAB_SIZE)
    bits = torch.tensor([[-1] * 4, [0] * 4], dtype=torch.int32)
    masks = Masks(bits, torch.tensor([0, 1, 0], dtype=torch.int32))
    sequences = [make(Sampling(temperature=t), seed=3) for t in (0.0, 1.0, 0.0)]
    drawn = sampler.sample(logits.clone(), sequences, masks).read()
    assert drawn[1][0] == -1
    assert [drawn[0][0], drawn[2][0]] == logits[[0, 2]].argmax(-1).tolist()


def test_the_repetition_penalty_equals_the_oracle() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, VOCAB_SIZE)
    tokens = [[1, 5, 5, 9], [7, 8, 9], [1]]
    sequences = [make(Sampling(repetition_penalty=p), 0, t) for p, t in zip((1.3, 1.0, 0.7), tokens, strict=True)]
    ours = logits.clone()
    apply_repetition_penalty(ours, sequences, [()] * 3)
    for row, (sequence, ids) in enumerate(zip(sequences, tokens, strict=True)):
        processor = RepetitionPenaltyLogitsProcessor(sequence.request.sampling.repetition_penalty)
        torch.testing.assert_close(ours[row], processor(torch.tensor([ids]), logits[row : row + 1].clone())[0])


def test_filters_that_nobody_uses_are_left_out() -> None:
    batch = build_sampling_batch([make(Sampling(), 1), make(Sampling(top_k=3), 2)], [()] * 2, CPU)
    assert batch.is_all_greedy
    assert (batch.top_k, batch.top_p, batch.min_p) == (None, None, None)
    sequences = [make(Sampling(temperature=1.0), 1), make(Sampling(temperature=1.0, top_k=3), 2)]
    batch = build_sampling_batch(sequences, [()] * 2, CPU)
    assert batch.top_k is not None
    assert batch.top_k.tolist() == [0, 3]
    assert batch.top_p is None


def test_the_seed_decides_and_the_position_moves_it_on() -> None:
    sampler = Sampler(ReferenceKernels(), CPU)
    logits = torch.zeros(1, VOCAB_SIZE)

    def draw(seed: int, num_output: int) -> int:
        sequence = make(Sampling(temperature=1.0), seed)
        sequence.token_ids.extend([4] * num_output)
        return sampler.sample(logits.clone(), [sequence], None).read()[0][0]

    assert draw(1, 0) == draw(1, 0)
    assert len({draw(seed, 0) for seed in range(50)}) > 20
    assert len({draw(1, position) for position in range(50)}) > 20
