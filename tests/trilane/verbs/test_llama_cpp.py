"""``--engine llama.cpp`` with an engine whose times are known, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import BenchPoint, time_points
from realrun.llama_cpp.benchmark_models import bench_models
from realrun.llama_cpp.kernel_numbers import piece_ns, write_engine
from sim.costs.engine import load_engine
from sim.costs.kernel_costs import kernel_steps
from sim.machine.hardware import load_hardware
from sim.machine.sourced import Sourced
from tests.kit.fake_engine import FakeContext, FakeSplitContext, known_gpu_kernels, known_kernels, known_split
from traces.models.catalogue import load_model
from trilane.engines.tune.machine_found import Assumption, MachineFound, UnknownCardError
from trilane.verbs.llama_cpp import (
    LlamaProfile,
    LlamaRun,
    LlamaValidation,
    _threads,
    machine_found,
    measure_llama,
    profile_llama,
    validate_llama,
)
from trilane.verbs.options import OptionError

SHAPE, KERNELS = load_model("olmoe-1b-7b@q8_0:1"), known_kernels(("q8_0",))


@contextmanager
def opened(path: Path, settings: Any) -> Iterator[FakeContext]:
    yield FakeContext(SHAPE, kernel_steps(SHAPE, KERNELS, 1).blocks, KERNELS)


def test_measure_prints_tokens_and_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    measure_llama(LlamaRun("model.gguf", threads=2, depth=32, prompt=16, repeats=3), str(tmp_path / "m.json"))
    steps = kernel_steps(SHAPE, KERNELS, 2)
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["decode at 32 tokens"]["median_ms"] == pytest.approx(piece_ns(steps, 1, 33) / 1e6, rel=1e-6)
    assert found["decode at 32 tokens"]["repeats"] == 12
    assert found["prompt of 16"]["tokens_per_s"] == pytest.approx(16e9 / piece_ns(steps, 16, 16), rel=1e-6)
    assert found["prompt of 16"]["spread"] == 0
    assert "all on the CPU, 2 threads, pieces of 512, keys and values in f16" in capsys.readouterr().out


def test_measure_runs_a_llama_bench_where_the_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its 16 tokens of a repeat are timed together; one that was named is taken even if the package is there."""
    asked: list[tuple[str, Path]] = []

    def times(program: str, path: Path, settings: Any, points: Any) -> dict[BenchPoint, list[int]]:
        asked.append((program, path))
        return {point: [5_000_000] * repeats for point, repeats in points}

    monkeypatch.setattr("realrun.llama_cpp.bench.program_times", times)
    monkeypatch.setattr("realrun.llama_cpp.abi.has_library", lambda: False)
    monkeypatch.setenv("LLAMA_BENCH", "/opt/llama-bench")
    measure_llama(LlamaRun("model.gguf", threads=2, prompt=10, repeats=3), str(tmp_path / "m.json"))
    assert "model.gguf with llama.cpp (/opt/llama-bench), all on the CPU, 2 threads" in capsys.readouterr().out
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["program"] == "/opt/llama-bench"
    assert (found["decode at 0 tokens"]["repeats"], found["prompt of 10"]["tokens_per_s"]) == (12, 2000)
    monkeypatch.setattr("realrun.llama_cpp.abi.has_library", lambda: True)
    measure_llama(LlamaRun("model.gguf", llama_bench="./mine"), None)
    assert asked == [("/opt/llama-bench", Path("model.gguf")), ("./mine", Path("model.gguf"))]


def test_all_cores_are_the_physical_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.machine.cores.physical_cores", lambda: [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert _threads(None) == (1, 2, 4)


@pytest.fixture(autouse=True)
def _empty_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trilane.verbs.llama_cpp.disk_usage", lambda folder: Mock(free=10**12))


def test_measure_needs_a_file() -> None:
    with pytest.raises(OptionError, match="give --gguf FILE"):
        measure_llama(LlamaRun(), None)


