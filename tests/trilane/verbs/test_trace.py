"""``trilane trace``: statistics, logs that are imported, and routing that is made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.commands import Trilane
from tests.kit.toys import toy_trace
from tests.traces.importers.routes import MODEL, routes
from traces.file import read_trace, write_trace
from traces.importers import FORMATS
from traces.models.catalogue import Published, published_figures
from traces.statistics import trace_statistics
from traces.trace import Trace
from trilane import import_trace, load_trace
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
        assert f"[{place}] {note}" in " ".join(out.split())
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


# --- import -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def answers(tmp_path: Path) -> None:
    ids = routes(8).tolist()
    answer = {"choices": [{"routed_experts": ids[4:]}], "prompt_routed_experts": ids[:4]}
    (tmp_path / "answers.jsonl").write_text(f"{json.dumps(answer)}\n" * 2)


def test_an_imported_log_is_played_and_every_heading_says_that_weights_are_unknown(
    trilane: Trilane, answers: None
) -> None:
    done = trilane("trace", "import", "answers.jsonl", "--model", MODEL, "-o", "t.safetensors")
    assert (done.status, done.out) == (0, "")
    said = "t.safetensors (weights unknown): 2 sequences of mini-moe:2, 8 prompt and 8 decode tokens, no forecasts"
    assert said in done.err
    settings = ("trace=t.safetensors", "model=null", "cached_share=0.5", "batch=2", "policy=on-demand")
    for words in (
        ("trace", "info", "t.safetensors"),
        ("trace", "stats", "t.safetensors"),
        ("simulate", *(word for each in settings for word in ("--set", each))),
    ):
        done = trilane(*words)
        assert done.status == 0, done.err
        assert "t.safetensors (weights unknown)" in done.out + done.err


def test_python_imports_as_the_command_line_does(trilane: Trilane, answers: None) -> None:
    trilane("trace", "import", "answers.jsonl", "--model", MODEL, "-o", "t.safetensors")
    assert import_trace("answers.jsonl", model=MODEL).checksum == load_trace("t.safetensors").checksum


def test_the_help_names_every_format(trilane: Trilane) -> None:
    shown = " ".join(trilane("trace", "import", "--help").out.split())
    assert [name for name in FORMATS if name not in shown] == []


def test_a_log_that_needs_a_model_names_the_option(trilane: Trilane, answers: None) -> None:
    for words in (("trace", "info", "answers.jsonl"), ("trace", "import", "answers.jsonl", "-o", "t.safetensors")):
        done = trilane(*words)
        assert done.status == 2
        assert "trilane trace import answers.jsonl --model NAME -o FILE" in " ".join(done.err.split())


def test_prompts_alone_are_named_and_how_to_mark_decode_tokens(trilane: Trilane) -> None:
    Path("g.csv").write_text("token,layer,experts\n0,0,3 1\n0,1,0 7\n1,0,3 1\n1,1,0 7\n")
    words = ("trace", "import", "g.csv", "--model", "phi-3.5-moe:2", "-o")
    assert "trilane trace import LOG --prompt-tokens N" in trilane(*words, "g.safetensors").err
    assert "--prompt-tokens" not in trilane(*words, "h.safetensors", "--prompt-tokens", "1").err
    played = ("--set", "trace=g.safetensors", "--set", "model=null", "--policies", "on-demand")
    assert "no TPOT: all tokens of g.safetensors" in trilane("compare", *played, "--draws", "1", "--jobs", "1").out


def test_a_missing_model_says_how_models_are_named(trilane: Trilane) -> None:
    Path("g.csv").write_text("token,layer,experts\n0,0,3 1\n0,1,0 7\n")
    refusal = trilane("trace", "import", "g.csv", "-o", "g.safetensors").err
    assert "NAME:N" in refusal
    assert "config.json" in refusal


# --- synth ------------------------------------------------------------------------------------------------------------

SYNTH = ("trace", "synth", "--like", "mini-moe:2", "-o", "t.safetensors")
SMALL = ("--sequences", "2", "--prompt-tokens", "3", "--generated-tokens", "4")


def test_a_trace_has_what_was_asked_for_and_says_how_near_it_comes(trilane: Trilane) -> None:
    done = trilane(*SYNTH, *SMALL, "--seed", "7", "--json", "fit.json")
    assert done.status == 0, done.err
    assert "synthetic trace: t.safetensors" in done.err
    assert done.out.startswith("synthetic routing for mini-moe:2")
    assert "fitted to mini-moe (the bundled trace mini-moe; 8 layers, 16 experts, top-2)" in done.out
    assert "made to the 2 layers, 16 experts, top-2 of mini-moe:2" in done.out
    row = next(line.split() for line in done.out.splitlines() if line.startswith("used again 1 tokens later"))
    assert float(row[-3]) + float(row[-1]) == pytest.approx(float(row[-2]), abs=2e-3)
    facts = trilane("trace", "info", "t.safetensors", "--json", "-").json
    assert (facts["moe_layers"], facts["sequences"], facts["prefill_tokens"], facts["decode_tokens"]) == (2, 2, 6, 8)
    assert facts["provenance"]["seed"] == 7
    assert sorted(path.name for path in Path().iterdir()) == ["fit.json", "t.safetensors"]


def test_a_seed_gives_one_trace(trilane: Trilane) -> None:
    checksums = []
    for seed in ("1", "1", "2"):
        trilane(*SYNTH, *SMALL, "--seed", seed)
        checksums.append(read_trace("t.safetensors").checksum)
    assert checksums[0] == checksums[1] != checksums[2]


def test_a_trace_of_ones_own_can_be_the_model(trilane: Trilane) -> None:
    """Cut after two layers it is quickly fitted; its topology is its own, unless a model is named."""
    done = trilane("trace", "synth", "--fit", "mini-moe:2", "-o", "t.safetensors", *SMALL)
    assert done.status == 0, done.err
    assert "compared with the trace mini-moe:2" in done.out
    assert read_trace("t.safetensors").shape.name == "mini-moe:2"
    done = trilane("trace", "synth", "--fit", "t.safetensors", "-o", "u.safetensors")
    assert done.status == 2
    assert "expected a sequence of at least 4 prompt and 32 decode tokens" in done.err


def test_everything_on_it_is_called_synthetic(trilane: Trilane) -> None:
    for name, seed in (("t", "1"), ("c", "2")):
        trilane(*SYNTH, *SMALL, "--seed", seed, "-o", f"{name}.safetensors")
    scenario = [
        word for value in ("trace=t.safetensors", "model=null", "calibration=c.safetensors", "cached_share=0.5")
        for word in ("--set", value)
    ]
    for words in (
        ("simulate", "--policy", "on-demand", *scenario),
        ("simulate", "--policy", "on-demand", *scenario, "--json", "-"),
        ("compare", "--policies", "on-demand,oracle", "--draws", "1", *scenario),
        ("compare", "--policies", "on-demand", "--draws", "1", *scenario, "--json", "-"),
        ("trace", "info", "t.safetensors"),
        ("trace", "stats", "t.safetensors"),
        ("trace", "stats", "t.safetensors", "--json", "-"),
        ("trace", "stats", "t.safetensors", "mini-moe:2"),
        ("cache-curve", "t.safetensors", "--policies", "lru"),
        ("cache-curve", "t.safetensors", "--policies", "lru", "--json", "-"),
    ):
        done = trilane(*words)
        assert done.status == 0, done.err
        assert "synthetic" in done.out, words


def test_a_synthetic_trace_needs_no_file(trilane: Trilane) -> None:
    done = trilane("cache-curve", "synthetic:mini-moe/1x4+8:2", "--policies", "lru")
    assert done.status == 0, done.err
    assert "routing of synthetic:mini-moe/1x4+8:2," in done.out


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown model": (("--like", "eliza"), "eliza"),
    "unknown trace": (("--fit", "eliza"), "eliza"),
    "no sequences": (("--sequences", "0"), "--sequences"),
    "no folder": (("-o", "nowhere/t.safetensors"), "the folder nowhere does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(trilane: Trilane, name: str) -> None:
    words, expected = BAD[name]
    done = trilane(*SYNTH, *words)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert expected in line
    assert not list(Path().iterdir())


def test_somebody_must_be_likened(trilane: Trilane) -> None:
    done = trilane("trace", "synth", "-o", "t.safetensors")
    assert (done.status, done.out) == (2, "")
    assert "expected --like MODEL, --fit TRACE or both" in done.err
