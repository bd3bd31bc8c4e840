"""``trilane trace synth``: routing that is made up, and says so wherever it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from traces.file import read_trace

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