def test_a_profile_is_an_engine_and_says_which_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of known kernels; the model with the larger router takes as long as the other one."""
    found = {}
    for model in bench_models(("q4_0", "q8_0"), (1,)):
        times = time_points(FakeContext(model.shape, model.blocks, known_kernels(("q4_0", "q8_0"))), model.points)
        found[model.name] = {point: float(each[0]) for point, each in times.items()}
    found["many-rows"] = found["few-rows"]
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr("realrun.llama_cpp.benchmark_models.measure_samples", lambda *given: found)
    profile_llama(LlamaProfile(threads="1", blocks="q8_0"), str(tmp_path / "mine.yaml"), str(tmp_path / "times.json"))
    kernels = load_engine(str(tmp_path / "mine.yaml")).kernels
    assert kernels is not None
    assert set(kernels.products) == {"q4_0", "q8_0", "f32"}
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "times.json"}
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"8.0 GB of models of random weights are written to {tmp_path}, and removed at the end"
    assert said[1].startswith(
        "kernels.products.f32.experts, kernels.products.f32.others: bounded, since the times are within noise"
    )


def test_a_profile_of_a_gpu_names_it_and_has_both_sides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, split, asked = known_gpu_kernels(("q4_0",)), known_split(("q4_0",)), []

    def measured(opened: Any, folder: Path, models: Any, rounds: int, say: Any) -> dict[str, dict[BenchPoint, float]]:
        found = {}
        for model in models:
            asked.append((model.samples_name, model.settings.gpu, model.settings.cpu_layers, model.settings.mapped))
            times = time_points(FakeSplitContext(model.shape, model.blocks, gpu, split, model.settings), model.points)
            found[model.samples_name] = {point: float(each[0]) for point, each in times.items()}
        return found

    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr("realrun.llama_cpp.abi.gpu_name", lambda: "a card")
    monkeypatch.setattr("realrun.llama_cpp.benchmark_models.measure_samples", measured)
    profile_llama(LlamaProfile(threads="4,8", blocks="q4_0", gpu=True), str(tmp_path / "gpu.yaml"), None)
    engine = load_engine(str(tmp_path / "gpu.yaml"))
    assert (engine.kernels, engine.gpu_kernels is None, engine.split is None) == (None, False, False)
    assert "kernels on a card, " in engine.about
    assert "an engine for machines with a card, " in capsys.readouterr().err
    assert {name for name, *_ in asked} >= {"few-q4_0", "few-layers", "many-rows", "few-q4_0-split", "split-pinned"}
    assert all(on_gpu for _, on_gpu, _, _ in asked)
    assert {cpu_layers > 0 for name, _, cpu_layers, _ in asked if name.endswith(("-split", "-pinned"))} == {True}
    assert {name.endswith("-pinned") for name, _, _, mapped in asked if not mapped} == {True}


def test_a_profile_of_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr("realrun.llama_cpp.abi.llama_library", NoGpu)
    with pytest.raises(RefusedError, match=r"that finds a GPU, this one \(a.so\) does not; .*LLAMA_LIBRARY"):
        profile_llama(LlamaProfile(gpu=True), str(tmp_path / "gpu.yaml"), None)
    assert list(tmp_path.iterdir()) == []


class NoGpu:
    """A library of a build for the CPU alone."""

    _name = "a.so"

    def ggml_backend_dev_by_type(self, kind: int) -> None:
        assert kind == 1


def test_a_plan_for_this_machine_takes_the_parts_that_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trilane.engines.tune.machine_found.found_machine", lambda: MachineFound(
        "rtx-4090", "ddr5-5600", None, 12, "4x16", 64, (Assumption("ram", "ddr5-5600"),),
    ))
    machine = load_hardware(machine_found())
    assert (machine.cpu_only, machine.cpu.cores) == (False, 12)
    assert "4090" in machine.name
    assert capsys.readouterr().err == f"assumed: ram: ddr5-5600, which is usual\n{NAMED}\n"


NAMED = "name the parts: --set hardware=GPU+MEMORY+CPU (HARDWARE= of examples/gpu.sh)"


def test_a_card_that_is_not_in_the_catalogue_is_named_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> MachineFound:
        raise UnknownCardError("there is no gpu 'B9' with 12 GiB")

    monkeypatch.setattr("trilane.engines.tune.machine_found.found_machine", found)
    with pytest.raises(OptionError) as refused:
        machine_found()
    assert str(refused.value) == f"hardware=here: there is no gpu 'B9' with 12 GiB; {NAMED}"


def test_parts_that_do_not_go_together_are_refused_with_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trilane.engines.tune.machine_found.found_machine", lambda: MachineFound(
        "rtx-4090", "ddr5-5600", "server", 192, "4x16", 64, ()
    ))
    with pytest.raises(OptionError, match=r"server CPU has at most 128 cores, got 192; .*--set hardware="):
        machine_found()


def test_validate_makes_the_folder_of_its_report_and_takes_times_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large models are written to it, and removed; the kernels that are measured are those that predict."""
    plan, engine, written = tmp_path / "plan.yaml", tmp_path / "engine.yaml", []
    plan.write_text(
        "hardware: none+ddr5-4800+2-cores\nmodels: ['olmoe-1b-7b@q8_0:1']\nthreads: [1]\nprompts: [16]\nrepeats: 2\n"
    )
    write_engine(KERNELS, "made up", engine)
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr(
        "trilane.study.validation.engine_validation.write_model",
        lambda name, shape, path: written.append(path.write_bytes(b"")),
    )
    report = tmp_path / "new" / "report"
    validate_llama(LlamaValidation(), str(plan), str(engine), str(report), None)
    assert {path.name for path in report.iterdir()} == {"report.md", "rows.csv", "scatter.png"}
    assert (len(written), "held: worst error 0.0% of 2 scenarios" in capsys.readouterr().out) == (1, True)
    slower, again = tmp_path / "slower.yaml", tmp_path / "again"
    write_engine(KERNELS._replace(step_ns=Sourced((1e9, 1e9), "slower", "low")), "made up", slower)
    validate_llama(LlamaValidation(str(report / "rows.csv")), str(plan), str(slower), str(again), None)
    assert (len(written), "not held: worst error" in capsys.readouterr().out) == (1, True)
    assert f"Measured earlier ({report / 'rows.csv'})" in (again / "report.md").read_text()


def test_models_that_have_no_room_are_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trilane.verbs.llama_cpp._open_llama", lambda: opened)
    monkeypatch.setattr("trilane.verbs.llama_cpp.disk_usage", lambda folder: Mock(free=5_000_000_000))
    with pytest.raises(OptionError, match=r"expected room for 8\.0 GB of models of random weights, 5\.0 GB are free"):
        profile_llama(LlamaProfile(threads="1", blocks="q8_0"), str(tmp_path / "mine.yaml"), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("choice", "words"), [
    (LlamaProfile(threads="1,x"), "whole numbers from 1 to"), (LlamaProfile(blocks="q4_0,q9"), "'q9'"),
])
def test_profile_refuses_before_it_measures(choice: LlamaProfile, words: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=words):
        profile_llama(choice, str(tmp_path / "mine.yaml"), None)
    assert list(tmp_path.iterdir()) == []
