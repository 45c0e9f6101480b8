"""Text to tokens and back: the tokenizer of a checkpoint, its chat template, its end tokens.

The only module that imports transformers. Knows no requests' fate; prompt text is never logged.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from engine.encoder import LITERAL, Encoder
from engine.overlong import Overlong
from schemas.errors import ModelError, PromptError
from schemas.gguf_file import GgufFile
from schemas.model_files import ModelFiles, read_config
from schemas.records import Message, Request
from schemas.tokenizer import gguf_tokenizer

OPEN_CHARACTER = "\ufffd"
"""What decoding an unfinished UTF-8 sequence ends with."""


class Text:
    """A model's tokenizer. Raises ModelError if it cannot be read."""

    def __init__(self, files: ModelFiles) -> None:
        if files.layout == "gguf":
            metadata = GgufFile(files.path).metadata
            self.tokenizer = _tokenizer_of_gguf(metadata)
            end_ids = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        else:
            self.tokenizer = _tokenizer_of_directory(files.path)
            end_ids = _configured_end_ids(files.path)
        end_ids.add(self.tokenizer.eos_token_id)
        self.eos_token_ids: frozenset[int] = frozenset(token_id for token_id in end_ids if token_id is not None)
        self.vocab_size: int = max(self.tokenizer.get_vocab().values()) + 1
        added = self.tokenizer.added_tokens_decoder.items()
        control_ids = {token.content: token_id for token_id, token in added if token.special or token_id in end_ids}
        self._encoder = Encoder(self.tokenizer.backend_tokenizer, control_ids)
        self._overlong = Overlong(self.tokenizer.backend_tokenizer, self._encoder.encode_plain)

    def encode_request(self, request: Request, max_tokens: int = sys.maxsize) -> list[int]:
        """Tokenise a request: messages by the chat template, text as it is, token ids untouched.

        Special tokens come from the template, or from text outside ``data_spans``: their names in a message or in data
        are text, so that no row can forge a turn.
        Raises PromptError for a conversation that the template refuses, or a model without one, and TooLong where it is
        sure without tokenising all of it that there are more than ``max_tokens``.
        """
        if request.token_ids is not None:
            return list(request.token_ids)
        if request.messages is not None:
            protect = self._encoder.protect
            messages = [Message(role=protect(each.role), content=protect(each.content)) for each in request.messages]
            rendered = self.render(messages)
            self._overlong.refuse(rendered.replace(LITERAL, ""), max_tokens)
            return self._encoder.encode(rendered)
        text = request.text or ""
        self._overlong.refuse(text, max_tokens)
        protected = self._encoder.protect_spans(text, request.data_spans) if request.data_spans else text
        if request.has_start:
            return self._encoder.encode(protected)
        if protected == text:
            return self._encoder.encode_with_start(text)
        return [*self._encoder.encode_with_start(""), *self._encoder.encode(protected)]

    def render(self, messages: Sequence[Message]) -> str:
        """Apply the chat template, up to where the assistant's answer begins."""
        if not self.tokenizer.chat_template:
            raise PromptError("the model has no chat template: send plain text (--no-chat)")
        if not messages:
            raise PromptError("a conversation needs at least one message")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise PromptError(f"the model's chat template refuses the conversation ({roles}): {error}") from error
        return str(text)

    def encode_after(self, context: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Tokenise ``text`` as it follows the tokens ``context``; on its own where the two would merge."""
        whole = self._encoder.encode_plain(self.decode(context) + text)
        if tuple(whole[: len(context)]) == context:
            return tuple(whole[len(context) :])
        return tuple(self._encoder.encode_plain(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode, leaving special tokens out; bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> "IncrementalDetokenizer":
        """Return a decoder for one sequence of output tokens."""
        return IncrementalDetokenizer(self)


class IncrementalDetokenizer:
    """Decodes token by token: what ``push`` and a last ``flush`` return adds up to ``Text.decode`` of all tokens."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._token_ids: list[int] = []
        self._start = 0  # the last tokens already shown are decoded again: a token's text may depend on its left
        self._shown = 0  # tokens whose text was returned

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; "" while a character is open."""
        self._token_ids.append(token_id)
        return self._advance(is_last=False)

    def flush(self) -> str:
        """Return what is left at the end: an unfinished character as U+FFFD."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        before = self._text.decode(self._token_ids[self._start : self._shown])
        after = self._text.decode(self._token_ids[self._start :])
        if len(after) <= len(before) or (after.endswith(OPEN_CHARACTER) and not is_last):
            return ""
        self._start, self._shown = self._shown, len(self._token_ids)
        return after[len(before) :]


def _tokenizer_of_directory(directory: Path) -> PreTrainedTokenizerFast:
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(f"{directory} holds no tokenizer.json: convert the tokenizer with transformers first")
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(directory))
    except Exception as error:  # the Rust tokenizer raises it bare for a malformed file
        raise ModelError(f"cannot read the tokenizer of {directory}: {error}") from error


def _configured_end_ids(directory: Path) -> set[int | None]:
    """End tokens of generation_config.json, or of config.json where it names none."""
    path = directory / "generation_config.json"
    try:
        configured = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if configured is None:
        configured = read_config(directory).get("eos_token_id")
    return set(configured) if isinstance(configured, list) else {configured}


def _tokenizer_of_gguf(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    found = gguf_tokenizer(metadata)
    return PreTrainedTokenizerFast(
        tokenizer_object=found.tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=found.chat_template,
        **found.named,
    )


def find_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the first stop string begins in ``text``; None if there is none."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return min(found, default=None)
