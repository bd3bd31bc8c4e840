"""The check on this machine: what is run, with which settings, and what is laid side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.table import Table

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import RunSettings, TimedRun, reported_bytes
from tests.kit.commands import ROOT
from traces.models.catalogue import load_model
from trilane.engines.accuracy.slow_machines import SlowPart
from trilane.engines.load_memory import LoadSetting, load_memory
from trilane.engines.question import FitError, Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import Tuning, tune
from trilane.output.pages.tune import check_page
from trilane.study.validation.tune_check import Checked, check, file_to_run, slow_causes_of

LOG = """load_tensors:   CPU_Mapped model buffer size =  1142.91 MiB
load_tensors:   CPU_REPACK model buffer size =   864.00 MiB
llama_kv_cache:        CPU KV buffer size =    17.00 MiB
llama_memory_recurrent:        CPU RS buffer size =     1.50 MiB
sched_reserve:      CUDA0 compute buffer size =    59.71 MiB
sched_reserve:        CPU compute buffer size =     4.00 MiB
llama_context:        CPU  output buffer size =     0.19 MiB""".splitlines()


@cache
def tuned(gpu: str = "rtx-3060") -> Tuning:
    return tune(TuneQuestion(Question(
        model="deepseek-v2-lite:4", gpu=gpu, ram="ddr4-3200", cores=4, prompt_tokens=600, generated=50, window=2048,
    ), "both", ("f16",)))


def of_file(tuning: Tuning, path: Path, **changed: object) -> Tuning:
    """The same answer as if the model were a file."""
    path.touch()
    asked = replace(tuning.question.fit, model=str(path), **changed)  # type: ignore[arg-type]
    return replace(tuning, question=replace(tuning.question, fit=asked))


class FakeEngine:
    """Takes twice the predicted time of the best setting."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.ran = tuning, list[RunSettings]()

    def __call__(self, path: Path, settings: RunSettings) -> TimedRun:
        self.ran.append(settings)
        best = self.tuning.best
        return TimedRun(round(2e6 * best.ttft_ms), (round(2e6 * best.tpot_ms),) * 3, {"model": 10, "KV": 20})


def test_the_best_three_and_the_engines_own_settings_are_run(tmp_path: Path) -> None:
    tuning = of_file(tuned(), tmp_path / "model.gguf")
    engine = FakeEngine(tuning)
    found = list(check(tuning, engine))
    assert [one.name for one in found][:3] == ["best", "best but 1", "best but 2"]
    assert [one.tuned for one in found][:3] == list(tuning.leading)
    assert engine.ran[0] == RunSettings(
        threads=tuning.best.threads, piece_tokens=tuning.best.piece_tokens, kv="f16", window_tokens=2048,
        prompt_tokens=600, generated_tokens=32, gpu=True, cpu_expert_layers=tuning.best.n_cpu_moe,
        expert_cache_mib=tuning.best.cache_mib or 0,
    )
    assert found[0].decode_error == pytest.approx(1.0, abs=1e-5)
    assert found[0].prompt_error == pytest.approx(1.0, abs=1e-5)


def test_predicted_memory_is_next_to_what_was_reported(tmp_path: Path) -> None:
    tuning = of_file(tuned("none"), tmp_path / "model.gguf")
    first = next(iter(check(tuning, FakeEngine(tuning))))
    shape = load_model("deepseek-v2-lite@q4_k_m:4")
    assert first.memory["model"] == (shape.routed_bytes + shape.non_expert_bytes, 10)
    assert first.memory["KV"] == (tuning.best.memory.kv_bytes, 20)
    assert set(first.memory) == {"model", "KV"}


