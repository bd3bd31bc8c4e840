"""``trilane quality`` on the command line: bundled and published values, measuring, refusals; and what other verbs show
of the costs of changed routing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from trilane.output.figures.quality_words import cost_text, nats
from trilane.study.quality.table import read_table

MINI = Path(__file__).parents[3] / "traces" / "bundled" / "mini-moe"
SHORT = ("--sizes-of", "qwen3-30b-a3b", "--passages", "2", "--prompt-tokens", "6", "--given-tokens", "4")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (path := tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and sleeps.\n" * 6)
    return str(path)


def test_without_a_model_it_shows_the_bundled_measurements(trilane: Trilane, tmp_path: Path) -> None:
    done = trilane("quality", "--json", "q.json", "--plot", "q.png")
    assert done.out.startswith("measured for Trilane on mini models")
    lines = {line.split("  ")[0]: line for line in done.out.splitlines()}
    assert " 1.00x " in lines["best-exact"]
    assert "daop ~" in lines
    record = json.loads((tmp_path / "q.json").read_text())
    assert {"kl", "kl_low", "kl_high", "agreement", "tpot_ms"} <= set(record["rows"][0])
    assert (tmp_path / "q.png").stat().st_size > 10_000


def test_fronts_shows_every_value_with_intervals(trilane: Trilane) -> None:
    out = trilane("quality", "--fronts").out
    assert "smoe{alpha: 0.1}" in out
    assert " to " in out


def test_published_tells_trends_the_curve_and_its_use_for_large_models(trilane: Trilane, tmp_path: Path) -> None:
    done = trilane("quality", "--published", "--json", "p.json")
    for said in ("Kendall's tau", "left out", "large models inside the band", "ghost91-/llama-bench"):
        assert said in done.out
    record = json.loads((tmp_path / "p.json").read_text())
    assert {"trends", "curve", "values"} == set(record)


def test_it_measures_a_model_and_writes_a_table(trilane: Trilane, text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = trilane("quality", "router-pf,on-demand", "--model", str(MINI), "--text", text, *SHORT, "-o", "mine.csv")
    assert done.status == 0, done.err
    kl = {quality.choice: quality.kl.mean for quality in read_table(tmp_path / "mine.csv")}
    assert kl["on-demand"] == 0 < kl["router-pf"]
    before = (tmp_path / "mine.csv").read_bytes()
    trilane("quality", "router-pf,on-demand", "--model", str(MINI), "--text", text, *SHORT, "-o", "mine.csv")
    assert (tmp_path / "mine.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("smoe",), "expected --model MODEL"),
        (("--published", "--model", "mine"), "expected no --model"),
        (("--published", "smoe"), "POLICIES: expected --model MODEL"),
        (("--published", "--plot", "q.png"), "expected no --plot"),
        (("--set", "batch=2"), "--set: expected --model MODEL"),
        (("--passages", "9"), "--passages: expected --model MODEL"),
        (("--vectors", "nothing"), "--vectors: expected --model MODEL"),
        (("--model", str(MINI)), "give --text FILE"),
        (("-o", "mine.txt"), "expected the name of a file, ending in .csv"),
    ],
)
def test_options_that_do_not_go_together_are_refused(trilane: Trilane, words: tuple[str, ...], told: str) -> None:
    done = trilane("quality", *words)
    assert done.status == 2
    assert told in done.err


@pytest.mark.parametrize(
    ("policy", "passages", "told"),
    [("oracle", "2", "not known while a model runs"), ("smoe", "90", "give a longer text")],
)
def test_what_cannot_be_measured_is_refused(
    trilane: Trilane, text: str, policy: str, passages: str, told: str
) -> None:
    pytest.importorskip("transformers")
    words = [passages if before == "--passages" else word for before, word in zip(("", *SHORT), SHORT, strict=False)]
    done = trilane("quality", policy, "--model", str(MINI), "--text", text, *words, "-o", "mine.csv")
    assert done.status == 2
    assert told in done.err
    assert not Path("mine.csv").exists()


# --- elsewhere --------------------------------------------------------------------------------------------------------


def test_tune_opens_other_formats_only_when_asked(trilane: Trilane) -> None:
    words = ("tune", "qwen3.6-35b-a3b", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--cpu", "ryzen-5-5600")
    asked = trilane(*words, "--accept-kl", "0.006").out
    assert "accepting KL 0.006" in asked
    assert "ud-q6_k_xl" in asked
    assert "q4_k_s of" not in asked


def test_tune_says_when_nothing_is_published(trilane: Trilane) -> None:
    out = trilane("tune", "deepseek-v2-lite:4", "--gpu", "rtx-3050", "--ram", "ddr4-3200", "--accept-kl", "1").out
    assert "no format of this model has a published divergence" in out


def test_a_cost_is_told_as_far_as_it_is_known() -> None:
    assert cost_text("daop").startswith("KL 0.0")
    assert cost_text("mine") == "not measured: trilane quality does that"
    assert [nats(value) for value in (0.0, 1e-9, 0.00123, 0.2345)] == ["0", "0", "0.0012", "0.234"]
