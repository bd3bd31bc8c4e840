"""The fixture that runs commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.running import Result, Trilane
from trilane.cli import main


@pytest.fixture
def trilane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Trilane:
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["trilane", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return Result(int(stop.value.code or 0), printed.out, printed.err)

    return run
