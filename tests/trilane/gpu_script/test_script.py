"""examples/gpu.sh: what its stages run, and that they fail and go on one by one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.kit.commands import ROOT
from tests.kit.depth import deep
from tests.kit.gpu_script import (
    SCRIPT,
    STAGES,
    Play,
    called,
    changes,
    environment_for,
    options_of,
    stages_of,
)
from tests.kit.processes import wait_until
from traces.models.catalogue import load_model
from trilane.study.validation.validate import ValidationPlan

MODELS = {
    "cuda": ["deepseek-v2-lite", "qwen3-30b-a3b:24", "mixtral-8x7b:4"],
    "host-lanes": ["deepseek-v2-lite:2", "qwen3-30b-a3b:2", "mixtral-8x7b:1"],
}


# --- what it runs -----------------------------------------------------------------------------------------------------


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_every_command_is_understood(commands: list[list[str]]) -> None:
    ours = [words for words in commands if not words[0].startswith("-") and not words[0].endswith(".py")]
    assert [words[0] for words in ours] == [
        "smoke", *["profile"] * 3, "validate", *["trace", "trace", "validate"] * 2, "profile", "validate", "validate",
    ]
    assert all(options_of(words) for words in ours)


def test_it_measures_and_validates_the_same_models_in_one_profile(commands: list[list[str]]) -> None:
    measured, validated = [list(called(commands, verb)) for verb in ("profile", "validate")]
    assert {call["out"] for call in measured} == {call["profile"] for call in validated} == {"a folder/profile.yaml"}
    [lanes] = {call["lanes"] for call in measured}
    models = [changes(call)["model"] for call in validated]
    assert [list(call["model"]) for call in measured] == [[model] for model in models]
    assert models == MODELS[str(lanes)]
    assert [load_model(str(model)).name for model in models] == models


def test_it_makes_the_traces_up_that_it_asks_for(commands: list[list[str]]) -> None:
    made = {call["output"]: call["like"] for call in called(commands, "trace", "synth")}
    for call in called(commands, "validate"):
        asked = changes(call)
        for routing in (asked["trace"], asked.get("calibration", "mini-deepseek-calibration")):
            assert made.get(routing, asked["model"]) == asked["model"]
            assert routing in made or str(routing).startswith("mini-deepseek")


def test_the_plan_has_the_policies_whose_decisions_are_timed(commands: list[list[str]]) -> None:
    [timed] = {call["policies"] for call in called(commands, "profile")}
    for call in called(commands, "validate"):
        plan = ValidationPlan.from_yaml(ROOT / "examples" / "gpu.yaml", changes(call))
        assert {scenario.policy for scenario in plan.scenarios} == set(str(timed).split(","))


def test_a_validation_ends_by_itself_before_its_stage_does(commands: list[list[str]]) -> None:
    limits = [call["time_limit"] for call in called(commands, "validate")]
    assert all(isinstance(limit, float) and 300 < limit <= 380 for limit in limits)


def test_the_tests_of_cuda_lanes_run_on_the_device_or_on_the_fake(commands: list[list[str]]) -> None:
    [words] = [words for words in commands if words[:2] == ["-m", "pytest"]]
    [lanes] = {call["lanes"] for call in called(commands, "smoke")}
    assert words[words.index("--device") + 1] == {"cuda": "cuda", "host-lanes": "fake"}[str(lanes)]
    assert {Path(word).name for word in words if word.endswith(".py")} >= {"test_cuda_lanes.py", "test_cuda_streams.py"}


# --- stage by stage ---------------------------------------------------------------------------------------------------


def test_all_stages_pass_in_order_and_are_not_repeated(play: Play) -> None:
    first = play()
    assert (first.status, first.said) == (0, dict.fromkeys(STAGES, "passed"))
    again = play()
    assert (again.status, again.said) == (0, dict.fromkeys(STAGES, "passed"))
    assert [words[0] for words in again.commands if words[0] != "-c"] == [str(ROOT / "examples" / "pack_results.py")]


def test_a_stage_that_fails_does_not_stop_the_next_and_is_tried_again(play: Play, tmp_path: Path) -> None:
    first = play(FAILING="model=qwen3-30b-a3b:24")
    assert first.status == 1
    assert first.said == {**dict.fromkeys(STAGES, "passed"), "qwen3-30b-a3b": "failed (status 1)"}
    assert (tmp_path / "a folder" / "logs" / "qwen3-30b-a3b.log").exists()
    again = play()
    assert (again.status, again.said["qwen3-30b-a3b"]) == (0, "passed")
    [only] = called(again.commands, "validate")
    assert changes(only)["model"] == "qwen3-30b-a3b:24"


def test_of_a_profile_only_the_models_that_are_missing_are_measured_again(play: Play) -> None:
    assert play("profile", FAILING="mixtral-8x7b:4").said == {"profile": "failed (status 1)"}
    assert [list(call["model"]) for call in called(play("profile").commands, "profile")] == [["mixtral-8x7b:4"]]


def test_a_validation_without_time_left_has_passed_in_part_and_goes_on(play: Play) -> None:
    first = play("deepseek-v2-lite", FAILING="validate", STATUS="3")
    assert (first.status, first.said) == (3, {"deepseek-v2-lite": "passed in part, continues when run again"})
    assert len(list(called(play("deepseek-v2-lite").commands, "validate"))) == 1


def test_a_failure_outweighs_what_has_passed_in_part(play: Play) -> None:
    assert play("smoke", "deepseek-v2-lite", FAILING="validate", STATUS="3").status == 3
    assert play("profile", "deepseek-v2-lite", FAILING="--json", STATUS="2").status == 1


def test_a_stage_that_takes_too_long_is_ended(play: Play) -> None:
    done = play("smoke", SLOW="smoke", STAGE_SECONDS="1")
    assert (done.status, done.said) == (1, {"smoke": "failed (status 124)"})


def test_a_stage_shorter_than_its_report_gives_its_validation_a_second(play: Play) -> None:
    [call] = called(play("deepseek-v2-lite", STAGE_SECONDS="60").commands, "validate")
    assert call["time_limit"] == 1


def test_a_stage_that_there_is_not_is_refused(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "out", "smok"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected stages among smoke profile" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "changes", "why"), [
    ((), {}, "expected a folder to write to, got ''; usage"),
    (("-o",), {}, "expected a folder to write to, got '-o'"),
    (("out",), {"STAGE_SECONDS": "soon"}, "expected STAGE_SECONDS as a whole number, got soon"),
    (("out",), {"LLAMA_SECONDS": "0"}, "expected LLAMA_SECONDS as a whole number, got 0"),
    (("out",), {"TRILANE": "trilain"}, "trilain: no such command; in a checkout TRILANE='python3 -m trilane'"),
    (("out",), {"LANES": "foo"}, "expected LANES=cuda or LANES=host-lanes, got foo"),
])
def test_what_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], changes: dict[str, str], why: str
) -> None:
    environment = {**environment_for(tmp_path), **changes}
    done = subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_help_is_the_head_of_the_script() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Check, profile and validate one CUDA GPU")
    assert "set -uo" not in done.stdout


def test_help_names_every_variable_that_is_read() -> None:
    text = SCRIPT.read_text()
    head, _, rest = text.partition("set -uo")
    read = set(re.findall(r"\$\{([A-Z][A-Z_]+):[-+]", rest)) - {"PYTHONPATH"}
    assert {name for name in read if f"#   {name}" not in head} == set()


@pytest.mark.parametrize(("chosen", "taken"), [({}, 24.0), ({"MEMORY_GB": "11"}, 11.0)], ids=["not known", "chosen"])
def test_the_gpu_s_free_memory_is_used_unless_it_is_chosen(play: Play, chosen: dict[str, str], taken: float) -> None:
    assert [call["memory_gb"] for call in called(play("profile", **chosen).commands, "profile")] == [taken] * 3


def test_a_signal_is_handed_on_and_ends_the_script_with_its_summary(tmp_path: Path) -> None:
    environment = {**environment_for(tmp_path), "SLOW": "smoke"}
    process = subprocess.Popen(["bash", str(SCRIPT), "a folder"], cwd=tmp_path, env=environment,
                               stdout=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "recorded.slow").exists, "the first stage has begun")
    except TimeoutError:
        process.kill()
        raise
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 1
    assert stages_of(tmp_path)["smoke"].startswith("failed (status 1")
    assert all(stages_of(tmp_path)[stage] == "not begun: stopped" for stage in STAGES[1:])
    assert out.endswith((tmp_path / "a folder" / "stages.txt").read_text())


def test_make_gpu_runs_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\ngpu: " in makefile
    assert "examples/gpu.sh $(GPU_OUT)" in makefile


# --- for real ---------------------------------------------------------------------------------------------------------


@deep
def test_the_smallest_stages_for_real(tmp_path: Path) -> None:
    """One small file of the tests of CUDA lanes, on the fake, and packing; ``trilane smoke`` has tests of its own."""
    environment = {**os.environ, "TRILANE": "true", "PYTHON": sys.executable, "LANES": "host-lanes",
                   "PYTEST_ADDOPTS": "-k TestSettingsAreRefused"}
    done = subprocess.run(["bash", str(SCRIPT), "out", "smoke", "pack"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / "out" / "results.zip") as packed:
        assert {"MANIFEST.txt", "logs/device-tests.log", "done/smoke", "done/device-tests"} <= set(packed.namelist())
