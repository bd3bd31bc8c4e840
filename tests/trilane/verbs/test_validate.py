"""``trilane validate``: a tiny plan measured and predicted, stopped and gone on with, and the report."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("torch")

from realrun.machine.cores import usable_cores
from realrun.machine.host_lanes import HostLanes, HostLaneSettings
from realrun.profiling.lab import Points
from realrun.profiling.profile import profile
from realrun.profiling.timing import Effort
from sim.machine.hardware import load_hardware, write_hardware
from tests.kit.commands import ROOT, Trilane
from tests.kit.depth import deep
from tests.kit.processes import wait_until
from tests.kit.small_sweeps import kept_blobs
from tests.kit.validations import LOCKED, as_if_quiet
from traces.models.catalogue import load_model
from trilane.study.validation.validate import Stop
from trilane.verbs.validate import FILES, JOURNAL, STOPPED

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
                        effort=Effort(rounds=2, most=1, probe_ns=0))
    finally:
        machine.close()
    write_hardware(as_if_quiet(found.hardware), path)
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
             "2.5", "--out", "report", "--json", "agreement.json")
    done = trilane(*words)
    assert done.status == 0, done.err
    assert f"\n{LOCKED}\n" in done.out
    assert "2 scenarios, 1 runs each, on here" in done.out
    assert {path.name for path in Path("report").iterdir()} == {*FILES, JOURNAL}
    page = Path("report/report.md").read_text()
    assert f"## Command\n\n```\n{shlex.join(['trilane', *words])}\n```" in page
    assert "- profile made: 20" in page
    said = load_hardware(str(profiled)).profile.machine["fidelity"]  # type: ignore[union-attr]
    assert str(said).startswith("not for fidelity: more threads than cores: 4 threads (GPU, CPU experts, link, host)")
    assert f"\n- {said}\n" in page.partition("## Results")[2]
    assert page.count(str(said)) == 1
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
    assert set(done.json) == {"summary", "verdicts", "lanes", "rankings", "scenarios", "runs"}
    worst = max(done.json["scenarios"], key=lambda scenario: abs(scenario["tpot_ms"]["error"]))
    caption = f"{worst['tpot_ms']['error']:+.1%}: {worst['name']}. Measured above"
    assert caption in Path("report/report.md").read_text()


# --- stopped, and begun again -----------------------------------------------------------------------------------------

MANY = "100"  # repeats, for a validation that is still at work when it is stopped


def begun(profiled: Path, *words: str) -> subprocess.Popen[str]:
    """A validation in a process of its own, with two measured runs at least in its journal."""
    command = [sys.executable, "-m", "trilane", "validate", "my plan.yaml", "--profile", str(profiled), "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "--repeats", MANY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment)
    try:
        wait_until(lambda: len(measured_runs()) >= 2 or process.poll() is not None, "two measured runs")
    except TimeoutError:
        process.kill()
        raise
    return process


def measured_runs() -> dict[str, bytes]:
    """The measured runs in the journal, also while a validation holds it."""
    blobs = kept_blobs(Path("out/journal"), "validation")
    return {key: blob for key, blob in blobs.items() if key.startswith("run-")}


@deep
def test_after_kill_9_the_same_command_goes_on_and_measures_nothing_twice(
    trilane: Trilane, plan: str, profiled: Path
) -> None:
    process = begun(profiled)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = measured_runs()
    assert not Path("out/report.md").exists()
    turns = 1 + max(int(name[8:10]) for name in kept)  # so many rounds, at most, have to be completed
    done = trilane("validate", plan, "--profile", str(profiled), "--repeats", str(turns), "--out", "out", "--json", "-")
    assert done.json["runs"] == {"measured": 2 * turns, "asked": 2 * turns, "stopped": None}
    assert [scenario["scenario"]["policy"] for scenario in done.json["scenarios"]] == ["fiddler", "on-demand"]
    assert kept.items() <= measured_runs().items()
    assert len(measured_runs()) == 2 * turns


@pytest.mark.usefixtures("trilane")  # for the folder
def test_after_sigterm_there_is_a_report_on_what_was_measured(plan: str, profiled: Path) -> None:
    process = begun(profiled)
    process.terminate()
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    runs = len(measured_runs())
    assert f"stopped early: SIGTERM was received; {runs} of 200 runs are measured, the rest is left out" in out
    assert f"{runs} of 200 runs are measured" in Path("out/report.md").read_text()


def test_the_time_limit_ends_a_validation_with_a_report_and_a_status_of_its_own(
    trilane: Trilane, plan: str, profiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("validate", plan, "--profile", str(profiled), "--repeats", MANY, "--out", "out", "--json", "-")
    asked = count()
    monkeypatch.setattr(Stop, "why", lambda self: "the time limit of 60 s is used up" if next(asked) > 4 else None)
    done = trilane(*words, "--time-limit", "60")
    assert done.status == STOPPED
    assert done.json["runs"]["measured"] == len(measured_runs()) == 3
    assert "--time-limit 60" in Path("out/report.md").read_text()


def test_no_time_at_all_is_refused_with_a_sentence(trilane: Trilane, plan: str, profiled: Path) -> None:
    done = trilane("validate", plan, "--profile", str(profiled), "--time-limit", "0", "--out", "out")
    assert (done.status, done.out) == (2, "")
    assert "nothing was measured: the time limit of 0 s is used up" in done.err


# --- refusals ---------------------------------------------------------------------------------------------------------

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
}


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
