"""Pictures of decode steps: the right step, all lanes, short work still visible; measured and predicted."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.runs.spans import Row, spans_frame
from sim.runs.vocabulary import COPIES, FURTHER_LANES, LANES
from sim.simulate import simulate
from tests.kit.results import comparison, decode_spans
from tests.kit.results import run as played
from trilane.output.figures.families import LANE_NAMES
from trilane.output.figures.figure_files import PictureError, save_figure
from trilane.output.figures.perfetto import trace_events, write_perfetto
from trilane.output.figures.timelines import median_decode_step, plot_gantt, plot_measured_timeline
from trilane.study.validation.comparison import RunComparison


def step_end(time: int, step: int = 0, phase: str = "decode") -> Row:
    """The wait that ends a step."""
    return ("host", time, time, time, "wait", phase, step, -1, -1, -1, 0, 0)


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(Scenario(policy="dali", prompt_tokens=4, generated_tokens=3))


def test_gantt_shows_all_lanes_and_its_message(run: Run) -> None:
    figure = plot_gantt(run)
    step = median_decode_step(run.spans)
    assert figure.get_suptitle().startswith(f"dali: decode step {step} (median step) takes ")
    for ax in figure.axes[:2]:
        assert len(ax.get_yticklabels()) == 5
        assert "(ms)" in ax.get_xlabel()


def test_gantt_says_what_was_run_and_shows_short_work(run: Run) -> None:
    figure = plot_gantt(run, step=1, about="a model on a machine")
    assert "median" not in figure.get_suptitle()
    assert figure.subfigs[0].get_suptitle() == "a model on a machine"
    above = figure.axes[0]
    dot = above.get_window_extent().width  # a bar narrower than a dot of the panel would not be seen
    left, right = above.get_xlim()
    widths = [np.ptp(path.vertices[:, 0]) for bars in above.collections for path in bars.get_paths()]
    assert min(widths) * dot / (right - left) > 0.8


def test_gantt_comes_close_where_the_gpu_waits_as_long_as_elsewhere(run: Run) -> None:
    """Layers of 10 ns: in 0 to 2 the GPU waits 8 ns, in 3 it waits 4 ns, in 4 to 7 none. Mean 3.5 ns a layer: 2 to 4
    (4 ns a layer) come nearest.
    """
    waits = [8, 8, 8, 4, 0, 0, 0, 0]
    rows = [("gpu", 10 * n, 10 * n, 10 * n + 1, "attention", "decode", 0, n, -1, -1, 1, 0) for n in range(8)]
    rows += [("gpu", 10 * n + 1 + wait, 10 * n + 1 + wait, 10 * n + 10, "combine", "decode", 0, n, -1, -1, 1, 0)
             for n, wait in enumerate(waits)]
    rows = [*sorted(rows, key=lambda row: row[1]), step_end(80)]
    figure = plot_gantt(Run(run.scenario, "by-hand", spans_frame(rows)))
    assert figure.axes[1].get_title(loc="left").startswith("layers 2 to 4 ")


def test_copies_are_named_with_their_layer(run: Run) -> None:
    """In layer 0 expert 7 is prefetched for layer 2, expert 5 is loaded for layer 0, and expert 3 runs."""
    rows = [
        ("h2d", 0, 0, 100, "prefetch", "decode", 0, 2, -1, 7, 0, 1),
        ("h2d", 100, 100, 200, "demand", "decode", 0, 0, -1, 5, 0, 1),
        ("gpu", 0, 0, 100, "attention", "decode", 0, 0, -1, -1, 1, 0),
        ("gpu", 100, 100, 200, "expert", "decode", 0, 0, -1, 3, 1, 0),
        ("cpu", 100, 100, 200, "precompute", "decode", 0, 0, 1, 9, 1, 0),
        step_end(200),
    ]
    below = plot_gantt(Run(run.scenario, "by-hand", spans_frame(rows))).axes[1]
    assert [text.get_text() for text in below.texts] == ["3", "1/9", "2/7", "0/5"]


def test_median_decode_step_by_hand() -> None:
    """Decode steps of 10, 30 and 20 ns: the last has the median duration."""
    ends = [(100, "prefill"), (110, "decode"), (140, "decode"), (160, "decode")]
    rows = [step_end(end, step, phase) for step, (end, phase) in enumerate(ends)]
    assert median_decode_step(spans_frame(rows)) == 3


def test_gantt_without_decode_steps(run: Run) -> None:
    prefill = Run(run.scenario, run.policy, run.spans[run.spans["phase"] == "prefill"])
    with pytest.raises(PictureError, match="decode step"):
        plot_gantt(prefill)


def test_gantt_of_a_step_that_is_not_there(run: Run) -> None:
    with pytest.raises(PictureError, match="from 0 to 3, got 9"):
        plot_gantt(run, step=9)


# --- measured and predicted -------------------------------------------------------------------------------------------

def words(figure: Figure) -> str:
    return "\n".join([figure.get_suptitle(), *(text.get_text() for ax in figure.axes for text in ax.texts)])


def bars(ax: Axes) -> list[tuple[float, float, float]]:
    """Middle of the row, begin and end in ms of every bar."""
    found = []
    for collection in ax.collections:
        for path in collection.get_paths():
            box: Any = path.get_extents()
            found.append((round((box.y0 + box.y1) / 2, 2), round(box.x0, 6), round(box.x1, 6)))
    return sorted(found)


class TestOverlay:
    def test_every_lane_has_a_row_measured_and_one_predicted(self) -> None:
        """The copy starts 7 ms into the step and takes 8 as measured, 12 as predicted; h2d is the fourth lane."""
        above, _ = plot_measured_timeline(comparison(measured=(20,), predicted=24)).axes
        assert [bar for bar in bars(above) if 2.5 < bar[0] < 3.5] == [(2.79, 7, 15), (3.21, 7, 19)]

    def test_busy_times_stand_at_the_rows(self) -> None:
        texts = words(plot_measured_timeline(comparison(measured=(20,), predicted=24)))
        assert "8.00 ms busy" in texts
        assert "12.00 ms (+50%)" in texts

    def test_the_ends_of_the_step_are_marked(self) -> None:
        above, _ = plot_measured_timeline(comparison(measured=(20,), predicted=24)).axes
        ends = [float(line.get_xdata()[0]) for line in above.lines if line.get_color() == "black"]  # type: ignore[index]
        assert ends == [20, 24]

    def test_the_headline_says_how_far_off_the_step_is(self) -> None:
        headline = plot_measured_timeline(comparison(measured=(20,), predicted=24)).get_suptitle()
        assert all(fact in headline for fact in ("dali: decode step 1 ", "20.00 ms", "24.00 ms", "(+20.0%)"))

    def test_the_repeat_of_median_tpot_is_shown(self) -> None:
        assert "took 20.00 ms" in plot_measured_timeline(comparison(measured=(30, 20, 19), predicted=24)).get_suptitle()

    def test_close_by_both_sides_begin_with_the_layer(self) -> None:
        """Attention is the layer's first work on the GPU, 1 ms into the step; it starts at 0 on either side."""
        late = played(spans=decode_spans(attention=2))
        _, below = plot_measured_timeline(RunComparison((played(),), late)).axes
        gpu = [bar for bar in bars(below) if 0.5 < bar[0] < 1.5]
        assert (0.79, 0, 4) in gpu
        assert (1.21, 0, 2) in gpu

    def test_a_step_of_a_simulated_run_is_drawn_whole(self, tmp_path: Path) -> None:
        asked = Scenario(prompt_tokens=4, generated_tokens=3, cached_share=0.4)
        slower = simulate(asked.with_(hardware_overrides={"link.h2d_bytes_per_s": 9e9}))
        figure = plot_measured_timeline(RunComparison((slower,), simulate(asked)), about="somewhere")
        save_figure(figure, tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        assert figure.subfigs[0].get_suptitle() == "somewhere"


# --- the timeline file ------------------------------------------------------------------------------------------------


MB = 1_000_000


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


def test_every_lane_has_a_name() -> None:
    assert set(LANE_NAMES) == {*LANES, *FURTHER_LANES}
