"""Load a model: safetensors (one file or sharded), GGUF, or random weights. Knows names and layouts, not layers.

Weights are cast to the job's dtype and moved to the device one by one; a tensor nobody asked for is an error.
"""

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.dist import Ranks
from engine.models import Model
from engine.models.block_spec import BlockSpec
from engine.models.decoder import Decoder
from engine.models.hyper_decoder import HyperDecoder
from engine.models.spec import ModelSpec
from engine.random_weights import ROUTER_SKEW, RandomWeights
from engine.shards import Part, cut
from kernels.api import Kernels
from schemas.errors import ModelError
from schemas.gguf_file import GgufFile
from schemas.model_files import ModelFiles, read_config, resolve_model
from schemas.records import ModelRef

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BLOCK = 32  # values of a row that share a scale
FP4_PAIRS = (torch.int8, torch.uint8)

_UNUSED_TENSORS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|.*\.masked_bias")
"""Buffers that old checkpoints carry and every implementation recomputes."""

_COPIED_TENSORS = frozenset(("embed_tokens.weight", "lm_head.weight"))
"""Of draft models: copies of their target's, which training leaves alone."""

_EXPERT = re.compile(r".*\.experts\.\d+\.")


class TensorFile(Protocol):
    """Tensors by Hugging Face name, on the CPU, in the checkpoint's dtype."""

    names: frozenset[str]

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """Read one tensor, or a part of it."""


def load_model(
    files: ModelFiles | None,
    ref: ModelRef,
    kernels: Kernels,
    device: torch.device,
    ranks: Ranks | None = None,
    *,
    wants_predictor: bool = False,
) -> Model:
    """Read spec and this rank's weights into a model on ``device``. Raises ModelError or SettingsError with the cause.

    ``wants_predictor``: also the layer that predicts the token after the next, if the checkpoint has it.

    With a ``load_format`` other than "auto" only the spec is read; the weights depend on their names and shapes alone.
    """
    files = files or resolve_model(ref.name, ref.revision)
    dtype = getattr(torch, ref.dtype)
    gguf = GgufFile(files.path) if files.layout == "gguf" else None
    spec, ranks = read_spec(files, gguf), ranks or Ranks()
    ranks.topology.check_model(spec)
    if spec.compressed:
        return _load_compressed(files, spec, ref, kernels, device)
    if ref.load_format != "auto":
        return Decoder(spec, _random_weights(spec, ref, device), kernels, ranks)
    tensors = GgufTensors(gguf, spec) if gguf else SafetensorsFiles(files.path)
    source = CheckpointWeights(tensors, spec, device, dtype)
    has_predictor = wants_predictor and f"model.layers.{spec.num_layers}.eh_proj.weight" in tensors.names
    model = Decoder(spec, source, kernels, ranks, has_predictor=has_predictor)
    source.check_all_used()
    return model


def load_drafter(name: str, model: Model, device: torch.device, dtype: torch.dtype) -> None:
    """Load the draft model ``name`` into ``model``, its target. Raises ModelError with the cause."""
    files = resolve_model(name)
    try:
        if files.layout != "huggingface" or not isinstance(model, Decoder):
            raise ModelError(f"only safetensors draft models, and not for {model.spec.architecture}")
        spec = BlockSpec.from_config(read_config(files.path), model.spec)
        source = CheckpointWeights(DrafterNames(SafetensorsFiles(files.path)), spec.layers, device, dtype)
        model.add_block_drafter(spec, source)
        source.check_all_used()
    except ModelError as error:
        raise ModelError(f"engine.draft_model {name}: {error}") from error


def _load_compressed(
    files: ModelFiles, spec: ModelSpec, ref: ModelRef, kernels: Kernels, device: torch.device
) -> HyperDecoder:
    """DeepSeek V4, as far as it is implemented: ops/runbook.md lists what is not."""
    if ref.deterministic or ref.quantization != "none":
        raise ModelError(
            f"{ref.name}: {spec.architecture} runs without fp8 products and --deterministic: leave these options out"
        )
    if ref.load_format != "auto":
        return HyperDecoder(spec, _random_weights(spec, ref, device), kernels)
    source = CheckpointWeights(DeepSeekNames(SafetensorsFiles(files.path)), spec, device, getattr(torch, ref.dtype))
    model = HyperDecoder(spec, source, kernels)
    source.check_all_used()
    return model


