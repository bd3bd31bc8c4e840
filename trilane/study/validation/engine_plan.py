"""What is measured to validate an engine: models of random weights, experts on the CPU, threads, tokens in the cache,
pieces of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from realrun.llama_cpp.bench import BenchPoint
from realrun.llama_cpp.random_gguf import gguf_layout
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import gguf_architecture, load_model
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.hints import NOT_EMPTY, Count, between
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

_Tokens = Annotated[int, between(0, 1_000_000)]
_PASSES = 2


class EnginePlanError(TrilaneError):
    """A plan that cannot be measured."""


class EngineScenario(NamedTuple):
    """One thing that is measured and predicted; a single token is one of an answer. ``n_cpu_moe``: as llama.cpp's
    argument, the model is on the GPU but for the experts of its first blocks; None: no GPU is used."""

    model: str
    point: BenchPoint
    n_cpu_moe: int | None = None


@dataclass(frozen=True)
class EnginePlan:
    """``models``: names in the catalogue with a weight format, such as olmoe-1b-7b@q4_0; ``prompts``: tokens of a
    piece, computed with an empty cache; ``depths``: tokens in the cache while single tokens are decoded.
    ``cpu_parts``: of a model's MoE layers, the parts whose experts stay with the CPU, each a value of ``--n-cpu-moe``;
    none on a machine without a GPU.
    """

    hardware: str
    models: Annotated[tuple[str, ...], NOT_EMPTY]
    threads: Annotated[tuple[Count, ...], NOT_EMPTY]
    depths: tuple[_Tokens, ...] = (0,)
    prompts: tuple[Count, ...] = ()
    repeats: Count = 5
    cpu_parts: tuple[Annotated[float, between(0, 1)], ...] = ()

    @classmethod
    def from_yaml(cls, path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> EnginePlan:
        """Read a plan, with other values of some keys. Raises EnginePlanError naming the file, and what its models and
        its machine raise."""
        document = read_yaml(path, EnginePlanError)
        changed = {**document, **changes} if isinstance(document, dict) else document
        plan: EnginePlan = from_dict(cls, changed, str(path), EnginePlanError)
        plan.check()
        return plan

    def check(self) -> None:
        """Refuse what cannot be written or predicted, before anything is measured. Raises EnginePlanError."""
        self.machine()
        for name in self.models:
            if parted(name).weights is None:
                raise EnginePlanError(f"model {name!r}: expected a weight format after an @, such as {name}@q4_0")
            gguf_layout(load_model(name), gguf_architecture(name))

    def machine(self) -> Hardware:
        """The machine: with a GPU if experts stay with the CPU next to one, or else without. Raises EnginePlanError."""
        found = load_hardware(self.hardware)
        if found.cpu_only and self.cpu_parts:
            raise EnginePlanError(f"hardware {self.hardware!r}: expected one with a GPU, since cpu_parts are given")
        if not found.cpu_only and not self.cpu_parts:
            raise EnginePlanError(
                f"hardware {self.hardware!r}: expected a machine without a GPU, such as none+ddr5-4800, or cpu_parts: "
                f"the parts of a model's layers whose experts stay with the CPU, such as [0, 0.5, 1]"
            )
        return found

    def splits(self, model: str) -> tuple[int | None, ...]:
        """Values of ``--n-cpu-moe`` for a model, the most first, which need the least GPU memory; None: no GPU."""
        if not self.cpu_parts:
            return (None,)
        return tuple(sorted({n_cpu_moe(load_model(model), part) for part in self.cpu_parts}, reverse=True))

    def points(self) -> Iterator[tuple[BenchPoint, int]]:
        """What is timed on each model, and how often: the fullest cache first, with most threads, which fill it; in two
        passes, so that a short disturbance spoils no point.
        """
        of_a_pass, threads = -(-self.repeats // _PASSES), sorted(self.threads, reverse=True)
        for depth in sorted(self.depths, reverse=True):
            yield from [(BenchPoint(each, depth, 1), of_a_pass) for each in threads] * _PASSES
        yield from [(BenchPoint(each, 0, tokens), of_a_pass) for tokens in self.prompts for each in threads] * _PASSES

    @property
    def context_tokens(self) -> int:
        """Tokens that the cache must hold."""
        return max(*self.depths, *self.prompts, 0) + 64


def n_cpu_moe(shape: ModelShape, part: float) -> int:
    """The value of ``--n-cpu-moe``, which counts blocks, dense ones too, for a part of a model's MoE layers."""
    layers = round(part * shape.moe_layers)
    return shape.expert_blocks[layers - 1] + 1 if layers else 0
