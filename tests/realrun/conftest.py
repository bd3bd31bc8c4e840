"""Machines that tests share, and a thread that they leave as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from realrun.machine.cuda_lanes import CudaLanes
    from realrun.machine.host_lanes import HostLanes
    from tests.kit.fake_cuda import FakeCuda

TORCH_FOLDERS = ("execution", "experts", "generation", "machine", "profiling", "quality", "replay", "smoke")
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else [*TORCH_FOLDERS, "test_robustness.py"]

SLACK = Path("/proc/self/timerslack_ns")  # by how much the main thread's sleeps may be longer


@pytest.fixture(scope="session")
def inline_lanes() -> Iterator[HostLanes]:
    """Host lanes on which the calling thread is the GPU."""
    from realrun.machine.host_lanes import HostLanes

    lanes = HostLanes(inline=True)
    yield lanes
    lanes.close()


@pytest.fixture
def cuda() -> FakeCuda:
    """A GPU that executes nothing before its time."""
    from tests.kit.fake_cuda import FakeCuda

    return FakeCuda()


@pytest.fixture
def machine(cuda: FakeCuda) -> Iterator[CudaLanes]:
    """The lanes of a CUDA machine, on ``cuda``."""
    from tests.kit.fake_torch import fake_machine

    with fake_machine(cuda) as machine:
        yield machine


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    """A test thread with one core, or with precise sleeps, makes all later tests that use threads slow."""
    before = _settings()
    yield
    assert _settings() == before


def _settings() -> tuple[object, ...]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return cores, SLACK.read_text() if SLACK.exists() else ""
