"""examples/gpu.sh, played in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.gpu_script import Play, commands_of, player


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return player(tmp_path)


@pytest.fixture(scope="module", params=["cuda", "host-lanes"])
def commands(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[list[str]]:
    """What all stages run."""
    return commands_of(tmp_path_factory.mktemp("script"), request.param)
