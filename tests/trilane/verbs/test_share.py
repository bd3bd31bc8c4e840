"""``trilane share``: predicted against measured, what is missing, and a file whose every cell was shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import Trilane
from tests.trilane.engines.accuracy.test_outputs import TESTS
from trilane.page.share_view import shared
from trilane.verbs.llama_cpp import LlamaRun


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


def test_a_model_is_measured_once_all_else_was_named(
    trilane: Trilane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[LlamaRun] = []

    def timed(run: LlamaRun) -> tuple[dict[str, Any], dict[str, Any]]:
        runs.append(run)
        about = {"gguf": run.gguf, "threads": 6, "settings": {"piece_tokens": 512, "gpu": True, "cpu_layers": 28}}
        return about, {"decode at 0 tokens": {"tokens_per_s": 31.5}, "prompt of 512": {"tokens_per_s": 402.0}}

    monkeypatch.setattr("trilane.verbs.llama_cpp.timed_llama", timed)
    monkeypatch.setattr("trilane.common.computer.cpu_name", lambda: "AMD Ryzen 5 5600 6-Core Processor")
    model, out = str(tmp_path / "Qwen3-30B-A3B-Q4_K_M.gguf"), tmp_path / "c.csv"
    assert "found no such file" in trilane("share", model).err
    Path(model).write_bytes(b"GGUF")
    done = trilane("share", model, "--gpu", "rtx-3060", "--n-cpu-moe", "28")
    assert (done.status, runs) == (2, [])
    assert "--ram: kind and speed of the memory modules" in done.err
    trilane("share", model, "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--n-cpu-moe", "28", "-o", str(out))
    assert runs == [LlamaRun(model, n_cpu_moe=28)]
    assert [line.split(",")[1] for line in out.read_text().splitlines()[1:]] == ["qwen3-30b-a3b"] * 2
    assert "rtx-3060+ddr4-3200+ryzen-5-5600" in out.read_text()
    trilane("share", model, "--gpu", "none", "--ram", "ddr4-3200", "--n-cpu-moe", "0")
    assert runs[1] == LlamaRun(model, n_cpu_moe=None)
