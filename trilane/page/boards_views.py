"""*Does it pay*, *Accuracy* and *Leaderboard*: the maps, every measured row, and every policy."""

from __future__ import annotations

from policies.protocols import PolicyKind
from trilane.engines.accuracy.errors import error_of, read_predictions
from trilane.engines.accuracy.measured_rows import MeasuredRow, read_rows
from trilane.engines.accuracy.near import measured_points
from trilane.engines.accuracy.scores import Explanation, explain, row_of
from trilane.output.figures.marks import marked, meanings
from trilane.output.figures.pays_words import gain_text
from trilane.output.pages.fit_engine import duration, milliseconds
from trilane.output.pages.leaderboard import MEANINGS, cost_of
from trilane.output.pages.output import number, percent, signed_percent
from trilane.page.machine_views import point_record
from trilane.page.questions import Query
from trilane.page.records import Record
from trilane.page.view import ViewPlan
from trilane.study.leaderboard.standings import Standing, all_settings, leaderboard_settings, read_entries, standings
from trilane.study.pays.bundled_maps import MapCell, bundled_maps
from trilane.study.quality.curve import measured_nats

# --- accuracy ---------------------------------------------------------------------------------------------------------


def accuracy(query: Query) -> ViewPlan:
    """Every measured row that was predicted without its machine."""
    return ViewPlan({"kind": "accuracy", "points": [point_record(point) for point in measured_points()]})


def row(query: Query) -> ViewPlan:
    """One row: its setting, its errors, and the parts of its predicted time. Raises RowsError."""
    found = row_of(read_rows(), query.get("id", ""))
    return ViewPlan({
        "kind": "row", "id": found.id, "errors": _errors(found),
        "times": [_explained(one) for one in explain(found)],
    })


def _errors(found: MeasuredRow) -> Record:
    held_out = read_predictions()
    return {quantity: signed_percent(error_of(found, held_out, quantity)) for quantity in ("decode", "prompts")}


def _explained(one: Explanation) -> Record:
    text = milliseconds if one.quantity == "decode" else duration
    parts = [{"name": part.name, "ns": part.ns, "text": text(float(f"{part.ns}e-6"))} for part in one.parts]
    return {"quantity": one.quantity, "parts": parts, "measured_ns": one.measured_ns}


# --- the leaderboard --------------------------------------------------------------------------------------------------


def leaderboard(query: Query) -> ViewPlan:
    """All policies that run in some setting, best first."""
    found = [one for one in standings(read_entries()) if one.relative]
    settings = leaderboard_settings()
    return ViewPlan({
        "kind": "leaderboard", "rows": [_standing(one) for one in found], "meanings": MEANINGS,
        "marks": meanings({PolicyKind(one.kind) for one in found}),
        "settings": [{"name": setting.name, "machine": settings.machines[setting.machine].about,
                      "family": setting.family, "batch": setting.batch} for setting in all_settings()],
    })


def _standing(one: Standing) -> Record:
    entries = {setting.name: entry for setting, entry in one.entries.items()}
    return {
        "policy": one.policy, "marked": marked(one.policy, PolicyKind(one.kind)), "kind": one.kind,
        "score": one.score, "score_text": percent(one.score), "lowest": one.lowest, "lowest_text": percent(one.lowest),
        "best_in": one.best_in, "runs_in": len(one.relative), "kl_text": cost_of(one),
        "kl": max(measured_nats(one.policy) or (0.0,)),
        "speeds": {name: number(entry.tokens_per_s) for name, entry in entries.items()},
        "relative": {setting.name: value for setting, value in one.relative.items()},
    }


# --- whether an idea pays ---------------------------------------------------------------------------------------------


def pays(query: Query) -> ViewPlan:
    """The maps that come with the program."""
    maps = [
        {"name": one.name, "title": one.title, "x": one.x, "y": one.y,
         "xs": [{"value": x, "text": percent(x)} for x in dict.fromkeys(cell.x for cell in one.cells)],
         "ys": [{"value": y, "text": number(y, 0)} for y in dict.fromkeys(cell.y for cell in one.cells)],
         "cells": [_cell(cell) for cell in one.cells]}
        for one in bundled_maps()
    ]
    return ViewPlan({"kind": "pays", "maps": maps})


def _cell(cell: MapCell) -> Record:
    return {
        **cell._asdict(), "text": "cannot run" if cell.gain is None else gain_text(cell.gain),
        "why": cell.reason or (
            f"{number(cell.using_tokens_per_s)} tokens/s with {cell.using}, {number(cell.without_tokens_per_s)} with "
            f"{cell.without}; {_ends(cell)} over the draws"
        ),
    }


def _ends(cell: MapCell) -> str:
    return " to ".join(gain_text(end) for end in (cell.lowest, cell.highest) if end is not None)
