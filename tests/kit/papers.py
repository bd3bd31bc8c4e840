"""A paper of a few figures, on a small trace that is played in no time."""

from __future__ import annotations

from typing import Any

from trilane.common.schema import from_dict
from trilane.study.papers.paper import Paper, PublishedFigure
from trilane.study.papers.scores import FigureScore

VALUES: dict[str, Any] = {
    "name": "Toy", "title": "A toy", "source": "ours", "readings": ["nothing is open"], "draws": 2, "texts": 4,
    "setting": {"trace": "mini-moe", "hardware": "rtx3090-ddr4", "engine": "pytorch", "cached_share": 0.5,
                "prompt_tokens": 8, "generated_tokens": 4},
    "models": {"small": {"model": "mini-moe"}, "large": {"model": "phi-3.5-moe:8"}},
    "methods": {
        "ours": {"policy": "on-demand", "parameters": {"cache": "lru"}},
        "theirs": {"policy": "naive-cpu"},
        "third": {"policy": "fiddler", "engine": "ideal"},
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


def score(
    figure_id: str, published: float, simulated: float | None, kind: str = "exact", **question: Any
) -> FigureScore:
    """A figure that asks this question of a toy paper."""
    asked = {"ask": "speedup", "method": "ours", "over": "theirs", **question}
    paper = toy_paper(questions={figure_id: asked}, headlines=[])
    return FigureScore(figure(figure_id, published, kind), paper, simulated)
