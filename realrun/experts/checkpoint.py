"""Models of the Hugging Face library whose routed experts are in an expert store, and nowhere else.

The weights are either taken out of a model in memory, or the model is loaded without them and they are read from the
checkpoint one expert at a time, so that at most one expert is in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from realrun.errors import RefusedError
from realrun.experts.checkpoint_tensors import ExpertTensors, Piece, stored_tensors
from realrun.experts.ffn import check_kernel
from realrun.experts.store import Allocate, ExpertLayout, ExpertStore, Slab, expert_parameters
from realrun.machine.host_memory import check_host_memory
from traces.capture.layers import MoeLayer, find_moe_layers
from traces.capture.load import NO_CODE, NO_PICKLE, library_errors
from traces.capture.settings import CaptureError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

CAUSAL_MODELS: Any = AutoModelForCausalLM  # whose own annotations are incomplete

LayerPieces = list[dict[str, list[Piece]]]  # for every expert, by parameter


def take_experts(model: nn.Module, layers: Sequence[MoeLayer], allocate: Allocate) -> ExpertStore:
    """Move the experts' weights out of a model in memory, layer by layer: one layer is in memory twice.

    The modules keep their flags, and parameters with a shape but no storage, and can no longer run on their own. Raises
    RefusedError, before anything is moved, for a family that the executor cannot compute.
    """
    layouts = _layouts(layers)
    return ExpertStore(
        _taken(name, layer.experts, layout, allocate)
        for name, layer, layout in zip(_names(model, layers), layers, layouts, strict=True)
    )


def load_streamed(
    folder: Path, dtype: torch.dtype, device: torch.device | str, allocate: Allocate
) -> tuple[Any, list[MoeLayer], ExpertStore]:
    """The model in ``folder`` in ``dtype`` with everything but its experts on ``device``, its mixtures, and the store.

    Modules of experts are as ``take_experts`` leaves them. Raises RefusedError, before any expert is read, for tensors
    that are missing, quantised, too large for host memory, or of a family that cannot be computed.
    """
    skeleton = _skeleton(folder, dtype)
    layers = _mixtures(skeleton, folder)
    layouts = _layouts(layers)
    names = _names(skeleton, layers)
    tensors = ExpertTensors(skeleton, stored_tensors(folder))
    pieces: list[LayerPieces] = []
    for name, layout in zip(names, layouts, strict=True):
        by_part = {part.name: tensors.pieces(f"{name}.{part.name}") for part in layout.parts}
        pieces.append([dict(zip(by_part, expert, strict=True)) for expert in zip(*by_part.values(), strict=True)])
    check_host_memory(sum(layout.size_bytes * len(experts) for layout, experts in zip(layouts, pieces, strict=True)))
    model = _without_experts(folder, dtype, {type(layer.experts) for layer in layers})
    for name, layer in zip(names, layers, strict=True):
        _empty(name, model.get_submodule(name), expert_parameters(layer.experts))
    move(model, device)
    slabs = (_read(experts, layout, allocate) for experts, layout in zip(pieces, layouts, strict=True))
    return model, _mixtures(model, folder), ExpertStore(slabs)


def move(model: nn.Module, device: torch.device | str) -> None:
    """Move everything with storage, without a change of type (``model.to`` fails on parameters without storage).

    Copies on the CPU too: the library leaves weights in the mapped file, at unaligned addresses for which kernels may
    round in other ways.
    """
    model._apply(lambda value: value if value.is_meta else value.to(device, copy=True))  # type: ignore[no-untyped-call]


def _layouts(layers: Iterable[MoeLayer]) -> list[ExpertLayout]:
    layouts = []
    for layer in layers:
        check_kernel(layer.experts)
        layouts.append(ExpertLayout.from_module(layer.experts))
    return layouts


def _taken(name: str, experts: nn.Module, layout: ExpertLayout, allocate: Allocate) -> Slab:
    parameters = expert_parameters(experts)
    slab = Slab.allocated(layout, len(next(iter(parameters.values()))), allocate)
    for expert in range(len(slab.memory)):
        for part, view in slab.views(expert).items():
            view.copy_(parameters[part].detach()[expert])
    _empty(name, experts, parameters)
    return slab


def _empty(name: str, experts: Any, parameters: Mapping[str, Tensor]) -> None:
    """Leave only shapes in the module, and an error if it is run."""
    for part, value in parameters.items():
        setattr(experts, part, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))
    experts.forward = partial(_refuse_to_run, name)


def _refuse_to_run(name: str, *given: object, **named: object) -> NoReturn:
    raise RuntimeError(f"{name}: its weights are in an expert store; run the model through the executor")


def _skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """The model without storage."""
    config_file = folder / "config.json"
    if not config_file.exists():
        raise RefusedError(f"{config_file}: expected a folder with a model of the Hugging Face library")
    document = parse_json(config_file.read_bytes(), str(config_file), RefusedError)
    if not isinstance(document, dict):  # of which other keys may be infinite
        raise RefusedError(f"{config_file}: expected a mapping, got {quoted(document)}")
    if (quantised := document.get("quantization_config")) is not None:
        raise RefusedError(
            f"{config_file}: expected plain weights, found quantization_config {quoted(quantised)}: not supported; "
            f"use the bfloat16 checkpoint"
        )
    with library_errors(folder, RefusedError), torch.device("meta"):
        return CAUSAL_MODELS.from_config(AutoConfig.from_pretrained(folder, **NO_CODE), dtype=dtype, **NO_CODE)


def _mixtures(model: Any, folder: Path) -> list[MoeLayer]:
    try:
        return find_moe_layers(model)
    except CaptureError as error:
        raise RefusedError(f"{folder}: {error}") from error


def _names(model: nn.Module, layers: Iterable[MoeLayer]) -> list[str]:
    """The names of the experts modules, such as model.layers.3.mlp.experts."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return [names[layer.experts] for layer in layers]


