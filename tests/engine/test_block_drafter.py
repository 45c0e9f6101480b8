"""A draft model guesses blocks (DSpark): it is what its formulas say, and output with its drafts is the plain one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from engine.draft import NUM_DRAFT_TOKENS, DraftLimit, resolve_num_drafts
from engine.parts import load_parts
from engine.types import Draft, Run
from schemas.errors import ModelError, NightmillError, SettingsError
from schemas.model_files import model_ref
from schemas.records import Request, Sampling
from schemas.settings import EngineSettings
from tests.engine.fakes import make_sequence, run_all
from tests.engine.test_lookahead import Silent, run
from tests.engine.test_parity import make_engine, random_prompts
from tests.tiny_models import (
    VOCAB_SIZE,
    tiny_config,
    tiny_drafter_config,
    tiny_drafter_weights,
    tiny_weights,
    write_tiny_drafter,
    write_tiny_model,
)

FAMILY, NUM_LAYERS = "qwen3", 4
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"target_layer_ids": [-1, 0, 2]},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False, "attention_bias": False},
    "rnn": {"markov_head_type": "rnn", "target_layer_ids": [1]},
    "no heads": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}
KINDS = {name: {"num_target_layers": NUM_LAYERS, "target_layer_ids": [0, 2], **kind} for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), FAMILY, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_drafter(tmp_path_factory.mktemp("drafter"), FAMILY, **KINDS["vanilla"])


class Oracle:
    """The formulas of the paper over a whole sequence at once, on the inner states of transformers' model."""

    def __init__(self, model: Path, fields: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.trunk: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.config = tiny_drafter_config(FAMILY, **fields)
        self.weights = tiny_drafter_weights(self.config)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x * (mean + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]

    def heads(self, x: torch.Tensor, name: str, places: torch.Tensor) -> torch.Tensor:
        """Projected, normed and rotated heads [H, T, D] of rows at ``places``."""
        size = self.config["head_dim"]
        x = self.norm(self.linear(x, f"{name}_proj").unflatten(-1, (-1, size)), f"{name}_norm").transpose(0, 1)
        turns = places[:, None] * self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    def attend(self, block: torch.Tensor, context: torch.Tensor, prefix: str) -> torch.Tensor:
        num_known, size = len(context), self.config["head_dim"]
        places = torch.arange(num_known + len(block)).float()
        q = self.heads(block, f"{prefix}q", places[num_known:])
        rows = torch.cat((context, block))
        k = self.heads(rows, f"{prefix}k", places)
        v = self.linear(rows, f"{prefix}v_proj").unflatten(-1, (-1, size)).transpose(0, 1)
        k, v = (side.repeat_interleave(len(q) // len(side), dim=0) for side in (k, v))
        scores = q @ k.transpose(1, 2) * size**-0.5  # every row of the block sees all of it
        return self.linear((scores.softmax(dim=-1) @ v).transpose(0, 1).flatten(1), f"{prefix}o_proj")

    @torch.no_grad()
    def guess(self, token_ids: list[int]) -> tuple[list[int], list[float]]:
        """What follows the last token, of which and of nothing behind it the target has no states yet."""
        config, known = self.config, torch.tensor([token_ids[:-1]])
        states = self.trunk.model(known, output_hidden_states=True).hidden_states
        read = torch.cat([states[index + 1][0] for index in config["target_layer_ids"]], dim=-1)
        context = self.norm(self.linear(read, "fc"), "hidden_norm")
        ids = torch.tensor([token_ids[-1]] + [config["mask_token_id"]] * (config["block_size"] - 1))
        x = self.trunk.model.embed_tokens(ids)
        for index in range(config["num_hidden_layers"]):
            layer = f"layers.{index}."
            x = x + self.attend(self.norm(x, f"{layer}input_layernorm"), context, f"{layer}self_attn.")
            normed = self.norm(x, f"{layer}post_attention_layernorm")
            gate = functional.silu(self.linear(normed, f"{layer}mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(normed, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
        return self.choose(self.norm(x, "norm"), token_ids[-1])

    def choose(self, hidden: torch.Tensor, token_id: int) -> tuple[list[int], list[float]]:
        config, chosen, chances = self.config, [], []
        state = torch.zeros(config["markov_rank"])
        for row in hidden:
            scores, features = self.trunk.lm_head(row), row
            if config["markov_rank"]:
                before = self.weights["markov_head.markov_w1.weight"][token_id]
                latent = before
                if config["markov_head_type"] == "gated":
                    gate = self.linear(torch.cat((row, before)), "markov_head.gate_proj").sigmoid()
                    latent = gate * before
                elif config["markov_head_type"] == "rnn":
                    joint = self.linear(torch.cat((state, before, row)), "markov_head.joint_proj")
                    gate, new, latent = joint.chunk(3)
                    state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                    latent = latent.tanh()
                scores = scores + self.linear(latent, "markov_head.markov_w2")
                features = torch.cat((row, before)) if config["confidence_head_with_markov"] else row
            token_id = int(scores.argmax())
            chosen.append(token_id)
            if config["enable_confidence_head"]:
                chances.append(float(self.linear(features, "confidence_head.proj").sigmoid()))
        return chosen, chances


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_its_guesses_are_the_oracles_in_chunks_and_where_drafts_were_wrong(
    model: Path, tmp_path: Path, kind: str, deterministic: bool
) -> None:
    settings = {"num_threads": 1, "num_draft_tokens": 5, "block_size": 4, "draft_model": None}
    settings["draft_model"] = str(write_tiny_drafter(tmp_path, FAMILY, **KINDS[kind]))
    engine = make_engine(str(model), 128, num_tokens=160, deterministic=deterministic, **settings)
    replica, oracle = engine._replica, Oracle(model, KINDS[kind])
    lookahead = replica.lookahead
    assert lookahead is not None
    (token_ids, others) = random_prompts([26, 9], VOCAB_SIZE)
    sequence, other = make_sequence(token_ids[:17]), make_sequence(others)
    sequence.block_ids.extend(range(3, 12))
    other.block_ids.extend(range(20, 26))

    def check() -> None:
        guesses = lookahead.guess(None, [(sequence, 0), (other, 1)], 5)
        for each, (found, chances) in zip((sequence, other), guesses, strict=True):
            expected, confidences = oracle.guess(list(each.token_ids))
            assert list(found) == expected
            assert list(chances) == pytest.approx(confidences, abs=1e-4)

    replica.run([Run(other, 0, 8, False), Run(sequence, 0, 11, False)])
    replica.run([Run(sequence, 11, 5, True)])
    check()
    wrong = Draft(tuple(reversed(token_ids[17:22])), (1, 3, 5), (None,) * 3)
    replica.run([Run(sequence, 16, 1, True, wrong)])
    sequence.token_ids.extend(token_ids[17:18])
    check()
    sequence.token_ids.extend(token_ids[18:])
    replica.run([Run(sequence, 17, 8, True)])
    check()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"num_tokens": 160, "overlap": True},
        {"deterministic": True},
        {"num_draft_tokens": None},
        {"num_draft_tokens": 7, "block_size": 8, "prefix_cache": False},
    ],
    ids=str,
)
def test_output_with_its_drafts_is_the_plain_output(model: Path, drafter: Path, settings: dict[str, Any]) -> None:
    plain, none = run(model, 0, draft_model=str(drafter))
    settings = {"num_draft_tokens": 3, "draft_source": Silent(), "draft_model": str(drafter), **settings}
    drafted, stats = run(model, **settings)
    assert none.num_draft_tokens == 0
    assert drafted == plain
    assert (stats.num_draft_tokens > 60) or settings["num_draft_tokens"] is None
    assert (stats.num_preemptions > 0) == ("num_tokens" in settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_output_with_its_drafts_is_the_plain_output(model: Path, drafter: Path, cuda_graphs: bool) -> None:
    settings = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "kv_cache_gib": 0.1}
    plain, _ = run(model, 0, **settings)
    options = {"draft_source": Silent(), "draft_model": str(drafter), "cuda_graphs": cuda_graphs}
    drafted, stats = run(model, 3, **settings, **options)
    assert drafted == plain
    assert stats.num_draft_tokens > 60


def test_a_drafter_that_is_always_right_is_accepted_at_every_position(tmp_path: Path) -> None:
    """Layers that add nothing: the next token hangs on the last one alone, and so does the Markov head's."""
    config = tiny_config(FAMILY, tie_word_embeddings=False)
    weights = {name: torch.ones_like(w) if "norm." in name else w for name, w in tiny_weights(config).items()}
    weights = {name: w * 0 if "o_proj" in name or "down_proj" in name else w for name, w in weights.items()}
    model = write_tiny_model(tmp_path / "model", FAMILY, tie_word_embeddings=False)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    fields = {"markov_rank": 64, "block_size": 4}
    drafter = write_tiny_drafter(tmp_path / "drafter", FAMILY, **fields)
    heads = tiny_drafter_weights(tiny_drafter_config(FAMILY, **fields))
    embedding = weights["model.embed_tokens.weight"]
    heads["markov_head.markov_w1.weight"] = functional.rms_norm(embedding, (64,), eps=config["rms_norm_eps"])
    heads |= {"markov_head.markov_w2.weight": weights["lm_head.weight"].clone(), "norm.weight": torch.zeros(64)}
    save_file(heads, drafter / "model.safetensors", metadata={"format": "pt"})
    requests = [
        Request(request_id=str(index), token_ids=tuple(prompt), sampling=Sampling(max_tokens=33, ignore_eos=True))
        for index, prompt in enumerate(random_prompts([5, 12, 7], VOCAB_SIZE))
    ]
    outputs = []
    for num_draft_tokens in (0, 4):
        settings = {"num_threads": 1, "num_draft_tokens": num_draft_tokens, "draft_model": str(drafter)}
        engine = make_engine(str(model), 128, draft_source=Silent(), **settings)
        outputs.append({name: done.token_ids for name, done in run_all(engine, requests).items()})
    assert outputs[0] == outputs[1]
    stats = engine.stats
    assert stats.drafts_by_position == stats.accepted_by_position
    assert len(stats.drafts_by_position) == 4
    assert stats.num_accepted_tokens == stats.num_draft_tokens == sum(stats.drafts_by_position)
    assert stats.num_output_tokens / stats.num_draws > 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"vocab_size": 288}, "vocab_size 288"),
        ({"num_target_layers": 36}, "num_target_layers 36"),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids .* from -1 to 0, not \[0, 1\]"),
        ({"target_layer_ids": [0, -1]}, "target_layer_ids"),
        ({"mask_token_id": VOCAB_SIZE}, "mask_token_id 320"),
        ({"markov_head_type": "attention"}, "markov_head_type 'attention'"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}, "sliding"),
        ({"loops": 2}, "loops=2"),
        ({"markov_head_type": "gated"}, "markov_head.gate_proj.weight"),
        ({"enable_confidence_head": False}, "confidence_head.proj"),
    ],
    ids=str,
)
def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    model = write_tiny_model(tmp_path / "model", FAMILY)
    drafter = write_tiny_drafter(tmp_path / "drafter", FAMILY, **fields)
    save_file(tiny_drafter_weights(tiny_drafter_config(FAMILY)), drafter / "model.safetensors")
    with pytest.raises(ModelError, match=f"engine.draft_model .*{message}"):
        load(model, drafter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_model": "no-such-model"}, "unknown model 'no-such-model'"),
        ({"tensor_parallel": 2}, "an engine of 2 ranks has no draft model"),
    ],
    ids=str,
)
def test_a_draft_model_that_cannot_be_had_is_an_error(
    model: Path, drafter: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ModelError, SettingsError), match=message):
        load(model, drafter, **settings)


def load(model: Path, drafter: Path, **settings: Any) -> None:
    ref = model_ref(str(model), dtype="float32", max_model_len=128)
    fields = {"device": "cpu", "num_threads": 1, "draft_model": str(drafter)} | settings
    resolved = EngineSettings(**fields)
    loaded = load_parts(ref, resolved)
    raise NightmillError(f"loaded {loaded.model.block_drafter}")


def test_a_draft_model_asks_for_drafts_unless_they_are_switched_off(model: Path, drafter: Path) -> None:
    asked = EngineSettings(draft_model="m")
    assert resolve_num_drafts(asked, torch.device("cuda")) == DraftLimit(NUM_DRAFT_TOKENS, is_measured=True)
    settings = EngineSettings(device="cpu", num_threads=1, draft_model=str(drafter), num_draft_tokens=0)
    loaded = load_parts(model_ref(str(model), dtype="float32", max_model_len=128), settings)
    assert loaded.model.block_drafter is None
