"""A run: the result of one scenario, as spans and the numbers made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.mechanism.routing_error import RoutingErrors, totals_of
from sim.machine.devices import Power
from sim.runs.bounds import null_model, step_bytes
from sim.runs.calibration import calibration_name
from sim.runs.demand import lacking
from sim.runs.host_memory import read_seconds
from sim.runs.metrics import Metrics, metrics_of
from sim.runs.prepare import Prepared
from sim.runs.scenario import Scenario
from sim.runs.spans import Row, spans_frame
from sim.runs.vocabulary import GPU_LANES, Device, Label, labels_of_needs

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (  # numbers of a row that a notebook shows; all others are in ``Run.to_dict()``
    "ttft_ms", "tpot_ms", "tpot_ms_min", "tpot_ms_max", "tokens_per_s", "lower_bound_tpot_ms", "null_model_tpot_ms",
    "decode_resident_hit_rate", "gpu_busy_share",
)


@dataclass(frozen=True)
class Run:
    """The result of simulating (or measuring) one scenario.

    ``scenario`` is the resolved one; ``spans`` has the columns of :class:`sim.runs.spans.Span`; ``labels`` says
    what a reader must know of the run, such as "clairvoyant" or "changes routing"; ``bounds`` holds the lower bound
    and the null model in ms.
    """

    scenario: Scenario
    policy: str
    spans: pd.DataFrame
    labels: tuple[str, ...] = ()
    trace_checksum: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    power: Power | None = None  # of the machine, for the energy
    further_power: tuple[Power | None, ...] = ()  # with each of its further GPUs
    routing_errors: pd.DataFrame | None = None  # ``RoutingErrors.frame()``; None: the routing was kept

    @classmethod
    def of(cls, prepared: Prepared, rows: list[Row], routing_errors: RoutingErrors | None, *labels: str) -> Run:
        """The run of a prepared scenario that left these spans: simulated or, where ``labels`` say so, measured.

        Bounds and energy are those of the scenario's machine: a measured run has them only where that was profiled.
        """
        of_this_machine = not labels or prepared.hardware.measured
        memory = prepared.memory
        return cls(
            scenario=resolved(prepared),
            policy=prepared.composition.name,
            spans=spans_frame(rows),
            labels=(*labels_of(prepared), *labels),
            trace_checksum=prepared.trace.checksum,
            bounds=bounds_of(prepared) if of_this_machine else {},
            memory={
                "cache_bytes": memory.cache_bytes, "cache_slots": memory.slots, "staging_bytes": memory.staging_bytes
            },
            power=prepared.hardware.power if of_this_machine else None,
            further_power=tuple(card.hardware.power for card in prepared.cards[1:]),
            routing_errors=None if routing_errors is None else routing_errors.frame(),
        )

    @cached_property
    def metrics(self) -> Metrics:
        """Every number of docs/design.md, Metrics, made from the spans alone."""
        scenario = self.scenario
        answer_tokens = None if scenario.sampled_steps is None else scenario.generated_tokens
        return metrics_of(
            self.spans, scenario.batch, answer_tokens,
            whole_prompt=Label.SHORT_PROMPT not in self.labels,
        )

    def to_dict(self) -> dict[str, Any]:
        """One flat, JSON-ready row: policy, labels, metrics, routing errors in decode, energy, bounds, memory."""
        energy = joules_per_token(self.metrics, self.power, self.scenario.batch, self.further_power)
        return {
            "policy": self.policy,
            "parameters": self.scenario.to_dict()["parameters"],
            "labels": list(self.labels),
            **self.metrics.to_dict(),
            **totals_of(self.routing_errors),
            "energy_j_per_token": energy,
            **self.bounds,
            **self.memory,
        }

    def __repr__(self) -> str:
        asked, ttft, tpot = self.scenario, self.metrics.ttft_ms, self.metrics.tpot_ms
        times = [f"{name} {ms:.2f} ms" for name, ms in (("TTFT", ttft), ("TPOT", tpot)) if ms is not None]
        return f"<Run of {', '.join((self.policy, *self.labels))}: {', '.join((*times, asked.trace, asked.hardware))}>"

    def _repr_html_(self) -> str:
        return html_of([self.to_dict()])

    def save_spans(self, path: str | Path) -> None:
        """Write the spans as the ending says, .parquet or .csv, whole or not at all. Raises OutputError."""
        import pyarrow as pa

        from trilane.common.files import atomic_path, ending_of
        from trilane.common.parquet_files import write_parquet

        frame = self.spans.astype({"lane": str, "kind": str, "phase": str})
        if ending_of(path, ".parquet", ".csv") == ".csv":
            with atomic_path(path) as aside:
                frame.to_csv(aside, index=False, lineterminator="\n")
            return
        write_parquet(pa.Table.from_pandas(frame, preserve_index=False), path)


def html_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of ``SHOWN`` with a line for each of the rows (``Run.to_dict()``): policy and labels, then numbers."""
    import pandas as pd

    named = {", ".join((row["policy"], *row["labels"])): {name: row.get(name) for name in SHOWN} for row in rows}
    frame = pd.DataFrame.from_dict(named, orient="index", dtype=float)
    return frame.dropna(axis="columns", how="all").to_html(float_format="{:,.2f}".format, na_rep="")


