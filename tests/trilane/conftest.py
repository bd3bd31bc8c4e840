"""Fixtures that run commands, and forget the policies that these load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies import user_files
from policies.registry import SYSTEMS
from tests.kit.commands import Result, Trilane
from trilane.cli import main
from trilane.output.pages.output import WIDTH


@pytest.fixture
def no_user_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No policy has been loaded from a file; those that the test loads, from files named own_*.py, are forgotten."""
    before = dict(SYSTEMS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_files, "_loaded", {})
    yield
    SYSTEMS.clear()
    SYSTEMS.update(before)
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture
def trilane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_user_files: None
) -> Trilane:
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(WIDTH, "250")  # sentences on one line

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["trilane", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return Result(int(stop.value.code or 0), printed.out, printed.err)

    return run
