"""Two systems that the engine benchmark compares: our engine, and static batches of transformers with xgrammar.

Each gets token ids and returns, row by row, the text and its token ids without the end token. Knows no clock.
"""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.client import EngineClient
from ops.bench.roofline import RowWork
from ops.bench.tickets import TicketWorkload
from schemas.errors import ModelError
from schemas.model_files import resolve_model
from schemas.records import ModelRef, Request, Sampling
from schemas.settings import EngineSettings

WARM_UP_PROMPTS = ((1, 4093, 198, 6004, 2), (1, 4093, 198, 28120, 2))
"""Shares nothing but two tokens with the workload: a warm-up must not fill the prefix cache for the measured run."""

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """What a system generated for one row."""

    text: str
    num_tokens: int
    finish_reason: str


class System(ABC):
    """A loaded model that can run a workload once."""

    name: str

    def warm_up(self, workload: TicketWorkload) -> None:
        """Compile the constraint and touch every weight, with prompts that share nothing with the workload's."""
        self._generate(WARM_UP_PROMPTS, workload, WARM_UP_TOKENS)

    def run(self, workload: TicketWorkload) -> list[Answer]:
        """Answer every row, in order: all are handed over at once, the system holds back what it has no room for."""
        return self._generate(workload.prompts, workload, workload.max_tokens)

    @abstractmethod
    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], workload: TicketWorkload, max_tokens: int
    ) -> list[Answer]: ...


class Nightmill(System):
    """Our engine behind its client, as a worker uses it."""

    name = "nightmill"

    def __init__(self, client: EngineClient, eos_token_id: int) -> None:
        self._client = client
        self._eos_token_id = eos_token_id
        self.kernels = client.hello.kernels
        self.works: list[RowWork] = []  # of the last run

    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], workload: TicketWorkload, max_tokens: int
    ) -> list[Answer]:
        sampling = Sampling(max_tokens=max_tokens)
        key = workload.constraint.key
        requests = [
            Request(request_id=f"{max_tokens}-{index}", token_ids=prompt, constraint_key=key, sampling=sampling)
            for index, prompt in enumerate(prompts)
        ]
        futures = [self._client.submit(request, workload.constraint) for request in requests]
        completions = [future.result() for future in futures]
        self.works = [
            RowWork(done.num_prompt_tokens, done.num_cached_tokens, len(done.token_ids)) for done in completions
        ]
        return [
            Answer(done.text, sum(token != self._eos_token_id for token in done.token_ids), str(done.finish_reason))
            for done in completions
        ]


@contextmanager
def nightmill(
    model: ModelRef, settings: EngineSettings, workload: TicketWorkload, eos_token_id: int
) -> Iterator[Nightmill]:
    """Start a fresh, warmed-up engine: a used one would find the whole workload in its prefix cache."""
    client = EngineClient(model, settings)
    try:
        client.start()
        system = Nightmill(client, eos_token_id)
        system.warm_up(workload)
        yield system
    finally:
        client.stop()


class StaticBatches(System):
    """transformers' generate over left-padded batches in input order, masked by xgrammar's own logits processor."""

    def __init__(self, directory: Path, dtype: str, device: str, num_threads: int, batch_rows: int) -> None:
        import torch
        import xgrammar
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self.name = f"transformers static batches of {batch_rows}"
        self._batch_rows = batch_rows
        self._device = device
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval().to(device)
        vocab_size = self._model.config.vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info)
        self.eos_token_id: int = self._tokenizer.eos_token_id

    def run(self, workload: TicketWorkload) -> list[Answer]:
        """Generate batch by batch."""
        answers: list[Answer] = []
        for start in range(0, len(workload.prompts), self._batch_rows):
            batch = workload.prompts[start : start + self._batch_rows]
            answers += self._generate(batch, workload, workload.max_tokens)
        return answers

    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], workload: TicketWorkload, max_tokens: int
    ) -> list[Answer]:
        import torch
        from xgrammar.contrib.hf import LogitsProcessor

        width = max(map(len, prompts))
        eos = self.eos_token_id
        input_ids = torch.tensor([[eos] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # The compiler caches: only the first batch compiles.
        grammar = self._compiler.compile_json_schema(workload.constraint.source, any_whitespace=False)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=eos,
                pad_token_id=eos,
                logits_processor=[LogitsProcessor(grammar)],
            )
        return [self._answer(row) for row in output[:, width:].tolist()]

    def _answer(self, token_ids: list[int]) -> Answer:
        has_ended = self.eos_token_id in token_ids
        kept = token_ids[: token_ids.index(self.eos_token_id)] if has_ended else token_ids
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        return Answer(text, len(kept), "stop" if has_ended else "length")


def huggingface_directory(model: ModelRef, cache: Path) -> Path:
    """The model as a directory that transformers loads; a GGUF file is dequantised once into ``cache``.

    The tokenizer made from a GGUF file splits numbers differently: good to decode and to build masks, not to encode.
    """
    files = resolve_model(model.name, model.revision)
    if files.layout == "huggingface":
        return files.path
    directory = cache / f"{model.digest}-{model.dtype}"
    if not directory.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=cache))
        try:
            _convert_gguf(files.path, staging, model.dtype)
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return directory


def _convert_gguf(path: Path, directory: Path, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()

    # Not from_pretrained(gguf_file=...): it asks for accelerate, which nothing else here needs.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    loaded = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := set(loaded.missing_keys) - tied | set(loaded.unexpected_keys):
        raise ModelError(f"{path} does not fill transformers' model: {', '.join(sorted(missing))}")
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)
