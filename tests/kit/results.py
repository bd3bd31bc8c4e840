"""Results of studies, written by hand: runs of a validation, a leaderboard, a paper, and measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.protocols import PolicyKind
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import Span, spans_frame
from trilane.common.schema import from_dict
from trilane.engines.accuracy.measured_rows import MeasuredRow
from trilane.study.leaderboard.standings import Entry, all_settings
from trilane.study.papers.figures import PublishedFigure
from trilane.study.papers.paper import Paper
from trilane.study.papers.scores import FigureScore
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.parity import Parity

# --- runs for the tests of agreement ----------------------------------------------------------------------------------

# Runs written by hand for the tests of agreement: a prefill of 100 ms, then one decode step of one layer.
# In ms from the step's begin: host launch 0-1, gpu attention 1-5, host wait 5-6, plan 6-7 and launch 7-8, h2d demand
# from 7 on (8 long, unless told otherwise), then gpu expert (3), combine (1), and the host's last wait (1). That is
# 12 ms and the copy, 20 ms in all: the GPU works 8, waits 10 for the copy (from 5 to 15) and 2 for the host (0-1,
# 19-20).

MS = 1_000_000


def decode_spans(copy: float = 8, attention: float = 4, late: float = 0) -> list[Span]:
    """The run's spans; the copy starts ``late`` ms after the plan."""
    rows: list[tuple[str, str, float, float, float, int, int]] = [  # lane kind ready start end layer expert
        ("host", "launch", 100, 100, 101, 0, -1),
        ("gpu", "attention", 101, 101, 101 + attention, 0, -1),
    ]
    routed = 101 + attention
    planned = routed + 2
    copied = planned + late + copy
    rows += [
        ("host", "wait", routed, routed, routed + 1, 0, -1),
        ("host", "plan", routed + 1, routed + 1, planned, 0, -1),
        ("host", "launch", planned, planned, planned + 1, 0, 1),
        ("h2d", "demand", planned, planned + late, copied, 0, 1),
        ("gpu", "expert", copied, copied, copied + 3, 0, 1),
        ("gpu", "combine", planned + 1, copied + 3, copied + 4, 0, -1),
        ("host", "wait", copied + 4, copied + 4, copied + 5, -1, -1),
    ]
    prefill = [_span("gpu", "attention", 0, 0, 99, -1, -1, 0), _span("host", "wait", 99, 99, 100, -1, -1, 0)]
    return prefill + [_span(*row, 1) for row in rows]


def _span(lane: str, kind: str, ready: float, start: float, end: float, layer: int, expert: int, step: int) -> Span:
    times = (round(ready * MS), round(start * MS), round(end * MS))
    size = 100 if kind == "demand" else 0
    tokens = int(kind != "wait")  # that of a step counts accepted drafts
    return Span(lane, *times, kind, "decode" if step else "prefill", step, layer, -1, expert, tokens, size)


def run(
    policy: str = "dali", copy: float = 8, *, null: float | None = None, parameters: Mapping[str, Any] | None = None,
    checksum: str = "", spans: list[Span] | None = None, **scenario: Any,
) -> Run:
    """A run whose TPOT is 12 ms and the copy, of a scenario with some fields changed."""
    asked = Scenario(policy=policy, parameters=parameters or {}, **scenario)
    rows = decode_spans(copy) if spans is None else spans
    bounds = {} if null is None else {"null_model_tpot_ms": null}
    frame = spans_frame([tuple(span) for span in rows])  # type: ignore[misc]
    return Run(asked, policy, frame, trace_checksum=checksum, bounds=bounds)


def comparison(
    policy: str = "dali", measured: tuple[float, ...] = (20,), predicted: float = 20, parity: Parity | None = None,
    *, null: float | None = None, **asked: Any,
) -> RunComparison:
    """Repeats and a prediction of the TPOTs given, ms."""
    repeats = tuple(run(policy, tpot - 12, **asked) for tpot in measured)
    return RunComparison(repeats, run(policy, predicted - 12, null=null, **asked), parity)


def agreement(*comparisons: RunComparison) -> Agreement:
    """The agreement of the comparisons."""
    return Agreement(comparisons)


