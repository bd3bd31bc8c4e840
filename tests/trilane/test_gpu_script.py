"""examples/gpu.sh: what its stages run, that they fail and go on one by one, and what is packed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

from examples.pack_results import LIMIT_BYTES, pack
from tests.kit.depth import deep
from tests.kit.running import ROOT
from tests.kit.script_tools import tools
from tests.kit.waiting import wait_until
from traces.models.catalogue import load_model
from traces.models.gguf_blocks import blocks_of
from trilane import cli
from trilane.study.validation.engine_plan import EnginePlan
from trilane.study.validation.plan import ValidationPlan
from trilane.verbs.inputs import changes_of
from trilane.verbs.llama_cpp import _threads
from trilane.verbs.this_machine import HERE

SCRIPT = ROOT / "examples" / "gpu.sh"
LLAMA_STAGES = ["llama.cpp-profile", "llama.cpp-qwen3-30b-a3b", "llama.cpp-gpt-oss-20b"]
STAGES = [
    "smoke", "profile", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b", "llama.cpp-build", *LLAMA_STAGES, "peer",
    "pack",
]  # fmt: skip
MODELS = {
    "cuda": ["deepseek-v2-lite", "qwen3-30b-a3b:24", "mixtral-8x7b:4"],
    "host-lanes": ["deepseek-v2-lite:2", "qwen3-30b-a3b:2", "mixtral-8x7b:1"],
}
RECORDER = """#!/bin/sh
{ printf "%s\\n" "$@"; echo ---; } >> "$RECORDED"
case " $* " in *" $SLOW "*) echo begun >> "$RECORDED.slow"; exec sleep 60 ;; esac
case " $* " in *" $FAILING "*) exit "${STATUS:-1}" ;; esac
"""


class Played(NamedTuple):
    """The script's exit status, the lines on stages at its end, and the commands that it ran."""

    status: int
    said: dict[str, str]
    commands: list[list[str]]


Play = Callable[..., Played]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Plays the script in a folder; its commands are written down and end as ``changes`` say."""
    environment = environment_for(tmp_path)

    def played(*stages: str, **changes: str) -> Played:
        Path(environment["RECORDED"]).unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(SCRIPT), "a folder", *stages], cwd=tmp_path, env={**environment, **changes},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return Played(done.returncode, stages_of(tmp_path), recorded(tmp_path))

    return played


def environment_for(folder: Path) -> dict[str, str]:
    recorder = folder / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    here = {"TRILANE": str(recorder), "PYTHON": str(recorder), "RECORDED": str(folder / "recorded")}
    return {**here, "PATH": "/usr/bin:/bin", "FAILING": "nothing", "SLOW": "nothing"}


def recorded(folder: Path) -> list[list[str]]:
    return [call.split("\n")[:-1] for call in (folder / "recorded").read_text().split("---\n")[:-1]]


def stages_of(folder: Path) -> dict[str, str]:
    lines = (folder / "a folder" / "stages.txt").read_text().splitlines()
    return {line.split()[0]: line.partition(" s  ")[2] or line[25:] for line in lines}


@pytest.fixture(scope="module", params=["cuda", "host-lanes"])
def commands(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[list[str]]:
    """What all stages run."""
    folder = tmp_path_factory.mktemp("script")
    environment = {**environment_for(folder), "LANES": request.param}
    subprocess.run(["bash", str(SCRIPT), "a folder"], check=True, cwd=folder, env=environment, capture_output=True)
    return recorded(folder)


def options_of(words: list[str]) -> dict[str, object]:
    """The values of a command's options, by the parser that the command has. Raises its usage errors."""
    command = cli.command()
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words)) as context:
        return dict(context.params)


def called(commands: list[list[str]], *verb: str, engine: str | None = None) -> Iterator[dict[str, object]]:
    found = (options_of(words) for words in commands if tuple(words[: len(verb)]) == verb)
    return (options for options in found if options.get("engine") == engine)


def changes(call: Mapping[str, object]) -> dict[str, object]:
    return changes_of(call["changes"])  # type: ignore[arg-type]


# --- what it runs -----------------------------------------------------------------------------------------------------


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_every_command_is_understood(commands: list[list[str]]) -> None:
    ours = [words for words in commands if not words[0].startswith("-") and not words[0].endswith(".py")]
    assert [words[0] for words in ours] == [
        "smoke", *["profile"] * 3, "validate", *["trace", "trace", "validate"] * 2, "profile", "validate", "validate",
    ]  # fmt: skip
    assert all(options_of(words) for words in ours)


