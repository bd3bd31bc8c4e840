"""Causes of a machine that is slower than its parts: found where they were put in, and named on the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import FittedEngine, load_fitted
from sim.machine.hardware import Hardware, load_hardware
from tests.kit.results import row
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.measured_rows import predict_on
from trilane.engines.accuracy.slow_machines import SlowCause, SlowPart, is_slow, slow_causes, slow_causes_of_row
from trilane.output.pages.slow_machine import slow_part

MACHINE = load_hardware("rtx-3090+ddr4-3200+ryzen-9-5900x")
ENGINE = load_fitted("llama.cpp")
ROW = row(
    model="qwen3-30b-a3b", weights="q4_k_m", cpu_layers=30, machine=MACHINE.name, prompt_tokens=4096,
    prompt_tokens_per_s=1.0,
)


def predicted(hardware: Hardware, engine: FittedEngine) -> Speeds:
    found = predict_on(ROW, hardware, engine)
    return Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)


def with_share(key: str, share: float) -> Speeds:
    return predicted(MACHINE.with_numbers({key: MACHINE.flat()[key] * share}), ENGINE)


@pytest.mark.parametrize(("part", "key", "share"), [
    (SlowPart.HOST_MEMORY, "cpu.read_bytes_per_s", 0.5),
    (SlowPart.HOST_MEMORY, "cpu.read_bytes_per_s", 0.05),
    (SlowPart.LINK, "link.h2d_bytes_per_s", 0.25),
    (SlowPart.GPU_MEMORY, "gpu.bandwidth_bytes_per_s", 0.1),
])
def test_the_rate_that_was_made_slower_is_found(part: SlowPart, key: str, share: float) -> None:
    found = {cause.part: cause for cause in slow_causes(predicted, with_share(key, share), MACHINE, ENGINE)}
    assert found[part].share == pytest.approx(share, rel=0.02)
    assert found[part].off == pytest.approx(1.0, abs=0.01)


def test_slower_memory_of_the_host_is_not_a_slow_link() -> None:
    """Decode is slower too, which no link explains."""
    causes = slow_causes(predicted, with_share("cpu.read_bytes_per_s", 0.5), MACHINE, ENGINE)
    assert SlowPart.LINK not in [cause.part for cause in causes]


def test_memory_that_was_not_pinned() -> None:
    copies = ENGINE.prompt.copies
    pinned = replace(ENGINE, prompt=ENGINE.prompt._replace(copies=copies._replace(value="pinned")))
    causes = slow_causes(predicted, predicted(MACHINE, ENGINE), MACHINE, pinned)
    assert SlowCause(SlowPart.PAGEABLE, 1.0, 1.0) in causes
    assert "- copies from pageable memory: the driver did not pin the host memory" in slow_part(causes)


@pytest.mark.parametrize(("share", "slow"), [(0.81, False), (0.79, True), (2.0, False)])
def test_slow_is_a_quarter_below_what_the_parts_give(share: float, slow: bool) -> None:
    own = predicted(MACHINE, ENGINE)
    assert own.decode is not None
    known = Speeds(own.decode * share)
    assert is_slow(own, known) == slow
    assert bool(slow_causes(predicted, known, MACHINE, ENGINE)) == slow


def test_a_bundled_row() -> None:
    """An RTX 2080 whose decode fits two channels of its four (docs/accuracy.md)."""
    measured = replace(ROW, machine="rtx-2080+ddr4-3200+core-i9-10900x+4-channels")
    speeds = predict_on(measured, load_hardware(measured.machine), ENGINE)
    half = replace(measured, prompt_tokens_per_s=None, decode_tokens_per_s=(speeds.decode_tokens_per_s or 0) / 1.6)
    causes = slow_causes_of_row(half)
    assert causes[0].part is SlowPart.HOST_MEMORY
    assert 0.4 < causes[0].share < 0.6


def test_lines_of_the_page() -> None:
    causes = [SlowCause(SlowPart.HOST_MEMORY, 0.61, 1.0), SlowCause(SlowPart.HOST_MEMORY, 0.5, 1.0),
              SlowCause(SlowPart.GPU_MEMORY, 0.1, 1.0)]
    assert slow_part(causes) == [
        "",
        "Slower than predicted from its parts. If the parts are right, one of these explains all that was measured:",
        "- 0.61 of the rate of the host memory: modules at their default speed (no XMP or EXPO profile), pages of 4 "
        "KiB, or another program that reads memory",
        "- 0.50 of the rate of the host memory: one memory channel in place of two or more, or another program that "
        "reads memory",
        "- 0.10 of the rate of the GPU memory: weights that the driver keeps in host memory, since the card is full",
    ]
    assert slow_part([]) == []
