"""OpenVINO GenAI in a Python of its own: `PYTHON peer_process.py MODEL_DIRECTORY NUM_THREADS`, one JSON value a line.

It says {"system": its name} when it is loaded, and answers {"prompts", "schema", "max_tokens"} by [token ids of each
row without the end token, and the text]. Imports nothing of ours; its settings are the fastest that we found.
"""

import json
import os
import sys
from pathlib import Path

NUM_SEQS = 64
CACHE_GIB = 3
BATCHED_TOKENS = 512

Rows = list[tuple[list[int], str]]


class OpenVino:
    """OpenVINO GenAI's continuous batching with its prefix cache and xgrammar, over a model that is exported once."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        import openvino
        import openvino_genai as genai

        self._genai, self._tensor = genai, openvino.Tensor
        self.name = f"OpenVINO GenAI {genai.__version__.split('-')[0]}"
        config = genai.SchedulerConfig()
        config.cache_size, config.enable_prefix_caching, config.dynamic_split_fuse = CACHE_GIB, True, True
        config.max_num_seqs, config.max_num_batched_tokens = NUM_SEQS, BATCHED_TOKENS
        device = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": num_threads,
            "ENABLE_CPU_PINNING": False,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(str(_exported(directory)), config, "CPU", device)
        self._tokenizer = self._pipeline.get_tokenizer()

    def generate(self, prompts: list[list[int]], schema: str, max_tokens: int) -> Rows:
        """Answer the first row before the others: what they share is then in the prefix cache."""
        import numpy as np

        genai, tokenizer = self._genai, self._tokenizer
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = max_tokens, False, False
        config.eos_token_id = tokenizer.get_eos_token_id()
        config.stop_token_ids = {config.eos_token_id}
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        inputs = [self._tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = self._pipeline.generate(inputs[:1], [config])
        if inputs[1:]:
            done += self._pipeline.generate(inputs[1:], [config] * (len(inputs) - 1))
        rows = [[token for token in each.m_generation_ids[0] if token != config.eos_token_id] for each in done]
        return [(row, tokenizer.decode(row)) for row in rows]


def _exported(directory: Path) -> Path:
    """The model in OpenVINO's format beside ``directory``; made once, by optimum-intel."""
    target = directory.with_name(f"{directory.name}-openvino")
    if not target.is_dir():
        import subprocess

        staging = target.with_name(f"{target.name}-{os.getpid()}")
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", directory, *options]
        subprocess.run([*map(str, command), str(staging)], check=True, stdout=sys.stderr)
        staging.rename(target)
    return target


def main(directory: str, num_threads: str) -> None:
    """Serve standard input until it ends; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = OpenVino(Path(directory), int(num_threads))
    print(json.dumps({"system": peer.name}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.generate(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
