"""``trilane plot``: the results of a sweep become pictures with their data, or a reason why not."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.kit.commands import Trilane
from trilane.study.sweep.sweep import sweep

GRID = {
    "scenario": {"trace": "mini-moe", "model": None, "prompt_tokens": 4, "generated_tokens": 2},
    "grid": {"policy": ["on-demand", "layer-wise"], "cached_share": [0.2, 0.6], "batch": [1, 2]},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "results.parquet"
    sweep(GRID, path)
    return path


def test_every_picture_with_its_data(trilane: Trilane, table: Path) -> None:
    done = trilane("plot", str(table))
    assert done.status == 0, done.err
    folder = table.with_suffix("")
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{kind}.{ending}" for kind in ("heat", "hits", "speedup", "tpot") for ending in ("csv", "png")
    ]
    assert done.err.count(" is fastest ") == 2  # each picture is told of with its finding
    times = pd.read_csv(folder / "tpot.csv")
    assert sorted(set(times["policy"])) == ["layer-wise", "lower bound", "on-demand", "oracle"]
    assert len(times) == 4 * 4
    played = pd.read_parquet(table)
    both = times.merge(played, on=["policy", "cached_share", "batch"], suffixes=("", "_played"))
    assert len(both) == 12
    assert both["tpot_ms"].tolist() == pytest.approx(both["tpot_ms_played"].tolist(), rel=1e-12)


def test_a_part_of_the_table(trilane: Trilane, table: Path) -> None:
    words = ("--where", "batch=2", "--baseline", "on-demand", "--policies", "layer-wise")
    done = trilane("plot", str(table), "-o", "out", *words)
    assert done.status == 0
    assert sorted(path.name for path in Path("out").glob("*.png")) == ["hits.png", "speedup.png", "tpot.png"]
    assert "no picture heat: expected 2 axes that vary" in done.err
    speedups = pd.read_csv("out/speedup.csv")
    assert set(speedups["policy"]) == {"on-demand", "layer-wise", "oracle", "lower bound"}
    assert set(speedups.loc[speedups["policy"] == "on-demand", "speedup"]) == {1.0}


def test_the_same_bytes_every_time(trilane: Trilane, table: Path) -> None:
    for folder in ("a", "b"):
        assert trilane("plot", str(table), "-o", folder, "--kind", "tpot", "--x", "batch").status == 0
    for name in ("tpot.png", "tpot.csv"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kind", "heet"), "--kind: there is no picture 'heet'; did you mean 'heat'"),
        (("--kind", "heat", "--where", "batch=1"), "heat: expected 2 axes that vary"),
        (("--where", "batch=3"), "--where batch=3: expected one of the values in the table: 1, 2"),
        (("--where", "batch"), "--where: expected KEY=VALUE, got 'batch'"),
        (("--policies", "dali"), "there is no policy in these results 'dali'"),
        (("--kind", "speedup", "--baseline", "dali"), "there is no policy in these results 'dali'"),
        (("--x", "gpu_memory_gb"), "--x: there is no varying axis (other than policy) 'gpu_memory_gb'"),
        (("--x", "policy"), "(other than policy) 'policy'; choose from cached_share, batch"),
        (("--x", "cached-share"), "did you mean 'cached_share'"),
        (("--y", "nonsense"), "--y: there is no varying axis (other than policy) 'nonsense'"),
        (("--x", "batch", "--y", "batch", "--kind", "heat"), "expected two axes, got one twice"),
        (("--baseline", "nope"), "--baseline: there is no policy in these results 'nope'"),
        (("--policies", "oracle"), "only clairvoyant runs are left"),
        (("--where", "policy=oracle", "--kind", "tpot"), "only clairvoyant runs are left"),
    ],
)
def test_refusals(trilane: Trilane, table: Path, words: tuple[str, ...], message: str) -> None:
    done = trilane("plot", str(table), "-o", "out", *words)
    assert done.status == 2
    assert message in done.err
    assert not Path("out").exists()


def test_a_key_given_twice_means_either(trilane: Trilane, table: Path) -> None:
    words = ("--where", "batch=1", "--where", "batch=2", "--where", "cached_share=0.2", "--kind", "tpot")
    assert trilane("plot", str(table), "-o", "either", *words).status == 0
    assert set(pd.read_csv("either/tpot.csv")["batch"]) == {1, 2}


def test_what_is_no_table_of_a_sweep(trilane: Trilane) -> None:
    pd.DataFrame({"a": [1]}).to_parquet("other.parquet")
    for name, message in (("other.parquet", "this is some other table"), ("none.parquet", "there is no such file")):
        done = trilane("plot", name)
        assert done.status == 2
        assert message in done.err
