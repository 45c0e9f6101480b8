"""What the kernel bench says of a backend: its share of the bound, its error, or why it failed."""

import pytest
import torch
from torch import Tensor

from kernels.reference import ReferenceKernels
from ops.bench.kernels import PAGE, RANK, ROPE, Case, decode_batch, measure, run_kernels_bench, table
from ops.bench.roofline import Rates
from schemas.errors import InputDataError

RATES = Rates(flops_per_s=1000.0, bytes_per_s=100.0)


def refuse() -> Tensor:
    raise RuntimeError("takes no such size\nat line 3")


def test_a_backend_is_measured_against_the_larger_bound_and_the_reference() -> None:
    backends = {"exact": lambda: torch.ones(4), "off": lambda: torch.full((4,), 1.1), "none": refuse}
    case = Case("sum", "4", 3000.0, 200.0, backends, lambda: torch.ones(4), speedup=2)
    result = measure(case, RATES, lambda compute: 4.0)
    assert (result["bound_ms"], result["bound_by"]) == (2000.0, "bytes"), "3,000 flops take 1.5 s at twice the rate"
    assert result["backends"]["exact"] == {"ms": 4000.0, "share_of_bound": 0.5, "relative_error": 0.0}
    assert result["backends"]["off"]["relative_error"] == pytest.approx(0.1)
    assert "no such size" in result["backends"]["none"]["failure"]
    lines = table([result])
    assert len(lines) == 4
    assert lines[3].endswith("takes no such size")


def test_a_decode_batch_has_a_row_at_the_end_of_each_sequence() -> None:
    lens = [1, 64, 65, 200]
    batch = decode_batch(lens, torch.device("cpu"))
    used = [block for row, length in zip(batch.block_table, lens, strict=True) for block in row[: -(-length // PAGE)]]
    assert len(set(map(int, used))) == len(used)
    assert min(used) > 0
    cache = torch.zeros(int(batch.block_table.max()) + 1, PAGE, 1, RANK + ROPE)
    ReferenceKernels().write_latent(cache, batch.slots, torch.ones(4, RANK), torch.ones(4, ROPE))
    last = [int(batch.block_table[row, (length - 1) // PAGE]) for row, length in enumerate(lens)]
    assert [float(cache[block, (length - 1) % PAGE].min()) for block, length in zip(last, lens, strict=True)] == [
        1.0
    ] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(InputDataError, match="measured on a GPU"):
        run_kernels_bench()
