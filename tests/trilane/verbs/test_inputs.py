"""The scenario and the policies that a command line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.runs.scenario import Scenario
from tests.kit.commands import SHORT, Trilane
from trilane.verbs.inputs import describe, scenario_of
from trilane.verbs.options import OptionError

WRITTEN = Scenario(policy="dali", parameters={"window": 3}, batch=2)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text("policy: dali\nparameters: {window: 3}\nbatch: 2\n")
    return str(path)


def test_the_file_or_the_default() -> None:
    assert scenario_of(None, None) == Scenario()


@pytest.mark.parametrize("policy", [None, "dali"])
def test_the_policy_of_the_file_keeps_its_parameters(
    file: str, policy: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scenario_of(file, None, policy) == WRITTEN
    assert scenario_of(file, ["batch=4"], policy) == WRITTEN.with_(batch=4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("policy", "changes"), [("fiddler", ["batch=4"]), (None, ["batch=4", "policy=fiddler"])])
def test_another_policy_has_none_of_them_and_says_so(
    file: str, policy: str | None, changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert scenario_of(file, changes, policy) == Scenario(policy="fiddler", batch=4)
    assert file in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["dali", "fiddler"])
def test_parameters_of_set_belong_to_the_policy_that_runs(file: str, policy: str) -> None:
    expected = Scenario(policy=policy, parameters={"window": 5}, batch=2)
    assert scenario_of(file, ["parameters={window: 5}"], policy) == expected


def test_two_policies_are_refused(file: str) -> None:
    with pytest.raises(OptionError, match="--policy mix and --set policy=fiddler"):
        scenario_of(file, ["policy=fiddler"], "mix")
    assert scenario_of(file, ["policy=mix"], "mix").policy == "mix"


def test_a_misspelt_parameter_of_a_named_policy_is_refused(trilane: Trilane) -> None:
    """Once, ``--policy`` dropped all parameters, those of ``--set`` too."""
    done = trilane("simulate", *SHORT, "--policy", "mix", "--set", "parameters={cache: lruu}")
    assert done.status == 2
    assert "'lruu'" in done.err


def test_parameters_reach_the_named_policy(trilane: Trilane) -> None:
    words = ("simulate", *SHORT, "--policy", "mix", "--set", "cached_share=0.3", "--json", "-", "--set")
    mixes = [trilane(*words, f"parameters={{cache: {cache}, assigner: greedy}}").json for cache in ("lru", "static")]
    assert [mix["scenario"]["parameters"]["cache"] for mix in mixes] == ["lru", "static"]
    assert mixes[0]["run"]["decode_resident_hit_rate"] != mixes[1]["run"]["decode_resident_hit_rate"]


def test_a_scenario_is_described_with_what_was_sampled() -> None:
    about = describe(Scenario(sampled_steps=56, sampled_prompt_tokens=64))
    assert "at most 56 decode steps" in about
    assert "at most 64 tokens" in about
    assert "at most" not in describe(Scenario())


def test_a_scenario_is_described_with_its_lengths_and_its_engine() -> None:
    short = Scenario(prompt_tokens=4, generated_tokens=3)
    assert ", batch 1, 4+3 tokens, " in describe(short)
    assert ", batch 2, 4+3 tokens, " in describe(short.with_(batch=2))
    assert " on rtx3090-ddr4, engine pytorch, " in describe(short)
    assert " on rtx3090-ddr4, engine graphs, " in describe(short.with_(engine="graphs"))


@pytest.mark.parametrize(("model", "named"), [
    ("deepseek-v2-lite", "deepseek-v2-lite in 16 bits on "),
    ("deepseek-v2-lite@q4_k_m", "deepseek-v2-lite@q4_k_m on "),
    (None, "mini-deepseek in 16 bits on "),
])
def test_a_scenario_is_described_with_the_format_of_its_weights(model: str | None, named: str) -> None:
    assert describe(Scenario(model=model)).startswith(named)


SAMPLED = ("--set", "generated_tokens=60", "--set", "sampled_steps=2", "--set", "prompt_tokens=4")
ERROR = "2 of 60 decode steps were played: error of TPOT from 24 steps at batch 1, measured in 24 runs: 3.8% on average"


@pytest.mark.parametrize("words", [("compare", "--draws", "1"), ("whatif", "--vary", "pcie=4x16")])
def test_pages_of_sampled_answers_print_the_measured_error(trilane: Trilane, words: tuple[str, ...]) -> None:
    done = trilane(*words, *SAMPLED, "--policies", "fiddler", "--jobs", "1")
    assert ERROR in done.out
    assert "error of TPOT" not in trilane(*words, *SHORT, "--policies", "fiddler", "--jobs", "1").out


def test_a_sweep_of_sampled_answers_ends_with_the_measured_error(trilane: Trilane) -> None:
    Path("sweep.yaml").write_text(
        "scenario: {prompt_tokens: 4, generated_tokens: 60, sampled_steps: 2}\ngrid: {policy: [fiddler]}\n"
    )
    assert ERROR in trilane("sweep", "sweep.yaml", "-o", "t.parquet", "--jobs", "1").err
