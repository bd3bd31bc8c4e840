"""Models of the Hugging Face library whose routed experts are in an expert store, and nowhere else.

The weights are either taken out of a model in memory, or the model is loaded without them and they are read from the
checkpoint one expert at a time, so that at most one expert is in memory twice.

The tensors that make up each expert are found in the shards' headers before weights are read. Families name and group
experts in different ways (one tensor for each expert and matrix, or one for all experts). The library's own renaming
table is used (transformers 5.17 to 5.23), and what it would build from a tensor is split again, so that experts can be
read one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from realrun.errors import RefusedError
from realrun.experts.ffn import check_kernel
from realrun.experts.store import Allocate, ExpertLayout, ExpertStore, Slab, expert_parameters
from realrun.machine.host_memory import check_host_memory
from traces.capture.layers import MoeLayer, find_moe_layers
from traces.capture.load import NO_CODE, NO_PICKLE, library_errors
from traces.capture.settings import CaptureError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict

PLAIN_TYPES = ("F32", "BF16", "F16")
ONE_BY_ONE = ("MergeModulelist(dim=0)",)
GATE_AND_UP = ("MergeModulelist(dim=0)", "Concatenate(dim=1)")
INTERLEAVED = ("Interleave(dim=1)",)  # one tensor of all experts, the rows of gate and up by turns (Inkling 2)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, as described by the header of its shard."""

    file: Path
    key: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class Piece:
    """Rows ``begin`` to ``end`` of one expert's parameter: a whole tensor, or slice ``index`` of one for all experts.
    """

    tensor: StoredTensor
    begin: int
    end: int
    index: int | None = None
    interleaved: bool = False  # rows 0, 2, 4... of the stored tensor come first, then 1, 3, 5...


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint. Raises RefusedError for a shard that is missing or damaged, or lacks a tensor."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _header(folder / "model.safetensors", f"{folder} has no {index.name} either")
    document = parse_json(index.read_bytes(), str(index), RefusedError)
    named = from_dict(Mapping[str, Any], document, str(index), RefusedError).get("weight_map")
    shard_of: dict[str, str] = from_dict(Mapping[str, str], named, f"{index}: weight_map", RefusedError)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        tensors |= _header(folder / shard, f"{index.name} names it")
    for key, shard in shard_of.items():
        if key not in tensors:
            raise RefusedError(f"{folder / shard}: expected tensor {key}, which {index.name} lists; download it again")
    return tensors


