"""Copies that take turns with the GPU: a step takes the sum of both, as in a program whose steps were measured.

aojsd/GPU_Offloading (results/MoE/mixtral-8x7B/results_H100.md) replays Mixtral in 16 bits on an H100 with PCIe 5.0; its
computation takes 37.5 ms a step of 32 layers at 80 % of the experts cached. Loads and times of a step are facts of it.
"""

from __future__ import annotations

import pytest

from sim.costs.engine_costs import costs_on
from sim.machine.hardware import load_hardware
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.models.catalogue import load_model

STEPS, COMPUTE_MS = 4387, 37.54
MEASURED = {  # loads of all steps, ms a step, by cache
    "Belady": (158_474, 268.19), "static": (182_442, 302.82), "LFU": (559_018, 848.28), "LRU": (769_268, 1153.51),
}
MACHINE, MODEL = "h100-pcie+ddr5-4800-ecc", "mixtral-8x7b"


def step_ms(*, serial: bool) -> tuple[float, float, float]:
    """A step of Mixtral with 60 % of its experts cached: its time, and those of its copies and of the GPU's work."""
    run = simulate(
        Scenario(
            trace=f"synthetic:{MODEL}/8x8+4", model=MODEL, hardware=MACHINE, policy="on-demand", cached_share=0.6,
            batch=8,
            engine_overrides={"software.serial_copies": serial}, hardware_overrides={"gpu.memory_bytes": 100e9},
        )
    )
    loads = run.spans[(run.spans.kind == "demand") & (run.spans.phase == "decode")]
    tpot_ms, gpu_share = run.metrics.tpot_ms, run.metrics.busy_share["gpu"]
    assert tpot_ms is not None
    assert gpu_share is not None
    return tpot_ms, (loads.end_ns - loads.start_ns).sum() / 1e6 / (run.metrics.decode_steps or 1), gpu_share * tpot_ms


def test_a_step_takes_the_sum_of_copies_and_computation_or_less_where_they_overlap() -> None:
    serial_ms, copies_ms, gpu_ms = step_ms(serial=True)
    assert serial_ms == pytest.approx(copies_ms + gpu_ms, rel=0.01)
    overlapped_ms, *parts = step_ms(serial=False)
    assert parts == pytest.approx([copies_ms, gpu_ms], rel=0.001)
    assert max(parts) < overlapped_ms < serial_ms - gpu_ms / 2


def test_the_sum_is_what_a_program_with_serial_copies_was_measured_to_take() -> None:
    copy_ms = costs_on(load_hardware(MACHINE), load_model(MODEL), 1).experts[0].copy_ns / 1e6
    for loads, measured_ms in MEASURED.values():
        copies_ms = loads / STEPS * copy_ms
        assert copies_ms + COMPUTE_MS == pytest.approx(measured_ms, rel=0.02)
        assert max(copies_ms, COMPUTE_MS) < measured_ms * 0.98, "overlapped, it would be quicker"
