"""The best command line: what it says, that it fits, that nothing better was tried, and what it is compared with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import write_hardware
from tests.kit.commands import ROOT
from tests.kit.hand_measured import toy_machine
from trilane.engines.question import FitError, Question, engine_of
from trilane.engines.tune.search import AS_FAST, SettingSearch, searched
from trilane.engines.tune.settings import GOALS, Setting, TuneQuestion, choices, may_be_pinned
from trilane.engines.tune.tune import Tuning, single_tensors_ms, tune

QWEN: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": 32,
}
CPU_ONLY: dict[str, Any] = {"model": "deepseek-v2-lite", "gpu": "none", "ram": "ddr4-3200", "cores": 4}
SMALL: dict[str, Any] = {"model": "deepseek-v2-lite:4", "gpu": "rtx-3060", "ram": "ddr4-3200"}


def question(goal: Any = "both", keep_free_gb: float = 0.0, kv: Any = ("f16", "q8_0"), **asked: Any) -> TuneQuestion:
    return TuneQuestion(Question(**asked), goal, kv, keep_free_gb)


@cache
def tuned(goal: Any = "both", keep_free_gb: float = 0.0, **asked: Any) -> Tuning:
    return tune(question(goal, keep_free_gb, **asked))


def search_of(asked: TuneQuestion) -> SettingSearch:
    hardware = asked.hardware
    return searched(asked, hardware, asked.shape_with("f16"), engine_of(asked.fit, hardware))


@cache
def searched_for(goal: Any) -> SettingSearch:
    return search_of(question(goal, **QWEN))


# --- the line ---------------------------------------------------------------------------------------------------------


def test_the_line_has_every_argument_that_the_answer_rests_on() -> None:
    assert tuned(**QWEN, window=16384).best.command == (
        "llama-server -m qwen3-30b-a3b-q4_k_m.gguf -ngl 99 --n-cpu-moe 28 -c 16384 -fa on -b 2048 -ub 2048 -t 6 "
        "-ctk f16 -ctv f16 --load-mode none -np 1"
    )


def test_without_a_gpu_there_is_no_split_and_the_engines_own_settings_are_kept_where_others_give_little() -> None:
    found = tuned(**CPU_ONLY)
    assert found.best.command == (
        "llama-server -m deepseek-v2-lite-q4_k_m.gguf -ngl 0 -c 4352 -fa on -b 2048 -ub 512 -t 4 "
        "-ctk f16 -ctv f16 -np 1"
    )
    assert found.usual is None
    assert found.cached is None


def test_a_cache_of_experts_is_never_the_answer_and_is_told_with_its_size() -> None:
    for goal in ("decode", "both"):
        found = tuned(goal, **QWEN)
        assert found.best.cache_mib is None
        assert found.cached is not None
        assert f"--moe-cache-mib {found.cached.tuned.cache_mib}" in found.cached.tuned.arguments
        assert found.cached.reason.slower < 0


def test_the_cpu_alone_is_a_setting_next_to_a_card() -> None:
    """A weak card next to a strong CPU: the answer is that of the machine without the card."""
    parts = {"ram": "mrdimm-8800", "cpu": "xeon-6980p", "model": "qwen3.5-35b-a3b", "ram_gb": 256}
    lengths = {"prompt_tokens": 1024, "generated": 512}
    found, none = tuned(gpu="gtx-1060-6gb", **parts, **lengths), tuned(gpu="none", **parts, **lengths)
    assert "-dev none" in found.best.arguments
    assert "-ngl 0" in found.best.arguments
    assert (found.best.cpu_only, found.regime) == (True, "CPU only")
    times = {field: getattr(found.best, field) for field in ("tpot_ms", "ttft_ms", "memory", "piece_tokens")}
    assert times == {field: getattr(none.best, field) for field in times}
    assert "-dev none" not in none.best.arguments


def test_the_cpu_alone_is_refused_where_the_host_has_no_room_for_the_model() -> None:
    asked = {"model": "qwen3.5-35b-a3b", "ram": "mrdimm-8800", "cpu": "xeon-6980p", "gpu": "gtx-1060-6gb"}
    assert not tuned(**asked, ram_gb=20).best.cpu_only


def test_a_model_that_the_card_has_no_room_for_runs_on_the_cpu_alone() -> None:
    found = tuned(**QWEN, keep_free_gb=11)
    assert found.best.cpu_only


def test_memory_that_is_kept_free_is_named_where_it_is_short() -> None:
    with pytest.raises(FitError, match=r"GB are missing\n.*--keep-free-gb 0\n"):
        tune(question(keep_free_gb=11, **{**QWEN, "ram_gb": 20}))


def test_a_window_that_is_too_long_is_told_by_its_option() -> None:
    less = {**QWEN, "ram_gb": 24}  # the CPU alone has no room either
    with pytest.raises(FitError, match=r"KV cache 20.9, .* GB are missing\nit runs with --context \d+") as error:
        tune(question(**less, window=400_000))
    longest = int(str(error.value).partition("--context ")[2].split()[0].rstrip(","))
    assert tune(question(**less, window=longest)).best.kv == "q8_0"


def test_single_tensors_would_save_what_there_is_room_for() -> None:
    """2/3 of a layer's bytes are left, of which the CPU needs 0.6 ms a token: 0.4 of 20 ms."""
    found = tuned(**QWEN).best
    layers, missing = found.host_layers, found.memory.missing_bytes
    memory = replace(found.memory, host_bytes=3 * layers * 10**8)
    memory = replace(memory, experts_bytes=memory.experts_bytes - 2 * 10**8 - missing)
    best = replace(found, memory=memory, tpot_ms=20.0, decode_ms={"cpu_experts": 0.6 * layers})
    assert single_tensors_ms(best) == pytest.approx(0.4)
    assert single_tensors_ms(replace(best, tpot_ms=50.0)) is None
    assert single_tensors_ms(replace(best, host_layers=0)) is None