def _header(file: Path, why: str) -> dict[str, StoredTensor]:
    if not file.exists():
        raise RefusedError(f"{file}: expected a shard of the checkpoint, found no such file ({why}); download it")
    try:
        with safe_open(file, framework="pt") as shard:
            slices = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118 (no mapping)
            return {k: StoredTensor(file, k, tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
    except SafetensorError as error:
        raise RefusedError(f"{file}: expected a whole safetensors file: {error}; download it again") from error


class ExpertTensors:
    """The tensors that the library would load into each parameter of a model, split by expert.

    ``skeleton`` is the model without storage: all of its parameters are on the meta device.
    """

    def __init__(self, skeleton: Any, tensors: Mapping[str, StoredTensor]) -> None:
        rules = get_model_conversion_mapping(skeleton)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._state = skeleton.base_model_prefix, skeleton.state_dict()
        self._sources: dict[str, list[tuple[StoredTensor, str | None]]] = defaultdict(list)
        for key in sorted(tensors):
            target, pattern = self._target(key)
            self._sources[target].append((tensors[key], pattern))

    def pieces(self, parameter: str) -> list[list[Piece]]:
        """For every expert, the pieces of its slice of ``parameter`` (full name).

        Raises RefusedError if tensors are missing in the checkpoint, or are of another shape or type.
        """
        shape, sources = tuple(self._state[parameter].shape), self._sources[parameter]
        if not sources:
            raise RefusedError(f"{parameter}: the checkpoint has no tensor for it; is it whole, and of this model?")
        for tensor, _ in sources:
            if tensor.type not in PLAIN_TYPES:
                raise RefusedError(
                    f"{tensor.file}: tensor {tensor.key} has type {tensor.type}, expected one of "
                    f"{', '.join(PLAIN_TYPES)}: quantised experts are not supported; use the bfloat16 checkpoint"
                )
        pattern = sources[0][1]
        if pattern is None:
            return _of_all(parameter, shape, sources)
        converter = self._converter(parameter, pattern)
        if _operations(converter) == INTERLEAVED:
            return _of_all(parameter, shape, sources, interleaved=True)
        return self._of_each(parameter, shape, converter.source_patterns)

    def _target(self, key: str) -> tuple[str, str | None]:
        """The parameter for a tensor, and the pattern of its converter, if any.

        As in the library, a rule that leads to no parameter is not applied.
        """
        rules: list[tuple[list[Any], list[Any]]] = [(self._renamings, self._converters), ([], [])]
        for renamings, converters in rules:
            target, pattern = rename_source_key(key, renamings, converters, self._prefix, self._state)
            if target in self._state:
                return target, pattern
        return key, None

    def _of_each(self, parameter: str, shape: tuple[int, ...], patterns: Sequence[str]) -> list[list[Piece]]:
        """One tensor for each expert and matrix; gate and up, where there are two, one below the other."""
        tensors = {(source, _expert(tensor.key)): tensor for tensor, source in self._sources[parameter]}
        experts: list[list[Piece]] = []
        for expert in range(shape[0]):
            pieces: list[Piece] = []
            for source in patterns:
                begin = pieces[-1].end if pieces else 0
                tensor = _of_expert(tensors, source, expert, parameter)
                pieces.append(Piece(tensor, begin, begin + tensor.shape[0]))
            _check_shape(parameter, shape[1:], pieces)
            experts.append(pieces)
        return experts

    def _converter(self, parameter: str, pattern: str) -> WeightConverter:
        converter = next(rule for rule in self._converters if pattern in rule.source_patterns)
        if _operations(converter) not in (ONE_BY_ONE, GATE_AND_UP, INTERLEAVED):
            raise RefusedError(
                f"{parameter}: the library builds it from tensors {pattern} by {', '.join(_operations(converter))}; "
                "expected tensors that can be read one expert at a time; this family cannot be streamed: load it in "
                "memory"
            )
        return converter


def _operations(converter: WeightConverter) -> tuple[str, ...]:
    return tuple(f"{type(op).__name__}(dim={getattr(op, 'dim', '?')})" for op in converter.operations)


def _of_all(
    parameter: str, shape: tuple[int, ...], sources: Sequence[tuple[StoredTensor, str | None]],
    interleaved: bool = False,
) -> list[list[Piece]]:
    """One tensor for all experts, as in the model, or with its rows interleaved."""
    tensor, _ = sources[0]
    if len(sources) != 1 or tensor.shape != shape:
        stored = ", ".join(f"{t.key} {list(t.shape)} in {t.file}" for t, _ in sources)
        raise RefusedError(f"{parameter}: expected one tensor of shape {list(shape)}, found {stored}")
    return [[Piece(tensor, 0, shape[1], expert, interleaved)] for expert in range(shape[0])]


def _of_expert(
    tensors: Mapping[tuple[str | None, int], StoredTensor], source: str, expert: int, parameter: str
) -> StoredTensor:
    tensor = tensors.get((source, expert))
    if tensor is None:
        near = next(iter(tensors.values()))
        raise RefusedError(
            f"{near.file.parent}: no tensor {source.replace('*', str(expert))} for expert {expert} of {parameter} "
            f"(another tensor is {near.key}, in {near.file.name}); the checkpoint is incomplete"
        )
    return tensor


def _check_shape(parameter: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    if any((pieces[-1].end, *piece.tensor.shape[1:]) != shape for piece in pieces):
        stored = ", ".join(f"{p.tensor.key} {list(p.tensor.shape)} in {p.tensor.file}" for p in pieces)
        raise RefusedError(f"{parameter}: expected {list(shape)} for one expert, found {stored}")


def _expert(key: str) -> int:
    """The number of an expert, which follows that of its layer: model.layers.3.mlp.experts.17.w1.weight."""
    return int([word for word in key.split(".") if word.isdecimal()][-1])


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
