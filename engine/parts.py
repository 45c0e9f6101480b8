"""What an engine is made of: model, text side, kernels, device and the other ranks. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog
import torch

from engine.device import select_device
from engine.dist import Ranks, connect, share_experts
from engine.draft import DraftSource, PromptLookup, resolve_num_drafts
from engine.models import Model
from engine.text import Text
from engine.topology import Topology
from engine.weights import load_drafter, load_model, read_spec
from kernels.api import Choice, Kernels
from kernels.select import BackendError, select_kernels
from schemas.errors import KernelError, SettingsError
from schemas.model_files import resolve_model
from schemas.records import ModelRef
from schemas.settings import EngineSettings

log = structlog.get_logger()


@dataclass(frozen=True)
class Parts:
    """What an engine is made of once everything is loaded."""

    model: Model
    text: Text
    kernels: Kernels
    choices: tuple[Choice, ...]
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    draft_source: DraftSource = field(default_factory=PromptLookup)


def load_parts(model: ModelRef, settings: EngineSettings, rank: int = 0, rendezvous: str = "") -> Parts:
    """Load model and tokenizer. Raises SettingsError, ModelError, KernelError or EngineError with the cause.

    An engine of several ranks meets at the file ``rendezvous``.
    """
    files = resolve_model(model.name, model.revision)
    topology = Topology.of(settings)
    device = select_device(settings, rank, topology.num_ranks)
    if model.deterministic:
        settings = _settle_order(settings, topology)
    if settings.draft_model and topology.num_ranks > 1:
        raise SettingsError(
            f"engine.draft_model {settings.draft_model}: an engine of {topology.num_ranks} ranks has no draft model, "
            "so leave it out or serve replicas by workers of their own"
        )
    dtype = getattr(torch, model.dtype)
    ranks = connect(topology, rank, rendezvous, device)
    try:
        kernels, choices = select_kernels(
            device,
            dtype,
            settings.kernels,
            is_fp8=model.quantization == "fp8",
            is_invariant=model.deterministic,
        )
        if ranks.experts.size > 1:
            ranks, exchange = share_experts(ranks, read_spec(files), dtype, device, settings.exchange)
            choices = (*choices, exchange)
    except BackendError as error:
        raise KernelError(str(error)) from error
    for choice in choices:
        log.info("kernel_chosen", operation=choice.operation, backend=choice.backend, reason=choice.reason)
    has_drafts = resolve_num_drafts(settings, device).num_tokens > 0
    wants_predictor = has_drafts and topology.num_ranks == 1 and not settings.draft_model
    loaded = load_model(files, model, kernels, device, ranks, wants_predictor=wants_predictor)
    if settings.draft_model and has_drafts:
        load_drafter(settings.draft_model, loaded, device, dtype)
    return Parts(loaded, Text(files), kernels, choices, device, ranks)


def _settle_order(settings: EngineSettings, topology: Topology) -> EngineSettings:
    """Settings with which ranks add up what they share in one order for any number of rows. Raises SettingsError."""
    if topology.rebalance_interval:
        raise SettingsError(
            f"engine.rebalance_interval {topology.rebalance_interval}: experts that move are summed in another order, "
            "so leave it at 0 for deterministic jobs"
        )
    if topology.tensor > 2:
        raise SettingsError(
            f"engine.tensor_parallel {topology.tensor}: in which order more than 2 ranks are summed up depends on the "
            "number of rows, so deterministic jobs take at most 2"
        )
    if settings.exchange == "deep_ep":
        raise SettingsError("engine.exchange deep_ep promises no order of sums: leave it out for deterministic jobs")
    return settings.model_copy(update={"exchange": "collective"})  # "auto" chooses by the number of rows