def joules_per_token(
    metrics: Metrics, power: Power | None, batch: int, further: Sequence[Power | None] = ()
) -> float | None:
    """Joules per generated token (docs/design.md, Metrics); None without decode steps or watts. ``further``: of the
    machine with each of its further GPUs."""
    if power is None or metrics.tpot_ms is None:
        return None
    shares = {lane: metrics.busy_share.get(lane) or 0.0 for lane in GPU_LANES}
    all_w = watts(power, shares[Device.GPU], metrics.busy_share[Device.CPU] or 0.0)
    all_w += sum(_gpu_watts(own, shares[lane]) for own, lane in zip(further, GPU_LANES[1:], strict=False) if own)
    return all_w * metrics.tpot_ms / 1e3 / batch


def watts(power: Power, gpu_share: float, cpu_share: float) -> float:
    """Mean power in watts of a machine whose GPU and CPU work for these shares of the time.

    A device draws its busy watts while its lane works and its idle watts otherwise; DRAM, link and board draw what the
    machine states as ``platform_w``, and are left out where it states nothing.
    """
    gpu_w = _gpu_watts(power, gpu_share)
    cpu_w = power.cpu_idle_w + cpu_share * (power.cpu_busy_w - power.cpu_idle_w)
    return gpu_w + cpu_w + (power.platform_w or 0.0)


def _gpu_watts(power: Power, share: float) -> float:
    return power.gpu_idle_w + share * (power.gpu_busy_w - power.gpu_idle_w)


def resolved(prepared: Prepared) -> Scenario:
    """The scenario with everything spelled out that it left to defaults."""
    return prepared.scenario.with_(
        policy=prepared.composition.name,
        parameters=dict(prepared.composition.parameters),
        sequences=tuple(dict.fromkeys(sequence for step in prepared.steps for sequence in step.sequences)),
        generated_tokens=prepared.answer_tokens or None,
        calibration=calibration_name(prepared.scenario),
        gpus=prepared.gpus,
    )


def labels_of(prepared: Prepared) -> tuple[str, ...]:
    """Facts that a reader must know of a run, such as "clairvoyant"."""
    needs, trace = prepared.needs, prepared.trace
    forecasts = (str(prepared.noisy),) if lacking(trace, needs) else ()
    marks = (
        (trace.provenance.get("synthetic"), Label.SYNTHETIC_TRACE),
        (trace.provenance.get("synthetic_prompts"), Label.SYNTHETIC_PROMPTS),
        (needs.scores and trace.scores is None, Label.CHOSEN_SCORES),
        (not prepared.whole_prompt, Label.SHORT_PROMPT),
        (prepared.scenario.draft_tokens, Label.SPECULATIVE),
    )
    return (*map(str, labels_of_needs(needs)), *forecasts, *(str(label) for holds, label in marks if holds))


def bounds_of(prepared: Prepared) -> dict[str, float]:
    """Lower bound and null model in ms, by the name of their column; those that do not apply are left out.

    The bound's proof does not reach policies that change the routing, and a prompt that is not played at its length has
    no bound on TTFT.
    """
    memory, needs = prepared.memory, prepared.needs
    bound = prepared.lower_bounds.at(memory.cache_bytes + memory.staging_bytes)
    values: dict[str, float] = {}
    if bound.ttft_ns is not None and prepared.whole_prompt and not needs.changes_routing:
        values["lower_bound_ttft_ms"] = bound.ttft_ns / 1e6
    if bound.tpot_ns is None:
        return values
    if not needs.changes_routing:
        values["lower_bound_tpot_ms"] = bound.tpot_ns / 1e6
    shape, decode = prepared.shape, [step for step in prepared.demand if step.phase == "decode"]
    read, share = step_bytes(decode, shape, prepared.answer_tokens), memory.cache_bytes / shape.routed_bytes
    disk_s = read_seconds(prepared.scenario, shape, prepared.costs, share)
    null_s = sum(
        null_model(shape, card.hardware, read, share, needs.gpu_only, disk_s) * (card.block.layers / shape.moe_layers)
        for card in (prepared.cards if prepared.cards[0].share is None else prepared.cards[:1])
    )
    values["null_model_tpot_ms"] = null_s * 1e3
    return values
