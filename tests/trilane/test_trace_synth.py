"""``trilane trace synth``: routing that is made up, and says so wherever it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trilane.running import Trilane
from traces.trace_file import read_trace

SYNTH = ("trace", "synth", "--like", "mini-moe:2", "-o", "t.safetensors")
SMALL = ("--sequences", "2", "--prompt-tokens", "3", "--generated-tokens", "4")


def test_a_trace_has_what_was_asked_for(trilane: Trilane) -> None:
    done = trilane(*SYNTH, *SMALL, "--skew", "2", "--persistence", "0.5", "--seed", "7")
    assert (done.status, done.out) == (0, "")
    assert "synthetic trace: t.safetensors" in done.err
    assert [path.name for path in Path().iterdir()] == ["t.safetensors"]
    facts = trilane("trace", "info", "t.safetensors", "--json", "-").json
    assert (facts["moe_layers"], facts["sequences"], facts["prefill_tokens"], facts["decode_tokens"]) == (2, 2, 6, 8)
    assert facts["provenance"]["synthetic"] == "skew 2, persistence 0.5, seed 7"


def test_a_seed_gives_one_trace(trilane: Trilane) -> None:
    checksums = []
    for seed in ("1", "1", "2"):
        trilane(*SYNTH, *SMALL, "--seed", seed)
        checksums.append(read_trace("t.safetensors").checksum)
    assert checksums[0] == checksums[1] != checksums[2]


def test_a_run_on_it_is_called_synthetic(trilane: Trilane) -> None:
    for name, seed in (("t", "1"), ("c", "2")):
        trilane(*SYNTH, *SMALL, "--seed", seed, "-o", f"{name}.safetensors")
    done = trilane("simulate", "--policy", "on-demand", "--set", "trace=t.safetensors", "--set", "model=null",
                   "--set", "calibration=c.safetensors", "--set", "cached_share=0.5")  # fmt: skip
    assert done.status == 0, done.err
    assert "synthetic" in done.out


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown model": (("--like", "eliza"), "eliza"),
    "no sequences": (("--sequences", "0"), "--sequences"),
    "more than persistent": (("--persistence", "1.5"), "--persistence"),
    "less than no skew": (("--skew", "-1"), "--skew"),
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
