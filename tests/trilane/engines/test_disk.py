"""Experts that are read from a disk: hand-worked waits, and laws of questions with a disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.disks import Disk, disk
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced
from traces.models.catalogue import load_model
from trilane.engines import disk as reads_of_disk
from trilane.engines.disk import FAULT_BYTES, DiskReads, hidden_from_gbps
from trilane.engines.hit_curve import HitCurve
from trilane.engines.question import FitError, Question
from trilane.engines.shortage import NoRoomError
from trilane.engines.speed import EngineSpeed, engine_answer
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune

LARGE: dict[str, Any] = {"model": "gpt-oss-120b", "gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600"}
ASKED = Question(**LARGE, prompt_tokens=600, generated=16, ram_gb=32, disk="nvme-4x4")
SHAPE = load_model("qwen3-30b-a3b")  # 48 layers of 128 experts, 8 chosen, three matrices each


def speed_of(question: Question) -> EngineSpeed:
    return EngineSpeed.asked(question, question.model_shape, question.load_machine())


def reads(monkeypatch: pytest.MonkeyPatch, *, room: float, first: float = 0.0, **question: Any) -> DiskReads:
    """Of a disk that reads 1 GB/s, whatever is asked, through room for a share of the model's experts."""
    numbers = (Sourced(value, "a test", "high") for value in (0.0, 1e9, 1e9, 1.0))
    monkeypatch.setattr(reads_of_disk, "hit_curve", lambda asked: HitCurve((room,), (0.5,), first))
    return DiskReads(SHAPE, Disk("a disk", *numbers), round(room * SHAPE.routed_bytes), replace(ASKED, **question))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_the_misses_of_its_experts_and_for_what_is_read_around_them(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = SHAPE.routed_bytes * 8 / 128
    around = 1 + FAULT_BYTES / 2 / (SHAPE.expert_bytes_by_layer[0] / 3)
    assert float(reads(monkeypatch, room=0.25).decode_ns(48, 4)) == pytest.approx((1 - 0.5) * chosen * around)


def test_an_expert_that_was_not_used_before_is_there_as_often_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    none, some = (reads(monkeypatch, room=0.25, first=first).decode_ns(48, 4) for first in (0.0, 0.4))
    assert float(some) == pytest.approx(float(none) * (0.5 - 0.25 * 0.4) / 0.5)


def test_a_prompts_copies_of_what_is_missing_hide_as_much_reading_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    one = reads(monkeypatch, room=0.25)
    all_ns = 2 * SHAPE.routed_bytes  # at the disk's rate: two pieces, each of which uses every expert
    assert float(one.prompt_ns(48, 4, 8192, 4096, 0.0)) == pytest.approx(0.75 * all_ns)
    assert float(one.prompt_ns(48, 4, 8192, 4096, 0.8 * all_ns)) == pytest.approx(0.75 * 0.2 * all_ns)
    assert float(one.prompt_ns(48, 4, 8192, 4096, all_ns)) == 0


def test_layers_of_the_gpu_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one = reads(monkeypatch, room=0.25)
    assert one.decode_ns(np.array([0, 12]), 4).tolist() == [0, 0]  # a quarter of the layers has room
    assert float(one.decode_ns(24, 4)) < float(one.decode_ns(48, 4))


def test_windows_reads_one_page_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    linux, windows = (reads(monkeypatch, room=0.25, system=system) for system in ("linux", "windows"))
    slow = linux.disk._replace(latency_ns=Sourced(1e5, "a test", "high"))
    assert replace(windows, disk=slow).decode_ns(48, 4) > replace(linux, disk=slow).decode_ns(48, 4)


# --- laws -------------------------------------------------------------------------------------------------------------


@given(gib=st.sampled_from([64, 96, 128]), kind=st.sampled_from(["sata-ssd", "nvme-5x4"]))
def test_with_room_in_memory_a_disk_changes_nothing(gib: int, kind: str) -> None:
    asked = replace(ASKED, ram_gb=gib, disk=None)
    with_disk = replace(asked, disk=kind)
    answers = [engine_answer(one, one.model_shape, one.load_machine()) for one in (asked, with_disk)]
    assert answers[0] == answers[1]


def test_more_memory_and_a_faster_disk_are_no_slower() -> None:
    by_memory = [speed_of(replace(ASKED, ram_gb=gib)).answer_ns for gib in (16, 24, 32, 48, 64)]
    by_disk = [speed_of(replace(ASKED, disk=kind)).answer_ns for kind in ("sata-ssd", "nvme-3x4", "nvme-4x4", "50")]
    assert by_memory == sorted(by_memory, reverse=True)
    assert by_disk == sorted(by_disk, reverse=True)


def test_a_fast_enough_disk_is_as_good_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Disk("", *(Sourced(value, "a test", "high") for value in (0.0, 1e18, 1e18, 1.0)))
    monkeypatch.setattr("trilane.engines.speed.disk", lambda name: quick)
    without = speed_of(replace(ASKED, ram_gb=None, disk=None))
    assert speed_of(ASKED).answer_ns == pytest.approx(without.answer_ns, rel=1e-6)


def test_without_a_disk_it_is_refused_and_the_refusal_names_one() -> None:
    with pytest.raises(NoRoomError, match=r"--disk nvme-4x4"):
        tune(TuneQuestion(replace(ASKED, disk=None)))


def test_memory_for_less_than_what_every_token_needs_is_refused_with_a_disk_too() -> None:
    with pytest.raises(FitError, match=r"host memory"):
        speed_of(replace(ASKED, ram_gb=4)).decode  # noqa: B018


def test_an_engine_that_loads_its_file_reads_no_disk() -> None:
    with pytest.raises(FitError, match=r"host memory"):
        speed_of(replace(ASKED, model="qwen3-235b-a22b", engine="ktransformers")).decode  # noqa: B018


@pytest.mark.parametrize(("engine", "mapped", "in_memory"), [
    ("llama.cpp", "--no-repack", ""), ("ik_llama.cpp", "", "-rtr"),
])
def test_a_file_that_is_mapped_keeps_its_order_of_rows(engine: str, mapped: str, in_memory: str) -> None:
    """With another, all weights would be copied, for which there is no room."""
    alone = replace(ASKED, gpu="none", engine=engine)
    for gib, own in ((32, mapped), (96, in_memory)):
        words = speed_of(replace(alone, ram_gb=gib)).words
        assert [word for word in words if word in {"--no-repack", "-rtr"}] == [own] * bool(own)


def test_one_memory_of_gpu_and_host_reads_no_disk() -> None:
    with pytest.raises(FitError, match=r"memory"):
        speed_of(Question("deepseek-v3", gpu="gb10", disk="nvme-4x4")).decode  # noqa: B018


def test_the_best_setting_maps_its_file_and_has_the_disk_among_its_parts() -> None:
    tuned = tune(TuneQuestion(ASKED))
    assert not tuned.best.pinned
    assert tuned.cached is None
    assert tuned.best.decode_ms["disk"] > 0
    assert tuned.error is None
    assert tuned.best.memory.disk_bytes > 15e9


def test_the_limit_is_the_size_of_the_memory_where_more_of_it_gains_most() -> None:
    for asked in (replace(ASKED, disk="sata-ssd"), replace(ASKED, gpu="none", ram_gb=48, disk="sata-ssd")):
        answer = engine_answer(asked, asked.model_shape, asked.load_machine())
        gains = {one.part: one.tpot for one in answer.gains}
        more = speed_of(replace(asked, ram_gb=round(1.25 * (asked.ram_gb or 0)))).decode
        assert gains["host memory"] == pytest.approx(answer.tpot_ms * 1e6 / more.total_ns - 1, rel=1e-6)
        assert answer.limit == "host memory" == max(gains, key=lambda part: gains[part])


@pytest.mark.parametrize("batch", [2, 8])
def test_a_step_of_several_sequences_reads_no_less_than_one_and_no_more_than_each_by_itself(batch: int) -> None:
    """Of the same split: sequences share experts."""
    one, several = (speed_of(replace(ASKED, n_cpu_moe=36, batch=size)).decode.disk_ns for size in (1, batch))
    assert one < several < batch * one


def test_a_disk_of_a_host_whose_memory_is_not_stated_is_refused() -> None:
    with pytest.raises(FitError, match=r"--ram-gb"):
        replace(ASKED, ram_gb=None)


def test_an_unknown_disk_is_refused_where_nothing_would_be_read_from_it() -> None:
    with pytest.raises(HardwareError, match=r"there is no disk 'floppy'"):
        replace(ASKED, ram_gb=96, disk="floppy")


# --- what was measured ------------------------------------------------------------------------------------------------


RUSHUNA = Question(
    "qwen3.8-flash-next", weights="ud-iq3_xxs", gpu="rtx-3060", ram="ddr4-2133", cpu="core-i7-7700", threads=4,
    generated=128, ram_gb=31, disk="nvme-3x4",
)  # Rushuna's record of Qwen3.8-Flash-Next: all its kinds of rows


@pytest.mark.parametrize(("layers", "depth", "measured"), [
    (48, 1, 8.66), (44, 1, 9.22), (41, 1, 9.64), (48, 4096, 10.92), (44, 4096, 11.65), (41, 4096, 12.22),
    (48, 2343, 8.78), (41, 2343, 11.27),
])
def test_speeds_of_one_machine_are_10_to_32_percent_below_the_form(layers: int, depth: int, measured: float) -> None:
    predicted = 1e9 / speed_of(replace(RUSHUNA, n_cpu_moe=layers, prompt_tokens=depth)).decode.total_ns
    assert -0.32 < measured / predicted - 1 < -0.09


@pytest.mark.parametrize(("layers", "least", "most"), [(48, 31.2, 41.1), (41, 41.9, 70.5)])
def test_prompts_of_one_machine_lie_around_the_form(layers: int, least: float, most: float) -> None:
    """Three repeats each, of which the first still fills the page cache."""
    predicted = 2343e9 / speed_of(replace(RUSHUNA, n_cpu_moe=layers, prompt_tokens=2343)).prompt.total_ns
    assert -0.25 < least / predicted - 1 < most / predicted - 1 < 0.45


@pytest.mark.parametrize(("layers", "least", "most"), [(48, 0.7, 0.83), (41, 1.8, 2.8)])
def test_mib_a_token_against_those_that_were_counted(layers: int, least: float, most: float) -> None:
    """24.7 to 28.2 MiB with all 48 layers on the host, 4.7 to 6.9 with 41."""
    counted = {48: (24.67, 28.15), 41: (4.65, 6.87)}[layers]
    step = speed_of(replace(RUSHUNA, n_cpu_moe=layers, prompt_tokens=2343)).decode
    read_mib = step.disk_ns / 1e9 * disk("nvme-3x4").bytes_per_s(FAULT_BYTES, 4) / 2**20
    assert least < read_mib / counted[1] < read_mib / counted[0] < most


def test_speeds_of_machines_without_a_stated_disk_are_far_below_the_form() -> None:
    """ik_llama.cpp discussion 399, on 16 GB: the kind of disk is not told. hardware-corner.net, on 64 GB: the form has
    room for all experts, and nothing explains the speed."""
    small = Question(
        "qwen3-30b-a3b", weights="iq4_xs", gpu="gtx-1650-super", ram="ddr4-2666", cpu="ryzen-5-3500", threads=6,
        n_cpu_moe=48, prompt_tokens=512, generated=128, ram_gb=16, engine="llama.cpp-2025",
    )
    by_disk = [1e9 / speed_of(replace(small, disk=kind)).decode.total_ns for kind in ("sata-ssd", "nvme-4x4")]
    assert by_disk[0] / 2.75 > 3.9
    assert by_disk[1] / 2.75 < 6.5
    large = Question(
        "gpt-oss-120b", gpu="rtx-3090", ram="ddr4-3200-ecc", cpu="epyc-7343", threads=16, n_cpu_moe=27,
        prompt_tokens=500, generated=128, ram_gb=64, disk="sata-ssd",
    )
    assert speed_of(large).decode.disk_ns == 0


def test_from_the_rate_that_is_told_a_prompt_no_longer_waits_for_the_disk() -> None:
    answer = engine_answer(ASKED, ASKED.model_shape, ASKED.load_machine())
    missing = answer.memory.disk_bytes / answer.memory.host_bytes
    rate = hidden_from_gbps("nvme-4x4", answer.prompt_ms, missing)
    assert rate is not None
    waits = [speed_of(replace(ASKED, disk=f"{rate * factor:.4f}")).prompt.disk_ns for factor in (0.98, 1.001)]
    assert waits[0] > 0
    assert waits[1] == 0


def test_no_rate_is_told_where_no_copies_could_hide_reads_or_none_are_read() -> None:
    assert hidden_from_gbps("nvme-4x4", {"disk": 5.0}, 1.0) is None
    assert hidden_from_gbps("nvme-4x4", {"copies": 5.0}, 1.0) is None
