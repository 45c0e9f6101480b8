"""A checkpoint's tokenizer and chat template without torch: from tokenizer.json, or rebuilt from a GGUF file.

``engine.text`` generates with them; here they also count, for plans made where no engine runs.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import ModelError, PromptError
from schemas.gguf_file import GgufFile
from schemas.model_files import ModelFiles
from schemas.records import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPLITS = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": _GPT2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),
}
"""How llama.cpp's pre-tokenizers cut text before the merges, by their names in GGUF files."""

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that are matched before anything is cut."""


class Tokenizing(NamedTuple):
    """A tokenizer, the chat template if there is one, and the tokens that have a role, such as ``bos_token``."""

    tokenizer: "Tokenizer"
    chat_template: str | None
    named: dict[str, str]


def load_tokenizing(files: ModelFiles) -> Tokenizing:
    """Read what a checkpoint says about its tokens. Raises ModelError."""
    if files.layout == "gguf":
        return gguf_tokenizer(GgufFile(files.path).metadata)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
    except Exception as error:  # the Rust tokenizer raises it bare
        raise ModelError(f"cannot read the tokenizer of {files.path}: {error}") from error
    path = files.path / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    template_file = files.path / "chat_template.jinja"
    template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    named = {name: value for name, value in config.items() if name.endswith("_token") and value}
    named = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return Tokenizing(tokenizer, template, {name: value for name, value in named.items() if isinstance(value, str)})


class TokenCounter:
    """Turns prompts into tokens as the engine would, but for text that names special tokens. One thread uses it."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer, template, self._named = load_tokenizing(files)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.datetime.now().strftime}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._template = None if template is None else environment.from_string(template)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a plain prompt, with the start token where the tokenizer has one."""
        return list(self._tokenizer.encode(text).ids)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation. Raises PromptError if the template refuses it, or there is none."""
        if self._template is None:
            raise PromptError("the model has no chat template: send plain text (--no-chat)")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(messages=conversation, add_generation_prompt=True, **self._named)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the model's chat template refuses the conversation: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizing:
    """Rebuild a byte-level BPE tokenizer. Raises ModelError for another kind, or an unknown pre-tokenizer.

    transformers' own GGUF route leaves the pre-tokenizer's digit step out, so that numbers get other tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or name not in _SPLITS:
        raise ModelError(f"GGUF tokenizer {kind!r} with pre-tokenizer {name!r} is not implemented: use safetensors")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    named = _named_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    return Tokenizing(tokenizer, metadata.get("tokenizer.chat_template"), named)


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    steps = [Split(Regex(_SPLITS[name]), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    return Sequence([Digits(individual_digits=True), *steps] if name == "smollm" else steps)


def _named_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """The tokens that GGUF metadata give a role, under transformers' names."""
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, role in roles.items()}
    return {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}
