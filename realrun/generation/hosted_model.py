"""A model of the Hugging Face library whose routed experts are in an expert store, with the results of probing it.

Calls of its experts modules are redirected to our function through the library's registry of experts functions. A
module's own code computes router, shared experts and scaling; our function gets the arguments of the experts: hidden
states [N, H], ids [N, k] and weights [N, k] (transformers/integrations/moe.py, 5.17 to 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from realrun.errors import RefusedError
from realrun.execution.routed_tokens import choices_of, layer_scale
from realrun.experts.checkpoint import load_streamed, move, take_experts
from realrun.experts.ffn import check_kernel, compute_into
from realrun.experts.store import Allocate, ExpertStore
from realrun.generation.live_layers import RouterFacts
from traces.capture.layers import MoeLayer, config_value, shape_of
from traces.capture.load import NO_CODE, Loaded, library_errors, load, revision_of
from traces.capture.passes import HookedModel, Probe
from traces.capture.record import RouterRecorder
from traces.capture.settings import CaptureError, CaptureSettings, check_model
from traces.models.shape import ModelShape

NAME = "trilane"

ExpertsCall: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, hidden, ids, weights) -> [N, H]


def check_layers(layers: Sequence[MoeLayer]) -> None:
    """Raises RefusedError for experts that the library does not dispatch, and for layers of different sizes."""
    for layer in layers:
        check_kernel(layer.experts)
    sizes = sorted({(layer.experts_count, layer.expert_elements) for layer in layers})
    if len(sizes) > 1:
        raise RefusedError(
            f"{type(layers[0].experts).__name__}: expected as many experts of one size in every layer, got (experts, "
            f"weights of one) {sizes}; all slots have one size, so such models can only be simulated"
        )


@contextmanager
def routed_through(layers: Sequence[MoeLayer], call: ExpertsCall) -> Iterator[None]:
    """Let ``call`` compute the routed experts of every layer in the block; afterwards the modules are as before."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, lambda experts, hidden, ids, weights: experts.trilane(hidden, ids, weights))
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(_bound(layer.experts, partial(call, number)))
        yield


def computed_in_place(layers: Sequence[MoeLayer], store: ExpertStore) -> ExpertsCall:
    """Experts computed on the device of the hidden states, directly from the store: to probe a model before a run."""

    def call(layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kernel, layout = layers[layer].experts, store.layouts[layer]
        count, top_k = ids.shape
        dtype = torch.result_type(hidden, weights)
        parts = torch.zeros(count * top_k, hidden.shape[1], dtype=dtype, device=hidden.device)
        for expert, choices in choices_of(ids.cpu().numpy()).items():
            views = layout.views(store.buffer(layer, expert).to(hidden.device))
            compute_into(parts, kernel, views, hidden, choices.to(hidden.device), weights.reshape(-1), top_k)
        return parts.view(count, top_k, -1).sum(1).to(hidden.dtype)

    return call


@contextmanager
def _bound(experts: Any, call: Callable[..., Tensor]) -> Iterator[None]:
    """Let ``call`` compute the module in the block, even an emptied one, whose ``forward`` refuses to run."""
    implementation, forward = experts.config._experts_implementation, vars(experts).pop("forward", None)
    experts.trilane, experts.config._experts_implementation = call, NAME
    try:
        yield
    finally:
        experts.config._experts_implementation = implementation
        del experts.trilane
        if forward is not None:
            experts.forward = forward


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
