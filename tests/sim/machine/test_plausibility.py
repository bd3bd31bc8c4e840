"""Physical limits: what is refused, and what the message says."""

from __future__ import annotations

import math

import pytest

from sim.machine.hardware import hardware_names, load_hardware
from sim.machine.plausibility import LIMITS, HardwareError, check_plausible


def refused(key: str, value: float, **others: float) -> str:
    """The message that ``key`` = ``value`` gives."""
    with pytest.raises(HardwareError) as caught:
        check_plausible({key: value, **others}, "box")
    return str(caught.value)


@pytest.mark.parametrize("name", hardware_names())
def test_every_preset_is_plausible(name: str) -> None:
    check_plausible(load_hardware(name).flat(), name)


def test_every_number_of_a_machine_has_a_limit() -> None:
    numbers = {k for k, v in load_hardware("rtx-3090+ddr4-3200+64gb").flat().items() if isinstance(v, int | float)}
    assert numbers == set(LIMITS) - {"power.platform_w"}  # which no part states


@pytest.mark.parametrize("key", sorted(LIMITS))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_no_number_is_negative_or_not_finite(key: str, value: float) -> None:
    assert f"box: {key} = {value:g} is outside" in refused(key, value)


@pytest.mark.parametrize("key", sorted(LIMITS))
def test_zero_only_where_it_means_no_such_cost(key: str) -> None:
    if LIMITS[key].zero:
        check_plausible({key: 0}, "box")
    else:
        assert f"{key} = 0 is outside" in refused(key, 0)


@pytest.mark.parametrize(("key", "value", "hint"), [
    ("link.h2d_bytes_per_s", 25, "it looks like GB/s typed as bytes/s: write 2.5e+10"),
    ("link.d2h_bytes_per_s", 25000, "it looks like MB/s typed as bytes/s: write 2.5e+10"),
    ("gpu.bandwidth_bytes_per_s", 0.936, "it looks like TB/s typed as bytes/s: write 9.36e+11"),
    ("gpu.memory_bytes", 24, "it looks like GB typed as bytes: write 2.4e+10"),
    ("gpu.flops_per_s", 71.2, "it looks like TFLOP/s typed as flop/s: write 7.12e+13"),
    ("cpu.flops_per_s", 1300, "it looks like GFLOP/s typed as flop/s: write 1.3e+12"),
    ("host.launch_ns", 2.5, "it looks like us typed as ns: write 2500"),
    ("gpu.bandwidth_fraction", 80, "it looks like percent typed as fraction: write 0.8"),
    ("contention.cpu_permille", 0.85, "it looks like a fraction typed as permille: write 850"),
])
def test_slipped_units_are_named(key: str, value: float, hint: str) -> None:
    assert hint in refused(key, value)


@pytest.mark.parametrize(("key", "value"), [
    ("link.h2d_bytes_per_s", 9e11),  # above NVLink-C2C
    ("gpu.bandwidth_bytes_per_s", 1.1e13),
    ("cpu.flops_per_s", 1e15),
    ("link.h2d_latency_ns", 11_000_000),
    ("host.sync_ns", 11_000_000),
    ("contention.copy_permille", 1001),
    ("cpu.first_expert_ns", 50),
])
def test_numbers_beyond_physics_are_refused(key: str, value: float) -> None:
    limit = LIMITS[key]
    assert f"{limit.low:g}..{limit.high:g} {limit.unit}" in refused(key, value)


def test_effective_rates_stay_below_theory() -> None:
    text = refused("link.h2d_bytes_per_s", 40e9, **{"link.theory_bytes_per_s": 31.5e9})
    assert "link.h2d_bytes_per_s = 4e+10 exceeds link.theory_bytes_per_s = 3.15e+10" in text
    text = refused("cpu.read_bytes_per_s", 60e9, **{"cpu.dram_bytes_per_s": 51.2e9})
    assert "what the memory channels can carry; correct one of the two" in text


def test_copies_back_are_bounded_by_a_link_where_there_is_one() -> None:
    """On host lanes they are memory copies without a pace."""
    rates = {"link.theory_bytes_per_s": 4e9, "link.h2d_bytes_per_s": 4e9, "link.d2h_bytes_per_s": 20e9}
    check_plausible(rates, "box", "host-lanes")
    for kind in ("cuda", None):
        with pytest.raises(HardwareError, match=r"link.d2h_bytes_per_s = 2e\+10 exceeds link.theory_bytes_per_s"):
            check_plausible(rates, "box", kind)
    with pytest.raises(HardwareError, match=r"link.h2d_bytes_per_s = 5e\+09 exceeds link.theory_bytes_per_s"):
        check_plausible({**rates, "link.h2d_bytes_per_s": 5e9}, "box", "host-lanes")


def test_dram_bandwidth_is_a_socket_s() -> None:
    assert "1.2e+12 a socket, above 1e+12 bytes/s" in refused("cpu.dram_bytes_per_s", 1.2e12)
    check_plausible({"cpu.dram_bytes_per_s": 1.2e12, "cpu.sockets": 2}, "box")


def test_reserve_fits_the_card() -> None:
    assert "gpu.reserve_bytes = 5e+10 exceeds" in refused("gpu.reserve_bytes", 50e9, **{"gpu.memory_bytes": 24e9})


def test_unknown_keys_and_text_are_left_to_the_loader() -> None:
    check_plausible({"gpu.name": "RTX", "my.own": -5}, "box")


def test_load_hardware_checks_overrides() -> None:
    with pytest.raises(HardwareError, match=r"hardware 'rtx3090-ddr4': link.h2d_bytes_per_s = 25 .* GB/s typed as"):
        load_hardware("rtx3090-ddr4", {"link.h2d_bytes_per_s": 25})
