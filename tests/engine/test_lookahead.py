"""A checkpoint's own predictor drafts: it is what its paper says, and greedy output is the plain one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from engine.draft import Guess
from engine.lookahead import Foreseen
from engine.loop import Engine
from engine.parts import load_parts
from engine.types import Draft, Run, Sequence
from schemas.model_files import model_ref
from schemas.records import Constraint, ConstraintKind, Request, Sampling
from schemas.settings import EngineSettings
from tests.engine.fakes import make_sequence, run_all
from tests.engine.test_parity import make_engine, random_prompts
from tests.tiny_models import VOCAB_SIZE, tiny_config, tiny_weights, write_tiny_model

LAYER = "model.layers.3."
JSON = Constraint(kind=ConstraintKind.REGEX, source='\\{"route": "(billing|bug|other)", "note": "[a-z ]{3,12}"\\}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("v3"), "deepseek_v3", has_predictor=True)


def run(model: Path, num_draft_tokens: int | None, **settings: Any) -> tuple[list[tuple[int, ...]], Any]:
    engine = make_engine(str(model), 128, num_threads=1, num_draft_tokens=num_draft_tokens, **settings)
    engine.add_constraint(JSON)
    prompts = random_prompts([5, 40, 17, 9, 33, 21], VOCAB_SIZE, shared=32)
    requests = [
        Request(
            request_id=str(index),
            token_ids=tuple(prompt),
            constraint_key=JSON.key if index % 3 == 2 else None,
            sampling=Sampling(max_tokens=24, ignore_eos=True, temperature=0.0 if index < 4 else 1.0),
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]
    done = run_all(engine, requests)
    assert all(completion.error is None for completion in done.values())
    return [done[each.request_id].token_ids for each in requests], engine.stats


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24}, {"num_tokens": 160, "overlap": True}, {"deterministic": True}],
    ids=str,
)
def test_output_with_the_predictors_drafts_is_the_plain_output(model: Path, settings: dict[str, Any]) -> None:
    plain, none = run(model, 0)
    drafted, stats = run(model, 3, **settings)
    assert none.num_draft_tokens == 0
    assert stats.num_draft_tokens > 60
    assert drafted == plain


class Silent:
    """A source that leaves all guesses to the predictor."""

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        return Guess(())


def test_a_predictor_that_is_always_right_gives_all_its_tokens(tmp_path: Path) -> None:
    """Layers that add nothing: the next token hangs on the last one alone, for the trunk and for its predictor."""
    config = tiny_config("deepseek_v3", has_predictor=True)
    weights = {name: torch.ones_like(w) if "norm." in name else w for name, w in tiny_weights(config).items()}
    weights = {name: w * 0 if "o_proj" in name or "down_proj" in name else w for name, w in weights.items()}
    weights[f"{LAYER}eh_proj.weight"] = torch.cat((torch.eye(64), torch.zeros(64, 64)), dim=1)
    write_tiny_model(tmp_path, "deepseek_v3", has_predictor=True)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ref = model_ref(str(tmp_path), dtype="float32", max_model_len=128)
    outputs = []
    for num_draft_tokens in (0, 4):
        settings = EngineSettings(
            device="cpu", num_threads=1, num_draft_tokens=num_draft_tokens, kv_cache_gib=0.01, block_size=4
        )
        engine = Engine(ref, settings, replace(load_parts(ref, settings), draft_source=Silent()))
        sampling = Sampling(max_tokens=33, ignore_eos=True)
        prompts = random_prompts([5, 12, 7], VOCAB_SIZE)
        requests = [Request(request_id=str(i), token_ids=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
        outputs.append({name: done.token_ids for name, done in run_all(engine, requests).items()})
    assert outputs[0] == outputs[1]
    stats = engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_output_tokens / stats.num_draws > 4


class Oracle:
    """The predictor over a whole sequence at once, made of transformers' layer."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

        self.trunk: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        config = self.trunk.config
        weights = tiny_weights(tiny_config("deepseek_v3", has_predictor=True))
        self.weights = {name.removeprefix(LAYER): w for name, w in weights.items() if name.startswith(LAYER)}
        self.layer: Any = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers - 1).eval()
        experts = range(config.n_routed_experts)
        gate_up, down = (
            torch.stack([torch.cat([self.weights[f"mlp.experts.{e}.{n}_proj.weight"] for n in names]) for e in experts])
            for names in (("gate", "up"), ("down",))
        )
        stacked = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
        loaded = self.layer.load_state_dict(self.weights | stacked, strict=False)
        assert not loaded.missing_keys

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.trunk.config.rms_norm_eps)

    @torch.no_grad()
    def guesses(self, token_ids: list[int], num_tokens: int) -> list[list[int]]:
        """For each token but the first: the guesses after it, each made of the state of the one before."""
        states = self.trunk.model(torch.tensor([token_ids])).last_hidden_state[0]
        return [self.chain(token_ids[: n + 1], states[:n], num_tokens) for n in range(1, len(token_ids))]

    def chain(self, token_ids: list[int], states: torch.Tensor, num_tokens: int) -> list[int]:
        guessed: list[int] = []
        for _ in range(num_tokens):
            following = self.trunk.model.embed_tokens(torch.tensor([*token_ids, *guessed][1:]))
            joined = torch.cat((self.norm(following, "enorm"), self.norm(states, "hnorm")), dim=-1)
            rows = functional.linear(joined, self.weights["eh_proj.weight"])[None]
            places = torch.arange(len(following))[None]
            out = self.layer(
                rows,
                attention_mask=torch.full((len(following),) * 2, -torch.inf).triu(1)[None, None],
                position_ids=places,
                position_embeddings=self.trunk.model.rotary_emb(rows, places),
            )
            last = (out[0] if isinstance(out, tuple) else out)[0, -1]
            guessed.append(int(self.trunk.lm_head(self.norm(last, "shared_head.norm")).argmax()))
            states = torch.cat((states, last[None]))
        return guessed


def test_its_guesses_are_the_oracles_in_chunks_behind_drafts_and_in_a_chain(model: Path) -> None:
    ref = model_ref(str(model), dtype="float32", max_model_len=128)
    settings = EngineSettings(device="cpu", num_threads=1, num_draft_tokens=3, kv_cache_gib=0.01)
    replica = Engine(ref, settings, load_parts(ref, settings))._replica
    lookahead = replica.lookahead
    assert lookahead is not None
    (token_ids,) = random_prompts([23], VOCAB_SIZE)
    sequence = make_sequence(token_ids[:17])
    sequence.block_ids.extend(range(3, 8))
    first = [Run(sequence, 0, 11, False)]
    replica.run(first)
    lookahead.follow(first, None)
    second = [Run(sequence, 11, 6, True, Draft(tuple(token_ids[17:22]), (1, 3, 5), (None,) * 3))]
    replica.run(second)
    places = (17, 18, 20, 22)
    ahead = lookahead.follow(second, torch.tensor([token_ids[place] for place in places]))
    expected = Oracle(model).guesses(token_ids, 4)
    assert ahead.token_ids.tolist() == [expected[place - 1][0] for place in places]
    sequence.token_ids.extend(token_ids[17:])
    assert lookahead.guess(ahead, [(sequence, 3)], 4) == [Foreseen(tuple(expected[-1]))]
