"""``trilane accuracy --requests`` of logs of caches, and of timed kernels: one door, which tells what a file is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from trilane.study.cache_logs.kernel_rows import read_kernels
from trilane.study.cache_logs.rows import read_rows

LOG = """\
id,model,policy,slots,steps,hit_rate,left_out
few,qwen3-30b-a3b,layer-lru,16,16,0.5,
many,qwen3-30b-a3b,layer-lru,64,16,0.8,
none,qwen3-30b-a3b,layer-lru,,16,0.8,no slots
"""


def test_a_log_of_caches_is_played_and_compared(trilane: Trilane) -> None:
    Path("log.csv").write_text(LOG)
    done = trilane("accuracy", "--requests", "log.csv", "--json", "found.json")
    assert done.status == 0
    kept = json.loads(Path("found.json").read_text())
    assert [row["id"] for row in kept["rows"]] == ["few", "many"]
    [pair] = kept["pairs"]
    assert (pair["setting"], pair["right"]) == ("slots", True)
    assert kept["left_out"] == {"none": "no slots"}
    few = kept["rows"][0]["compared"]["hit_rate"]
    assert f"{few['predicted']:.1%}" in done.out
    assert "1 rows are not asked: no slots" in done.out


def test_any_log_becomes_the_table(trilane: Trilane) -> None:
    Path("runs.csv").write_text("run,cache_size,prefetch_size,placement_events,live_cache_hit\none,16,4,234,0.5\n")
    assert trilane("accuracy", "--requests", "runs.csv", "--template", "rows.csv").status == 0
    [row] = read_rows("rows.csv")
    assert (row.policy, row.steps) == ("hybrimoe@impl{prefetch_size: 4}", 9)


def test_timed_kernels_are_compared_with_the_parts(trilane: Trilane) -> None:
    done = trilane("accuracy", "--requests", "kernels", "--json", "found.json")
    assert done.status == 0
    rows = json.loads(Path("found.json").read_text())["rows"]
    assert len(rows) == len(read_kernels()) > 30
    assert f"{rows[0]['predicted_us']:,.1f}" in done.out


def test_bundled_rows_name_their_sources_and_no_row_is_of_the_log_without_a_licence() -> None:
    rows = read_rows()
    assert len({row.id for row in rows}) == len(rows) == 40
    assert all(row.source and row.hit_rate is not None for row in rows)
    assert not any("aojsd" in row.source for row in rows)
    assert all(row.source for row in read_kernels())


@pytest.mark.parametrize(("words", "expected"), [
    (("nofile.csv",), "found no such file"),
    (("nofile.log",), "found no such file"),
    (("",), "'': expected bundled, caches or kernels, or a file with"),
    ((".",), ".: expected bundled, caches or kernels, or a file with"),
    (("speeds.csv",), "got a table of speeds; use: trilane accuracy --check speeds.csv"),
    (("kernels", "--template", "x.csv"), "got a table of timed kernels"),
    (("caches", "--plot", "x.png"), "which has no picture"),
    (("bad.csv",), "line 2: steps: expected a whole number from 1 to 4096, got 'many'"),
    (("empty.csv",), "got an empty file"),
    (("large.csv",), "large.csv: no row can be asked: slots: expected at most the 128 experts of a layer, got 129"),
])
def test_what_cannot_be_done_is_refused_in_a_sentence(trilane: Trilane, words: tuple[str, ...], expected: str) -> None:
    Path("bad.csv").write_text(LOG.replace("16,16,0.5", "16,many,0.5"))
    Path("empty.csv").touch()
    Path("large.csv").write_text("id,model,policy,slots,hit_rate\none,qwen3-30b-a3b,layer-lru,129,0.5\n")
    trilane("accuracy", "--template", "speeds.csv")
    done = trilane("accuracy", "--requests", *words)
    assert done.status != 0
    assert expected in done.err
    assert "Errno" not in done.err
    assert not Path("x.csv").exists()