def _random_weights(spec: ModelSpec, ref: ModelRef, device: torch.device) -> RandomWeights:
    skew = ROUTER_SKEW if ref.load_format == "random_skewed" else 0.0
    return RandomWeights(spec, device, getattr(torch, ref.dtype), skew)


def read_spec(files: ModelFiles, gguf: GgufFile | None = None) -> ModelSpec:
    """Read a model's shape; ``gguf`` saves parsing the file a second time."""
    if files.layout == "gguf":
        gguf = gguf or GgufFile(files.path)
        return ModelSpec.from_gguf(gguf.metadata, frozenset(gguf.tensors))
    return ModelSpec.from_config(read_config(files.path))


class CheckpointWeights:
    """The WeightSource of a checkpoint; remembers what was asked for."""

    def __init__(self, tensors: TensorFile, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors, self._spec, self._device, self._dtype = tensors, spec, device, dtype
        self._used: set[str] = set()
        self._left: set[str] = set()

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> Tensor:
        """See WeightSource.get; fp8 and fp4 are multiplied by their scales, and cut then: a part may cut a block."""
        if name not in self._tensors.names:
            raise ModelError(f"the checkpoint has no tensor {name}: it is not complete or not of this architecture")
        self._used.add(name)
        is_scaled = f"{name}_scale_inv" in self._tensors.names
        tensor = self._tensors.read(name, None if is_scaled else part).to(self._device)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = cut(self._dequantize(name, tensor), part)
        elif tensor.dtype in FP4_PAIRS and is_scaled:
            tensor = cut(unpack_fp4(tensor, self._scales_of(name)), part)
        if not tensor.is_floating_point() and (dtype or self._dtype).is_floating_point:
            raise ModelError(f"tensor {name} is of {tensor.dtype} without scales: of packed weights only fp4 is known")
        return tensor.to(dtype or self._dtype)

    def leave(self, prefix: str) -> None:
        """See WeightSource.leave."""
        self._left.add(prefix)

    def _dequantize(self, name: str, tensor: Tensor) -> Tensor:
        scale_name = f"{name}_scale_inv"
        if self._spec.fp8_block is None or scale_name not in self._tensors.names:
            raise ModelError(
                f"tensor {name} is in fp8, but has no {scale_name} or config.json no weight_block_size: "
                "only fp8 with block scales is implemented"
            )
        return dequantize_blocks(tensor, self._scales_of(name), self._spec.fp8_block)

    def _scales_of(self, name: str) -> Tensor:
        self._used.add(f"{name}_scale_inv")
        return self._tensors.read(f"{name}_scale_inv").to(self._device)

    def check_all_used(self) -> None:
        """Raise ModelError if the checkpoint holds a tensor that the model did not take and that changes a result.

        Layers after the last one draft tokens (multi-token prediction): one may be asked for, the others are skipped.
        """
        spec = self._spec
        numbers = range(spec.num_mtp_layers)
        skipped = [f"mtp.{n}." if spec.compressed else f"model.layers.{spec.num_layers + n}." for n in numbers]
        rest = self._tensors.names - self._used - ({"lm_head.weight"} if spec.tie_embeddings else set())
        rest = frozenset(
            name
            for name in rest
            if not _UNUSED_TENSORS.fullmatch(name)
            and not name.startswith(tuple(skipped))
            and not ((expert := _EXPERT.match(name)) and expert[0] in self._left)
        )
        if rest:
            raise ModelError(
                f"the checkpoint holds {len(rest)} tensors that this architecture does not use, so its results would "
                f"be wrong: {', '.join(sorted(rest)[:3])} ..."
            )


def dequantize_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply ``weight`` float8 [out, in] by its blocks' ``scales``, one for block[0] x block[1] values: float32."""
    rows, columns = weight.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise ModelError(
            f"fp8 scales of shape {tuple(scales.shape)} for a weight of {rows} x {columns}: want {expected}"
        )
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]


