"""Finding models and giving them an identity without torch."""

import json
import struct
from pathlib import Path

import pytest

from schemas.errors import ModelError
from schemas.model_files import (
    GGUF_HEAD_BYTES,
    ModelFiles,
    checkpoint_dtype,
    model_digest,
    model_ref,
    read_config,
    resolve_model,
)


def write_model(directory: Path, *, config: object = None, weights: bytes = b"\0" * 8) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, len(weights)]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return directory


def digest(directory: Path) -> str:
    return model_digest(ModelFiles(directory, "huggingface"))


def test_a_directory_with_a_config_is_a_model(tmp_path: Path) -> None:
    assert resolve_model(str(write_model(tmp_path / "m"))) == ModelFiles(tmp_path / "m", "huggingface")


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "m.gguf")).layout == "gguf"


@pytest.mark.parametrize("name", ["nothing", "/no/such/directory", "./m", "a/b/c", "~/nowhere-at-all"])
def test_a_name_that_is_no_model_says_what_was_looked_for(name: str) -> None:
    with pytest.raises(ModelError, match="smollm2"):
        resolve_model(name)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_the_same_files_have_the_same_digest_anywhere(tmp_path: Path) -> None:
    assert digest(write_model(tmp_path / "a")) == digest(write_model(tmp_path / "b"))
    assert len(digest(tmp_path / "a")) == 16


def test_config_tokenizer_and_sizes_change_the_digest(tmp_path: Path) -> None:
    plain = digest(write_model(tmp_path / "a"))
    other_config = digest(write_model(tmp_path / "b", config={"model_type": "qwen3"}))
    other_size = digest(write_model(tmp_path / "c", weights=b"\0" * 16))
    (write_model(tmp_path / "d") / "tokenizer.json").write_text("{}")
    with_tokenizer = digest(tmp_path / "d")
    random_weights = model_digest(ModelFiles(tmp_path / "a", "huggingface"), "random")
    assert len({plain, other_config, other_size, with_tokenizer, random_weights}) == 5


@pytest.mark.parametrize("num_bytes", [8, 2**20])
def test_weights_that_were_trained_on_in_place_are_another_model(tmp_path: Path, num_bytes: int) -> None:
    before = digest(write_model(tmp_path / "m", weights=bytes(num_bytes)))
    assert digest(write_model(tmp_path / "m", weights=b"\1" * num_bytes)) != before


def test_so_are_those_behind_the_head_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    found = set()
    for byte in (b"\0", b"\1"):
        path.write_bytes(bytes(GGUF_HEAD_BYTES) + byte * 2**20)
        found.add(model_digest(ModelFiles(path, "gguf")))
    assert len(found) == 2


def test_dtype_auto_is_the_checkpoints_own(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config={"torch_dtype": "bfloat16"})
    assert model_ref(str(tmp_path / "m")).dtype == "bfloat16"
    assert model_ref(str(tmp_path / "m"), dtype="float32").dtype == "float32"


def test_an_unknown_checkpoint_dtype_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m", config={"dtype": "int3"})
    with pytest.raises(ModelError, match="int3"):
        checkpoint_dtype(ModelFiles(tmp_path / "m", "huggingface"))


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_queue_separates_what_must_not_be_mixed(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    queues = {
        model_ref(str(tmp_path / "m"), dtype=d, quantization=q, deterministic=r).queue
        for d in ("float32", "float16")
        for q in ("none", "fp8")
        for r in (False, True)
    }  # type: ignore[arg-type]
    assert len(queues) == 8
