"""``trilane sweep``, ``plot`` and ``whatif``: tables, pictures with their data, findings, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.kit.commands import SHORT, Result, Trilane
from tests.kit.small_sweeps import SMALL
from trilane.study.sweep import sweep as sweep_file
from trilane.study.sweep.sweep import sweep
from trilane.study.sweep.table import read_results
from trilane.verbs import sweeps as verb

GRID: dict[str, Any] = {"scenario": SMALL, "grid": {"batch": [1, 2]}}


def write(grid: Any) -> None:
    Path("f.yaml").write_text(json.dumps(grid))


def test_a_table_and_one_line(trilane: Trilane) -> None:
    write(GRID)
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done == (0, "", "4 points in o.parquet\n")
    assert list(read_results("o.parquet")["policy"]) == ["dali", "oracle"] * 2
    assert {path.name for path in Path().iterdir()} == {"f.yaml", "o.parquet"}


def test_points_that_fail_are_counted_by_reason(trilane: Trilane) -> None:
    write({"scenario": SMALL, "grid": {"batch": [1, 998, 999], "hardware": ["rtx3090-ddr4", "none"]}})
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    first, *reasons = done.err.splitlines()
    assert (done.status, first) == (0, "12 points in o.parquet, 10 of them with an error:")
    assert [line.split(" x ")[0].strip() for line in reasons] == ["6", "4"]
    assert "HardwareError: no hardware preset or file 'none'" in reasons[0]
    assert "BatchError: " in reasons[1]


def test_where_nothing_can_be_played_the_status_says_so(trilane: Trilane) -> None:
    write({"scenario": {**SMALL, "batch": 999}, "clairvoyant": False})
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 1
    assert done.err.startswith("1 point in o.parquet, 1 of them with an error:\n")


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    write(GRID)
    real = sweep_file.played_rows

    def play(tasks: Any, *how: Any) -> Any:
        played = real(tasks)
        yield from (next(played) for _ in range(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_file, "played_rows", play)
    done = trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1")
    assert done.status == 130
    assert "interrupted: 3 of 4 points are kept in o.parquet.journal; the same command continues from there" in done.err
    monkeypatch.setattr(sweep_file, "played_rows", lambda tasks, *how: real(tasks) if len(tasks) == 1 else 1 / 0)
    assert trilane("sweep", "f.yaml", "-o", "o.parquet", "--jobs", "1").err == "4 points in o.parquet\n"


def test_the_help_says_where_rows_are_kept_and_when_they_are_simulated_again(trilane: Trilane) -> None:
    said = " ".join(trilane("sweep", "--help").out.replace("│", " ").split())
    for words in (
        "OUTPUT.journal",
        "are not simulated again as long as their scenario, its files and Trilane itself are the same",
        "is refused, never overwritten",
        "Its workers need the same Trilane, and the same files",
    ):
        assert words in said


@pytest.mark.parametrize(("words", "expected"), [
    (("f.yaml",), "Missing option '--output'"),
    (("g.yaml", "-o", "o.parquet"), "g.yaml: No such file"),
    (("bad.yaml", "-o", "o.parquet"), "bad.yaml: grid: there is no axis 'bath'; did you mean 'batch'?"),
    (("f.yaml", "-o", "o.csv"), "o.csv: expected the name of a Parquet file"),
    (("f.yaml", "-o", "f.yaml"), "expected another file than the input"),
    (("f.yaml", "-o", "none/o.parquet"), "the folder none does not exist"),
    (("f.yaml", "-o", "o.parquet", "--jobs", "0"), "Invalid value for '--jobs'"),
    (("f.yaml", "-o", "o.parquet", "--dask", "nowhere"), "--dask: expected an address such as tcp://"),
    (("f.yaml", "-o", "o.parquet", "--dask", "tcp://127.0.0.1:9"), "no Dask scheduler answers at 'tcp://127"),
    (("twice.yaml", "-o", "o.parquet"), "twice.yaml: pcie and pcie_gbps set the same number of the machine"),
])
def test_bad_input_is_one_sentence(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("trilane.study.sweep.cluster.TIMEOUT", "1s")
    write(GRID)
    Path("bad.yaml").write_text("grid: {bath: 1}")
    Path("twice.yaml").write_text("grid: {pcie: 3x16, pcie_gbps: 8}")
    done = trilane("sweep", *words)
    assert (done.status, done.out) == (2, "")
    assert expected in done.err.splitlines()[-1]
    assert {path.name for path in Path().iterdir()} == {"f.yaml", "bad.yaml", "twice.yaml"}


# --- plot -------------------------------------------------------------------------------------------------------------

TWO_SHARES = {
    "scenario": {"trace": "mini-moe", "model": None, "prompt_tokens": 4, "generated_tokens": 2},
    "grid": {"policy": ["on-demand", "layer-wise"], "cached_share": [0.2, 0.6], "batch": [1, 2]},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "results.parquet"
    sweep(TWO_SHARES, path)
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


@pytest.mark.parametrize(("kind", "begin"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_plot_writes_vectors_and_leaves_out_titles(trilane: Trilane, table: Path, kind: str, begin: bytes) -> None:
    words = ("plot", str(table), "--kind", "tpot", "--x", "batch", "--format", kind)
    for folder, more in (("with", ()), ("without", ("--no-title",)), ("again", ("--no-title",))):
        assert trilane(*words, "-o", folder, *more).status == 0
    whole, plain, again = (Path(folder, f"tpot.{kind}").read_bytes() for folder in ("with", "without", "again"))
    assert whole.startswith(begin)
    assert plain == again != whole


@pytest.mark.parametrize(("words", "message"), [
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
])
def test_refusals_of_plot(trilane: Trilane, table: Path, words: tuple[str, ...], message: str) -> None:
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


# --- whatif -----------------------------------------------------------------------------------------------------------

QUICK = (*SHORT, "--policies", "on-demand,layer-wise,best-approx", "--jobs", "1")


def lines(done: Result, *starts: str) -> list[list[str]]:
    """The words of the table's lines that begin so."""
    return [line.split() for line in done.out.splitlines() if line.startswith(starts)]