def test_several_sequences_have_their_slots() -> None:
    assert "-np 4" in tuned(**SMALL, batch=4, prompt_tokens=64, generated=8).best.arguments


# --- it fits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "model", "window", "keep_free_gb"), [
    ("gtx-1060-6gb", "deepseek-v2-lite", 4352, 0.0), ("rtx-3060", "gpt-oss-20b", 32768, 1.0),
    ("rtx-4080", "qwen3-30b-a3b", 131072, 5.0), ("rtx-4090", "qwen3-30b-a3b", 4352, 0.0),
])
def test_no_setting_that_was_tried_needs_more_memory_than_there_is(
    gpu: str, model: str, window: int, keep_free_gb: float
) -> None:
    asked = question("both", keep_free_gb, model=model, gpu=gpu, ram="ddr5-5600", ram_gb=64, window=window, threads=8)
    found, own = search_of(asked), asked.hardware.gpu
    on_card = [setting for setting in found.costs if setting.gpu]
    assert len(on_card) >= 10
    for one in map(found.bench.tuned, on_card):
        memory = one.memory
        held = (
            memory.every_token_bytes + memory.kv_bytes + memory.compute_bytes + memory.reserve_bytes
            + memory.experts_bytes
        )
        assert held <= own.memory_bytes
        assert memory.reserve_bytes >= keep_free_gb * 1e9
        assert memory.host_bytes + 4e9 <= 64 * 2**30


def test_memory_that_is_kept_free_has_no_experts() -> None:
    less, more = searched_for("both"), search_of(question(keep_free_gb=2.0, **QWEN))
    experts_bytes = [found.bench.tuned(found.best).memory.experts_bytes for found in (less, more)]
    assert experts_bytes[0] - experts_bytes[1] > 1.5e9


def test_a_model_without_room_is_refused_with_the_missing_memory() -> None:
    ways = "it runs with --ram-gb 192, or with --disk nvme-4x4"
    with pytest.raises(FitError, match=rf"qwen3-235b.*needs .* of host memory .* missing\n{ways}\n"):
        tune(question(model="qwen3-235b-a22b", gpu="rtx-3060", ram="ddr5-5600", ram_gb=32))


def test_no_refusal_advises_more_memory_than_the_board_takes() -> None:
    """Four modules of DDR4 have 128 GiB, with room for fewer bits."""
    with pytest.raises(FitError, match=r"missing\nit runs with --weights \w+ --ram-gb 128, or with --disk nvme-4x4\n"):
        tune(question(model="qwen3-235b-a22b", gpu="rtx-3060", ram="ddr4-3200", ram_gb=32))


# --- it is the best ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("asked", [SMALL, CPU_ONLY], ids=["a GPU", "none"])
def test_times_of_the_search_are_those_of_the_answer(asked: dict[str, Any], goal: Any) -> None:
    found = search_of(question(goal, **asked))
    for setting, ms in found.costs.items():
        assert found.bench.tuned(setting).cost(goal) == pytest.approx(ms, rel=1e-6)


def test_as_good_as_the_best_is_the_setting_nearest_to_the_engines_own() -> None:
    done = search_of(question(**SMALL, ubatch=512, threads=8))
    own, read = Setting("f16", 512, 8), Setting("f16", 512, 8, pinned=True)
    assert replace(done, costs={own: 100.9, read: 100.0}).best == own
    assert replace(done, costs={own: 101.1, read: 100.0}).best == read
    usual, odd = own._replace(piece_tokens=1024), own._replace(piece_tokens=1000)
    assert replace(done, costs={odd: 100.0, usual: 100.9}).best == usual


