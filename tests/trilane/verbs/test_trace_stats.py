"""``trilane trace stats``: one trace, several, and what others publish."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.toys import toy_trace
from traces.file import write_trace
from traces.models.catalogue import Published, published_figures
from traces.statistics import trace_statistics
from traces.trace import Trace
from trilane.cli import main
from trilane.common.schema import SchemaError, from_dict
from trilane.output.pages.trace_stats import comparable_statistics

ROOT = Path(__file__).parents[3]
RECORDED = ROOT.parent / "shared" / "traces" / "route_trace_v1"

Stats = Callable[..., str]


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Stats:
    """Runs the verb in an empty folder; what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["trilane", "trace", "stats", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        return capsys.readouterr().out

    return run


def alternating() -> Trace:
    """Two sequences of 4 decode tokens, top-1 of 4 experts: 0 0 1 1, then 2 3 2 3."""
    one, other = (toy_trace([[[expert]] for expert in experts], prompt_tokens=0, experts=4)
                  for experts in ((0, 0, 1, 1), (2, 3, 2, 3)))
    tensors: dict[str, Any] = {
        name: np.concatenate([array, other.tensors()[name]]) for name, array in one.tensors().items()
    }
    tensors["sequence"] = np.repeat(np.arange(2, dtype=np.int32), 4)
    return Trace.from_tensors(one.shape, tensors, {})


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_a_sequence_by_itself_is_skewed_where_the_trace_is_even() -> None:
    """Each sequence uses 2 of 4 experts evenly: Gini 1/2, entropy ln 2 / ln 4. Shuffled, a token's expert is that of
    one of the 3 others.
    """
    found = comparable_statistics(alternating())
    assert found["layer_means"]["gini"] == pytest.approx(0)
    assert found["layer_means"]["entropy"] == pytest.approx(1)
    assert found["one_sequence"] == pytest.approx(
        {"gini": 0.5, "top_10_percent_share": 0.5, "entropy": 0.5, "chance": 1 / 3, "likeness": None}
    )


def test_a_quarter_of_four_experts_is_one_slot() -> None:
    """An LRU cache of one expert hits 0 0 and 1 1 of the first sequence, nothing in the second."""
    assert comparable_statistics(alternating())["layer_lru_hit_rate"] == 2 / 8


def test_comparable_statistics_hold_all_others() -> None:
    trace = alternating()
    assert trace_statistics(trace).items() <= comparable_statistics(trace).items()


def test_a_prompt_alone_says_nothing_about_decode(stats: Stats, tmp_path: Path) -> None:
    trace = toy_trace([[[0, 1]], [[0, 2]]], prompt_tokens=2, experts=4)
    found = comparable_statistics(trace)
    assert found["layer_lru_hit_rate"] is None
    assert found["one_sequence"]["chance"] is None
    write_trace(trace, "prompt.safetensors")
    assert cells(stats("prompt.safetensors", "--markdown"))["used again 1 token later"] == ["-"]


# --- what is printed and written --------------------------------------------------------------------------------------


def cells(markdown: str) -> dict[str, list[str]]:
    """Rows of a Markdown table by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_one_trace_is_described_as_ever(stats: Stats) -> None:
    out = json.loads(stats("mini-moe", "--json", "-"))
    assert "traces" not in out
    assert {"tokens", "layer_means", "lag_profile", "forecasts"} <= out.keys()
    assert "adjacent overlap" in stats("mini-moe")


def test_several_traces_stand_side_by_side(stats: Stats) -> None:
    write_trace(alternating(), "mine.safetensors")
    out = stats("mini-moe", "mine.safetensors", "--json", "both.json")
    both = json.loads(Path("both.json").read_text())
    assert list(both) == ["traces"]
    assert list(both["traces"]) == ["mini-moe", "mine.safetensors"]
    assert out.splitlines()[0].split() == ["mini-moe", "mine"]
    [sizes] = [line for line in out.splitlines() if line.startswith("layers")]
    assert "8 / 16 / 2" in sizes
    assert "1 / 4 / 1" in sizes
    rows = cells(stats("mini-moe", "mine.safetensors", "--markdown"))
    assert rows["in one sequence: Gini"][1] == "0.50"
    assert rows["used again 2 tokens later"][1] == "50.0%"  # none of the first sequence's, all of the second's
    gate = both["traces"]["mini-moe"]["forecasts"]["gate@1"]["accuracy_at_k"]
    assert rows["accuracy@k of gate@1"] == [f"{100 * gate:.1f}%", "-"]


def test_published_figures_stand_beside_and_say_where_they_are_from(stats: Stats) -> None:
    out = stats("mini-moe", "--published", "--json", "with.json")
    markdown = stats("mini-moe", "--published", "--markdown")
    written = json.loads(Path("with.json").read_text())
    assert [from_dict(Published, figure) for figure in written["published"]] == list(published_figures())
    for figure in published_figures():
        note = f"{figure.model}: {figure.source}; {figure.note}"
        [line] = [line for line in markdown.splitlines() if line.endswith(note)]
        place = line.split(". ")[0]
        assert f"[{place}] {note}" in out
        assert markdown.count(f" [{place}]") == 1
    assert cells(markdown)["used again 1 token later"][1].startswith("27.4% [")
    assert cells(markdown)["sequences"][1:] in ([], [""])


def test_recorded_traces_of_large_models_compare(stats: Stats) -> None:
    if not RECORDED.is_dir():
        pytest.skip(f"no recorded traces in {RECORDED}")
    rows = cells(stats("mini-deepseek", str(RECORDED / "qwen.route.csv"), "--markdown"))
    assert rows["layers / experts / top-k"] == ["26 / 64 / 6", "48 / 128 / 6"]
    assert rows["accuracy@k of gate@1"][1] == "-"
    [ours, theirs] = (float(rate.rstrip("%")) for rate in rows["used again 1 token later"])
    assert ours < theirs


# --- published.yaml ---------------------------------------------------------------------------------------------------


def test_every_published_figure_is_a_fraction_or_a_distance() -> None:
    assert len(published_figures()) >= 6
    for figure in published_figures():
        assert figure.quantity == "reuse_distance_p50" or all(0 < value < 1 for value in figure.ends)


GOOD: dict[str, Any] = {"quantity": "gini", "value": 0.5, "model": "m", "source": "s", "note": "n"}


@pytest.mark.parametrize(
    "change",
    [{"source": ""}, {"note": 3}, {"value": "0.5"}, {"value": None}, {"value": True}, {"value": []}, {"vaule": 1},
     {"value": [0.2, 0.1]}, {"value": [0.1, 0.1]}, {"value": [0.1, 0.2, 0.3]}],
)
def test_a_figure_with_something_wrong_is_refused(change: dict[str, Any]) -> None:
    assert from_dict(Published, GOOD).ends == (0.5,)
    with pytest.raises(SchemaError):
        from_dict(Published, {**GOOD, **change})
    with pytest.raises(SchemaError, match="missing key: source"):
        from_dict(Published, {key: text for key, text in GOOD.items() if key != "source"})
