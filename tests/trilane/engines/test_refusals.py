"""Refusals: which memory is short, what works, and the speed then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.machine.hardware import load_hardware
from tests.kit.depth import thinned
from traces.models.catalogue import load_model
from trilane.engines.memory import HOST_RESERVE_BYTES, need_of, surely_runs
from trilane.engines.question import Question
from trilane.engines.refusals import FULL, MOST_WAYS, check_fits, missing, roomier
from trilane.engines.shortage import Missing, NoRoomError, Shortage, Way
from trilane.engines.speed import EngineSpeed, engine_answer, where_it_fits
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune
from trilane.fit.fit import fit

OWNER: dict[str, Any] = {"gpu": "rtx-3060", "ram": "ddr4-3200", "ram_gb": 32}


def refused(question: Question, **numbers: Any) -> Missing:
    """What policies lack, on a machine with other ``numbers``."""
    with pytest.raises(NoRoomError) as error:
        check_fits(question.model_shape, load_hardware(question.hardware, numbers), question)
    return error.value.missing


def answered(question: Question) -> EngineSpeed:
    hardware = load_hardware(question.hardware)
    return EngineSpeed.asked(question, question.model_shape, hardware)


def test_a_refusal_has_three_lines() -> None:
    short = Shortage("host", "the host", 32 * 2**30, {"experts": 52_000_000_000, "the system": 4_000_000_000})
    found = Missing("gpt in llama.cpp", (short,), (Way({"ram_gb": 64}, 17.26), Way({"weights": "q2_k"}, 8.26)))
    assert found.text.split("\n") == [
        "gpt in llama.cpp needs 56.0 GB of host memory (experts 52.0, the system 4.0), and the host has 32 GiB, 34.4 "
        "GB: 21.6 GB are missing",
        "it runs with --ram-gb 64, or with --weights q2_k",
        "tokens/s then, about: 17 with --ram-gb 64, 8.3 with --weights q2_k",
    ]
    nothing = "\nno smaller weights, shorter prompt or memory that the board takes help"
    assert replace(found, ways=()).text.endswith(nothing)
    assert replace(found, ways=None).text.count("\n") == 0


def test_a_refusal_never_says_that_nothing_is_missing() -> None:
    """By a byte, "0.0 GB are missing" was said."""
    short = Shortage("host", "the host", 32 * 2**30, {"experts": 32 * 2**30 + 1})
    assert short.sentence.endswith("34.4 GB: 0.1 GB are missing")


def test_ways_are_options() -> None:
    changes = {"model": "qwen@q2_k", "prompt_tokens": 5, "window": 7, "n_cpu_moe": 3, "pcie": None}
    assert Way(changes, None).options == "qwen@q2_k --prompt 5 --context 7 --n-cpu-moe 3"


def test_nothing_is_missing_where_it_runs() -> None:
    found = missing(Question("qwen3-30b-a3b", **OWNER))
    assert (found.short, found.ways) == ((), None)


@pytest.mark.parametrize("asked", [
    {"model": "gpt-oss-120b", **OWNER}, {"model": "qwen3-next-80b-a3b", **OWNER},
    {"model": "qwen3-235b-a22b@q2_k", **OWNER, "ram_gb": 8}, {"model": "gpt-oss-120b", "gpu": "gb10", "ram_gb": 64},
    {"model": "deepseek-v3", "gpu": "none", "ram": "ddr4-3200-ecc", "ram_gb": 64},
    {"model": "qwen3-30b-a3b", **OWNER, "window": 400_000}, {"model": "qwen3-30b-a3b", **OWNER, "n_cpu_moe": 2},
    {"model": "qwen3-30b-a3b", **OWNER, "batch": 64}, {"model": "llama-4-scout", **OWNER, "gpu": "rtx-4060"},
    {"model": "kimi-k2", **OWNER, "gpu": "gtx-1650-super", "ram": "ddr4-3200-ecc"},
], ids=lambda asked: str(asked["model"]))
def test_every_way_works_at_the_speed_that_is_told(asked: dict[str, Any]) -> None:
    question = Question(**asked)
    found = missing(question)
    assert found.short
    assert found.ways
    assert len(found.ways) <= MOST_WAYS
    for way in found.ways:
        then = where_it_fits(answered(replace(question, **way.changes)))
        assert then.has_room
        assert "ram_gb" not in way.changes or then.splitter.memory(then.split).fullest <= FULL
        assert way.tokens_per_s == pytest.approx(1e9 / then.decode.total_ns)


def test_the_owner_of_32_gib_is_told_of_64_and_the_speed() -> None:
    found = missing(Question("gpt-oss-120b", **OWNER))
    assert [one.memory for one in found.short] == ["host"]
    assert [way.changes for way in found.ways or ()] == [{"ram_gb": 64}, {"disk": "nvme-4x4"}]
    assert "the host has 32 GiB, 34.4 GB" in found.text


def test_no_way_changes_more_than_it_must() -> None:
    """The largest smaller weights, the least memory, the fewest layers, the longest window."""
    ways = {next(iter(way.changes)): way.changes for way in missing(Question("qwen3-next-80b-a3b", **OWNER)).ways or ()}
    assert ways == {"ram_gb": {"ram_gb": 48}, "weights": {"weights": "ud-iq4_xs"}, "disk": {"disk": "nvme-4x4"}}
    assert not answered(Question("qwen3-next-80b-a3b", weights="iq4_xs", **OWNER)).has_room
    named = Question("qwen3-30b-a3b", **OWNER, n_cpu_moe=2)
    fewest = next(iter(missing(named).ways or ())).changes["n_cpu_moe"]
    assert isinstance(fewest, int)
    assert not answered(replace(named, n_cpu_moe=fewest - 1)).has_room


def test_no_layer_on_the_cpu_may_become_some() -> None:
    none, one = (missing(Question("qwen3-30b-a3b", **OWNER, n_cpu_moe=layers)).ways or () for layers in (0, 1))
    assert none[0] == one[0]
    assert none[0].changes.keys() == {"n_cpu_moe"}


def test_both_memories_that_are_short_are_told() -> None:
    """Little of either: the smaller shortage must not hide the larger."""
    found = missing(Question("llama-4-scout", gpu="rtx-4060", ram="ddr5-5600", ram_gb=32))
    assert [one.memory for one in found.short] == ["GPU", "host"]
    assert {"weights": "iq4_xs", "ram_gb": 64} in [way.changes for way in found.ways or ()]


def test_no_more_than_three_ways_are_told() -> None:
    """The CPU alone with more memory, which comes last, would be the fourth."""
    asked = Question("llama-4-scout", **{**OWNER, "gpu": "rtx-4060"})
    assert missing(replace(asked, gpu="none", ram_gb=96)).short == ()
    ways = [way.changes.keys() for way in missing(asked).ways or ()]
    assert ways == [{"weights"}, {"weights", "ram_gb"}, {"prompt_tokens", "ram_gb"}]


def test_settings_that_may_be_chosen_are_tried_with_the_least() -> None:
    question = Question("qwen3-30b-a3b", **OWNER, window=160_000)
    assert missing(question).short
    assert not missing(question, {"kv": "q8_0", "ubatch": 256}).short


def test_memory_that_is_kept_free_is_a_way() -> None:
    found = missing(Question("qwen3-30b-a3b", **OWNER), keep_free_bytes=11 * 10**9)
    assert (found.ways or ())[-1].options == "--keep-free-gb 0"


@pytest.mark.parametrize(("asked", "own", "first"), [
    ({"model": "qwen3-next-80b-a3b", "weights": "q3_k_m", **OWNER, "ubatch": 4096}, 0.995, "--ram-gb 48"),
    ({"model": "qwen3-235b-a22b", "gpu": "h100-sxm", "ram": "ddr5-5600"}, 0.971, "--n-cpu-moe 43"),
    ({"model": "qwen3-30b-a3b", **OWNER}, 0.858, None),
], ids=["the host is nearly full", "the GPU is", "neither is"])
def test_a_memory_that_is_nearly_full_is_told_with_what_leaves_room(
    asked: dict[str, Any], own: float, first: str | None
) -> None:
    speed = answered(Question(**asked))
    assert speed.splitter.memory(speed.split).fullest == pytest.approx(own, abs=0.005)
    ways = roomier(speed)
    assert (ways[0].options if ways else None) == first
    for way in ways:
        then = answered(replace(speed.question, **way.changes))
        assert then.splitter.memory(then.split).fullest <= FULL


# --- policies ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_the_gpu_cannot_hold_is_refused_with_the_longest_that_it_can() -> None:
    asked = Question("qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=184_000)
    found = refused(asked)
    assert found.short[0].missing_bytes == pytest.approx(7.7e9, rel=0.01)
    longest = advised(found)
    shape, hardware = asked.model_shape, load_hardware(asked.hardware)
    assert surely_runs(shape, hardware, replace(asked, prompt_tokens=longest))
    assert not surely_runs(shape, hardware, replace(asked, prompt_tokens=longest + 256))


def advised(found: Missing) -> int:
    """The prompt that a refusal advises."""
    return next(int(way.changes["prompt_tokens"] or 0) for way in found.ways or () if "prompt_tokens" in way.changes)


@thinned(2)
@pytest.mark.parametrize("ram_gb", [64, None])
def test_an_advised_prompt_runs(ram_gb: int | None) -> None:
    """Experts are staged, and slots are whole: what leaves no room for that is not advised."""
    asked = Question("llama-4-scout", "rtx-4090", "ddr5-5600", ram_gb=ram_gb, generated=4, prompt_tokens=800_000)
    found = fit(replace(asked, prompt_tokens=advised(refused(asked)))).policies
    assert found is not None
    assert found.best.tpot_ms > 0


def test_weights_that_the_host_cannot_hold_are_refused_with_the_largest_that_it_can() -> None:
    asked = Question("qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", weights="bf16", ram_gb=16)
    found = refused(asked)
    assert [way.options for way in found.ways or ()] == ["--ram-gb 64", "--weights ud-q5_k_xl"]
    check_fits(load_model("qwen3-30b-a3b@ud-q5_k_xl"), load_hardware(asked.hardware), asked)


def test_one_memory_holds_all_experts() -> None:
    asked = Question("gpt-oss-120b", gpu="gb10", ram_gb=64)
    shape, hardware = asked.model_shape, load_hardware(asked.hardware)
    need = need_of(shape, hardware, 1, asked.tokens)
    assert need.fixed > shape.routed_bytes + shape.non_expert_bytes
    assert need.host == HOST_RESERVE_BYTES
    found = refused(asked)
    assert [one.memory for one in found.short] == ["only"]
    assert found.short[0].parts["experts"] == shape.routed_bytes


MAC = Question("gpt-oss-120b", gpu="apple-m4-max", ram_gb=64, prompt_tokens=1000)


def test_the_cpu_alone_answers_where_the_system_keeps_too_much_from_the_gpu() -> None:
    own = MAC.load_machine()
    answer = engine_answer(MAC, MAC.model_shape, own)
    assert answer.cpu_only
    assert answer.command.endswith("-dev none")
    smaller = replace(MAC, ram_gb=48)  # 60.9 GB of experts
    with pytest.raises(NoRoomError):
        engine_answer(smaller, smaller.model_shape, smaller.load_machine())
    larger = replace(MAC, ram_gb=96)
    assert not engine_answer(larger, larger.model_shape, larger.load_machine()).cpu_only


def test_ways_out_of_a_nearly_full_memory_keep_to_the_cpu_alone_of_one_memory() -> None:
    done = tune(TuneQuestion(MAC))
    assert done.best.cpu_only
    assert done.best.memory.fullest > FULL
    [way] = done.roomier
    assert way.changes == {"ram_gb": 96}
    assert way.tokens_per_s == pytest.approx(1000 / done.best.tpot_ms, rel=0.1)
