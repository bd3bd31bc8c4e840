"""A disk's numbers give back the times that they were made of, times that do not show them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrun.errors import RefusedError
from realrun.experts.expert_file import BLOCK_BYTES, written
from realrun.experts.store import ExpertLayout, random_slabs
from realrun.profiling.drive import drive_from, timed_reads
from sim.machine.disks import rate_of_reads

SIZE, REQUEST, DEPTH = 64 * BLOCK_BYTES, 8 * BLOCK_BYTES, 8


@pytest.mark.parametrize("ceiling", [0.9e9, 2.5e9, 6e9])
def test_numbers_of_a_known_disk_are_found_again(ceiling: float) -> None:
    latency_ns, alone = 80_000.0, 2e9
    times = {
        "block": latency_ns + BLOCK_BYTES / alone * 1e9, "whole": latency_ns + SIZE / alone * 1e9,
        "requests": SIZE / rate_of_reads(latency_ns, alone, ceiling, REQUEST, DEPTH) * 1e9,
    }
    found = drive_from(times, SIZE, REQUEST, DEPTH, "known")
    assert found.latency_ns == pytest.approx(latency_ns)
    assert found.alone_bytes_per_s == pytest.approx(alone)
    assert found.bytes_per_s(REQUEST, DEPTH) * times["requests"] == pytest.approx(SIZE * 1e9)
    spoilt = drive_from({**times, "requests": times["requests"] * 1.2}, SIZE, REQUEST, DEPTH, "slower")
    assert spoilt.bytes_per_s(REQUEST, DEPTH) < 0.9 * found.bytes_per_s(REQUEST, DEPTH)


def test_a_block_that_takes_as_long_as_an_expert_is_refused() -> None:
    with pytest.raises(RefusedError, match="expected a read of 262144 bytes to take longer"):
        drive_from({"block": 5.0, "whole": 5.0, "requests": 5.0}, SIZE, REQUEST, DEPTH, "odd")
    with pytest.raises(RefusedError, match="expected a read of 4096 bytes to take longer"):
        drive_from({"block": 5.0, "whole": 5.1, "requests": 5.0}, BLOCK_BYTES, BLOCK_BYTES, DEPTH, "small")


def test_a_ceiling_and_a_latency_that_times_do_not_show_are_refused() -> None:
    """Eight requests at once, each as fast as one alone; a block as fast as its share of an expert."""
    latency_ns, alone = 80_000.0, 2e9
    times = {"block": latency_ns + BLOCK_BYTES / alone * 1e9, "whole": latency_ns + SIZE / alone * 1e9}
    times["requests"] = (latency_ns + REQUEST / alone * 1e9) * SIZE / REQUEST / DEPTH
    with pytest.raises(RefusedError, match=r"8\.0 times one alone, so that the ceiling stays unknown"):
        drive_from(times, SIZE, REQUEST, DEPTH, "deep")
    with pytest.raises(RefusedError, match="measured 2000 and 131072 ns: use a folder on a disk"):
        drive_from({**times, "block": 2000, "whole": 131_072}, SIZE, REQUEST, DEPTH, "memory")


def test_reads_of_a_real_file_are_counted(tmp_path: Path) -> None:
    layout = ExpertLayout.from_shape(256, 1024, torch.float32)
    slabs = random_slabs(layout, 2, 4, lambda size: torch.zeros(size, dtype=torch.uint8))
    with written(slabs, 2, tmp_path, depth=DEPTH) as file:
        assert all(ns > 0 for ns in timed_reads(file, reads=4).values())
        assert file.reads == 3 * 4
        assert file.bytes_read == 4 * (BLOCK_BYTES + 2 * file.stride)
