"""Stages of examples/gpu.sh that run llama.cpp: what they compare, and whether a library is found, built or missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.kit.gpu_script import LLAMA_STAGES, Play, called, changes, tools
from traces.models.catalogue import load_model
from traces.models.gguf_model import blocks_of
from trilane.study.validation.engine_validation import EnginePlan
from trilane.verbs.llama_cpp import HERE, _threads


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
                PATH=str(tools(tmp_path)))
    assert (done.status, done.said) == (1, {"llama.cpp-build": "failed (status 2)"})
    log = (tmp_path / "a folder" / "logs" / "llama.cpp-build.log").read_text()
    assert log == "examples/build_llama.sh: cmake: no such command, and llama.cpp is built with it\n"
    assert not (tmp_path / "made").exists()


def test_without_a_library_the_other_stages_leave_llama_cpp_out(play: Play) -> None:
    done = play(*LLAMA_STAGES, FAILING="gpu_name")
    assert (done.status, done.said) == (0, dict.fromkeys(LLAMA_STAGES, "passed"))
    assert all(words[0] == "-c" for words in done.commands)


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
