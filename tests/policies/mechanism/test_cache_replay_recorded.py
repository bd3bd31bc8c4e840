"""Replay against hit rates that an inference engine on a phone recorded with one LRU pool of 4000 MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.mechanism.cache_replay import ReplayEvent, ReplayResult, replay
from policies.parts.caches import LruCache
from policies.protocols import Budget

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "traces" / "route_trace_v1"
MIB = 1 << 20


def read(path: Path) -> tuple[tuple[int, ...], int, list[tuple[int, ...]]]:
    """Bytes of an expert by layer, experts a layer, and rows (turn, phase, step, layer, slot, expert)."""
    lines = path.read_text().splitlines()
    header = [dict(part.split("=") for part in line[2:].split() if "=" in part) for line in lines if line[0] == "#"]
    sizes = tuple(int(fields["expert_bytes"]) for fields in header if "expert_bytes" in fields)
    rows = [tuple(map(int, line.split(",")[:6])) for line in lines if line[0].isdigit()]
    return sizes, int(header[1]["n_expert"]), rows


def events_of(rows: list[tuple[int, ...]]) -> list[ReplayEvent]:
    """One event a step and layer, one a layer for the whole prefill; experts in the order in which they appear."""
    events: dict[tuple[int, int, int], dict[int, None]] = {}
    for _, phase, step, layer, _, expert in rows:
        events.setdefault((phase, step if phase else -1, layer), {})[expert] = None
    return [
        ReplayEvent(step, layer, "decode" if phase else "prefill", tuple(active))
        for (phase, step, layer), active in sorted(events.items())
    ]


def replayed(name: str) -> ReplayResult:
    path = RECORDED / f"{name}.route.csv"
    if not path.exists():
        pytest.skip(f"no recorded trace at {path}")
    sizes, experts, rows = read(path)
    return replay(events_of(rows), LruCache(), Budget(experts, sizes, 4000 * MIB))


@pytest.mark.parametrize(
    ("name", "lookups", "hits", "percent"), [("qwen", 39526, 29597, 74.9), ("gemma", 24578, 18872, 76.8)]
)
def test_gives_the_recorded_hit_rate(name: str, lookups: int, hits: int, percent: float) -> None:
    got = replayed(name)
    assert round(100 * got.hit_rate, 1) == percent
    assert (got.lookups, got.hits) == (lookups, hits)  # as recorded, to the single hit
