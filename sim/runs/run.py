"""A run: the result of one scenario, as spans and the numbers made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.machine.devices import Power
from sim.runs.energy import joules_per_token
from sim.runs.metrics import Metrics, metrics_of
from sim.runs.prepare import Prepared
from sim.runs.routing_error import RoutingErrors, totals_of
from sim.runs.spans import Row, spans_frame
from sim.runs.vocabulary import Label

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """The result of simulating (or measuring) one scenario.

    ``scenario`` is the resolved one; ``spans`` has the columns of :class:`sim.runs.spans.Span`; ``labels`` says
    what a reader must know of the run, such as "clairvoyant" or "changes routing"; ``bounds`` holds the lower bound
    and the null model in ms.
    """

    scenario: Mapping[str, Any]
    policy: str
    spans: pd.DataFrame
    labels: tuple[str, ...] = ()
    trace_checksum: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    power: Power | None = None  # of the machine, for the energy
    routing_errors: pd.DataFrame | None = None  # ``RoutingErrors.frame()``; None: the routing was kept

    @classmethod
    def of(cls, prepared: Prepared, rows: list[Row], routing_errors: RoutingErrors | None, *labels: str) -> Run:
        """The run of a prepared scenario that left these spans: simulated or, where ``labels`` say so, measured.

        Bounds and energy are those of the scenario's machine: a measured run has them only where that was profiled.
        """
        of_this_machine = not labels or prepared.hardware.measured
        memory = prepared.memory
        return cls(
            scenario=prepared.resolved.to_dict(),
            policy=prepared.composition.name,
            spans=spans_frame(rows),
            labels=(*prepared.labels, *labels),
            trace_checksum=prepared.trace.checksum,
            bounds=prepared.bounds if of_this_machine else {},
            memory={
                "cache_bytes": memory.cache_bytes, "cache_slots": memory.slots, "staging_bytes": memory.staging_bytes
            },
            power=prepared.hardware.power if of_this_machine else None,
            routing_errors=None if routing_errors is None else routing_errors.frame(),
        )  # fmt: skip

    @cached_property
    def metrics(self) -> Metrics:
        """Every number of docs/design.md, Metrics, made from the spans alone."""
        sampled = self.scenario.get("sampled_steps") is not None
        return metrics_of(
            self.spans, int(self.scenario["batch"]), self.scenario["generated_tokens"] if sampled else None,
            whole_prompt=Label.SHORT_PROMPT not in self.labels,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """One flat, JSON-ready row: policy, labels, metrics, routing errors in decode, energy, bounds, memory."""
        energy = joules_per_token(self.metrics, self.power, int(self.scenario["batch"]))
        return {
            "policy": self.policy,
            "parameters": dict(self.scenario["parameters"]),
            "labels": list(self.labels),
            **self.metrics.to_dict(),
            **totals_of(self.routing_errors),
            "energy_j_per_token": energy,
            **self.bounds,
            **self.memory,
        }

    def save_spans(self, path: str | Path) -> None:
        """Write the spans as Parquet, whole or not at all."""
        import pyarrow as pa

        from trilane.common.parquet_files import write_parquet

        frame = self.spans.astype({"lane": str, "kind": str, "phase": str})
        write_parquet(pa.Table.from_pandas(frame, preserve_index=False), path)
