"""Laws 2 and 3 (docs/design.md) of pools of threads, and of copies that the GPU makes itself."""

from __future__ import annotations

from sim.costs.cost_table import CostTable
from sim.runs.spans import Span
from trilane.testing.log import Layer, Log, Spans, home, log_of


def law_2_phases(spans: Spans, costs: CostTable) -> None:
    """In a pool, no expert's second products begin before all of its batch have had their first ones."""
    waiting: list[tuple[object, ...]] = []  # experts whose first products are done, in order
    second = False
    for span in log_of(spans).lanes["cpu"]:
        if costs.permille_before_barrier is None:
            assert span.kind != "gate_up", f"law 2: there is no pool, but {span}"
        elif span.kind == "gate_up":
            assert not (second and waiting), f"law 2: the pool begins with {span} before {waiting} are computed"
            waiting.append(_work(span))
            second = False
        else:
            assert waiting[:1] == [_work(span)], f"law 2: the pool computes {span}, next are {waiting}"
            del waiting[0]
            second = True
    assert not waiting, f"law 2: the pool has left {waiting} half computed"


def _work(span: Span) -> tuple[object, ...]:
    return span.step, span.layer, home(span), span.expert, span.tokens


def law_3_kernel_copies(spans: Spans, costs: CostTable) -> None:
    """A demand load that the GPU makes takes the GPU and the link, for the same time; no other copy takes the GPU."""
    log = log_of(spans)
    made = [_copy(span) for span in log.lanes["gpu"] if span.kind == "fetch"]
    loads = [_copy(span) for span in log.lanes["h2d"] if span.kind == "demand"] if costs.kernel_copies else []
    assert made == loads, f"law 3: the GPU has made {made}, loads are {loads}"


def _copy(span: Span) -> tuple[int, ...]:
    return span.start_ns, span.end_ns, span.step, span.layer, span.expert, span.bytes


def call_of(log: Log, layer: Layer, span: Span) -> list[Span]:
    """The experts that share a call with one which the GPU has copied: those between its copies and the next ones."""
    planned, call = log.planned(layer), list[Span]()
    for other in log.of(layer, "expert", "fetch", lane="gpu"):
        came_ns = [copy.end_ns for copy in log.copied.get((layer[1], other.expert), ())]
        copied = any(planned <= end_ns <= other.start_ns for end_ns in came_ns)
        if other.kind == "expert" and copied:
            call.append(other)
        elif span in call:
            break
        else:
            call = []
    return call if span in call else []
