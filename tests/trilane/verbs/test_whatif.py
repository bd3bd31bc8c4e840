"""``trilane whatif``: questions on one line, and their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.kit.commands import SHORT, Result, Trilane
from trilane.verbs import sweeps as verb

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


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (("batch",), "--vary: expected AXIS=VALUES"),
        (("policy=dali",), "use --policies A,B"),
        (("batch=1", "batch=2"), "--vary batch: expected every axis once"),
        (("batch=1", "seed=1", "pcie=4x16"), "expected one axis or two, got batch, seed, pcie"),
        (("bach=1",), "there is no axis 'bach'; did you mean 'batch'"),
        (("pcie=4x16,6x32",), "pcie: expected generation x lanes such as 3x16, 4x8 or 5x16, got '6x32'"),
        (("cached_share=1",), "no value can run: deepseek-v2-lite: a cached share of 1 is "),
    ],
)
def test_refusals(trilane: Trilane, vary: tuple[str, ...], message: str) -> None:
    done = trilane("whatif", *(word for text in vary for word in ("--vary", text)), *QUICK)
    assert done.status == 2
    assert message in done.err