def test_it_measures_and_validates_the_same_models_in_one_profile(commands: list[list[str]]) -> None:
    measured, validated = [list(called(commands, verb)) for verb in ("profile", "validate")]
    assert {call["out"] for call in measured} == {call["profile"] for call in validated} == {"a folder/profile.yaml"}
    [lanes] = {call["lanes"] for call in measured}
    models = [changes(call)["model"] for call in validated]
    assert [call["model"] for call in measured] == [[model] for model in models]
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


def test_llama_cpp_is_profiled_once_and_two_models_are_predicted_from_that(commands: list[list[str]]) -> None:
    [profile] = called(commands, "profile", engine="llama.cpp")
    calls = list(called(commands, "validate", engine="llama.cpp"))
    assert {profile["out"], *(call["profile"] for call in calls)} == {"a folder/llama.cpp.yaml"}
    plans = [EnginePlan.from_yaml(Path(str(call["plan"])), engine_changes(call)) for call in calls]
    [[first], [second]] = [plan.models for plan in plans]
    if profile["gpu"]:
        splits = [plan.splits(model) for plan, model in zip(plans, (first, second), strict=True)]
        assert splits == [(48, 36, 24, 12, 0), (24, 18, 12, 6, 0)]
        assert {plan.depths for plan in plans} == {(0, 2048)}
    else:
        assert (first, second) == ("qwen3-30b-a3b@q4_0:2", "gpt-oss-20b@mxfp4:2")
    assert {plan.threads for plan in plans} == {_threads(profile["threads"])}  # type: ignore[arg-type]
    used = {block for name in (first, second) for mix in blocks_of(load_model(name)) for block in mix}
    assert used <= set(str(profile["blocks"]).split(","))


def engine_changes(call: Mapping[str, object]) -> dict[str, object]:
    """Those of a plan, with a machine in place of the one at hand."""
    found = changes(call)
    return {**found, "hardware": "rtx-4090+ddr5-5600"} if found.get("hardware") == HERE else found


def test_the_tests_of_cuda_lanes_run_on_the_device_or_on_the_fake(commands: list[list[str]]) -> None:
    [words] = [words for words in commands if words[:2] == ["-m", "pytest"]]
    [lanes] = {call["lanes"] for call in called(commands, "smoke")}
    assert words[words.index("--device") + 1] == {"cuda": "cuda", "host-lanes": "fake"}[str(lanes)]
    assert {Path(word).name for word in words if word.endswith(".py")} >= {"test_cuda_lanes.py", "test_cuda_memory.py"}


# --- llama.cpp: found, built, or left out -----------------------------------------------------------------------------


def test_a_library_that_is_found_is_not_built(play: Play, tmp_path: Path) -> None:
    done = play("llama.cpp-build")
    assert (done.status, done.said) == (0, {"llama.cpp-build": "passed"})
    assert all(words[0] == "-c" for words in done.commands)
    assert list((tmp_path / "a folder" / "done").iterdir()) == []


def test_one_that_is_named_and_finds_no_gpu_fails_with_its_reason(play: Play) -> None:
    done = play("llama.cpp-build", FAILING="gpu_name", LLAMA_LIBRARY="mine.so", STATUS="2")
    assert (done.status, done.said) == (1, {"llama.cpp-build": "failed (status 2)"})


def test_without_a_library_it_is_built_from_the_sources_that_are_given(play: Play, tmp_path: Path) -> None:
    """The compilers are missing here: that is refused before anything is made."""
    done = play("llama.cpp-build", FAILING="gpu_name", LLAMA_BUILD=str(tmp_path / "made"), LLAMA_SOURCES="s.tar.gz",
                PATH=str(tools(tmp_path)))  # fmt: skip
    assert (done.status, done.said) == (1, {"llama.cpp-build": "failed (status 2)"})
    log = (tmp_path / "a folder" / "logs" / "llama.cpp-build.log").read_text()
    assert log == "examples/build_llama.sh: cmake: no such command, and llama.cpp is built with it\n"
    assert not (tmp_path / "made").exists()


def test_without_a_library_the_other_stages_leave_llama_cpp_out(play: Play) -> None:
    done = play(*LLAMA_STAGES, FAILING="gpu_name")
    assert (done.status, done.said) == (0, dict.fromkeys(LLAMA_STAGES, "passed"))
    assert all(words[0] == "-c" for words in done.commands)


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
    assert [call["model"] for call in called(play("profile").commands, "profile")] == [["mixtral-8x7b:4"]]


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


