"""Words for what happens in a step: a span, a wait of the GPU, and a change of its memory."""

from __future__ import annotations

from typing import Any

from trilane.common.units import MIB
from trilane.output.figures.families import LANE_NAMES
from trilane.study.step_replay import GpuWait, MemoryChange, StepSpan

_KINDS = {
    "expert": "computes expert", "deferred": "computes a deferred expert", "precompute": "computes ahead expert",
    "demand": "copies, while the layer waits, expert", "prefetch": "copies ahead expert",
    "swap": "copies into the cache expert", "writeback": "writes back expert", "attention": "attention",
    "gate": "the router chooses experts", "shared": "shared experts", "combine": "adds up the experts' results",
    "partial_sum": "adds up its experts' results", "hand_over": "carries what another GPU goes on with",
    "routing": "copies the choice of experts to the host", "activations": "copies activations to the host",
    "result": "copies a result to the GPU", "plan": "decides where experts run",
    "foresee": "decides what to copy ahead", "observe": "updates the cache's records",
    "launch": "launches kernels", "program": "the engine's own work", "wait": "waits for the routing",
    "speculate": "forecasts the next layers", "draft": "drafts tokens",
}
_CAUSES = {
    "h2d": "the copy of expert {expert}", "cpu": "experts that the CPU computes",
    "host": "the host thread, which plans and launches",
}
_COMBINED = "a copy for this layer"


def span_text(span: StepSpan) -> str:
    """Words for a lane's work: what it does, for which layer, how long, and how long it waited for its lane."""
    home = span.target_layer if span.target_layer >= 0 else span.layer
    where = f", layer {home}" if home >= 0 else ""
    expert = f" {span.expert}" if span.expert >= 0 else ""
    size = f", {span.bytes / MIB:.1f} MiB" if span.bytes else ""
    waited = f"; was ready {span.waited_ms:.3f} ms before its lane was free" if span.waited_ms > 0 else ""
    took = f"{span.end_ms - span.start_ms:.3f} ms from {span.start_ms:.3f}"
    return f"{LANE_NAMES[span.lane]} {_KINDS.get(span.kind, span.kind)}{expert}{where}: {took}{size}{waited}"


def wait_text(wait: GpuWait) -> str:
    """Words for a wait of the GPU: how long, and for what."""
    cause = _CAUSES[wait.lane].format(expert=wait.expert)
    cause = _COMBINED if wait.lane == "h2d" and wait.expert < 0 else cause
    where = f" in layer {wait.layer}" if wait.layer >= 0 else ""
    return f"the GPU waits {wait.end_ms - wait.start_ms:.3f} ms{where} for {cause}"


def change_record(change: MemoryChange) -> list[Any]:
    """Time in ms, layer, expert, and what becomes of it."""
    return list(change)
