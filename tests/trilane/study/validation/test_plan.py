"""Plans of what to measure and predict, and running one on a small machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from realrun.errors import RefusedError
from realrun.profiling.lab import Points
from realrun.profiling.profile import profile
from realrun.profiling.timing import Effort
from sim.machine.hardware import write_hardware
from sim.runs.scenario import Scenario, ScenarioError
from tests.kit.tiny_bench import TRACE, machine
from traces.models.catalogue import load_model
from trilane.output.pages.validation import notes_of
from trilane.study.validation import validate as validate_file
from trilane.study.validation.validate import ValidationPlan, alternating, validate

HARDWARE = "rtx3090-ddr4"
PLAN = """
repeats: 2
scenario: {trace: "mini-moe:3", model: null, prompt_tokens: 4, generated_tokens: 2}
vary:
  cached_share: [0.25, 0.5]
  batch: [1, 2]
policies:
  - on-demand
  - dali: {window: 3}
"""


def read(tmp_path: Path, text: str) -> ValidationPlan:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return ValidationPlan.from_yaml(path, {"hardware": HARDWARE})


def test_every_combination_with_every_policy(tmp_path: Path) -> None:
    plan = read(tmp_path, PLAN)
    assert plan.repeats == 2
    assert [(it.cached_share, it.batch, it.policy, it.parameters) for it in plan.scenarios] == [
        (share, batch, policy, parameters)
        for share in (0.25, 0.5)
        for batch in (1, 2)
        for policy, parameters in (("on-demand", {}), ("dali", {"window": 3}))
    ]
    assert {(it.trace, it.hardware, it.prompt_tokens) for it in plan.scenarios} == {(TRACE, HARDWARE, 4)}


def test_options_go_before_what_the_plan_says(tmp_path: Path) -> None:
    plan = read(tmp_path, "scenario: {hardware: a100-pcie4, seed: 1}\npolicies: [fiddler]")
    assert [(it.hardware, it.seed) for it in plan.scenarios] == [(HARDWARE, 1)]


def test_nothing_need_vary(tmp_path: Path) -> None:
    plan = read(tmp_path, "scenario: {batch: 3}\npolicies: [fiddler]")
    assert plan == ValidationPlan((Scenario(hardware=HARDWARE, batch=3, policy="fiddler"),), repeats=5)


@pytest.mark.parametrize(("text", "message"), [
    ("[1, 2]", "plan.yaml: expected a mapping with the keys scenario, policies, vary, repeats"),
    ("scenario: {}", "plan.yaml: missing key: policies"),
    ("scenario: {}\npolicies: [dali]\nrepeat: 3", "there is no key 'repeat'; did you mean 'repeats'"),
    ("scenario: {}\npolicies: [dali]\nrepeats: 0", "repeats: expected a whole number from 1 to 1000, got 0"),
    ("scenario: {}\npolicies: [dali]\nrepeats: 25e9", "repeats: expected a whole number from 1 to 1000, got"),
    (f"scenario: {{}}\npolicies: [dali]\nvary: {{a: {[*range(101)]}, b: {[*range(100)]}}}", "at most 10,000 scen"),
    ("scenario: {}\npolicies: [dali]\nrepeats: true", "repeats: expected a whole number from 1 to 1000, got True"),
    ("scenario: 3\npolicies: [dali]", "plan.yaml: scenario: expected a mapping (`key: value`), got 3"),
    ("scenario: {}\nvary: [batch]\npolicies: [dali]", "plan.yaml: vary: expected a mapping"),
    ("scenario: {}\nvary: {batch: 1}\npolicies: [dali]", "vary.batch: expected a list"),
    ("scenario: {}\nvary: {batch: []}\npolicies: [dali]", "vary.batch: expected a list"),
    ("scenario: {}\npolicies: []", "policies: expected a list"),
    ("scenario: {}\npolicies: dali", "that is not empty, got 'dali'"),
    ("scenario: {}\npolicies: [{dali: {}, smoe: {}}]", "policies[0]: expected text or a mapping"),
    ("scenario: {}\npolicies: [{dali: 3}]", "policies[0].dali: expected a mapping (`key: value`), got 3"),
    ("scenario: {policy: dali}\npolicies: [dali]", "policy is given in the list of policies"),
    ("scenario: {}\nvary: {hardware: [a, b]}\npolicies: [dali]", "vary: hardware is given as an option"),
    ("scenario: {", "plan.yaml"),
])
def test_what_is_no_plan_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RefusedError) as raised:
        read(tmp_path, text)
    assert message in str(raised.value)


@pytest.mark.parametrize(("most", "refused"), [(8, False), (7, True)])
def test_a_plan_has_no_more_scenarios_than_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, refused: bool
) -> None:
    """Two shares, two batches and two policies are eight."""
    monkeypatch.setattr(validate_file, "MOST_SCENARIOS", most)
    if refused:
        with pytest.raises(RefusedError, match="expected at most 7 scenarios to measure, got 8"):
            read(tmp_path, PLAN)
    else:
        assert len(read(tmp_path, PLAN).scenarios) == 8


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No such file"):
        ValidationPlan.from_yaml(tmp_path / "none.yaml", {})


def test_a_key_that_no_scenario_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="there is no key 'bach'; did you mean 'batch'"):
        read(tmp_path, "scenario: {}\nvary: {bach: [1]}\npolicies: [dali]")


def test_scenarios_are_measured_there_and_back() -> None:
    assert [list(order) for order in alternating(3, 3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
    assert [list(order) for order in alternating(1, 2)] == [[0], [0]]


# --- running one ------------------------------------------------------------------------------------------------------


def test_every_scenario_is_measured_and_predicted(tmp_path: Path) -> None:
    said: list[str] = []
    path, text = tmp_path / "here.yaml", PLAN.replace("batch: [1, 2]", "batch: [1]")
    (tmp_path / "plan.yaml").write_text(text)
    with machine(link_bytes_per_s=4e9) as lanes:
        points = Points(batches=(1,), contexts=(4, 6), prompts=(4,))
        found = profile(lanes, [load_model("mini-moe:3")], points, ["dali"], name="here", effort=Effort(1, 1, 0))
        write_hardware(found.hardware, path)
        plan = ValidationPlan.from_yaml(tmp_path / "plan.yaml", {"hardware": str(path)})
        validated = validate(plan, lanes, said.append)
    for agreement in (validated.agreement, validated.by_file):
        assert len(agreement.comparisons) == len(plan.scenarios)
        for scenario, comparison in zip(plan.scenarios, agreement.comparisons, strict=True):
            assert (comparison.predicted.policy, len(comparison.measured)) == (scenario.policy, plan.repeats)
            assert all("measured on host-lanes" in run.labels for run in comparison.measured)
            assert comparison.parity is not None
            assert comparison.parity.held
    assert [line for line in said if line.startswith("measuring")][-1].endswith("round 2 of 2")
    assert sum(line.startswith("microbenchmarks") for line in said) == plan.repeats + 1  # and once more at the end
    assert validated.hardware.profile is not None
    assert found.hardware.profile is not None
    again, before = (hardware.profile.models["mini-moe"] for hardware in (validated.hardware, found.hardware))
    assert again != before, "predictions are made from what was measured meanwhile"
    assert notes_of(validated)[:-2] == list(lanes.remarks())
    assert [note.split()[0] for note in notes_of(validated)[-2:]] == ["predictions:", "predicted"]


def test_scenarios_of_two_models_are_refused(tmp_path: Path) -> None:
    plan = read(tmp_path, 'scenario: {model: null}\nvary: {trace: ["mini-moe:3", mini-moe]}\npolicies: [dali]')
    with machine() as lanes, pytest.raises(RefusedError, match=r"one model, got 'mini-moe:3' and 'mini-moe'"):
        validate(plan, lanes)


def test_a_policy_that_cannot_run_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    plan = read(tmp_path, PLAN.replace("- dali: {window: 3}", "- nonesuch"))
    with machine() as lanes, pytest.raises(ValueError, match="nonesuch"):
        validate(plan, lanes, said.append)
    assert said == []
