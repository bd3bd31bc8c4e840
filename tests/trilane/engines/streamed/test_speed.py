"""Programs that read experts by themselves: a token by hand, and what each setting does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.machine.disks import disk
from sim.machine.sourced import Sourced
from traces.trace import Trace
from trilane.common.units import GB, GIB
from trilane.engines.question import FitError, Question
from trilane.engines.routing import routing_for
from trilane.engines.streamed.kinds import StreamedEngine, streamed_engines
from trilane.engines.streamed.speed import (
    AHEAD_BYTES,
    PIECE_BYTES,
    SYSTEM_BYTES,
    StreamedSetting,
    StreamedSpeed,
    per_layer_curve,
)

COLIBRI = streamed_engines()["colibri"]
DESKTOP = Question(
    "glm-5", gpu="none", ram="ddr5-5600", cpu="ryzen-9-9950x", ram_gb=64, disk="nvme-4x4", prompt_tokens=64,
    generated=32,
)
PLAIN = StreamedSetting(slots_bytes=30 * GB, tokens_per_pass=1, direct=True)


def speed(
    setting: StreamedSetting = PLAIN, engine: StreamedEngine = COLIBRI, asked: Question = DESKTOP
) -> StreamedSpeed:
    return StreamedSpeed(engine, engine.shape(asked.model), asked, setting)


def test_a_token_of_direct_reads_by_hand() -> None:
    """75 layers of 8 of 256 experts of 21.2 MB; 16 cores multiply 2.35 GB/s each; misses are read in pieces."""
    one, expert = speed(), 3 * 6144 * 2048 * 4.5 / 8
    token = 75 * 8 * expert
    missed = 8 * (1 - one.hit_rate)
    rate = disk("nvme-4x4").bytes_per_s(PIECE_BYTES, missed * expert / PIECE_BYTES)
    assert 1 < missed < 8
    assert one.disk_bytes == pytest.approx(token * (1 - one.hit_rate))
    assert one.read_ns == pytest.approx(one.disk_bytes / rate * 1e9)
    assert one.experts_ns == pytest.approx(token / (16 * 2.35))
    assert one.dense_ns == pytest.approx(one.shape.product_bytes / (16 * 2.35))
    hidden = min(one.experts_ns * one.hit_rate, one.read_ns)
    assert one.token_ns == pytest.approx(one.dense_ns + one.experts_ns + one.read_ns - hidden)


def test_a_program_that_does_not_overlap_waits_for_all_of_its_reads() -> None:
    serial = speed(engine=COLIBRI._replace(overlaps=Sourced(False, "test", "low")))
    assert serial.token_ns == pytest.approx(serial.dense_ns + serial.experts_ns + serial.read_ns)
    assert serial.token_ns > speed().token_ns


def test_the_page_cache_has_what_the_slots_leave_of_the_memory() -> None:
    """A copy from it takes less time than a read, and its reads are those that the system reads ahead."""
    through = speed(replace(PLAIN, direct=False))
    direct = speed()
    left = 64 * GIB - SYSTEM_BYTES - through.fixed_bytes - 30 * GB
    both = speed(replace(PLAIN, slots_bytes=30 * GB + left))
    assert through.hit_rate == direct.hit_rate
    assert through.disk_bytes == pytest.approx(both.disk_bytes)
    assert through.disk_bytes < direct.disk_bytes
    at_once = 8 * (1 - through.hit_rate)
    read = through.disk_bytes / disk("nvme-4x4").bytes_per_s(AHEAD_BYTES, at_once)
    copied = (direct.disk_bytes - through.disk_bytes) / min(11.6e9 * at_once, 41e9)
    assert through.read_ns == pytest.approx((read + copied) * 1e9)


def test_without_a_number_of_slots_the_program_takes_its_share_of_the_memory() -> None:
    one = speed(StreamedSetting())
    budget = 0.88 * (64 * GIB - SYSTEM_BYTES)
    assert one.budget_bytes == pytest.approx(budget)
    assert one.slots_bytes == pytest.approx(budget - one.shape.non_expert_bytes - 6.8e9)


def test_drafts_read_for_all_positions_and_compute_shared_experts_once() -> None:
    """Three drafts, 2.4 tokens a pass; 41.3 % of the experts are those of the token before."""
    with_drafts, without = speed(replace(PLAIN, tokens_per_pass=None)), speed()
    assert with_drafts.disk_bytes == pytest.approx(without.disk_bytes * 4 / 2.4)
    assert with_drafts.experts_ns == pytest.approx(without.experts_ns * (1 + 3 * (1 - 0.413)) / 2.4)
    assert with_drafts.dense_ns == pytest.approx(without.dense_ns / 2.4)


def test_experts_on_the_gpu_are_neither_read_nor_computed_by_the_cpu() -> None:
    there = speed(replace(PLAIN, gpu_bytes=20 * GB))
    assert there.hit_rate > speed().hit_rate
    assert there.experts_ns < speed().experts_ns
    assert there.dense_ns == speed().dense_ns


def test_dense_weights_on_the_gpu_take_the_rate_of_its_memory() -> None:
    asked = replace(DESKTOP, gpu="rtx-5090")
    gpu = asked.load_machine().gpu
    there = speed(replace(PLAIN, dense_on_gpu=True), asked=asked)
    rate = gpu.bandwidth_bytes_per_s * gpu.bandwidth_fraction
    assert there.dense_ns == pytest.approx(there.shape.product_bytes / rate * 1e9)


def test_a_cache_of_all_layers_with_less_than_a_token_hits_nothing() -> None:
    """One a layer has no such cliff."""
    engine = streamed_engines()["ds4-metal"]
    mac = Question("deepseek-v4-flash", gpu="apple-m5-pro", ram_gb=64, disk="12.8", prompt_tokens=64, generated=32)
    token = 43 * 6 * engine.shape("deepseek-v4-flash").expert_bytes_by_layer[0]
    assert speed(StreamedSetting(0.99 * token), engine, mac).hit_rate == 0.0
    assert speed(StreamedSetting(1.01 * token), engine, mac).hit_rate > 0.1
    by_layer = engine._replace(per_layer=Sourced(True, "test", "low"))
    assert speed(StreamedSetting(0.99 * token), by_layer, mac).hit_rate > 0.1


def test_slots_that_start_empty_miss_what_is_used_first_and_the_longer_the_answer_the_less() -> None:
    """One that has run before has experts that the routing has not used yet as often as there is room for any."""
    mac = Question("deepseek-v4-flash", gpu="apple-m5-pro", ram_gb=64, disk="12.8", prompt_tokens=8, generated=24)
    empty = streamed_engines()["ds4-metal"]
    filled = empty._replace(starts_empty=Sourced(False, "test", "low"))
    short, long, before = (
        speed(StreamedSetting(64 * GB), engine, replace(mac, generated=tokens)).hit_rate
        for engine, tokens in ((empty, 24), (empty, 96), (filled, 24))
    )
    assert short < long < before


@pytest.mark.parametrize("better", [{"disk": "nvme-5x4"}, {"ram_gb": 128}])
def test_better_parts_never_take_longer(better: dict[str, str | int]) -> None:
    automatic = StreamedSetting(tokens_per_pass=1)
    assert speed(automatic, asked=replace(DESKTOP, **better)).token_ns < speed(automatic).token_ns  # type: ignore[arg-type]


def test_with_room_for_all_experts_nothing_is_read() -> None:
    one = speed(replace(PLAIN, slots_bytes=1e12))
    assert one.hit_rate == pytest.approx(1.0)
    assert one.read_ns == pytest.approx(0.0, abs=1.0)


def test_a_cache_of_one_layer_grows_with_its_slots() -> None:
    curve = per_layer_curve(_trace())
    rates = curve.rates(np.linspace(0, 1, 20))
    assert np.all(np.diff(rates) >= 0)
    assert curve.known_rates[-1] == pytest.approx(1 - curve.first_uses)


def _trace() -> Trace:
    return routing_for(DESKTOP).trace


def test_a_model_that_a_program_does_not_read_is_refused() -> None:
    with pytest.raises(FitError, match="expected glm-5, and no format"):
        COLIBRI.shape("deepseek-v4-flash")
    with pytest.raises(FitError, match="reads its own"):
        COLIBRI.shape("glm-5@q4_0")


def test_each_program_says_how_it_computes() -> None:
    for name, engine in streamed_engines().items():
        assert (engine.like is None) != (engine.core_bytes_per_s is None), name
        assert (engine.drafts is None) == (engine.accepted is None) == (engine.repeated is None), name
