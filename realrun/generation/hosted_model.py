"""A model of the Hugging Face library whose routed experts are in an expert store, with the results of probing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from realrun.errors import RefusedError
from realrun.experts.checkpoint import load_streamed, move, take_experts
from realrun.experts.store import Allocate, ExpertStore
from realrun.generation.hf_experts import check_layers, computed_in_place, routed_through
from realrun.generation.live_layers import RouterFacts
from realrun.generation.model_routing import layer_scale
from traces.capture.layers import config_value, shape_of
from traces.capture.load import NO_CODE, Loaded, library_errors, load, revision_of
from traces.capture.passes import HookedModel, Probe
from traces.capture.record import RouterRecorder
from traces.capture.settings import CaptureError, CaptureSettings, check_model
from traces.models.shape import ModelShape

PROBE_TOKENS = 32  # spread over the vocabulary: enough to distinguish scoring rules


@dataclass(frozen=True)
class HostedModel:
    """Ready for any number of runs; the modules of its experts hold no weights."""

    loaded: Loaded
    store: ExpertStore
    shape: ModelShape
    probe: Probe
    facts: RouterFacts
    weights_dtype: torch.dtype  # of its routers' weights

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type in which experts' results are added."""
        return torch.promote_types(self.store.layouts[0].parts[0].dtype, self.weights_dtype)


def load_model(model: str | Path, dtype: str, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    """Load a model: from a folder, with experts read one by one into memory from ``allocate``; by its id on the hub, as
    a whole, which is then taken apart. Raises RefusedError.
    """
    try:
        check_model(model, dtype)
        if Path(model).is_dir():
            return _streamed(Path(model), dtype, device, allocate)
        return taken_apart(load(model, dtype), device, allocate)
    except CaptureError as error:
        raise RefusedError(str(error)) from error


def taken_apart(loaded: Loaded, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    """A model in memory, without its experts, and the store of these. Raises RefusedError for unsupported families."""
    check_layers(loaded.layers)
    store = take_experts(loaded.model, loaded.layers, allocate)
    move(loaded.model, device)
    return loaded, store


def look_at(loaded: Loaded, store: ExpertStore) -> HostedModel:
    """Probe a model in one pass over arbitrary tokens. Raises RefusedError for a model whose layers differ."""
    check_layers(loaded.layers)
    try:
        last = int(config_value(loaded.model.config.get_text_config(), "vocab_size")) - 1
        with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
            run = HookedModel(loaded, CaptureSettings(temperature=0), recorder)
            with routed_through(loaded.layers, computed_in_place(loaded.layers, store)):
                probe = run.probe([place * last // PROBE_TOKENS for place in range(PROBE_TOKENS)])
        bits = store.layouts[0].parts[0].dtype.itemsize * 8
        shape = shape_of(loaded.model, loaded.layers, loaded.name, probe.top_k, bits)
    except CaptureError as error:
        raise RefusedError(str(error)) from error
    scales = [layer_scale(record, probe.rule, shape.norm_topk) for record in probe.records]
    weights = probe.records[0].weights
    assert weights is not None
    return HostedModel(loaded, store, shape, probe, RouterFacts(probe.rule, shape.norm_topk, scales), weights.dtype)


def _streamed(folder: Path, dtype: str, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    with library_errors(folder, RefusedError):
        config = AutoConfig.from_pretrained(folder, **NO_CODE)
        tokenizer = AutoTokenizer.from_pretrained(folder, **NO_CODE)
    stored = config.get_text_config().dtype or torch.float32
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    model, layers, store = load_streamed(folder, wanted, device, allocate)
    loaded = Loaded(folder.name, revision_of(config, folder), model, tokenizer, layers, stored.itemsize * 8)
    return loaded, store
