"""A profile: times that microbenchmarks measured on one machine, in tables that a cost table is read from.

It is the section ``measured`` of a hardware file; ``sim.costs.measured_costs`` turns it into costs. Every time is the
median of repeated measurements, with its quartiles; all are ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

from sim.machine.interpolation import DecodeGrid, Measured, PrefillGrid, Table, check_quartiles
from sim.machine.plan_costs import PlanCost
from sim.machine.plausibility import HardwareError
from traces.models.shape import ModelShape
from trilane.common.hints import at_least, between
from trilane.common.quoting import quoted

Kind = Literal["host-lanes", "cuda"]
Permille = Annotated[int, between(1, 1000)]
_ONLY_WITH = {"shared": "shared_width", "dense_ffn": "dense_width", "dense_launch": "dense_width"}
_LATER = ("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille")  # all or none


@dataclass(frozen=True)
class MeasuredRate:
    """A rate in permille of the undisturbed one: the median and its quartiles; running together never helps."""

    permille: Permille
    low: Permille
    high: Permille

    def __post_init__(self) -> None:
        check_quartiles(1, [self.permille], [self.low], [self.high])


@dataclass(frozen=True)
class MeasuredSizes:
    """All sizes of a model on which its measured times depend; ``ModelShape`` explains them."""

    hidden: int
    expert_width: int
    matrices_per_expert: int
    shared_width: int
    dense_width: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_width: int
    attention_params: int
    vocab: int
    experts: int
    top_k: int
    weight_bits: float
    dense_bits: float
    expert_bytes: int  # of one expert

    @classmethod
    def of(cls, shape: ModelShape) -> MeasuredSizes:
        """The sizes of ``shape``. Raises HardwareError if its layers' experts differ in size: one is measured."""
        [*sizes] = set(shape.expert_bytes_by_layer)
        if len(sizes) > 1:
            raise HardwareError(
                f"model {shape.name!r}: a profile measures experts of one size, those of its layers have "
                f"{len(sizes)} sizes; simulate it on a preset"
            )
        names = [f.name for f in fields(cls) if f.name != "expert_bytes"]
        return cls(**{name: getattr(shape, name) for name in names}, expert_bytes=sizes[0])


@dataclass(frozen=True)
class MeasuredModel:
    """Times of one model's parts, in ns.

    Expert times are as measured, so a table need not rise: a product of two rows in 32 bits may take longer than one
    of four. The cost table takes the running maximum. ``shared`` is None without a shared expert,
    ``dense_ffn`` and ``dense_launch`` without dense layers. Launches are host time per group of kernels, of which
    ``launch_lead`` passes until the GPU starts, and after which it needs ``launch_tail``; None in a profile of an
    earlier version, whose GPU is assumed to start when the launch has ended. The same holds for the rates of GPU and
    CPU experts that run at the same time, which are then assumed not to slow each other down.
    """

    sizes: MeasuredSizes
    expert_gpu: Table  # by workload
    expert_cpu: Table  # by workload
    gate: Table  # from here to combine: by tokens of the step
    speculate: Table  # one forecast: the next gate on this layer's input
    estimator: Table  # one forecast by the learned estimator
    combine: Table
    head: Table  # by sequences
    routing: Table  # d2h, by tokens of the step
    activations: Table  # d2h, by tokens of the step
    result: Table  # h2d, by tokens of the step
    attention_decode: DecodeGrid  # one layer
    attention_prefill: PrefillGrid  # one layer
    copy: Measured  # one expert over the link
    writeback: Measured  # one expert back to the host
    first_cpu_expert: Measured  # extra time of the first CPU expert of a layer
    launch: Measured  # attention + gate + shared expert of one layer
    expert_launch: Measured
    combine_launch: Measured
    head_launch: Measured
    sync: Measured  # from "the gate is done" to "the routing is readable in the program"
    cpu_permille: MeasuredRate  # rate of CPU experts while a copy runs
    copy_permille: MeasuredRate  # rate of a copy while CPU experts run
    gpu_permille: MeasuredRate  # rate of GPU experts while a copy runs
    shared: Table | None = None  # by tokens of the step
    dense_ffn: Table | None = None  # feed-forward part of ONE dense layer, by tokens of the step
    dense_launch: Measured | None = None  # one dense layer
    launch_lead: Measured | None = None  # from the beginning of ``launch`` to the start of its first kernel
    launch_tail: Measured | None = None  # from the end of a launch to the end of its last kernel, on an idle GPU
    gpu_with_cpu_permille: MeasuredRate | None = None  # rate of GPU experts while CPU experts run, and no copy
    cpu_with_gpu_permille: MeasuredRate | None = None  # rate of CPU experts while GPU experts run, and no copy

    def __post_init__(self) -> None:
        """Check that the tables are those that a model of these sizes has. Raises HardwareError."""
        later = any(getattr(self, name) is not None for name in _LATER)
        expected = {name: bool(getattr(self.sizes, width)) for name, width in _ONLY_WITH.items()}
        for name, needed in {**expected, **dict.fromkeys(_LATER, later)}.items():
            if needed and getattr(self, name) is None:
                raise HardwareError(f"missing key: {name}")
            if not needed and getattr(self, name) is not None:
                raise HardwareError(f"{name}: the model has no such part, by its {_ONLY_WITH[name]} of 0")


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    ``machine``: facts, ``kind`` ("host-lanes" or "cuda") among them. ``plan`` and ``foresee``: host time of decisions
    by policy name, measured on this host (no ``plan_factor``). ``rates``: achieved figures, for information only.
    ``models``: by catalogue name, without ":N".
    """

    machine: Mapping[str, str | int | float]
    plan: Mapping[str, PlanCost]
    foresee: Mapping[str, PlanCost]
    rates: Mapping[str, Annotated[float, at_least(0)]]
    models: Mapping[str, MeasuredModel]

    def __post_init__(self) -> None:
        if self.machine.get("kind") not in get_args(Kind):
            kinds = " or ".join(map(repr, get_args(Kind)))
            raise HardwareError(f"machine.kind: expected {kinds}, got {quoted(self.machine.get('kind'))}")

    @property
    def kind(self) -> str:
        """Kind of the device that serves as the GPU: a CUDA device, or a host core."""
        return str(self.machine["kind"])

    def model_of(self, shape: ModelShape, where: str) -> MeasuredModel:
        """Measured times of ``shape``, or of the model that it is cut from (``NAME:N``).

        ``where`` names the profile in the HardwareError that a model not measured, or of other sizes, raises.
        """
        name = shape.base_name
        if name not in self.models:
            raise HardwareError(
                f"{where}: model {name!r} has not been measured; measured: {', '.join(self.models) or 'none'}; "
                f"add it: trilane profile --model {name} -o FILE"
            )
        _check_sizes(self.models[name].sizes, MeasuredSizes.of(shape), f"{where}: model {name!r}")
        return self.models[name]


def _check_sizes(measured: MeasuredSizes, needed: MeasuredSizes, where: str) -> None:
    """Refuse the times of another model with the same name. Raises HardwareError."""
    pairs = [(f.name, getattr(measured, f.name), getattr(needed, f.name)) for f in fields(MeasuredSizes)]
    wrong = [f"{name} = {quoted(was)}, expected {now}" for name, was, now in pairs if was != now]
    if wrong:
        raise HardwareError(f"{where} was measured with {'; '.join(wrong)}: measure it again as it is now")