def test_the_long_stages_of_llama_cpp_have_a_limit_of_their_own(play: Play, tmp_path: Path) -> None:
    """``timeout`` is one that writes its limit down."""
    (bins := tmp_path / "bins").mkdir()
    (bins / "timeout").write_text(f'#!/bin/sh\necho "$2" >> "{tmp_path}/limits"\nshift 2\nexec "$@"\n')
    (bins / "timeout").chmod(0o755)
    done = play("smoke", *LLAMA_STAGES, STAGE_SECONDS="50", LLAMA_SECONDS="7000", PATH=f"{bins}:/usr/bin:/bin")
    assert done.status == 0
    *short, profile, first, second = map(int, (tmp_path / "limits").read_text().split())
    assert all(40 < limit <= 50 for limit in short)
    assert all(6900 < limit <= 7000 for limit in (profile, first, second))


def test_a_stage_shorter_than_its_report_gives_its_validation_a_second(play: Play) -> None:
    [call] = called(play("deepseek-v2-lite", STAGE_SECONDS="60").commands, "validate")
    assert call["time_limit"] == 1


def test_a_stage_that_there_is_not_is_refused(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "out", "smok"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected stages among smoke profile" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "changes", "why"),
    [
        ((), {}, "expected a folder to write to, got ''; usage"),
        (("-o",), {}, "expected a folder to write to, got '-o'"),
        (("out",), {"STAGE_SECONDS": "soon"}, "expected STAGE_SECONDS as a whole number, got soon"),
        (("out",), {"LLAMA_SECONDS": "0"}, "expected LLAMA_SECONDS as a whole number, got 0"),
        (("out",), {"TRILANE": "trilain"}, "trilain: no such command; in a checkout TRILANE='python3 -m trilane'"),
        (("out",), {"LANES": "foo"}, "expected LANES=cuda or LANES=host-lanes, got foo"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], changes: dict[str, str], why: str
) -> None:
    environment = {**environment_for(tmp_path), **changes}
    done = subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)  # fmt: skip
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
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
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
                   "PYTEST_ADDOPTS": "-k test_cuda_memory"}  # fmt: skip
    done = subprocess.run(["bash", str(SCRIPT), "out", "smoke", "pack"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(tmp_path / "out" / "results.zip") as packed:
        assert {"MANIFEST.txt", "logs/device-tests.log", "done/smoke", "done/device-tests"} <= set(packed.namelist())


# --- the archive ------------------------------------------------------------------------------------------------------


def fill(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))


def test_all_but_weights_and_half_written_files_is_packed(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {"report.md": 10, "a/journal/run.parquet": 99, "made.safetensors": 10, ".x.json.1.trilane-part/x.json": 10},
    )
    assert pack(tmp_path, tmp_path / "results.zip") == []
    assert pack(tmp_path, tmp_path / "results.zip") == []  # an archive is no result
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"report.md", "a/journal/run.parquet", "MANIFEST.txt"}
        assert packed.read("MANIFEST.txt").startswith(b"2 files; left out, because of the limit of the archive: none")


def test_the_largest_are_left_out_first_and_named(tmp_path: Path) -> None:
    fill(tmp_path, {"small": 1_000, "large": 50_000, "larger": 60_000, "medium": 20_000})
    out = pack(tmp_path, tmp_path / "results.zip", limit_bytes=40_000)
    assert [file.name for file in out] == ["larger", "large"]
    assert (tmp_path / "results.zip").stat().st_size <= 40_000
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"small", "medium", "MANIFEST.txt"}
        lines = packed.read("MANIFEST.txt").decode().splitlines()
    assert lines[1:] == ["      60,000 bytes  larger", "      50,000 bytes  large"]


@pytest.mark.parametrize("limit_bytes", [3_000, 10_000, 37_123])
def test_the_archive_is_never_larger_than_its_limit(tmp_path: Path, limit_bytes: int) -> None:
    fill(tmp_path, {f"folder {n % 3}/{'long name ' * 5}{n}": 10 + 37 * n for n in range(40)})
    pack(tmp_path, tmp_path / "results.zip", limit_bytes)
    assert (tmp_path / "results.zip").stat().st_size <= limit_bytes


def test_the_limit_is_16_mb() -> None:
    assert LIMIT_BYTES == 16_000_000