# --- entries of a leaderboard -----------------------------------------------------------------------------------------

def entries_of(policy: str, *speeds: float | None, kind: PolicyKind = PolicyKind.KEEPS) -> list[Entry]:
    """In the first settings; None: it cannot run there."""
    return [
        Entry(*setting, policy, "", None, None, None, None, None, "too small") if speed is None else
        Entry(*setting, policy, kind, speed, 0.9 * speed, 1.1 * speed, 0.5, 12.0, "")
        for setting, speed in zip(all_settings(), speeds, strict=False)
    ]


def some_entries() -> Sequence[Entry]:
    """Three settings: steady is best in two, quick in one and refused in one; wild changes the routing."""
    return [
        *entries_of("steady", 10.0, 10.0, 8.0), *entries_of("quick", 5.0, None, 16.0),
        *entries_of("wild", 20.0, 20.0, 16.0, kind=PolicyKind.CHANGES), *entries_of("never", None, None, None),
    ]


# --- a paper ----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "name": "Toy", "title": "A toy", "source": "ours", "readings": ["nothing is open"], "draws": 2, "texts": 4,
    "setting": {"trace": "mini-moe", "hardware": "rtx3090-ddr4", "engine": "pytorch", "cached_share": 0.5,
                "prompt_tokens": 8, "generated_tokens": 4},
    "models": {"small": {"model": "mini-moe"}, "large": {"model": "phi-3.5-moe:8"}},
    "methods": {
        "ours": {"policy": "on-demand", "parameters": {"cache": "lru"}},
        "theirs": {"policy": "naive-cpu"},
        "third": {"policy": "fiddler", "engine": "graphs"},
    },
    "variants": {"ours": {"large": {"parameters": {"demand_slots": 1}}}},
    "settings": {"both": {"model": ["small", "large"], "batch": [1, 2]}},
    "questions": {
        "toy-speed": {"ask": "speedup", "method": "ours", "over": "theirs", "at": "both"},
        "toy-hits": {"ask": "hit_rate", "method": "ours"},
    },
    "headlines": ["toy-speed"],
}


def toy_paper(**changes: Any) -> Paper:
    """With some keys changed."""
    return from_dict(Paper, {**VALUES, **changes}, "toy.yaml")


def put_in(*figure_ids: str) -> list[dict[str, Any]]:
    """The note that these figures set a rate."""
    return [{"why": "a rate", "figures": list(figure_ids)}]


def figure(figure_id: str = "toy-speed", value: float = 2.0, kind: str = "exact", **changes: Any) -> PublishedFigure:
    """A published figure."""
    values = {"id": figure_id, "paper": "Toy", "where": "Table 1", "quantity": "speedup", "method": "", "baseline": "",
              "model": "", "value": value, "unit": "x", "kind": kind, "left_out": ""}
    return from_dict(PublishedFigure, {**values, **changes})


class ToyFigures(dict[str, PublishedFigure]):
    """In place of the published figures: any, each in a table of its own."""

    def __missing__(self, figure_id: str) -> PublishedFigure:
        return figure(figure_id, where=f"Table {figure_id}")


def score(
    figure_id: str, published: float, simulated: float | None, kind: str = "exact", **question: Any
) -> FigureScore:
    """A figure that asks this question of a toy paper."""
    asked = {"ask": "speedup", "method": "ours", "over": "theirs", **question}
    paper = toy_paper(questions={figure_id: asked}, headlines=[])
    return FigureScore(figure(figure_id, published, kind), paper, simulated)


# --- measured rows ----------------------------------------------------------------------------------------------------

DESKTOP = "rtx-4080+ddr5-5600+ryzen-9-7950x"


def row(row_id: str = "1", decode: float | None = 100.0, **others: Any) -> MeasuredRow:
    """A row of Qwen3-30B on a desktop, wholly on the GPU."""
    given = {"model": "qwen3-30b-a3b", "weights": "q4_k_m", "machine": DESKTOP, "engine": "llama.cpp", "cpu_layers": 0}
    return MeasuredRow(id=row_id, decode_tokens_per_s=decode, **{"quality": "A", **given, **others})
