"""Weights for benchmarks have the shapes of a checkpoint, whose loading other tests cover."""

from pathlib import Path

import torch

from engine.models.hyper_decoder import HyperDecoder
from engine.random_weights import RandomWeights
from engine.weights import DeepSeekNames, SafetensorsFiles, load_model, read_spec
from kernels.reference import ReferenceKernels
from schemas.model_files import ModelFiles
from schemas.records import ModelRef
from tests.engine.test_decoder import CPU, random_ids
from tests.engine.test_hyper_decoder import HEAVY, SLIDING, SPARSE, write_oracle
from tests.step_batches import BLOCK_SIZE, block_tables, step_batch


def test_v4s_have_the_shapes_of_a_checkpoint_and_run(tmp_path: Path) -> None:
    write_oracle(tmp_path, [SLIDING, SPARSE, HEAVY], {})
    files = ModelFiles(tmp_path, "huggingface")
    checkpoint, random = DeepSeekNames(SafetensorsFiles(tmp_path)), RandomWeights(read_spec(files), CPU, torch.float32)
    for name in checkpoint.names:
        kind = torch.int64 if name.endswith("tid2eid") else torch.float32
        assert random.get(name, kind).shape == checkpoint.read(name).shape, name
    table = random.get("layers.0.ffn.gate.tid2eid", torch.int64)
    assert all(len(set(experts)) == 2 and max(experts) < 8 for experts in table.tolist())
    ref = ModelRef(name=str(tmp_path), digest="0" * 16, dtype="float32", load_format="random")
    model = load_model(files, ref, ReferenceKernels(CPU), CPU)
    assert isinstance(model, HyperDecoder)
    batch = step_batch([random_ids(20, seed=1)], [0], block_tables([20]))
    assert model.logits(model.forward(batch, model.alloc_cache(9, BLOCK_SIZE))).isfinite().all()