def _without_experts(folder: Path, dtype: torch.dtype, classes: Iterable[type[nn.Module]]) -> Any:
    """Let the library load all but the experts, whose tensors it treats as superfluous and never reads."""
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for cls in classes:
            stack.enter_context(_built_empty(cls))
        model, report = CAUSAL_MODELS.from_pretrained(folder, dtype=dtype, output_loading_info=True, **NO_PICKLE)
    if report["missing_keys"]:
        raise RefusedError(f"{folder}: the checkpoint has no tensor for {sorted(report['missing_keys'])}")
    return model.train(False)


@contextmanager
def _built_empty(cls: Any) -> Iterator[None]:
    """In the block, modules of the class are built without the parameters that hold all experts."""
    original = cls.__init__

    def init(experts: Any, *given: Any, **named: Any) -> None:
        original(experts, *given, **named)
        for part in expert_parameters(experts):
            setattr(experts, part, None)
        experts._is_hf_initialized = True  # otherwise the library initialises the missing parameters

    cls.__init__ = init
    try:
        yield
    finally:
        cls.__init__ = original


@contextmanager
def _quiet() -> Iterator[None]:
    """In the block, the library does not warn about the tensors that it does not read."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _read(experts: LayerPieces, layout: ExpertLayout, allocate: Allocate) -> Slab:
    """Read one layer from its shards, and close them: open shards keep what was read in memory."""
    slab = Slab.allocated(layout, len(experts), allocate)
    files = {piece.tensor.file for parts in experts for pieces in parts.values() for piece in pieces}
    with ExitStack() as stack:
        shards = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        for expert, parts in enumerate(experts):
            for part, view in slab.views(expert).items():
                for piece in parts[part]:
                    view[piece.begin : piece.end].copy_(_weights(shards[piece.tensor.file], piece))
    return slab


def _weights(shard: Any, piece: Piece) -> Tensor:
    if piece.index is None:
        whole: Tensor = shard.get_tensor(piece.tensor.key)
        return whole
    one: Tensor = shard.get_slice(piece.tensor.key)[piece.index : piece.index + 1]
    return torch.cat([one[0, 0::2], one[0, 1::2]]) if piece.interleaved else one[0]
