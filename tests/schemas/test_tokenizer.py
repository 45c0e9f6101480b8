"""Token counts without torch equal those of the engine, which uses transformers' template and encoder."""

from pathlib import Path

import pytest

from engine.text import Text
from schemas.errors import ModelError, PromptError
from schemas.model_files import ModelFiles
from schemas.records import Message, Request
from schemas.tokenizer import TokenCounter
from tests.demo_model import demo_model
from tests.tiny_models import write_tiny_model

TEXTS = ["a", "Where is my refund of 1,234.50 €?", "  two  spaces\n\n\ttabs ", "ünï 日本語 🎉", "x" * 300]
CONVERSATIONS = [[Message(role="user", content=text)] for text in TEXTS] + [
    [Message(role="system", content="Be brief."), Message(role="user", content="Why?")]
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return ModelFiles(directory, "huggingface")


def check(files: ModelFiles) -> None:
    counter, engine = TokenCounter(files), Text(files)
    for text in TEXTS:
        assert counter.encode_text(text) == engine.encode_request(Request(request_id="", text=text))
    for messages in CONVERSATIONS:
        expected = engine.encode_request(Request(request_id="", messages=tuple(messages)))
        assert counter.encode_messages(messages) == expected


def test_a_directory_s_tokens_are_the_engine_s(tiny: ModelFiles) -> None:
    check(tiny)


def test_a_gguf_file_s_tokens_are_the_engine_s() -> None:
    check(demo_model())


def test_a_model_without_tokenizer_or_template_says_so(tiny: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        TokenCounter(ModelFiles(tmp_path, "huggingface"))
    (tmp_path / "tokenizer.json").write_bytes((tiny.path / "tokenizer.json").read_bytes())
    with pytest.raises(PromptError, match="no chat template"):
        TokenCounter(ModelFiles(tmp_path, "huggingface")).encode_messages(CONVERSATIONS[0])