def test_one_axis_is_a_table_of_policies(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "pcie=4x16,5x16", *QUICK, "--json", "r.json")
    assert done.status == 0, done.err
    answer = json.loads(Path("r.json").read_text())
    times = {(row["policy"], row["pcie"]): row["tpot_ms"] for row in answer["rows"]}
    assert answer["axes"] == {"pcie": ["4x16", "5x16"]}
    assert len(times) == 2 * 5  # three policies, the clairvoyant run, the lower bound
    for cells in lines(done, "4x16", "5x16"):
        numbers = [float(cell) for cell in cells[1:] if cell != "<"]
        names = ("on-demand", "layer-wise", "best-approx", "oracle", "lower bound")
        assert numbers[:5] == [round(times[name, cells[0]], 2) for name in names]
        assert cells[cells.index("<") - 1] == f"{min(numbers[:3]):.2f}"
        assert numbers[5] == pytest.approx(1000 / min(numbers[:3]), abs=0.1)
    assert "routing of mini-deepseek, 1 draw" in done.out
    assert answer["says"][0].startswith("From PCIe 4x16 to PCIe 5x16 the lowest time ")
    assert all(sentence in done.out for sentence in answer["says"])
    assert "--draws 5" in done.err
    assert max(map(len, done.out.splitlines()[1:])) < 120  # below the heading


def test_a_winner_that_changes_the_routing_is_not_the_only_answer(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "batch=1,2", *SHORT, "--policies", "daop,on-demand", "--jobs", "1")
    assert "\ndaop ~ is fastest throughout: " in done.out
    assert "\nOf those that keep the routing, on-demand " in done.out
    assert "\nThe throughput of the whole batch goes from " in done.out
    assert "~            changes the routing" in done.out


def test_values_that_do_not_fit_are_said_so(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "cached_share=0.5,0.9,1", *QUICK, "--json", "-")
    assert done.status == 0
    assert "left out 90% cached, 100% cached: deepseek-v2-lite: a cached share of 0.9 is " in done.err
    assert {row["cached_share"] for row in done.json["rows"]} == {0.5}


def test_policies_that_cannot_run_are_named(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "batch=1", "--set", "prompt_tokens=4", "--set", "generated_tokens=2",
                   "--set", "trace=mini-moe", "--set", "model=null", "--set", "cached_share=0.01",
                   "--policies", "on-demand,nobody", "--jobs", "1")
    assert done.status == 2
    assert "there is no policy 'nobody'" in done.err


def test_two_axes_are_a_table_of_winners_and_a_heat_map(trilane: Trilane) -> None:
    words = ("--vary", "gpu_memory_gb=12,24", "--vary", "batch=1,2", "--png", "a.png", "--json", "r.json")
    done = trilane("whatif", *words, *QUICK)
    assert done.status == 0, done.err
    rows = pd.DataFrame(json.loads(Path("r.json").read_text())["rows"])
    real = rows[~rows["kind"].isin(["clairvoyant", "lower bound"])]
    for cells in lines(done, "12 ", "24 "):
        mine = real[real["gpu_memory_gb"] == float(cells[0])]
        times = [mine.loc[mine["batch"] == batch, "tpot_ms"].min() for batch in (1, 2)]
        assert [cell for cell in cells[1:] if cell[0].isdigit()] == [f"{time:.2f}" for time in times]
    assert "\nbatch 2: from 12 GB to 24 GB the lowest time per token " in done.out
    drawn = pd.read_csv("a.csv")
    assert len(drawn) == 4
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_below_each_winner_is_what_is_left_to_gain(trilane: Trilane) -> None:
    words = ("--vary", "pcie=4x16", "--vary", "batch=1,2")
    done = trilane("whatif", *words, *SHORT, "--policies", "on-demand", "--jobs", "1", "--json", "r.json")
    rows = pd.DataFrame(json.loads(Path("r.json").read_text())["rows"]).set_index(["kind", "batch"])["tpot_ms"]
    small = [f"* {rows['clairvoyant', batch]:,.1f}, bound {rows['lower bound', batch]:,.1f}" for batch in (1, 2)]
    assert "  ".join(" ".join(small).split()) in "  ".join(done.out.split())
    assert "\n*      knows the future\nbound  no policy that keeps the routing can be faster" in done.out
    assert f"\nbatch 2: on-demand is fastest at PCIe 4x16: {rows['keeps the routing', 2]:.1f} ms " in done.out


