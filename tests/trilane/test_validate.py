"""``trilane validate``: a tiny plan measured and predicted, the report, and the script for full-size models."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

pytest.importorskip("torch")

from realrun.machine.cores import usable_cores
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.profiling.profile_lab import Points
from realrun.profiling.profile_timing import Effort
from realrun.profiling.profiling import profile
from realrun.validation.validation_plan import ValidationPlan
from sim.machine.hardware import load_hardware
from sim.machine.profile_yaml import write_profile
from tests.trilane.measuring import LOCKED
from tests.trilane.running import ROOT, Trilane
from traces.catalogue import load_model
from trilane.cli import app
from trilane.question import changes_of
from trilane.verbs.validate import FILES, command_of

PLAN = """
scenario: {trace: "mini-moe:2", model: null, prompt_tokens: 2, generated_tokens: 2, cached_share: 0.5}
policies: [fiddler, on-demand]
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of host lanes without a core for the link, made in no time: its numbers are poor, and not looked at."""
    first, last = min(usable_cores()), max(usable_cores())
    path, machine = tmp_path_factory.mktemp("profile") / "here.yaml", HostLanes(HostLaneSettings(first, (last,)))
    try:
        found = profile(machine, [load_model("mini-moe:2")], Points((1,), (4,), (2,)), ["fiddler"], name="here",
                        effort=Effort(rounds=2, most=1, probe_ns=0))  # fmt: skip
    finally:
        machine.close()
    write_profile(found.hardware, path)
    return path


@pytest.fixture
def plan() -> str:
    """In the folder that commands run in."""
    Path("my plan.yaml").write_text(PLAN)
    return "my plan.yaml"


def test_a_plan_is_measured_predicted_and_reported(
    trilane: Trilane, plan: str, profiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLanes, "remarks", lambda self: (LOCKED, self.crowding))
    before = profiled.read_bytes()
    words = ("validate", plan, "--profile", str(profiled), "--set", "seed=1", "--repeats", "1", "--host-memory-gb",
             "2.5", "--out", "report", "--json", "agreement.json")  # fmt: skip
    done = trilane(*words)
    assert done.status == 0, done.err
    assert f"\n{LOCKED}\n" in done.out
    assert "2 scenarios, 1 runs each, on here" in done.out
    assert {path.name for path in Path("report").iterdir()} == set(FILES)
    page = Path("report/report.md").read_text()
    assert f"## How to repeat it\n\n```\n{shlex.join(['trilane', *words])}\n```" in page
    assert "- profile made: 20" in page
    said = load_hardware(str(profiled)).profile.machine["fidelity"]  # type: ignore[union-attr]
    assert str(said).startswith("not for fidelity: more threads than cores: 4 threads (GPU, CPU experts, link, host)")
    assert f"- fidelity: {said}\n" in page.partition("## What was asked")[0]
    assert f"\n- {said}\n" in page.partition("## What came out")[2]
    assert f"\n{said}\n" in done.out
    assert profiled.read_bytes() == before
    repeated = load_hardware("report/repeated-profile.yaml").profile
    asked = load_hardware(str(profiled)).profile
    assert repeated is not None
    assert asked is not None
    assert repeated.plan == asked.plan
    assert repeated.machine == asked.machine
    assert repeated.models != asked.models


def test_the_picture_is_of_the_worst_scenario_and_says_so(trilane: Trilane, plan: str, profiled: Path) -> None:
    words = ("validate", plan, "--profile", str(profiled), "--repeats", "1", "--out", "report", "--json", "-")
    done = trilane(*words)
    assert set(done.json) == {"summary", "verdicts", "lanes", "rankings", "scenarios"}
    worst = max(done.json["scenarios"], key=lambda scenario: abs(scenario["tpot_ms"]["error"]))
    caption = f"predicted worst, {worst['tpot_ms']['error']:+.1%}: {worst['name']}. One decode step of it"
    assert caption in Path("report/report.md").read_text()


def test_the_command_is_whole_and_fit_for_a_shell() -> None:
    everything = command_of("a b.yaml", "p.yaml", ["model=x:2", "sequences=[1, 2]"], 3, "out dir", None)
    assert everything == (
        "trilane validate 'a b.yaml' --profile p.yaml --set model=x:2 --set 'sequences=[1, 2]' --repeats 3 "
        "--out 'out dir'"
    )
    assert command_of("a.yaml", "p.yaml", None, None, None, None) == "trilane validate a.yaml --profile p.yaml"


OTHER = "deepseek-v2-lite:1"
BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no plan": (("nowhere.yaml", "--profile", "{profile}"), "nowhere.yaml: No such file or directory"),
    "no profile": (("my plan.yaml", "--profile", "nowhere.yaml"), "no hardware preset or file 'nowhere.yaml'"),
    "a preset": (("my plan.yaml", "--profile", "rtx3090-ddr4"), "expected a profile, measured on this machine"),
    "too little host memory": (
        ("my plan.yaml", "--profile", "{profile}", "--host-memory-gb", "0.000001"), "are given by --host-memory-gb",
    ),
    "a key that there is not": (("my plan.yaml", "--profile", "{profile}", "--set", "bach=2"), "did you mean 'batch'"),
    "a model that was not measured": (
        ("my plan.yaml", "--profile", "{profile}", "--set", "trace=mini-deepseek:1", "--set", f"model={OTHER}"),
        "model 'deepseek-v2-lite' has not been measured",
    ),
    "the plan for a result": (("my plan.yaml", "--profile", "{profile}", "--json", "my plan.yaml"), "would be lost"),
    "the profile for a result": (("my plan.yaml", "--profile", "out/repeated-profile.yaml"), "would be lost"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(trilane: Trilane, plan: str, profiled: Path, name: str) -> None:
    Path("out").mkdir()
    Path("out/repeated-profile.yaml").write_bytes(profiled.read_bytes())
    words, expected = BAD[name]
    done = trilane("validate", *(word.replace("{profile}", str(profiled)) for word in words), "--out", "out")
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert expected in line
    assert {path.name for path in Path().rglob("*")} == {plan, "out", "repeated-profile.yaml"}
    assert Path("out/repeated-profile.yaml").read_bytes() == profiled.read_bytes()


# --- examples/full-size.sh --------------------------------------------------------------------------------------------

SCRIPT = ROOT / "examples" / "full-size.sh"
RECORDER = '#!/bin/sh\n{ printf "%s\\n" "$@"; echo ---; } >> "$RECORDED"\n'


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the script would run, without running it."""
    folder = tmp_path_factory.mktemp("script")
    recorder, recorded = folder / "recorder", folder / "recorded"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    environment = {"TRILANE": str(recorder), "RECORDED": str(recorded), "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", str(SCRIPT), "a folder"], check=True, cwd=folder, env=environment)
    return [call.split("\n")[:-1] for call in recorded.read_text().split("---\n")[:-1]]


