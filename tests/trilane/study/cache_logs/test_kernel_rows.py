"""Timed copies and kernels by the parts of a machine, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.machine.hardware import load_hardware
from trilane.study.cache_logs.kernel_rows import KernelRow, errors_by_part, predicted_us, read_kernels
from trilane.study.cache_logs.rows import LogError

MACHINE = "rtx-5070+ddr5-6000+ryzen-9-7950x"
COPY = KernelRow(id="a", machine=MACHINE, part="copy", bytes=55e6, us=1000.0)


def test_a_copy_takes_the_latency_of_each_call_and_its_bytes() -> None:
    link = load_hardware(MACHINE).link
    assert predicted_us(COPY) == pytest.approx(link.h2d_latency_ns / 1e3 + 55e6 / link.h2d_bytes_per_s * 1e6)
    assert predicted_us(replace(COPY, calls=11)) - predicted_us(COPY) == pytest.approx(link.h2d_latency_ns / 100)


def test_narrow_weights_are_read_at_a_fraction_of_the_rate() -> None:
    for part in ("gpu", "cpu"):
        wide = replace(COPY, part=part)
        assert predicted_us(replace(wide, bits=4.25)) > predicted_us(wide)
    cpu = load_hardware(MACHINE).cpu
    assert predicted_us(replace(COPY, part="cpu")) == pytest.approx(55e6 / cpu.read_bytes_per_s * 1e6)


def test_errors_are_of_each_part() -> None:
    right = predicted_us(COPY)
    errors = errors_by_part([replace(COPY, us=right), replace(COPY, us=2 * right), replace(COPY, part="cpu", us=right)])
    assert errors["copy"] == pytest.approx([0, -0.5])
    assert len(errors["cpu"]) == 1


def test_a_swapped_unit_is_seen() -> None:
    """The broken twin: ns in place of us."""
    rows = [replace(row, us=row.us * 1000) for row in read_kernels()]
    assert all(error < -0.99 for errors in errors_by_part(rows).values() for error in errors)
    assert all(abs(error) < 1.5 for errors in errors_by_part(read_kernels()).values() for error in errors)


def test_an_unknown_part_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(f"id,machine,part,bytes,us\na,{MACHINE},disk,5,5\n")
    with pytest.raises(LogError, match="line 2: part: expected 'copy', 'gpu' or 'cpu'"):
        read_kernels(path)
