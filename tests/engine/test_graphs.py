"""Graphs of steps: what is recorded, how a step is laid into a recorded buffer, and that a replay changes no answer."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.graphs import MIXED_SIZES, GraphLimits, Shape, _fill, _num_inputs, _split, graph_shapes
from engine.llm import LLM, SamplingParams

LIMITS = GraphLimits(max_runs=48, max_rows=300, max_blocks=3)


def test_every_step_within_the_limits_has_a_graph_of_its_kind() -> None:
    shapes = graph_shapes(LIMITS, has_shared=False)
    decodes, mixed = ([shape for shape in shapes if shape.is_decode is kind] for kind in (True, False))
    assert all(shape.runs == shape.rows for shape in decodes)
    assert decodes[-1].rows == LIMITS.max_runs
    assert [shape.rows for shape in mixed] == [size for size in MIXED_SIZES if size <= LIMITS.max_rows]
    assert all(shape.runs == min(shape.rows, LIMITS.max_runs) for shape in mixed)
    assert graph_shapes(replace(LIMITS, max_rows=0), has_shared=False) == decodes
    shared = graph_shapes(LIMITS, has_shared=True)
    assert {shape for shape in shared if not shape.is_shared} == set(decodes), "mixed steps always look for a prefix"
    assert {replace(shape, is_shared=False) for shape in shared if shape.is_shared} == set(shapes)


def test_a_buffer_holds_the_step_and_then_rows_and_runs_of_nobody() -> None:
    shape = Shape(rows=6, runs=4, is_decode=False)
    flat = torch.full((_num_inputs(shape, 3),), 77, dtype=torch.int64)
    host = {name: part.numpy() for name, part in _split(flat, shape, 3).items()}
    step = {
        "input_ids": np.array([5, 6, 7]),
        "sources": np.array([-1, -1, 2]),
        "positions": np.array([0, 1, 9]),
        "slots": np.array([16, 17, 41]),
        "seq_lens": np.array([2, 10]),
        "logits_rows": np.array([2]),
        "query_starts": np.array([0, 2, 3]),
        "block_table": np.array([[4, 0], [9, 2]]),
    }
    _fill(host, step)
    assert host["slots"].tolist() == [16, 17, 41, 0, 0, 0]
    assert host["sources"].tolist() == [-1, -1, 2, -1, -1, -1]
    assert host["seq_lens"].tolist() == [2, 10, 1, 1]
    assert host["logits_rows"].tolist() == [2, 0, 0, 0]
    assert host["query_starts"].tolist() == [0, 2, 3, 3, 3]
    assert host["block_table"][:2, :2].tolist() == [[4, 0], [9, 2]]
    assert host["shared"].tolist() == [0, 0]
    _fill(host, step | {"shared": np.array([16, 1])})
    assert host["shared"].tolist() == [16, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_change_no_greedy_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.tiny_models import write_tiny_model

    directory = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    draw = random.Random(0)
    start = [draw.randrange(200) for _ in range(150)]  # long enough for decode rows to share it
    prompts = [start + [draw.randrange(200) for _ in range(draw.randrange(1, 90))] for _ in range(64)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + index % 9, ignore_eos=True) for index in range(64)]
    answers = []
    for cuda_graphs in (False, True):
        with LLM(str(directory), dtype="float32", max_model_len=256, cuda_graphs=cuda_graphs, max_num_seqs=32) as llm:
            answers.append([completion.token_ids for completion in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