def options_of(words: list[str]) -> dict[str, object]:
    """The values of a command's options, by the parser that the command has. Raises its usage errors."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words)) as context:
        return dict(context.params)


def called(commands: list[list[str]], *verb: str) -> Iterator[dict[str, object]]:
    return (options_of(words) for words in commands if tuple(words[: len(verb)]) == verb)


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_the_script_s_commands_are_understood(commands: list[list[str]]) -> None:
    assert [words[0] for words in commands] == ["profile", "validate", *["profile", "trace", "trace", "validate"] * 2]
    assert all(options_of(words) for words in commands)


def test_the_script_measures_and_validates_the_same_models_in_one_profile(commands: list[list[str]]) -> None:
    measured, validated = [list(called(commands, verb)) for verb in ("profile", "validate")]
    assert {call["out"] for call in measured} == {call["profile"] for call in validated} == {"a folder/profile.yaml"}
    models = [changes_of(call["changes"])["model"] for call in validated]  # type: ignore[arg-type]
    assert [call["model"] for call in measured] == [[model] for model in models]
    assert [load_model(name).name for name in models] == ["deepseek-v2-lite", "qwen3-30b-a3b:24", "mixtral-8x7b:8"]


def test_the_script_makes_the_traces_up_that_it_asks_for(commands: list[list[str]]) -> None:
    made = {call["output"]: call["like"] for call in called(commands, "trace", "synth")}
    for call in called(commands, "validate"):
        changes = changes_of(call["changes"])  # type: ignore[arg-type]
        for routing in (changes["trace"], changes.get("calibration", "mini-deepseek-calibration")):
            assert made.get(routing, changes["model"]) == changes["model"]
            assert routing in made or routing.startswith("mini-deepseek")


def test_the_script_s_plan_has_the_policies_whose_decisions_are_timed(commands: list[list[str]]) -> None:
    [timed] = {call["policies"] for call in called(commands, "profile")}
    for call in called(commands, "validate"):
        plan = ValidationPlan.from_yaml(ROOT / "examples" / "full-size.yaml", changes_of(call["changes"]))  # type: ignore[arg-type]
        assert {scenario.policy for scenario in plan.scenarios} == set(str(timed).split(","))