def unpack_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Two fp4 (e2m1) values a byte, the lower half first, times a scale for FP4_BLOCK of a row: float32 [out, in].

    OCP Microscaling Formats (MX) Specification v1.0, MXFP4.
    """
    rows, num_bytes = packed.shape
    expected = (rows, -(-2 * num_bytes // FP4_BLOCK))
    if tuple(scales.shape) != expected:
        raise ModelError(f"fp4 scales of shape {tuple(scales.shape)} for {rows} x {2 * num_bytes}: want {expected}")
    half = torch.tensor(FP4_VALUES, device=packed.device)
    values = torch.cat((half, -half))
    codes = packed.view(torch.uint8).int()
    weight = torch.stack((values[codes & 15], values[codes >> 4]), dim=-1).flatten(1)
    return weight * scales.float().repeat_interleave(FP4_BLOCK, 1)[:, : 2 * num_bytes]


class SafetensorsFiles:
    """The TensorFile of a Hugging Face directory: model.safetensors, or shards with an index."""

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._open_files: dict[str, Any] = {}  # safe_open handles, which carry no types
        self._file_of: dict[str, str] = {}
        for path in _shards(directory):
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
            self._open_files[path.name] = file
            self._file_of |= dict.fromkeys(file.keys(), path.name)
        self.names = frozenset(self._file_of)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """See TensorFile.read; the file is mapped, so this copies nothing but a part by columns."""
        file = self._open_files[self._file_of[name]]
        tensor: Tensor = file.get_tensor(name) if part is None else cut(file.get_slice(name), part)
        return tensor


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{directory} holds neither model.safetensors nor {index.name}: no weights to load")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"cannot read {index}: {error!r}") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelError(f"{index} names files that are missing: {', '.join(missing)}")
    return [directory / name for name in names]


class DrafterNames:
    """The TensorFile of a draft model, whose names begin as a decoder's do here, without its target's own tensors."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self.names = frozenset(f"model.{name}" for name in file.names - _COPIED_TENSORS)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """See TensorFile.read."""
        return self._file.read(name.removeprefix("model."), part)


class DeepSeekNames:
    """The TensorFile of DeepSeek V4: names as DeepSeek publishes them, of which transformers saves some otherwise.

    Only the scales have the names that they have elsewhere, so that they are found.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._saved_name = {_published_name(name): name for name in file.names}
        self.names = frozenset(self._saved_name)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """See TensorFile.read."""
        return self._file.read(self._saved_name[name], part)


def _published_name(name: str) -> str:
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
    name = name.replace("embed_tokens.", "embed.").replace("lm_head.", "head.")
    return name.removesuffix(".scale") + ".weight_scale_inv" if name.endswith(".scale") else name


class GgufTensors:
    """The TensorFile of a GGUF file: names translated, blocks dequantised to fp32, Llama's q and k rows put back."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._file = file
        self._is_permuted = spec.architecture == "llama"
        self._num_heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
        self._gguf_name = {_huggingface_name(name): name for name in file.tensors}
        self.names = frozenset(self._gguf_name)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """See TensorFile.read; blocks of quantised values are read whole."""
        tensor = torch.from_numpy(self._file.read(self._gguf_name[name]))
        if self._is_permuted and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            tensor = unpermute(tensor, self._num_heads[match[1]])
        return cut(tensor, part)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _huggingface_name(gguf_name: str) -> str:
    """Translate a tensor's name; an unknown one stays as it is and is found unused."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if not match or match[2] not in _GGUF_NAMES:
        return gguf_name
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_GGUF_NAMES[match[2]]}.{match[3]}"


def unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: interleaved rotary pairs back to halves; rows [H * D] first."""
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
