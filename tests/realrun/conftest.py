"""Machines that tests share."""

from collections.abc import Iterator

import pytest

from realrun.machine.host_lanes import HostLanes


@pytest.fixture(scope="session")
def inline_lanes() -> Iterator[HostLanes]:
    """Host lanes on which the calling thread is the GPU."""
    lanes = HostLanes(inline=True)
    yield lanes
    lanes.close()
