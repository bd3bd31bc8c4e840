"""What is measured to validate an engine: models of random weights, threads, tokens in the cache, pieces of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from realrun.llama_cpp.bench_engine import BenchPoint
from realrun.llama_cpp.gguf_layouts import gguf_layout
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import gguf_architecture, load_model
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.common.errors import TrilaneError
from trilane.common.hints import NOT_EMPTY, Count, between
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

_Tokens = Annotated[int, between(0, 1_000_000)]


class EnginePlanError(TrilaneError):
    """A plan that cannot be measured."""


class EngineScenario(NamedTuple):
    """One thing that is measured and predicted; a single token is one of an answer."""

    model: str
    point: BenchPoint


@dataclass(frozen=True)
class EnginePlan:
    """``models``: names in the catalogue with a weight format, such as olmoe-1b-7b@q4_0; ``prompts``: tokens of a
    piece, computed with an empty cache; ``depths``: tokens in the cache while single tokens are decoded.
    """

    hardware: str
    models: Annotated[tuple[str, ...], NOT_EMPTY]
    threads: Annotated[tuple[Count, ...], NOT_EMPTY]
    depths: tuple[_Tokens, ...] = (0,)
    prompts: tuple[Count, ...] = ()
    repeats: Count = 5

    @classmethod
    def from_yaml(cls, path: Path) -> EnginePlan:
        """Read a plan. Raises EnginePlanError naming the file, and what its models and its machine raise."""
        plan: EnginePlan = from_dict(cls, read_yaml(path, EnginePlanError), str(path), EnginePlanError)
        plan.check()
        return plan

    def check(self) -> None:
        """Refuse what cannot be written or predicted, before anything is measured. Raises EnginePlanError."""
        self.machine()
        for name in self.models:
            if parted(name).weights is None:
                raise EnginePlanError(f"model {name!r}: expected a weight format after an @, such as {name}@q4_0")
            gguf_layout(self.shape(name), gguf_architecture(name))

    def machine(self) -> Hardware:
        """The machine, which has no GPU. Raises EnginePlanError."""
        found = load_hardware(self.hardware)
        if not found.cpu_only:
            raise EnginePlanError(
                f"hardware {self.hardware!r}: expected a machine without a GPU, such as none+ddr5-4800"
            )
        return found

    def shape(self, model: str) -> ModelShape:
        """The shape of one of the models."""
        return load_model(model)

    def points(self) -> Iterator[tuple[BenchPoint, int]]:
        """What is timed on each model, and how often: the fullest cache first, with most threads, which fill it; in two
        passes, so that a short disturbance spoils no point.
        """
        for depth in sorted(self.depths, reverse=True):
            singles = [(BenchPoint(threads, depth, 1), self._of_a_pass) for threads in self._most_first()]
            yield from singles * _PASSES
        pieces = [
            (BenchPoint(each, 0, tokens), self._of_a_pass) for tokens in self.prompts for each in self._most_first()
        ]
        yield from pieces * _PASSES

    @property
    def context_tokens(self) -> int:
        """Tokens that the cache must hold."""
        return max(*self.depths, *self.prompts, 0) + 64

    @property
    def _of_a_pass(self) -> int:
        return -(-self.repeats // _PASSES)

    def _most_first(self) -> Sequence[int]:
        return sorted(self.threads, reverse=True)


_PASSES = 2
