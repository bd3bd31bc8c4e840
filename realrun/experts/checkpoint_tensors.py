"""The tensors of a checkpoint that make up each routed expert, found in the shards' headers before weights are read.

Families name and group experts in different ways (one tensor for each expert and matrix, or one for all experts). The
library's own renaming table is used (transformers 5.17 to 5.23), and what it would build from a tensor is split again,
so that experts can be read one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from realrun.errors import RefusedError
from trilane.common.json_text import parse_json
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
