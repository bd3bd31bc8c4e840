"""Options that verbs share: groups of them, lanes, and the weights and lengths of a question."""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated

import pandas as pd
import pytest
import typer

from tests.kit.commands import SHORT, Trilane
from trilane.engines.question import Question
from trilane.fit.fit import with_longest_prompt
from trilane.verbs.options import LaneChoice, OptionError, Workload, grouped


@dataclass(frozen=True)
class Pair:
    first: Annotated[int, typer.Option(help="One.")]
    second: Annotated[str | None, typer.Option(help="Two.")] = None


def test_a_dataclass_stands_for_its_fields() -> None:
    given: list[object] = []

    @grouped
    def verb(before: int = 1, *, pair: Pair, after: int = 2) -> None:
        """What it does."""
        given.extend((before, pair, after))

    options = signature(verb).parameters
    assert list(options) == ["before", "first", "second", "after"]
    assert [options[name].default for name in ("second", "after")] == [None, 2]
    assert verb.__doc__ == "What it does."
    verb(before=3, first=4, second="five", after=6)
    assert given == [3, Pair(4, "five"), 6]


def test_a_chunk_is_a_size() -> None:
    assert LaneChoice(chunk_mb=0).chunk_mb == 0
    with pytest.raises(OptionError, match=r"--chunk-mb: .*10\^6 bytes"):
        LaneChoice(chunk_mb=-1)


