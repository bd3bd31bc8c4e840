"""The question of ``trilane tune``: which command line is best for this model on that machine?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from sim.machine.hardware import Hardware, load_hardware
from traces.models.shape import ModelShape
from trilane.common.hints import Share, between
from trilane.common.quoting import quoted
from trilane.common.schema import check
from trilane.common.units import GB
from trilane.engines.question import KV_BITS, FitError, KvFormat, Question

Goal = Literal["decode", "prompt", "both"]
GOALS: tuple[Goal, ...] = get_args(Goal)
KV_FORMATS: tuple[KvFormat, ...] = ("f16", "q8_0")  # that are tried unless the question names others


@dataclass(frozen=True)
class TuneQuestion:
    """A question of ``trilane fit``, and what is asked of the settings that it leaves open.

    ``fit``: model, machine and engine; a prompt and an answer, by whose times settings are compared; the window for
    which the KV cache has room. ``goal``: the least time per token ("decode"), until the first token ("prompt"), or
    until the last one ("both"). ``kv``: formats of the KV cache to choose from, in any order (kept as
    most bits first: the engine itself takes f16). ``keep_free_gb``: of the GPU's memory
    (of all memory where there is no GPU), in GB. ``draft_acceptance``: the share of drafts of the model's own layers
    that are accepted behind accepted ones; None: a range that was published.
    """

    fit: Question
    goal: Goal = "both"
    kv: tuple[KvFormat, ...] = KV_FORMATS
    keep_free_gb: Annotated[float, between(0, 1e5)] = 0.0
    draft_acceptance: Share | None = None

    def __post_init__(self) -> None:
        check(self, FitError)
        object.__setattr__(self, "kv", tuple(sorted({*self.kv}, key=lambda kv: -KV_BITS[kv])))
        if not self.kv:
            raise FitError(f"tune: kv: expected at least one format of the KV cache, of {', '.join(KV_BITS)}")

    @property
    def hardware(self) -> Hardware:
        """The machine without the memory that is kept free. Raises HardwareError, and FitError for a profile."""
        hardware = load_hardware(self.fit.hardware)
        if hardware.measured:
            raise FitError(
                f"tune: {quoted(hardware.name)} is a profile of one engine's times, which have no settings: expected "
                f"parts or a preset"
            )
        reserve = hardware.gpu.reserve_bytes + round(self.keep_free_gb * GB)
        return hardware.with_numbers({"gpu.reserve_bytes": reserve})

    def shape_with(self, kv: KvFormat) -> ModelShape:
        return replace(self.fit, kv=kv).model_shape
