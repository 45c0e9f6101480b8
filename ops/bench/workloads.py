"""The three labelling workloads and the model shapes that the GPU figures are stated on. Knows no engine.

free: 256 random prompts of 100 to 1,024 tokens, 100 to 1,024 new tokens each, no end of sequence (the public benchmark
of the small engines). route: 3,080 bank questions, 77 labels in fixed JSON. extract: 1,024 conversations, four fields.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_QUESTIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "banking77.parquet"
WORKLOADS = ("free", "route", "extract", "prefill")
FORECAST_JOBS = ("choice", "schema", "free")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}

DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}

DEEPSEEK_V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": DEEPSEEK
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3-slice": DEEPSEEK_V3 | {"num_hidden_layers": 9},
    "DeepSeek-V3-tiny": DEEPSEEK_V3
    | {
        "first_k_dense_replace": 1,
        "hidden_size": 128,
        "intermediate_size": 256,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 128,
        "n_group": 4,
        "n_routed_experts": 16,
        "num_attention_heads": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "topk_group": 2,
        "v_head_dim": 32,
        "vocab_size": 49152,
    },
    "DeepSeek-V4-slice": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "bos_token_id": 1,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
        "compress_rope_theta": 160000,
        "eos_token_id": 2,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
    },
}
"""config.json of each shape; weights are random, the tokenizer is SmolLM2's.

Slices have 9 of V3's 61 layers, and 6 of V4's 43; the tiny one is for CPUs.
"""


@dataclass(frozen=True)
class Workload:
    """Prompts (text or token ids) with their budgets; ``schema`` is JSON text, None for free generation."""

    name: str
    prompts: list[str] | list[list[int]]
    max_tokens: list[int]
    schema: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


def free() -> Workload:
    """142,827 prompt tokens and 133,966 new tokens in all."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    budgets = [draw.randint(100, 1024) for _ in range(256)]
    return Workload("free", prompts, budgets, sampling={"temperature": 0.6, "ignore_eos": True})


def route(questions: Path) -> Workload:
    """One shared instruction that lists the labels, one question a row, one label as the answer."""
    texts, labels = _read_questions(questions)
    schema = _object(category={"type": "string", "enum": labels})
    head = (
        "You label questions of a bank's customers. Answer with one JSON object whose category is exactly one of: "
        + ", ".join(labels)
        + ".\n"
    )
    prompts = [f"{head}Question: {text}\nAnswer: " for text in texts]
    return Workload("route", prompts, [64] * len(prompts), schema)


def extract(questions: Path) -> Workload:
    """A conversation of 24 questions a row; topic, urgency, a bounded summary and a name as the answer."""
    texts, labels = _read_questions(questions)
    draw = random.Random(1)
    schema = _object(
        topic={"type": "string", "enum": labels},
        urgent={"type": "boolean"},
        summary={"type": "string", "minLength": 40, "maxLength": 200},
        customer_name={"type": "string", "maxLength": 40},
    )
    head = (
        "Read the conversation and fill the object: topic (one of: "
        + ", ".join(labels)
        + "), urgent, summary, customer_name.\n"
    )
    conversations = [" ".join(draw.choice(texts) for _ in range(24)) for _ in range(1024)]
    prompts = [f"{head}Conversation: {text}\nObject: " for text in conversations]
    return Workload("extract", prompts, [160] * len(prompts), schema)


def prefill(questions: Path) -> Workload:
    """The prompts of ``extract``, and one free token of each: nearly nothing but prefill."""
    prompts = extract(questions).prompts
    return Workload("prefill", prompts, [1] * len(prompts))


def _object(**properties: dict[str, Any]) -> str:
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


def _read_questions(path: Path) -> tuple[list[str], list[str]]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["text", "category"]).to_pylist()
    return [row["text"] for row in rows], sorted({row["category"] for row in rows})
