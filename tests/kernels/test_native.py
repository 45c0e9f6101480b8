"""Loops compiled for this CPU against the reference in float32, on the same bfloat16 numbers."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kernels import native
from kernels.api import HeadNorms
from kernels.native import CompileError, NativeKernels
from kernels.reference import ReferenceKernels
from kernels.select import BackendError, select_kernels
from tests.step_batches import attention_batch, block_tables

CPU, BF16 = torch.device("cpu"), torch.bfloat16
WIDE = ReferenceKernels()
TOLERANCE = {"atol": 2**-9, "rtol": 2**-7}  # one rounding to 8 bits, and a little
OF_SHARES = {"atol": 2**-7, "rtol": 2**-7}  # each key's share of the attention is rounded before it multiplies a value


def compiled_kernels() -> NativeKernels:
    try:
        return NativeKernels()
    except CompileError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels()


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


@pytest.mark.parametrize("shape", [(1, 1), (3, 576), (70, 33), (2, 5, 64)])
def test_norms(kernels: NativeKernels, shape: tuple[int, ...]) -> None:
    x, residual, weight = numbers(*shape, scale=3), numbers(*shape, seed=1), numbers(shape[-1], seed=2)
    assert_close(kernels.rms_norm(x, weight, 1e-5).float(), WIDE.rms_norm(x.float(), weight.float(), 1e-5), **TOLERANCE)
    total = x + residual
    normed, got = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(got, total, rtol=0, atol=0)
    assert_close(normed.float(), WIDE.rms_norm(total.float(), weight.float(), 1e-5), **TOLERANCE)


def test_silu_mul(kernels: NativeKernels) -> None:
    gates = numbers(5, 130, scale=4)
    gates[0, :9] = torch.tensor([1e4, -1e4, 100, -100, 88, -88, 89, 0, math.nan], dtype=BF16)
    assert_close(kernels.silu_mul(gates).float(), WIDE.silu_mul(gates.float()), equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize("size", [2, 64, 96])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_reads_parts_of_a_fused_projection_and_writes_the_cache(
    kernels: NativeKernels, size: int, has_norms: bool
) -> None:
    q, k, v = numbers(7, 10, size).split([6, 2, 2], dim=1)
    angles = torch.rand(7, size // 2).repeat(1, 2) * 100
    cos_sin = angles.cos().to(BF16), angles.sin().to(BF16)
    norms = HeadNorms(numbers(size, seed=1), numbers(size, seed=2), 1e-6) if has_norms else None
    wide_norms = HeadNorms(norms.q.float(), norms.k.float(), norms.eps) if norms else None
    slots = torch.tensor([3, 17, 40, 5, 4, 47, 16])
    cache = numbers(2, 3, 16, 2, size, seed=3)
    wide_cache = cache.float()
    got = kernels.rotary_write_kv(q, k, v, cos_sin, cache=cache, slots=slots, norms=norms)
    cos, sin = cos_sin
    expected = WIDE.rotary_write_kv(
        q.float(), k.float(), v.float(), (cos.float(), sin.float()), cache=wide_cache, slots=slots, norms=wide_norms
    )
    assert_close(got.float(), expected, **TOLERANCE)
    assert_close(cache.float(), wide_cache, **TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.tuples(st.sampled_from([0, 1, 15, 16, 40, 217, 600]), st.integers(1, 40)), min_size=1, max_size=5),
    heads=st.sampled_from([(9, 3), (4, 4), (20, 1)]),
    size=st.sampled_from(native.TILED_SIZES),
    block_size=st.sampled_from([16, 48]),
    window=st.sampled_from([None, None, 1, 20, 530]),
)
def test_attention(
    lens: list[tuple[int, int]], heads: tuple[int, int], size: int, block_size: int, window: int | None
) -> None:
    kernels = compiled_kernels()
    starts, query_lens = zip(*sorted(lens, key=lambda pair: pair[1] > 1), strict=True)
    tables = block_tables([sum(pair) for pair in zip(starts, query_lens, strict=True)], block_size=block_size)
    batch = attention_batch(starts, query_lens, tables, block_size)
    num_heads, num_groups = heads
    cache = numbers(2, sum(map(len, tables)) + 1, block_size, num_groups, size)
    q = numbers(sum(query_lens), num_heads, size, seed=1)
    expected = WIDE.attention(q.float(), cache.float(), batch, scale=0.2, window=window)
    for table, start, rows in zip(tables, starts, query_lens, strict=True):
        cache[:, table[-1], (start + rows - 1) % block_size + 1 :] = torch.nan  # nobody has written there
    assert_close(kernels.attention(q, cache, batch, scale=0.2, window=window).float(), expected, **OF_SHARES)


def test_what_the_loops_do_not_take_goes_to_the_reference(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, weight = numbers(8, 6).T, numbers(8)
    assert_close(kernels.rms_norm(turned, weight, 1e-5), kernels.rms_norm(turned.contiguous(), weight, 1e-5))
    wide = torch.randn(2, 8)
    assert kernels.silu_mul(wide).dtype == torch.float32
    monkeypatch.setattr(kernels, "has_tiles", False)
    batch = attention_batch([0, 3], [1, 4], block_tables([1, 7], block_size=16), 16)
    q, cache = numbers(5, 4, 64), numbers(2, 3, 16, 2, 64)
    expected = WIDE.attention(q.float(), cache.float(), batch, scale=0.2)
    assert_close(kernels.attention(q, cache, batch, scale=0.2).float(), expected, **OF_SHARES)


def test_a_machine_without_a_compiler_has_the_reference_and_is_told_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_native.cache_clear()
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    kernels, choices = select_kernels(CPU, BF16, "auto")
    assert kernels.name == "reference"
    assert any("no C++ compiler (no-such-compiler)" in choice.reason for choice in choices)
    monkeypatch.setattr(native, "COMPILERS", ("false",))
    assert shutil.which("false")
    with pytest.raises(BackendError, match="false failed"):
        select_kernels(CPU, BF16, "native")
    native.load_native.cache_clear()


def test_it_is_what_auto_takes_for_bfloat16_and_says_what_it_does(kernels: NativeKernels) -> None:
    chosen, choices = select_kernels(CPU, BF16, "auto")
    assert chosen.name == "native"
    backends = {choice.operation: choice.backend for choice in choices}
    assert backends["norms, rotary, silu"] == "native"
    assert backends["attention"] == ("native" if kernels.has_tiles else "reference")
    with pytest.raises(BackendError, match=r"bfloat16 on a CPU, not in torch\.float32"):
        select_kernels(CPU, torch.float32, "native")
