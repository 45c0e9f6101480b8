"""Loading weights: shards, tied heads, GGUF, random ones; and what makes a checkpoint unusable."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import Model
from engine.weights import load_model, unpermute
from kernels.reference import ReferenceKernels
from schemas.errors import ModelError
from schemas.gguf_file import GgufFile
from schemas.model_files import ModelFiles, resolve_model
from schemas.records import ModelRef
from tests.step_batches import block_tables, step_batch
from tests.tiny_models import IM_END, tiny_config, tiny_tokenizer, tiny_weights, write_tiny_model

CPU = torch.device("cpu")
IDS = [5, 9, 17, 300, 44, 81, 7]


def load(path: Path, load_format: str = "auto") -> Model:
    files = ModelFiles(path, "gguf" if path.suffix == ".gguf" else "huggingface")
    ref = ModelRef(name=str(path), digest="0" * 16, load_format=load_format)  # type: ignore[arg-type]
    return load_model(files, ref, ReferenceKernels(), CPU)


def all_logits(model: Model, ids: list[int] = IDS) -> torch.Tensor:
    batch = step_batch([ids], [0], block_tables([len(ids)]), logits_rows=range(len(ids)))
    return model.logits(model.forward(batch, model.alloc_cache(1 + len(ids), 4)))


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    one, many = write_tiny_model(tmp_path / "one"), write_tiny_model(tmp_path / "many", num_shards=3)
    assert torch.equal(all_logits(load(one)), all_logits(load(many)))


def test_a_tied_head_is_the_embedding_even_if_the_file_holds_another(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "smollm2")
    wanted = all_logits(load(directory))
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(320, 48)}, directory / "model.safetensors")
    assert torch.equal(all_logits(load(directory)), wanted)


def test_a_bf16_checkpoint_loads_as_fp32(tmp_path: Path) -> None:
    narrow = write_tiny_model(tmp_path / "narrow", dtype=torch.bfloat16)
    logits = all_logits(load(narrow))
    wide = write_tiny_model(tmp_path / "wide")
    rounded = {k: v.bfloat16().float() for k, v in load_file(wide / "model.safetensors").items()}
    save_file(rounded, wide / "model.safetensors")
    assert torch.equal(all_logits(load(wide)), logits)


def test_a_missing_or_unused_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, path)
    with pytest.raises(ModelError, match=r"does not use.*model.layers.0.self_attn.q_proj.bias"):
        load(directory)
    save_file({**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    load(directory)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, path)
    with pytest.raises(ModelError, match=r"no tensor model.layers.1.mlp.down_proj.weight"):
        load(directory)


def test_missing_and_broken_weight_files_are_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, num_shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ModelError, match=f"cannot read .*{shard.name}"):
        load(directory)
    shard.unlink()
    with pytest.raises(ModelError, match=f"missing: {shard.name}"):
        load(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="no weights to load"):
        load(directory)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v2_lite", "deepseek_v3"])
def test_random_weights_need_no_weight_file_and_are_the_same_each_time(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family)))
    first, second = all_logits(load(tmp_path, "random")), all_logits(load(tmp_path, "random"))
    assert torch.equal(first, second)
    assert first.std() > 0


def quantize_to_fp8(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block by block as DeepSeek publishes: (float8 weight, inverse scales, the fp32 values that they stand for)."""
    rows, columns = weight.shape
    quantized, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[part].abs().max() / 448
            quantized[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = quantized[part].float() * scales[i, j]
    return quantized, scales, meant


def write_fp8_model(directory: Path, block: int) -> tuple[Path, Path]:
    """A tiny DeepSeek-V3 with fp8 linear layers, and the same values in fp32: two directories."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    narrow = write_tiny_model(directory / "narrow", "deepseek_v3", quantization_config=fp8)
    wide = write_tiny_model(directory / "wide", "deepseek_v3")
    stored, meant = {}, {}
    for name, tensor in load_file(wide / "model.safetensors").items():
        is_kept = tensor.dim() == 1 or any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate."))
        if is_kept:
            stored[name] = meant[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantize_to_fp8(tensor, block)
    save_file(stored, narrow / "model.safetensors")
    save_file(meant, wide / "model.safetensors")
    return narrow, wide


@pytest.mark.parametrize("block", [16, 128])
def test_an_fp8_checkpoint_means_its_values_times_their_blocks_scales(tmp_path: Path, block: int) -> None:
    narrow, wide = write_fp8_model(tmp_path, block)
    torch.testing.assert_close(all_logits(load(narrow)), all_logits(load(wide)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_projections_stay_near_the_model_they_round(tmp_path: Path, family: str) -> None:
    directory = write_tiny_model(tmp_path, family)
    exact = all_logits(load(directory))
    ref = ModelRef(name=str(directory), digest="0" * 16, quantization="fp8")
    kernels = ReferenceKernels(CPU, torch.float32, is_fp8=True)
    rounded = all_logits(load_model(ModelFiles(directory, "huggingface"), ref, kernels, CPU))
    assert 0.001 < float((rounded - exact).norm() / exact.norm()) < 0.2


def test_fp8_without_fitting_scales_is_refused_by_name(tmp_path: Path) -> None:
    narrow, _ = write_fp8_model(tmp_path, 16)
    path, name = narrow / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    weights = load_file(path)
    scales = weights.pop(f"{name}_scale_inv")
    save_file(weights, path)
    with pytest.raises(ModelError, match=f"{name} is in fp8, but has no {name}_scale_inv"):
        load(narrow)
    save_file({**weights, f"{name}_scale_inv": scales[:1]}, path)
    with pytest.raises(ModelError, match=r"fp8 scales of shape \(1, 3\) for a weight of 64 x 48: want \(4, 3\)"):
        load(narrow)


def test_layers_that_draft_tokens_are_skipped_where_the_config_has_them(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "deepseek_v3")
    wanted = all_logits(load(directory))
    path = directory / "model.safetensors"
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, path)
    assert torch.equal(all_logits(load(directory)), wanted)
    config = tiny_config("deepseek_v3", num_nextn_predict_layers=0)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"does not use.*model.layers.3.eh_proj.weight"):
        load(directory)


def write_gguf(path: Path, family: str) -> Path:
    """Write a tiny model as llama.cpp's converter does, Llama's q and k rows permuted, some tensors quantised."""
    import gguf

    config = tiny_config(family)
    arch = "qwen2" if family == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_eos_token_id(IM_END)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in tiny_weights(config).items():
        module, kind = name.rsplit(".", 1)
        parts = module.split(".")
        is_layer = module.startswith("model.layers.")
        short = names[".".join(parts[3:]) if is_layer else module]
        values = tensor.numpy()
        if arch == "llama" and short in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        full = f"blk.{parts[2]}.{short}.{kind}" if is_layer else f"{short}.{kind}"
        writer.add_tensor(full, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2"])
def test_a_gguf_file_holds_the_model_that_it_was_made_from(tmp_path: Path, family: str) -> None:
    made = load(write_gguf(tmp_path / "tiny.gguf", family))
    original = load(write_tiny_model(tmp_path / "hf", family))
    torch.testing.assert_close(all_logits(made), all_logits(original), atol=1e-5, rtol=1e-5)


def test_unpermute_undoes_llama_cpps_order() -> None:
    rows = torch.arange(24).view(12, 2)
    permuted = rows.view(2, 2, 3, 2).transpose(1, 2).reshape(12, 2)
    assert torch.equal(unpermute(permuted, num_heads=2), rows)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(40), b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_a_broken_gguf_file_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read .*broken\.gguf as GGUF"):
        GgufFile(path)


@pytest.fixture(scope="module")
def demo() -> ModelFiles:
    try:
        return resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


def test_the_gguf_reader_agrees_with_the_gguf_packages(demo: ModelFiles, tmp_path: Path) -> None:
    import gguf

    ours, theirs = GgufFile(demo.path), gguf.GGUFReader(demo.path)
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for key in ("llama.rope.freq_base", "tokenizer.ggml.pre", "tokenizer.chat_template", "tokenizer.ggml.token_type"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    assert ours.metadata["tokenizer.ggml.tokens"][:999] == theirs.fields["tokenizer.ggml.tokens"].contents(slice(999))
    for tensor in theirs.tensors[:4] + theirs.tensors[-1:]:  # Q8_0, F32, Q4_1
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        assert np.array_equal(ours.read(tensor.name), wanted)