def test_with_a_gpu_the_hosts_buffers_count_too(tmp_path: Path) -> None:
    """What llama.cpp reports is added up over all devices: so is what is predicted, the host's table of embeddings and
    inputs included."""
    tuning = of_file(tuned(), tmp_path / "model.gguf")
    reported = {"model": 10, "KV": 20, "compute": 30}
    first = next(iter(check(tuning, lambda path, settings: TimedRun(1, (1,), reported))))
    best, shape = tuning.best, load_model("deepseek-v2-lite@q4_k_m:4")
    loaded = load_memory(shape, LoadSetting(
        context_tokens=2048, ubatch_tokens=best.piece_tokens, cpu_layers=best.host_layers,
    ))
    assert min(loaded.host_weights_bytes, loaded.host_compute_bytes) > 0
    assert first.memory == {
        "model": (shape.routed_bytes + shape.non_expert_bytes, 10), "KV": (loaded.kv_bytes, 20),
        "compute": (loaded.compute_bytes + loaded.host_compute_bytes, 30),
    }


def test_a_setting_that_is_refused_does_not_lose_the_others(tmp_path: Path) -> None:
    tuning = of_file(tuned(), tmp_path / "model.gguf")
    engine = FakeEngine(tuning)

    def first_refused(path: Path, settings: RunSettings) -> TimedRun:
        if not engine.ran:
            engine.ran.append(settings)
            raise RefusedError("no room for 1 GiB")
        return engine(path, settings)

    found = list(check(tuning, first_refused))
    assert found[0] == Checked("best", tuning.best, refused="no room for 1 GiB")
    assert (found[0].decode_error, found[0].prompt_error) == (None, None)
    assert [one.refused for one in found[1:]] == [None] * (len(found) - 1)
    assert all(one.tpot_ms for one in found[1:])
    *_, shown, _, _, refused = check_page(found)
    assert isinstance(shown, Table)
    assert str(next(iter(shown.columns[3].cells))) == "-"
    assert refused == "best was refused: no room for 1 GiB"


def test_a_prompt_that_takes_longer_than_its_parts_say_has_a_cause() -> None:
    """All is on the GPU, and tokens are as fast as predicted: products are slower, and nothing else."""
    tuning = tuned()
    best = tuning.best
    assert best.n_cpu_moe == 0
    causes = slow_causes_of(tuning, Checked("best", best, best.tpot_ms, 1.6 * best.ttft_ms))
    assert [cause.part for cause in causes] == [SlowPart.GPU_PRODUCTS]
    assert slow_causes_of(tuning, Checked("best", best, best.tpot_ms, best.ttft_ms)) == []
    assert slow_causes_of(tuning, Checked("best", best, refused="no room")) == []


def test_a_model_without_a_file_is_refused() -> None:
    with pytest.raises(FitError, match="--check runs the model: expected a GGUF file, got 'deepseek-v2-lite:4'"):
        next(check(tuned()))


def test_an_engine_that_was_measured_is_llama_cpp(tmp_path: Path) -> None:
    measured = str(ROOT / "docs/validation/llama.cpp/engine.yaml")
    assert file_to_run(of_file(tuned("none"), tmp_path / "m.gguf", engine=measured).question) == tmp_path / "m.gguf"
    with pytest.raises(FitError, match=r"one sequence in llama\.cpp, got 1 in 'ik_llama\.cpp'"):
        file_to_run(of_file(tuned("none"), tmp_path / "m.gguf", engine="ik_llama.cpp").question)


def test_a_file_that_is_to_be_read_whole_is_not_mapped(tmp_path: Path) -> None:
    tuning = of_file(tuned(), tmp_path / "model.gguf")
    both = (tuning.best, replace(tuning.best, pinned=not tuning.best.pinned))
    engine = FakeEngine(tuning)
    list(check(replace(tuning, leading=both, usual=None), engine))
    assert [ran.mapped for ran in engine.ran] == [not one.pinned for one in both]


def test_several_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FitError, match=r"one sequence in llama\.cpp, got 4"):
        next(check(of_file(tuned(), tmp_path / "model.gguf", batch=4)))


def test_buffers_are_added_up_by_kind_without_second_copies_of_weights() -> None:
    mib = {kind: size / 2**20 for kind, size in reported_bytes(LOG).items()}
    assert mib == pytest.approx({"model": 1142.91, "KV": 18.5, "compute": 63.71, "output": 0.19}, abs=1e-5)
