"""``trilane share``: predicted against measured, what is missing, and a file whose every cell was shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from tests.trilane.engines.accuracy.test_outputs import TESTS
from trilane.page.share_view import shared


@pytest.fixture
def bench(tmp_path: Path) -> str:
    (tmp_path / "bench.json").write_text(json.dumps(TESTS))
    return str(tmp_path / "bench.json")


def test_everything_in_the_file_is_shown(trilane: Trilane, bench: str, tmp_path: Path) -> None:
    done = trilane("share", bench, "--gpu", "rtx-3060", "--ram", "ddr4-3200", "-o", str(tmp_path / "c.csv"))
    head, *lines = (tmp_path / "c.csv").read_text().splitlines()
    assert len(lines) == 2
    for cell in {cell for line in lines for cell in line.replace('"', "").split(",")} - {""}:
        assert cell.strip() in done.out
    assert "nothing is sent" in done.out
    assert head.startswith("id,model,machine,")


def test_what_is_missing_is_asked_for_and_nothing_is_written(trilane: Trilane, bench: str, tmp_path: Path) -> None:
    done = trilane("share", bench, "--gpu", "rtx-3060", "-o", str(tmp_path / "c.csv"))
    assert done.status == 2
    assert "--ram: kind and speed of the memory modules" in done.err
    assert not (tmp_path / "c.csv").exists()


def test_the_page_makes_the_same_file(trilane: Trilane, bench: str, tmp_path: Path) -> None:
    trilane("share", bench, "--gpu", "rtx-3060", "--ram", "ddr4-3200", "-o", str(tmp_path / "c.csv"))
    record = shared(json.dumps(TESTS), {"gpu": "rtx-3060", "ram": "ddr4-3200"})
    assert record["csv"] == (tmp_path / "c.csv").read_text()


def test_the_page_asks_for_what_is_missing_and_refuses_other_texts() -> None:
    assert [one["name"] for one in shared(json.dumps(TESTS), {})["missing"]] == ["ram"]
    assert shared("hello", {})["kind"] == "refused"