def test_null_is_a_value(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "gpu_memory_gb=null,12", "--vary", "model=null", *QUICK, "--json", "r.json")
    assert done.status == 0, done.err
    rows = json.loads(Path("r.json").read_text())["rows"]
    assert {(row["gpu_memory_gb"], row["model"]) for row in rows} == {
        (12.0, "the trace's own"), ("the card's own", "the trace's own")
    }
    assert len(lines(done, "12 ", "the card's own ")) == 2


def test_a_value_that_only_the_clairvoyant_run_can_have(trilane: Trilane) -> None:
    """Between the largest share that fits dali, which stages more, and that of the clairvoyant run."""
    words = ("--set", "prompt_tokens=4", "--set", "generated_tokens=3", "--policies", "dali", "--jobs", "1")
    done = trilane("whatif", "--vary", "pcie_gbps=12,24", "--vary", "cached_share=0.1,0.747", *words)
    assert done.status == 0, done.err
    assert "\n10% cached: from 12 GB/s to 24 GB/s the lowest time per token " in done.out
    assert "\n74.7% cached: " not in done.out
    alone = trilane("whatif", "--vary", "cached_share=0.747", *words)
    assert alone.status == 2
    assert "only clairvoyant runs are left; the others ended with an error, the first: BudgetError: " in alone.err


def test_many_runs_are_announced(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "MANY", 3)
    words = ("--vary", "batch=1,2", *SHORT, "--policies", "on-demand", "--jobs", "1")
    assert "4 simulations\n" in trilane("whatif", *words).err
    monkeypatch.setattr(verb, "MANY", 4)
    assert "runs to play" not in trilane("whatif", *words).err


def test_machines_are_compared(trilane: Trilane) -> None:
    words = ("--vary", "hardware=rtx3090-ddr4,rtx4090-ddr5", "--set", "batch=2", "--png", "m.png")
    done = trilane("whatif", *words, *QUICK)
    assert "\nFrom rtx3090-ddr4 to rtx4090-ddr5 the lowest time per token falls by " in done.out
    assert sorted(path.name for path in Path().iterdir()) == ["m.csv", "m.png"]


def test_several_draws_are_means(trilane: Trilane) -> None:
    done = trilane("whatif", "--vary", "batch=1", "--draws", "2", *QUICK, "--json", "-")
    assert {row["draws"] for row in done.json["rows"]} == {2, None}
    assert "may be chance" not in done.err


@pytest.mark.parametrize(("vary", "message"), [
    (("batch",), "--vary: expected AXIS=VALUES"),
    (("policy=dali",), "use --policies A,B"),
    (("batch=1", "batch=2"), "--vary batch: expected every axis once"),
    (("batch=1", "seed=1", "pcie=4x16"), "expected one axis or two, got batch, seed, pcie"),
    (("bach=1",), "there is no axis 'bach'; did you mean 'batch'"),
    (("pcie=4x16,6x32",), "pcie: expected generation x lanes such as 3x16, 4x8 or 5x16, got '6x32'"),
    (("cached_share=1",), "no value can run: deepseek-v2-lite: a cached share of 1 is "),
])
def test_refusals_of_whatif(trilane: Trilane, vary: tuple[str, ...], message: str) -> None:
    done = trilane("whatif", *(word for text in vary for word in ("--vary", text)), *QUICK)
    assert done.status == 2
    assert message in done.err


# --- policies with parameters -----------------------------------------------------------------------------------------

ONE_JOB = (*SHORT, "--jobs", "1")


@pytest.mark.parametrize("vary", [("batch=1,2",), ("batch=1,2", "cached_share=0.2,0.4")])
def test_two_settings_of_one_policy_have_two_labels(trilane: Trilane, vary: tuple[str, ...]) -> None:
    """Once, this ended in "cannot reindex on an axis with duplicate labels"."""
    axes = [word for axis in vary for word in ("--vary", axis)]
    policies = ("--policies", "dali{window: 8},dali")
    found = trilane("whatif", *ONE_JOB, *policies, *axes, "--png", "w.png", "--json", "-").json
    assert {row["policy"] for row in found["rows"]} == {"dali{window: 8}", "dali", "oracle", "lower bound"}


def test_a_policy_alone_keeps_its_parameters_in_its_name(trilane: Trilane) -> None:
    done = trilane("whatif", *ONE_JOB, "--policies", "dali{window: 8}", "--vary", "batch=1,2")
    assert "dali{window:" in done.out


def test_parameters_in_braces_and_on_an_axis_are_refused(trilane: Trilane) -> None:
    done = trilane("whatif", *ONE_JOB, "--policies", "dali{window: 8}", "--vary", "parameters.window=2,4")
    assert done.status == 2
    assert "--vary parameters.window: expected --policies without parameters, got 'dali{window: 8}'" in done.err
