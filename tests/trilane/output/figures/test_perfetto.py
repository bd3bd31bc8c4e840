"""The timeline file: what ui.perfetto.dev needs to show it right."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import spans_frame
from sim.runs.vocabulary import COPIES, LANES
from sim.simulate import simulate
from trilane.output.figures.perfetto import trace_events, write_perfetto

MB = 1_000_000


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(Scenario(policy="dali", prompt_tokens=4, generated_tokens=3))


@pytest.fixture(scope="module")
def events(run: Run) -> list[dict[str, Any]]:
    return list(trace_events(run))


def ns(us: float) -> int:
    """As Perfetto reads a time; cutting and rounding must agree."""
    assert int(us * 1000) == round(us * 1000)
    return int(us * 1000)


def slices(events: list[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    """(start, end) in ns of all slices, by thread, in file order."""
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    return by_thread


def test_every_lane_is_a_thread_and_every_span_a_slice(run: Run, events: list[dict[str, Any]]) -> None:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == dict(enumerate(("steps and layers", *LANES)))
    timed = run.spans[run.spans["end_ns"] > run.spans["start_ns"]]
    found = slices(events)
    for tid, lane in enumerate(LANES, 1):
        mine = timed[timed["lane"] == lane]
        assert sorted(found[tid]) == sorted(zip(mine["start_ns"], mine["end_ns"], strict=True))


def test_slices_of_a_lane_do_not_overlap(events: list[dict[str, Any]]) -> None:
    for tid, found in slices(events).items():
        if tid:
            assert all(end <= start for (_, end), (start, _) in pairwise(sorted(found)))


def test_layers_lie_within_their_steps(events: list[dict[str, Any]]) -> None:
    """On the first thread slices must nest: a slice begins after all open ones, and ends before them."""
    open_until: list[int] = []
    for start, end in slices(events)[0]:
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)
        assert len(open_until) <= 2


def test_an_arrow_goes_from_each_used_copy_to_its_expert(run: Run, events: list[dict[str, Any]]) -> None:
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    titles = {(e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    for arrow, begin in begins.items():
        copy, use = titles[begin["tid"], begin["ts"]], titles[ends[arrow]["tid"], ends[arrow]["ts"]]
        assert copy.split()[0] in COPIES
        assert use == f"expert {copy.split('/')[1]}"
    copies = run.spans["kind"].isin(COPIES).sum()
    assert len(begins) <= copies


def test_arrows_of_all_runs_have_numbers_of_their_own(run: Run, tmp_path: Path) -> None:
    """Perfetto reads an id that is text as a number in base 16, and drops one that is none."""
    write_perfetto([run, run], tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert ids
    assert all(type(number) is int and 0 < number < 2**53 for number in ids)
    assert len(set(ids)) == len(ids)
    assert sorted(ids) == sorted(event["id"] for event in events if event["ph"] == "f")


def test_memory_counter_by_hand(tmp_path: Path) -> None:
    """Two experts of 1 MB from the start; at 10 us one leaves and a copy starts; at 40 us the copy is released."""
    rows = [
        ("h2d", 0, 0, 0, "place", "prefill", -1, 0, -1, 0, 0, MB),
        ("h2d", 0, 0, 0, "place", "prefill", -1, 0, -1, 1, 0, MB),
        ("h2d", 10_000, 10_000, 10_000, "evict", "decode", 0, 0, -1, 1, 0, MB),
        ("h2d", 10_000, 10_000, 30_000, "demand", "decode", 0, 0, -1, 2, 0, MB),
        ("gpu", 30_000, 30_000, 35_000, "expert", "decode", 0, 0, -1, 2, 1, MB),
        ("h2d", 40_000, 40_000, 40_000, "release", "decode", 0, 0, -1, 2, 0, MB),
    ]
    run = Run(Scenario(), "by-hand", spans_frame(rows))
    counted = [(e["ts"], e["args"]["bytes"]) for e in trace_events(run) if e["ph"] == "C"]
    assert counted == [(0.0, 2 * MB), (10.0, 2 * MB), (40.0, MB)]


def test_file_is_valid_and_the_same_every_time(run: Run, tmp_path: Path) -> None:
    plain, packed, again = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    write_perfetto([run, run], plain)
    write_perfetto([run, run], packed)
    write_perfetto([run, run], again)
    content = json.loads(plain.read_text())
    assert {event["pid"] for event in content["traceEvents"]} == {1, 2}
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()
    assert packed.read_bytes()[:10] == bytes.fromhex("1f8b 08 00 00000000 00 ff")  # no name, no time, no system
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.gz", "b.json.gz"]


def test_first_steps_only(run: Run) -> None:
    steps = {e["args"]["step"] for e in trace_events(run, first_steps=2) if e["ph"] == "X" and "args" in e}
    assert steps == {0, 1}


def test_failure_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        write_perfetto([run, None], tmp_path / "a.json")  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