@pytest.mark.parametrize(
    ("q8_0_ms", "chosen"), [(100 / 1.05 - 0.1, "q8_0"), (100 / 1.05 + 0.1, "f16")], ids=["enough", "too little"]
)
def test_a_kv_cache_of_fewer_bits_must_save_5_percent(q8_0_ms: float, chosen: str) -> None:
    done = search_of(question(**SMALL, ubatch=512, threads=8))
    costs = {Setting("f16", 512, 8): 100.0, Setting("q8_0", 512, 8): q8_0_ms}
    assert replace(done, costs=costs).best.kv == chosen


def test_fewer_bits_are_taken_where_more_have_no_room() -> None:
    """96 KiB a token of Qwen3-30B: 6.4 GB of cache in 16 bits do not go with the rest into 8 GB, half of it does."""
    found = tuned(**{**QWEN, "gpu": "rtx-3050"}, window=65_536)
    assert (found.best.kv, found.best.cpu_only) == ("q8_0", False)
    assert found.other_kv is not None
    assert found.other_kv.tuned.cpu_only


def test_the_best_setting_with_another_kv_cache_is_named_though_it_is_a_little_faster() -> None:
    found = tuned(**QWEN, window=16_384)
    assert found.best.kv == "f16"
    assert found.other_kv is not None
    assert found.other_kv.tuned.kv == "q8_0"
    assert -0.05 < found.other_kv.reason.slower < 0


def test_experts_in_pinned_memory_reach_the_gpu_sooner_and_decode_alike() -> None:
    tried = search_of(question(**QWEN))
    mapped = Setting("f16", 4096, 6)
    before, after = (tried.bench.tuned(mapped._replace(pinned=pinned)) for pinned in (False, True))
    assert after.prompt_ms["copies"] < before.prompt_ms["copies"]
    assert {**after.prompt_ms, "copies": 0} == {**before.prompt_ms, "copies": 0}
    assert (after.decode_ms, after.memory) == (before.decode_ms, before.memory)
    assert {*after.arguments} - {*before.arguments} == {"--load-mode none"}


@pytest.mark.parametrize(("asked", "engine"), [
    (CPU_ONLY, "llama.cpp"), (QWEN, "ik_llama.cpp"), (QWEN, "ktransformers"), (QWEN, "llama.cpp-2025"),
])
def test_a_file_is_read_whole_where_copies_come_from_a_mapped_one_and_the_option_is_known(
    asked: dict[str, Any], engine: str
) -> None:
    assert may_be_pinned(question(**QWEN).hardware, load_engine("llama.cpp"))
    assert not may_be_pinned(question(**asked).hardware, load_engine(engine))


def test_measured_kernels_know_the_times_of_16_bits_alone() -> None:
    measured = load_engine(str(ROOT / "docs/validation/llama.cpp/engine.yaml"))
    asked, other = (question(**CPU_ONLY, kv=kv) for kv in (("f16", "q8_0"), ("q8_0",)))
    assert choices(asked, asked.shape_with("f16"), asked.hardware, measured).kv == ("f16",)
    with pytest.raises(FitError, match="expected f16, with which the engine was measured, got q8_0"):
        choices(other, other.shape_with("q8_0"), other.hardware, measured)


def test_the_same_question_has_the_same_answer() -> None:
    one, other = (tune(question(**SMALL, prompt_tokens=600, generated=16)).to_dict() for _ in range(2))
    assert one == other


def test_each_goal_has_the_least_of_its_own_time() -> None:
    """But for 1 %, within which the engine's own are kept."""
    searches = {goal: searched_for(goal) for goal in GOALS}
    best = {goal: found.bench.tuned(found.best) for goal, found in searches.items()}
    for goal in GOALS:
        assert best[goal].cost(goal) <= min(one.cost(goal) for one in best.values()) * 1.01
    assert best["prompt"].ttft_ms < best["decode"].ttft_ms


def test_what_the_question_fixes_is_not_chosen() -> None:
    asked = question(**QWEN, threads=3, ubatch=1024, kv=("q4_0",))
    found = choices(asked, asked.shape_with("q4_0"), asked.hardware, engine_of(asked.fit, asked.hardware))
    assert (found.kv, found.piece_tokens, found.threads) == (("q4_0",), (1024,), (3,))


@pytest.mark.parametrize(("asked", "message"), [
    ({**CPU_ONLY, "engine": "ktransformers"}, "ktransformers: expected a machine with a GPU, got none"),
    ({**CPU_ONLY, "engine": "llama.cpp-vulkan"}, "with a GPU, got none.*; choose llama.cpp"),
    ({**SMALL, "cores": 6, "threads": 13}, "expected at most 12, 2 on each of the 6"),
    ({**SMALL, "n_cpu_moe": 2, "gpu": "gb10", "ram": None}, "all of gb10 is in one memory"),
])
def test_a_setting_that_the_machine_has_no_use_for_is_refused_as_by_fit(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FitError, match=message):
        tune(question(**asked))


