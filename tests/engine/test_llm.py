"""LLM.generate end to end on a tiny random model in a real engine process, and what it refuses before one starts."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.client import EngineClient
from engine.frames import Heartbeat
from schemas.errors import ConstraintError, ModelError, SettingsError
from schemas.model_files import model_ref
from schemas.records import FinishReason, Request, Sampling
from schemas.settings import EngineSettings
from tests.tiny_models import write_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string", "maxLength": 12}, "label": {"enum": ["yes", "no"]}},
    "required": ["reason", "label"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=128, device="cpu", num_threads=1, kv_cache_gib=0.05) as llm:
        yield llm


def constrained(schema_type: str, schema: Any, **fields: Any) -> SamplingParams:
    so_args = {"schema_type": schema_type, "schema": schema}
    return SamplingParams(temperature=0, max_tokens=100, so_args=so_args, **fields)


def test_completions_come_in_prompt_order_whatever_their_lengths(llm: LLM) -> None:
    prompts = [f"{index} " * (1 + index % 7) for index in range(24)]
    params = [SamplingParams(temperature=0, max_tokens=1 + index % 5, ignore_eos=True) for index in range(24)]
    together = llm.generate(prompts, params)
    assert [len(c.token_ids) for c in together] == [1 + index % 5 for index in range(24)]
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [(c.text, c.token_ids) for c in together] == [(c.text, c.token_ids) for c in alone]


def test_a_prompt_that_is_too_long_fails_alone_and_in_its_place(llm: LLM) -> None:
    first, too_long, last = llm.generate(["short", "far too long " * 100, "short"], GREEDY)
    assert too_long.finish_reason == FinishReason.PROMPT_TOO_LONG
    assert re.search(r"prompt is at least \d+ tokens, limit 127", too_long.error or "")
    assert too_long.num_prompt_tokens > 128
    assert first.error is last.error is None
    assert first.token_ids == last.token_ids != ()


def test_json_keys_come_in_the_order_of_the_schema(llm: LLM) -> None:
    (completion,) = llm.generate(["route this"], constrained("json", SCHEMA))
    assert completion.finish_reason == FinishReason.STOP
    assert list(json.loads(completion.text)) == ["reason", "label"]
    assert llm.generate("route this", constrained("json", json.dumps(SCHEMA)))[0].text == completion.text


def test_each_prompt_keeps_its_own_constraint(llm: LLM) -> None:
    params = [
        constrained("regex", r"[a-c]{3}-\d{2}"),
        constrained("choice", ["cat", "category", "dog"]),
        GREEDY,
        constrained("ebnf", 'root ::= "a" | "b" root "b"'),
    ]
    regex, choice, free, ebnf = llm.generate(["same prompt"] * 4, params)
    assert re.fullmatch(r"[a-c]{3}-\d{2}", regex.text)
    assert choice.text in ("cat", "category", "dog")
    assert free.text == llm.generate("same prompt", GREEDY)[0].text
    assert re.fullmatch(r"b*ab*", ebnf.text) or ebnf.finish_reason == FinishReason.LENGTH


def test_a_prompt_is_thought_about_before_it_is_answered(llm: LLM) -> None:
    asked = constrained("choice", ["cat", "category", "dog"], thinking_token_budget=12, thinking_end="</t>")
    (completion,) = llm.generate("which?", asked)
    (free,) = llm.generate("which?", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert completion.text in ("cat", "category", "dog")
    assert free.text.strip().startswith(completion.reasoning or "?")
    assert 4 <= completion.num_reasoning_tokens <= 16 < len(completion.token_ids)
    assert llm.generate("which?", constrained("choice", ["cat", "dog"]))[0].reasoning is None


def test_a_budget_that_cuts_a_document_says_so(llm: LLM) -> None:
    so_args = {"schema_type": "json", "schema": SCHEMA}
    (completion,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=2, so_args=so_args))
    assert completion.finish_reason in (FinishReason.LENGTH, FinishReason.CLOSED)


def test_text_messages_and_token_ids_are_prompts(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    text, chat, tokens = llm.generate(["hello", messages, [40, 41, 42]], GREEDY)
    assert tokens.num_prompt_tokens == 3
    assert chat.num_prompt_tokens > text.num_prompt_tokens
    assert llm.generate(messages, GREEDY)[0].token_ids == chat.token_ids
    assert llm.generate([40, 41, 42], GREEDY)[0].token_ids == tokens.token_ids


def test_a_token_id_outside_the_vocabulary_fails_alone(llm: LLM) -> None:
    bad, good = llm.generate([[10**6], [40]], GREEDY)
    assert bad.finish_reason == FinishReason.ERROR
    assert "token id outside" in (bad.error or "")
    assert good.error is None


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_draws_depend_on_seed_and_prompt_but_not_on_neighbours(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    one, two = llm.generate(["draw", "draw"], params)
    assert one.token_ids != two.token_ids  # a prompt given twice is drawn twice
    assert llm.generate(["other", "draw", "more"], params)[1].token_ids == one.token_ids
    seeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seq_seed=-5)
    one, two = llm.generate(["draw", "draw"], seeded)
    assert one.token_ids == two.token_ids


def test_logprobs_come_one_for_each_token_when_asked_for(llm: LLM) -> None:
    with_logprobs = SamplingParams(temperature=0, max_tokens=5, logprobs=True)
    asked, not_asked = llm.generate(["x", "x"], [with_logprobs, GREEDY])
    assert asked.logprobs is not None
    assert len(asked.logprobs) == len(asked.token_ids)
    assert all(logprob <= 0 for logprob in asked.logprobs)
    assert not_asked.logprobs is None


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    free = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].text
    stop = next(char for char in free[1:] if char.isascii() and char.isprintable())
    (stopped,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop))
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == FinishReason.STOP


def test_an_interrupted_call_leaves_an_idle_engine_that_serves_the_next(llm: LLM) -> None:
    def wait_for(holds: Callable[[Heartbeat], bool]) -> None:
        end = time.monotonic() + 60
        while not ((stats := llm._client.stats) and holds(stats)):
            assert time.monotonic() < end, "deadline passed"
            threading.Event().wait(0.01)

    def interrupt() -> None:
        wait_for(lambda stats: stats.phase == "running")
        os.kill(os.getpid(), signal.SIGINT)

    wait_for(lambda stats: stats.phase == "idle")
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["never waited for"] * 5_000, long)
    thread.join()
    wait_for(lambda stats: stats.phase == "idle")
    assert llm.generate("next", GREEDY)[0].error is None


def test_progress_counts_to_the_number_of_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY, progress=True)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize("prompt", [None, 3.5, b"bytes", ["words", "in", "a", "list"], [{"role": "user"}], [1, "2"]])
def test_a_prompt_of_another_type_is_refused_by_its_place(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt 1 "):
        llm.generate(["fine", prompt], GREEDY)


def test_parameters_must_be_one_or_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"stop": ["a", ""]}, "stop strings must not be empty"),
    ],
)
def test_bad_sampling_parameters_are_refused_when_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("so_args", "message"),
    [
        ({"schema_type": "json"}, "needs the keys schema_type and schema"),
        ({"schema_type": "json", "schema": "{}", "trigger_token_ids": [1]}, "trigger_token_ids"),
        ({"schema_type": "xml", "schema": "<a/>"}, "unknown schema_type 'xml': use one of json, regex, ebnf, choice"),
        ({"schema_type": "regex", "schema": {"a": 1}}, "schema of type regex must be text, not dict"),
        ({"schema_type": "json", "schema": "{"}, "the JSON Schema is not JSON"),
        ({"schema_type": "regex", "schema": "(unclosed"}, "invalid regex"),
        ({"schema_type": "choice", "schema": []}, "must be a JSON list of non-empty strings"),
    ],
)
def test_bad_so_args_are_refused_when_built(so_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        SamplingParams(so_args=so_args)


def test_very_cold_sampling_is_greedy_and_top_k_minus_one_is_off() -> None:
    sampling = SamplingParams(temperature=1e-6, top_k=-1, stop="end").sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.0, 0, ("end",))


def test_unknown_arguments_are_named(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword arguments: enforce_eager, tensor_parallel_size"):
        LLM(str(tiny_model), tensor_parallel_size=2, enforce_eager=True)
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(presence_penalty=1.0)  # type: ignore[call-arg]


def test_a_bad_engine_setting_is_named_with_its_value(tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match=r"block_size: .*, not -1"):
        LLM(str(tiny_model), block_size=-1)


def test_a_model_that_is_not_there_fails_before_a_process_starts() -> None:
    with pytest.raises(ModelError, match="unknown model"):
        LLM("no-such-model")


def test_a_model_that_cannot_be_understood_gives_its_cause(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "m"}))
    with pytest.raises(ModelError, match="model_type 'm' is not implemented"):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.slow
def test_a_killed_rank_changes_no_token_of_a_real_model(tiny_model: Path) -> None:
    settings = EngineSettings(device="cpu", num_threads=1, kv_cache_gib=0.05)
    client = EngineClient(model_ref(str(tiny_model), max_model_len=128), settings)
    constraint = constrained("json", SCHEMA).constraint
    assert constraint is not None
    sampling = Sampling(temperature=1.0, max_tokens=40)
    requests = [
        Request(request_id=str(i), text=f"row {i}", seed=i, sampling=sampling, constraint_key=constraint.key)
        for i in range(100)
    ]
    try:
        client.start()
        undisturbed = [future.result() for future in [client.submit(request, constraint) for request in requests]]
        futures = [client.submit(request, constraint) for request in requests]
        wait(futures, return_when=FIRST_COMPLETED)
        os.kill(client.hello.pid, signal.SIGKILL)
        disturbed = [future.result() for future in futures]
        assert client.num_restarts == 1
    finally:
        client.stop()
    assert [c.token_ids for c in disturbed] == [c.token_ids for c in undisturbed]
    assert [c.finish_reason for c in disturbed] == [c.finish_reason for c in undisturbed]


def test_importing_engine_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'xgrammar', 'jsonschema'}"
    code = f"import engine, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