@pytest.mark.parametrize(("verb", "option", "unit"), [
    ("fit", "--ram-gb", "2^30 bytes"), ("profile", "--memory-gb", "10^9 bytes"),
    ("profile", "--host-memory-gb", "10^9 bytes"), ("measure", "--host-memory-gb", "10^9 bytes"),
    ("validate", "--host-memory-gb", "10^9 bytes"), ("measure", "--chunk-mb", "10^6 bytes"),
    ("profile", "--chunk-mb", "10^6 bytes"), ("profile", "--link-gb-per-s", "10^9 bytes"),
    ("cache-curve", "--pool", "2^20 bytes"), ("simulate", "--set", "10^9 bytes"),
    ("whatif", "--vary", "10^9 bytes"),
])
def test_the_help_of_a_size_names_its_unit(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch, verb: str, option: str, unit: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    lines = [line for line in trilane(verb, "--help").out.splitlines() if f" {option} " in line]
    assert unit in " ".join(lines)


@pytest.mark.parametrize(("words", "says"), [
    (("compare", "--draws", "1000000000000000000"), r"'--draws': .*\b10000\b"),
    (("ablate", "dali", "--draws", "10001"), r"'--draws': .*\b10000\b"),
    (("whatif", "-v", "batch=1", "--draws", "10001"), r"'--draws': .*\b10000\b"),
    (("compare", "--jobs", "9999999"), r"'--jobs': .*\b1024\b"),
    (("fit", "-m", "mini-moe", "--jobs", "9999999"), r"'--jobs': .*\b1024\b"),
    (("whatif", "-v", "seed=0..9999/10000"), "--vary: expected 20,000 simulations at most, got 80,000; give fewer"),
    (("whatif", "-v", f"batch=1..4/{5000 * '9'}"), "batch: expected 2 to 10,000 points in a range"),
    (("whatif", "-v", "pcie_gbps=1..1e999"), r"pcie_gbps: expected a range LOW\.\.HIGH of numbers"),
    (("validate", "p.yaml", "--profile", "x", "--time-limit", "inf"), "'--time-limit': "),
    (("validate", "p.yaml", "--profile", "x", "--time-limit", "nan"), "'--time-limit': "),
    (("validate", "p.yaml", "--profile", "x", "--repeats", "1001"), r"'--repeats': .*\b1000\b"),
    (("measure", "--cpu-threads", "999999"), r"'--cpu-threads': .*\b4096\b"),
    (("profile", "-o", "p.yaml", "--gpu-core", "-1"), r"'--gpu-core': .*\b0\b"),
    (("profile", "-o", "p.yaml", "--batch", "1,99999999"), "--batch: expected whole numbers from 1 to 1,000,000"),
])
def test_a_number_beyond_its_limit_is_one_sentence(trilane: Trilane, words: tuple[str, ...], says: str) -> None:
    done = trilane(*words)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert re.search(says, done.err)


# --- questions --------------------------------------------------------------------------------------------------------

MACHINE = {"model": "deepseek-v2-lite:2", "gpu": "rtx-3060", "ram": "ddr4-3200"}


def test_what_was_named_is_the_question() -> None:
    asked = Workload("q8_0", "512", 16, 2).question(**MACHINE, trace="mini-deepseek:2")
    assert asked == Question(
        "deepseek-v2-lite:2", "rtx-3060", "ddr4-3200", weights="q8_0", prompt_tokens=512, generated=16, batch=2,
        trace="mini-deepseek:2",
    )
    assert Workload().question(**MACHINE) == Question(**MACHINE)


def test_max_is_the_longest_prompt_that_fits() -> None:
    asked = Workload(prompt="MAX").question(**MACHINE)
    assert asked == with_longest_prompt(Question(**MACHINE))
    assert asked.prompt_tokens > Question(**MACHINE).prompt_tokens


@pytest.mark.parametrize("prompt", ["0", "-1", "", "1.5", "most", "\N{SUPERSCRIPT TWO}", "9" * 5000])
def test_any_other_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(OptionError, match=f"--prompt: expected a number of tokens, or max, got '{prompt[:20]}"):
        Workload(prompt=prompt)


# --- several cards ----------------------------------------------------------------------------------------------------

MODEL = ("tune", "mini-moe"), ("fit", "-m", "mini-moe"), ("pays", "cache", "-m", "mini-moe")


@pytest.mark.parametrize("words", MODEL)
@pytest.mark.parametrize("cards", [
    ("--gpu", "rtx-3060", "--gpu", "rtx-4090"), ("--gpu=rtx-3060", "--gpu=rtx-3060"), ("--gpu", "2xrtx-3060"),
    ("--gpu", "2 x RTX 3060"), ("--gpu", "rtx-3060,rtx-3060"), ("--gpu", "rtx-3060+rtx-4090"),
])
def test_several_cards_are_all_taken_or_refused(
    trilane: Trilane, words: tuple[str, ...], cards: tuple[str, ...]
) -> None:
    """Once, the last of two was taken for both without a word."""
    done = trilane(*words, *cards, "--ram", "ddr4-3200", "--cpu", "ryzen-9-5950x")
    if words[0] == "pays":
        assert (done.status, done.out) == (2, "")
        assert "expected one GPU here; several are answered by trilane fit, tune and recommend" in done.err
    else:
        assert done.status == 0
        assert "RTX 3060" in done.out
        assert "; RTX " in done.out


@pytest.mark.parametrize(("option", "name", "ending"), [
    ("--spans", "s.txt", ".parquet or .csv"), ("--perfetto", "t.html", ".json or .json.gz"),
    ("--gantt", "g.docx", ".png"),
])
def test_an_ending_that_no_writer_honours_is_refused(trilane: Trilane, option: str, name: str, ending: str) -> None:
    done = trilane("simulate", *SHORT, option, name)
    assert (done.status, done.out) == (2, "")
    assert f"{name}: expected the name of a" in done.err
    assert ending in done.err
    assert not Path(name).exists()


def test_spans_are_written_as_their_ending_says(trilane: Trilane) -> None:
    for name in ("s.csv", "s.parquet"):
        assert trilane("simulate", *SHORT, "--spans", name).status == 0
    table = pd.read_csv("s.csv", keep_default_na=False, na_values=[""])
    pd.testing.assert_frame_equal(table, pd.read_parquet("s.parquet"), check_dtype=False)


def test_the_help_of_a_disk_names_stripes(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert "a stripe (2x-nvme-4x4)" in trilane("recommend", "--help").out