@pytest.mark.parametrize("kv", [("q8_0", "f16"), ("f16", "q4_0", "q8_0", "f16")], ids=["turned", "one twice"])
def test_the_order_of_kv_formats_does_not_matter(kv: Any) -> None:
    asked = question(**SMALL, kv=kv)
    assert asked.kv == tuple(name for name in ("f16", "q8_0", "q4_0") if name in kv)
    assert asked == question(**SMALL, kv=tuple(reversed(kv)))
    assert search_of(asked).space.usual.kv == "f16"


def test_heads_that_are_no_whole_blocks_keep_16_bits() -> None:
    asked = question(**SMALL)
    shape = replace(asked.shape_with("f16"), head_dim=24)
    assert choices(asked, shape, asked.hardware, engine_of(asked.fit, asked.hardware)).kv == ("f16",)
    with pytest.raises(FitError, match="expected f16 for heads of 24"):
        choices(replace(asked, kv=("q8_0",)), shape, asked.hardware, engine_of(asked.fit, asked.hardware))


# --- what it is compared with -----------------------------------------------------------------------------------------


def test_the_runner_up_is_slower_and_differs_in_more_than_its_threads() -> None:
    found = tuned(**QWEN)
    assert found.runner_up is not None
    other = found.runner_up.tuned
    assert found.runner_up.reason.slower > AS_FAST
    same = replace(other, threads=found.best.threads)
    assert (same.kv, same.piece_tokens, same.pinned) != (found.best.kv, found.best.piece_tokens, found.best.pinned)


def test_the_engines_own_settings_lose_by_their_small_pieces() -> None:
    usual = tuned(**QWEN).usual
    assert usual is not None
    assert (usual.tuned.piece_tokens, usual.tuned.kv) == (512, "f16")
    assert (usual.reason.phase, usual.reason.part) == ("prompt", "copies")
    assert usual.reason.slower > 0.2


def test_other_engines_have_lines_of_their_own() -> None:
    lines = {rival.tuned.engine: rival.tuned.arguments for rival in tuned(**QWEN).others}
    assert set(lines) == {"ik_llama.cpp", "ktransformers", "llama.cpp-vulkan"}
    assert lines["ktransformers"][0] == "python -m sglang.launch_server"
    assert not any("moe-cache" in word for words in lines.values() for word in words)


def test_a_profile_is_refused(tmp_path: Path) -> None:
    write_hardware(toy_machine(), tmp_path / "mine.yaml")
    with pytest.raises(FitError, match=r"is a profile of one engine's times.*expected parts or a preset"):
        tune(question(model="deepseek-v2-lite", machine=str(tmp_path / "mine.yaml")))


KNOWN = {  # ggml-org/llama.cpp tools/server/README.md at 00dc805
    "-m": "--model", "-ngl": "--n-gpu-layers", "--n-cpu-moe": "--n-cpu-moe", "--moe-cache-mib": "--moe-cache-mib",
    "-c": "--ctx-size", "-fa": "--flash-attn", "-b": "--batch-size", "-ub": "--ubatch-size", "-t": "--threads",
    "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-np": "--parallel", "--load-mode": "--load-mode",
    "-dev": "--device", "--spec-type": "--spec-type", "--spec-draft-n-max": "--spec-draft-n-max",
}


def printed() -> set[str]:
    """The options of all lines that a question leads to, on a card, with a cache of experts and with drafts, and on the
    CPU alone."""
    asked = Question(
        model="qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=2000, generated=16, threads=8
    )
    found = tune(TuneQuestion(asked, "prompt", ("f16", "q8_0"), draft_acceptance=0.95))
    assert found.drafts is not None
    alone = tuned(**QWEN, keep_free_gb=11)
    rivals = (rival.tuned for rival in (found.usual, found.runner_up, found.cached) if rival)
    lines = [found.best.command, found.drafts.command or "", alone.best.command, *(one.command for one in rivals)]
    return {word for line in lines for word in line.split() if word.startswith("-")}


def test_every_option_is_known() -> None:
    assert printed() == set(KNOWN)


@pytest.mark.llama
def test_every_option_is_in_the_library() -> None:
    """Its long name; short ones may be parts of other texts."""
    library = pytest.importorskip("xllamacpp.xllamacpp")
    with open(library.__file__, "rb") as file:
        held = file.read()
    missing = [name for name in KNOWN.values() if f"{name}\0".encode() not in held]
    assert missing == []
