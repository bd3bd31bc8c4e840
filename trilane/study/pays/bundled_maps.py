"""Maps of ``trilane pays cache`` that come with the program: those of docs/pays.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trilane.common.csv_files import read_lines
from trilane.study.pays.ideas import PaysError

_FOLDER = Path(__file__).with_name("maps")
_TITLES = {
    "laptop-8gb": "8 GB laptop (RTX 4060), Qwen3-30B-A3B", "desktop-12gb": "12 GB desktop (RTX 3060), Qwen3-30B-A3B",
    "desktop-24gb": "24 GB desktop (RTX 4090), Qwen3.5-122B-A10B",
    "server-48gb": "server with an L40S, Qwen3-235B-A22B",
}


class MapCell(NamedTuple):
    """A cell of a map: gains as fractions, None where a side cannot run, and tokens a second of both sides."""

    x: float
    y: float
    gain: float | None
    lowest: float | None
    highest: float | None
    without: str
    without_tokens_per_s: float | None
    using: str
    using_tokens_per_s: float | None
    here: bool
    reason: str


class BundledMap(NamedTuple):
    """A map with the labels of its axes."""

    name: str
    title: str
    x: str
    y: str
    cells: tuple[MapCell, ...]


def bundled_maps() -> list[BundledMap]:
    """All of them, the smallest machine first. Raises PaysError for a file that cannot be read."""
    return [_map(name, title) for name, title in _TITLES.items()]


def _map(name: str, title: str) -> BundledMap:
    lines = read_lines(_FOLDER / f"pays-cache-{name}.csv", "a map of trilane pays", PaysError)
    x, y, *_ = lines[0]
    return BundledMap(name, title, x, y, tuple(_cell(line, x, y) for line in lines))


def _cell(line: Mapping[str, str], x: str, y: str) -> MapCell:
    return MapCell(
        float(line[x]), float(line[y]), _number(line["gain"]), _number(line["gain_min"]), _number(line["gain_max"]),
        line["without"], _number(line["without_tokens_per_s"]), line["using"], _number(line["using_tokens_per_s"]),
        line["here"] == "True", line["reason"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
