"""A model of the Hugging Face library whose routed experts lie in an expert store, and what one look at it tells."""

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
from traces.capture.layers import config_value
from traces.capture.load import Loaded, load, revision_of
from traces.capture.model_shape import shape_of
from traces.capture.record import RouterRecorder
from traces.capture.run import HookedModel, Probe
from traces.capture.settings import CaptureError, CaptureSettings, check_model
from traces.models.shape import ModelShape

PROBE_TOKENS = 32  # from all over the vocabulary: enough to tell one scoring rule from another


@dataclass(frozen=True)
class HostedModel:
    """Ready for any number of runs; the modules of its experts hold no weights."""

    loaded: Loaded
    store: ExpertStore
    shape: ModelShape
    probe: Probe
    facts: RouterFacts
    weights_dtype: torch.dtype  # of what its routers give

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which experts' results are added up."""
        return torch.promote_types(self.store.layouts[0].parts[0].dtype, self.weights_dtype)


def load_model(model: str | Path, dtype: str, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    """A model from a folder, its experts read one by one into memory by ``allocate``; or, by its id on the hub, as a
    whole, and then taken apart. Raises RefusedError.
    """
    try:
        check_model(model, dtype)
        if Path(model).is_dir():
            return _streamed(Path(model), dtype, device, allocate)
        return taken_apart(load(model, dtype), device, allocate)
    except CaptureError as error:
        raise RefusedError(str(error)) from error


def taken_apart(loaded: Loaded, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    """A model that is in memory, without its experts; and these. Raises RefusedError for a family not supported."""
    check_layers(loaded.layers)
    store = take_experts(loaded.model, loaded.layers, allocate)
    move(loaded.model, device)
    return loaded, store


def look_at(loaded: Loaded, store: ExpertStore) -> HostedModel:
    """One pass over tokens that mean nothing. Raises RefusedError for a model whose layers differ."""
    check_layers(loaded.layers)
    try:
        with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
            run = HookedModel(loaded, CaptureSettings(temperature=0), recorder)
            with routed_through(loaded.layers, computed_in_place(loaded.layers, store)):
                probe = run.probe(_probe(loaded))
        bits = store.layouts[0].parts[0].dtype.itemsize * 8
        shape = shape_of(loaded.model, loaded.layers, loaded.name, probe.top_k, bits)
    except CaptureError as error:
        raise RefusedError(str(error)) from error
    scales = [layer_scale(record, probe.rule, shape.norm_topk) for record in probe.records]
    weights = probe.records[0].weights
    assert weights is not None
    return HostedModel(loaded, store, shape, probe, RouterFacts(probe.rule, shape.norm_topk, scales), weights.dtype)


def _probe(loaded: Loaded) -> list[int]:
    vocabulary = int(config_value(loaded.model.config.get_text_config(), "vocab_size"))
    return [place * (vocabulary - 1) // PROBE_TOKENS for place in range(PROBE_TOKENS)]


def _streamed(folder: Path, dtype: str, device: torch.device, allocate: Allocate) -> tuple[Loaded, ExpertStore]:
    try:
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RefusedError(f"{folder}: expected a model and its tokenizer; could not load: {error}") from error
    stored = config.get_text_config().dtype or torch.float32
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    model, layers, store = load_streamed(folder, wanted, device, allocate)
    loaded = Loaded(folder.name, revision_of(config, folder), model, tokenizer, layers, stored.itemsize * 8)
    return loaded, store
