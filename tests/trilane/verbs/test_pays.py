"""``trilane pays``: an answer, a picture and its data."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.kit.commands import Trilane
from tests.kit.questions import WORDS, narrowed
from trilane.study.pays import ideas

QUICK = (*WORDS, "--prompt", "64", "--generated", "4", "--draws", "2", "--jobs", "1")


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas, "IDEAS", {name: narrowed(idea) for name, idea in ideas.IDEAS.items()})


def test_the_page_the_json_and_the_data_of_the_picture_agree(trilane: Trilane) -> None:
    done = trilane("pays", "cache", *QUICK, "--out", "m.png", "--json", "m.json")
    assert done.status == 0, done.err
    answer, drawn = json.loads(Path("m.json").read_text()), pd.read_csv("m.csv")
    here = drawn[drawn["here"]].iloc[0]
    first = done.out.splitlines()[0]
    verdict = "pays here" if here["gain_min"] > 0 else "may pay here or not"
    assert first.startswith(f"A cache of experts on the GPU (llama-cache-lru) {verdict}: {100 * here['gain']:+.0f}% (")
    assert f" {here['using_tokens_per_s']:.1f} tokens/s; {here['without_tokens_per_s']:.1f} with whole layers" in first
    assert answer["here"] == {"x": here.iloc[0], "y": here.iloc[1]}
    assert len(answer["cells"]) == len(drawn) == 9
    assert [min(cell["gains"]) for cell in answer["cells"]] == pytest.approx(drawn["gain_min"].tolist())
    assert Path("m.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_of_ones_own_has_the_idea(trilane: Trilane) -> None:
    Path("own_of_pays.py").write_text(
        "from dataclasses import dataclass\n"
        "from policies.papers.llama_cpp import LlamaCacheStatic\n"
        "from trilane import register\n\n\n"
        "@register('mine', 'stays')\n@dataclass(frozen=True)\nclass Mine(LlamaCacheStatic):\n    pass\n"
    )
    done = trilane("pays", "cache", *QUICK, "--policy", "own_of_pays.py", "--json", "m.json")
    assert done.status == 0, done.err
    assert done.out.startswith("A cache of experts on the GPU (mine) ")
    cells = json.loads(Path("m.json").read_text())["cells"]
    assert {cell["using"]["policy"] for cell in cells} == {"mine"}
    refused = trilane("pays", "deferral", *QUICK, "--policy", "own_of_pays.py")
    assert (refused.status, "such as kt-deferral; mine has none" in refused.err) == (2, True)


def test_deferral_says_how_many_are_deferred_and_that_the_output_changes(trilane: Trilane) -> None:
    done = trilane("pays", "deferral", *QUICK)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Deferring experts of low weight to the next layer (kt-deferral) ")
    assert lines[1] == "kt-deferral ~ changes the output; not judged"
    assert [line.split("  ")[0] for line in lines if line.startswith("with")] == [
        "without: kt-deferral, 0 deferred", "with it: kt-deferral ~, 1 deferred"
    ]


def test_refusals(trilane: Trilane) -> None:
    assert "there is no idea 'chache'; did you mean 'cache'?" in trilane("pays", "chache", *QUICK).err
    assert "fit the memory of the GPU" in trilane("pays", "link", *QUICK, "--gpu", "rtx-4090").err
    refused = trilane("pays", "cache", *QUICK, "--out", "map.jpg")
    assert (refused.status, "ending in .png" in refused.err) == (2, True)
