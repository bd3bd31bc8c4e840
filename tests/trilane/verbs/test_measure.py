"""``trilane measure``: a replay and a generation on host lanes, what they say and keep, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from realrun.machine.host_lanes import HostLanes
from sim.machine.hardware import write_hardware
from tests.kit.commands import ROOT, Trilane
from tests.kit.hand_measured import toy_machine, toy_model
from tests.kit.validations import LOCKED, SETS
from traces.models.catalogue import load_model

MINI = toy_model(load_model("mini-moe:2"), shared=None, dense_ffn=None, dense_launch=None)
MODEL = str(ROOT / "traces" / "bundled" / "mini-moe")
GENERATE = (
    "measure", "--mode", "generate", "--lanes", "host-lanes", "--policy", "on-demand", "--model", MODEL,
    "--prompts", "p.txt", "--set", "cached_share=0.3", "--set", "prompt_tokens=3", "--set", "generated_tokens=2",
)


def write_prompts(count: int = 2) -> None:
    lines = ["The old house by the river was empty.", "She gave him the letter and went away.", "A dog ran."]
    Path("p.txt").write_text("\n".join(lines[:count]) + "\n")


def test_a_replay_is_a_run_with_its_spans(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLanes, "remarks", lambda self: (LOCKED,))
    words = ("measure", "--lanes", "host-lanes", "--policy", "fiddler", *SETS)
    done = trilane(*words, "--spans", "s.parquet", "--json", "run.json")
    assert done.status == 0, done.err
    assert "fiddler  (measured on host-lanes): " in done.out
    assert "time per output token" in done.out
    assert done.err.splitlines()[0] == f"host-lanes: {LOCKED}"
    assert {path.name for path in Path().iterdir()} == {"s.parquet", "run.json"}


def test_a_replay_as_json(trilane: Trilane) -> None:
    found = trilane("measure", "--lanes", "host-lanes", "--policy", "on-demand", *SETS, "--json", "-").json
    assert set(found) == {"scenario", "run", "approximation"}
    assert found["scenario"]["policy"] == "on-demand"
    assert found["run"]["labels"] == ["measured on host-lanes"]
    assert found["run"]["tpot_ms"] > 0


def test_a_generation_gives_text_and_a_trace_that_is_simulated(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLanes, "remarks", lambda self: (LOCKED,))
    write_prompts()
    done = trilane(*GENERATE, "--set", "batch=2", "--trace", "t.safetensors", "--json", "run.json")
    assert done.status == 0, done.err
    for expected in ("sequence 0", "sequence 1", f"(generated on host-lanes): {MODEL}, 2 sequences"):
        assert expected in done.out
    assert f"host-lanes: {LOCKED}" in done.err.splitlines()
    assert {path.name for path in Path().iterdir()} == {"p.txt", "t.safetensors", "run.json"}
    simulated = trilane("simulate", "--policy", "on-demand", "--set", "trace=t.safetensors", "--set", "model=null",
                        "--set", "cached_share=0.3", "--set", "batch=2", "--json", "-")
    assert simulated.json["run"]["decode_steps"] == 2


def test_a_generation_as_json_has_the_texts(trilane: Trilane) -> None:
    write_prompts()
    found = trilane(*GENERATE, "--json", "-").json
    assert set(found) == {"scenario", "run", "approximation", "texts"}
    assert len(found["texts"]) == 1  # the first prompt, as batch says


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("measure", "--mode", "generate"), "expected a model and prompts; give --model MODEL and --prompts F"),
    "a file of another engine": (
        ("measure", "--gguf", "m.gguf", "--n-cpu-moe", "3"),
        "--gguf, --n-cpu-moe: expected --engine llama.cpp with that; add it, or leave that out",
    ),
    "a model to replay": (("measure", "--model", "m"), "--mode replay: expected no --model"),
    "fewer prompts than the batch": (
        (*GENERATE, "--set", "batch=4"), "p.txt: expected 4 prompts, one for each sequence of the batch, got 3; add "
        "some, or choose --set batch=3",
    ),
    "sequences": ((*GENERATE, "--set", "sequences=[0]"), "sequences is for simulations only; leave it out"),
    "chunks": ((*GENERATE, "--set", "prefill_chunk_tokens=2"), "prefill_chunk_tokens is for simulations"),
    "made-up forecasts": ((*GENERATE, "--set", "noisy_forecast_recall=[0.5]"), "noisy_forecast_recall is for simul"),
    "the future": ((*GENERATE, "--policy", "oracle"), "needs the routing of later layers"),
    "a replay in too little memory": (
        ("measure", "--lanes", "host-lanes", *SETS, "--host-memory-gb", "0.000001"),
        "0.00 GB are given by --host-memory-gb",
    ),
    "a generation in too little memory": ((*GENERATE, "--host-memory-gb", "0.000001"), "given by --host-memory-gb"),
    "no host memory": (
        ("measure", *SETS, "--host-memory-gb", "0"),
        "--host-memory-gb: expected a number of GB (10^9 bytes) above 0, got 0",
    ),
    "lanes that the profile is not of": (
        ("measure", *SETS, "--set", "hardware=lanes.yaml", "--lanes", "cuda"), "kind 'host-lanes' and not 'cuda'",
    ),
    "generating on lanes that the profile is not of": (
        (*GENERATE, "--set", "hardware=lanes.yaml", "--lanes", "cuda"), "kind 'host-lanes' and not 'cuda'",
    ),
    "generating where the profile is not from": (
        (*GENERATE, "--set", "hardware=lanes.yaml"), "this computer is not the profile's machine",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(trilane: Trilane, name: str) -> None:
    write_prompts(3)
    write_hardware(toy_machine(models={"mini-moe": MINI}), "lanes.yaml")
    words, expected = BAD[name]
    done = trilane(*words, "--trace", "t.safetensors") if "generate" in words else trilane(*words)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert expected in line
    assert {path.name for path in Path().iterdir()} == {"p.txt", "lanes.yaml"}


def test_prompts_of_several_lengths_are_refused_with_the_cure(trilane: Trilane) -> None:
    write_prompts(3)
    uncut = tuple(word.replace("prompt_tokens=3", "prompt_tokens=99") for word in GENERATE)
    done = trilane(*uncut, "--set", "batch=3", "--trace", "t.safetensors")
    assert (done.status, done.out) == (2, "")
    assert "expected prompts of one length, got [6, 10, 12] tokens" in done.err
    assert "cut all to the shortest, prompt_tokens=6, " in done.err
    assert [path.name for path in Path().iterdir()] == ["p.txt"]
