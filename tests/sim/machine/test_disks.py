"""Rates of disks: one read alone, many at once, kinds by name and by their GB/s."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.disks import Disk, disk, disks
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced

KIB = 1 << 10


def made(latency_ns: float, alone: float, ceiling: float) -> Disk:
    numbers = (Sourced(value, "a test", "high") for value in (latency_ns, alone, ceiling, 0.5))
    return Disk("a disk", *numbers)


def test_a_read_alone_takes_the_latency_and_its_bytes_at_the_rate_of_one() -> None:
    one = made(100_000, 1e9, 4e9)
    assert one.bytes_per_s(100_000, 1) == pytest.approx(100_000 / 200_000e-9)


def test_what_a_read_takes_beyond_the_ceiling_is_divided_by_the_depth() -> None:
    one = made(100_000, 1e9, 4e9)  # alone 2 ns a byte, at the ceiling 0.25
    assert one.bytes_per_s(100_000, 5) == pytest.approx(1e9 / (1.75 / 5 + 0.25))


def test_a_file_is_read_in_order_at_a_share_of_the_ceiling() -> None:
    assert made(100_000, 1e9, 4e9).in_order_bytes_per_s == 2e9


@given(name=st.sampled_from([*disks(), "2x-nvme-4x4"]), size=st.integers(4 * KIB, 16 << 20), depth=st.integers(1, 256))
def test_more_reads_at_once_are_no_slower_and_none_beat_the_ceiling(name: str, size: int, depth: int) -> None:
    one = disk(name)
    assert one.bytes_per_s(size, depth) <= one.bytes_per_s(size, depth + 1) <= one.ceiling_bytes_per_s.value


def test_kinds_rise_in_their_rates() -> None:
    ceilings = [one.ceiling_bytes_per_s.value for one in disks().values()]
    assert sorted(ceilings, reverse=True) == ceilings[::-1]
    assert all(one.alone_bytes_per_s.value <= one.ceiling_bytes_per_s.value for one in disks().values())


@pytest.mark.parametrize(("size", "depth", "measured"), [
    (64, 1, 0.49), (256, 1, 1.06), (256, 4, 2.35), (256, 16, 5.22), (256, 64, 5.84), (256, 128, 5.88),
])
def test_the_law_is_within_17_percent_of_an_e27t(size: int, depth: int, measured: float) -> None:
    """0xBakeer/deepseek-v41-flash-spark issue 2, in GB/s; the first two and the ceiling set the numbers."""
    assert disk("nvme-4x4").bytes_per_s(size * KIB, depth) / 1e9 == pytest.approx(measured, rel=0.171)


def test_a_rate_in_gb_per_s_is_the_ceiling_of_the_nearest_kind() -> None:
    stated, nearest = disk("3.0"), disk("nvme-3x4")
    assert stated.ceiling_bytes_per_s.value == 3e9
    assert (stated.latency_ns, stated.alone_bytes_per_s) == (nearest.latency_ns, nearest.alone_bytes_per_s)


def test_a_stripe_has_the_rates_of_its_drives_together_and_serves_one_request_as_one_of_them() -> None:
    one, two = disk("nvme-4x4"), disk("2x nvme-4x4")
    assert two.ceiling_bytes_per_s.value == 2 * one.ceiling_bytes_per_s.value
    assert two.bytes_per_s(1 << 20, 8) == pytest.approx(2 * one.bytes_per_s(1 << 20, 4))
    assert two.bytes_per_s(1 << 20, 1) == pytest.approx(one.bytes_per_s(1 << 20, 1))
    assert (two.title, two.in_order_bytes_per_s) == ("2 x NVMe SSD, PCIe 4.0 x4", 2 * one.in_order_bytes_per_s)


@pytest.mark.parametrize("name", [
    "1x-nvme-4x4", "5x-nvme-4x4", "2x-floppy", "2x-2x-nvme-4x4", "floppy", "nan", "0", "-1", "1e9", "",
])
def test_what_is_neither_a_kind_nor_a_rate_is_refused(name: str) -> None:
    with pytest.raises(HardwareError, match=r"disk"):
        disk(name)
