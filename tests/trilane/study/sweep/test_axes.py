"""The axes of a sweep, and the values that a text or a file names for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.dials import DIALS
from sim.machine.hardware import hardware_keys, load_hardware
from sim.machine.plausibility import HardwareError
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario, ScenarioError
from tests.kit.small_sweeps import SMALL, keep
from trilane.common.errors import TrilaneError
from trilane.study.sweep import sweep as sweep_file
from trilane.study.sweep.axes import (
    SCENARIO_KEYS,
    SweepError,
    axis_label,
    check_together,
    distinct,
    takers,
    values_in,
    values_of,
    vary,
)
from trilane.study.sweep.grid import Grid, points
from trilane.study.sweep.sweep import Player, sweep

BASE = Scenario()
MACHINE = load_hardware(BASE.hardware).flat()


def test_a_key_of_the_scenario() -> None:
    assert vary(BASE, "batch", 4) == BASE.with_(batch=4)
    assert vary(BASE, "sequences", [3, 1]) == BASE.with_(sequences=(3, 1))
    assert vary(BASE, "model", None) == BASE.with_(model=None)


def test_one_number_where_a_list_is_meant_is_a_list_of_one() -> None:
    assert vary(BASE, "sequences", 3) == BASE.with_(sequences=(3,))
    assert vary(BASE, "noisy_forecast_recall", 0.8) == BASE.with_(noisy_forecast_recall=(0.8,))


@pytest.mark.parametrize(
    ("name", "value"), [("cached_share", 0), ("gpu_memory_gb", 12), ("noisy_forecast_recall", [1])]
)
def test_whole_numbers_and_others_are_written_alike(name: str, value: Any) -> None:
    """They are equal in Python, and would not be in JSON."""
    kept = vary(BASE, name, value).to_dict()[name]
    assert json.dumps(kept) == json.dumps([1.0] if name == "noisy_forecast_recall" else float(value))


@pytest.mark.parametrize("names", [
    ("pcie", "pcie_gbps"),
    ("pcie_gbps", "link.h2d_bytes_per_s"),
    ("batch", "link.theory_bytes_per_s", "pcie"),
    ("dram_gbps", "cpu.read_bytes_per_s"),
    ("cpu.flops_per_s", "cpu_gflops"),
    ("gpu_memory_gb", "gpu.memory_bytes"),
])
def test_two_axes_that_set_the_same_number(names: tuple[str, ...]) -> None:
    with pytest.raises(SweepError, match="set the same number of the machine; vary one of them"):
        check_together(names)


def test_what_a_dial_takes_along_can_be_set_beside_it() -> None:
    check_together(("pcie_gbps", "link.d2h_bytes_per_s", "dram_gbps", "cpu.dram_bytes_per_s", "gpu_tflops", "batch"))
    check_together(("pcie", "link.h2d_bytes_per_s", *SCENARIO_KEYS, "gpu_gbps", "cpu_gflops"))


def test_another_policy_starts_from_its_own_defaults() -> None:
    base = BASE.with_(policy="dali", parameters={"window": 8})
    assert vary(base, "policy", "dali") == base
    assert vary(base, "policy", "fiddler") == base.with_(policy="fiddler", parameters={})
    assert vary(base, "policy", {"dali": {"window": 2}}) == base.with_(parameters={"window": 2})


def test_a_number_of_the_machine() -> None:
    base = BASE.with_(hardware_overrides={"host.sync_ns": 1000})
    changed = vary(base, "link.h2d_bytes_per_s", 12e9)
    assert changed == base.with_(hardware_overrides={"host.sync_ns": 1000, "link.h2d_bytes_per_s": 12e9})


def test_a_parameter_of_the_policy() -> None:
    base = BASE.with_(policy="dali", parameters={"prefetch": 0})
    assert vary(base, "parameters.window", 2).parameters == {"prefetch": 0, "window": 2}
    assert "dali" in takers("parameters.window")
    assert "fiddler" not in takers("parameters.window")


@pytest.mark.parametrize(("dial", "value", "expected"), [
    ("pcie_gbps", 50, {"link.h2d_bytes_per_s": 50e9, "link.theory_bytes_per_s": 63e9, "link.d2h_bytes_per_s": 52.6e9}),
    ("dram_gbps", 20.055, {"cpu.read_bytes_per_s": 20.055e9, "cpu.dram_bytes_per_s": 25.6e9}),
    ("gpu_gbps", 1008, {"gpu.bandwidth_bytes_per_s": 1008e9}),
    ("gpu_tflops", 165, {"gpu.flops_per_s": 165e12}),
    ("cpu_gflops", 800, {"cpu.flops_per_s": 800e9}),
])
def test_a_dial_scales_what_belongs_together(dial: str, value: float, expected: dict[str, float]) -> None:
    """By hand from the preset: 25 of 31.5 GB/s there, 26.3 back; 40.11 of 51.2 GB/s of DRAM."""
    assert vary(BASE, dial, value).hardware_overrides == pytest.approx(expected)


@pytest.mark.parametrize(("text", "theory"), [("3x16", 15.75e9), ("4x16", 31.5e9), ("5x8", 31.5e9), ("2x16", 8e9)])
def test_a_slot_by_generation_and_lanes(text: str, theory: float) -> None:
    changed = vary(BASE, "pcie", text).hardware_overrides
    assert changed["link.theory_bytes_per_s"] == pytest.approx(theory, rel=1e-3)
    for way in ("link.h2d_bytes_per_s", "link.d2h_bytes_per_s"):
        ratio = changed[way] / changed["link.theory_bytes_per_s"]
        assert ratio == pytest.approx(MACHINE[way] / MACHINE["link.theory_bytes_per_s"])


@pytest.mark.parametrize("dial", DIALS)
def test_a_dialled_machine_is_plausible(dial: str) -> None:
    """Half and double what the machine has: no rate is above what carries it."""
    first, unit = DIALS[dial].keys[0], DIALS[dial].unit
    for factor in (0.5, 2):
        assert prepare(vary(BASE, dial, MACHINE[first] * factor / unit)).hardware.flat()[first] == pytest.approx(
            MACHINE[first] * factor
        )


def test_a_dial_stands_on_the_numbers_that_were_changed_before() -> None:
    base = BASE.with_(hardware_overrides={"link.d2h_bytes_per_s": 12.5e9})
    assert vary(base, "pcie_gbps", 12.5).hardware_overrides["link.d2h_bytes_per_s"] == pytest.approx(6.25e9)


@pytest.mark.parametrize(("name", "value", "error", "says"), [
    ("bath", 1, SweepError, "there is no axis 'bath'; did you mean 'batch'?"),
    ("pcie_gbs", 1, SweepError, "did you mean 'pcie_gbps'"),
    ("link.h2d_bytes", 1, SweepError, "did you mean 'link.h2d_bytes_per_s'"),
    ("gpu.name", "x", SweepError, "there is no axis 'gpu.name'"),
    ("parameters.windw", 1, SweepError, "did you mean 'window'"),
    ("batch", "four", ScenarioError, "batch: expected a whole number >= 1, got 'four'"),
    ("pcie", "6x16", HardwareError, "expected generation x lanes such as 3x16"),
    ("pcie_gbps", 0, HardwareError, "expected a number above 0"),
    ("pcie_gbps", True, HardwareError, "expected a number above 0"),
    ("policy", ["dali"], SweepError, "expected a name, or `name: {parameter: value}`"),
])
def test_what_cannot_be_varied(name: str, value: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says.replace("?", r"\?").replace("{", r"\{")):
        vary(BASE, name, value)


def test_a_parameter_that_the_policy_lacks() -> None:
    with pytest.raises(SweepError, match="there is no parameter of 'fiddler' 'window'"):
        vary(BASE.with_(policy="fiddler"), "parameters.window", 2)


def test_a_dial_of_no_machine() -> None:
    with pytest.raises(HardwareError, match="no hardware preset or file 'none'"):
        vary(BASE.with_(hardware="none"), "pcie_gbps", 8)


def test_every_axis_has_a_label() -> None:
    assert axis_label("pcie_gbps") == "PCIe bandwidth (GB/s)"
    assert axis_label("gpu_memory_gb") == "GPU memory (GB)"
    assert axis_label("cached_share") == "share of experts cached"
    assert axis_label("batch") == "batch (sequences)"
    assert axis_label("link.h2d_bytes_per_s") == "link h2d (bytes/s)"
    assert axis_label("host.sync_ns") == "host sync (ns)"
    assert axis_label("parameters.window") == "window"
    assert all(axis_label(name) for name in (*SCENARIO_KEYS, *DIALS, *hardware_keys()))
    with pytest.raises(SweepError, match="no axis 'x'"):
        axis_label("x")


@pytest.mark.parametrize(("name", "text", "values"), [
    ("batch", "1,4,16", (1, 4, 16)),
    ("batch", "4", (4,)),
    ("batch", "1..16", (1, 2, 4, 8, 16)),
    ("batch", "3..12", (3, 4, 8, 12)),
    ("batch", "1..16/3", (1, 4, 16)),
    ("pcie_gbps", "8..64/4", (8, 16.0, 32.0, 64)),
    ("pcie_gbps", "8..64", (8, 10.8, 14.5, 19.5, 26.3, 35.3, 47.6, 64)),
    ("pcie_gbps", " 8 .. 64 / 2 ", (8, 64)),
    ("cached_share", "0..1/5", (0, 0.25, 0.5, 0.75, 1)),
    ("cached_share", "0.1..0.9/5", (0.1, 0.3, 0.5, 0.7, 0.9)),
    ("gpu_memory_gb", "12,24.5", (12, 24.5)),
    ("link.h2d_bytes_per_s", "8e9,16.0e+9", (8e9, 16e9)),
    ("link.copies", "pinned,pageable", ("pinned", "pageable")),
    ("parameters.window", "1..8", (1, 2, 4, 8)),
    ("parameters.lookahead", "1..3", (1, 2, 3)),
    ("parameters.alpha", "0..1/11", (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)),
    ("parameters.alpha", "1..4/4", (1, 2, 3, 4)),
    ("parameters.margin", "1..2/3", (1, 1.5, 2)),
    ("parameters.pool", "true,false", (True, False)),
    ("noisy_forecast_recall", "0.5..1/6", (0.5, 0.6, 0.7, 0.8, 0.9, 1)),
    ("sequences", "0..3", (0, 1, 2, 3)),
    ("policy", "dali, fiddler", ("dali", "fiddler")),
    ("pcie", "3x16,4x16", ("3x16", "4x16")),
    ("model", "null", (None,)),
    ("seed", "0..3", (0, 1, 2, 3)),
    ("batch", "2,2,4,2", (2, 4)),
])
def test_a_text_names_values(name: str, text: str, values: tuple[Any, ...]) -> None:
    assert values_in(name, text) == values


@pytest.mark.parametrize(("name", "given", "values"), [
    ("batch", 4, (4,)),
    ("batch", [4, 1], (4, 1)),
    ("batch", "1..4", (1, 2, 4)),
    ("policy", [{"dali": {"window": 2}}, "fiddler"], ({"dali": {"window": 2}}, "fiddler")),
    ("link.h2d_bytes_per_s", ["25e9"], (25e9,)),  # text to YAML 1.1
    ("trace", "../a..b.safetensors", ("../a..b.safetensors",)),
    ("model", None, (None,)),
])
def test_a_file_names_values(name: str, given: object, values: tuple[Any, ...]) -> None:
    assert values_of(name, given) == values


@pytest.mark.parametrize(("name", "given", "says"), [
    ("batch", [], "expected one value or more"),
    ("batch", "1,,2", "expected a value between commas"),
    ("batch", "", "expected a value"),
    ("batch", "8..1", "expected a range LOW..HIGH"),
    ("batch", "1..8/1", "expected 2 to 10,000 points"),
    ("batch", "1..8/" + "9" * 5000, "expected 2 to 10,000 points"),
    ("pcie_gbps", "1..1e400", "expected a range LOW..HIGH"),
    ("pcie_gbps", "-1e400..1", "expected a range LOW..HIGH"),
    ("batch", "9" * 100_000, "a number of 100,000 characters"),
    ("policy", "1..2", "expected a range LOW..HIGH of numbers"),
    ("parameters.pool", "0..1", "expected a range LOW..HIGH of numbers"),
    ("batch", "[1", "not plain YAML"),
    ("batches", "1", "did you mean 'batch'"),
], ids=lambda it: str(it)[:30])
def test_what_names_no_values(name: str, given: object, says: str) -> None:
    with pytest.raises(SweepError, match=says.replace("[", r"\[")):
        values_of(name, given)


def test_a_fine_range_has_as_many_points_as_asked() -> None:
    """Three digits would leave 901 of them."""
    values = values_in("pcie_gbps", "10..100/2000")
    assert len(values) == 2000
    assert list(values) == sorted(values)


def test_true_is_not_one() -> None:
    assert distinct([1, True, 1.0, True, "1"]) == (1, True, "1")


def test_lists_and_mappings_are_kept_once() -> None:
    once = ({"dali": {"window": 2}}, {"dali": {"window": True}}, [0, 1], [1, 0], None)
    assert distinct([*once, {"dali": {"window": 2.0}}, [0, 1.0], None]) == once


@given(st.lists(st.integers(0, 3) | st.booleans() | st.sampled_from([0.0, 1.5, "1", None])))
def test_each_is_kept_once_in_order(values: list[Any]) -> None:
    """The same as by comparing all with all."""
    kept: list[Any] = []
    for value in values:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in kept):
            kept.append(value)
    assert list(map(repr, distinct(values))) == list(map(repr, kept))


@given(low=st.integers(1, 50), more=st.integers(1, 200), count=st.integers(2, 40))
def test_a_range_has_its_ends_rises_and_has_no_more_points_than_asked(low: int, more: int, count: int) -> None:
    for name, scale in (("pcie_gbps", 1), ("batch", 1), ("cached_share", 250)):
        values = values_in(name, f"{low / scale}..{(low + more) / scale}/{count}")
        assert (values[0], values[-1]) == (low / scale, (low + more) / scale)
        assert list(values) == sorted(set(values))
        assert 2 <= len(values) <= count


# --- Values that no table could hold are refused before a point is played ---------------------------------------------


FAR = 2**63


def refuse_to_play(*given: Any) -> Any:
    raise AssertionError("a point was played")


@pytest.mark.parametrize(("changes", "says"), [
    ({"grid": {"batch": [1, FAR]}}, "batch.*at most 64 bits"),
    ({"grid": {"seed": [FAR - 1]}, "draws": 2}, r"seed: expected room for the 2 draws below 2\^63"),
    ({"grid": {"seed": [-FAR - 1]}}, "at most 64 bits"),
    ({"grid": {"parameters.window": [FAR]}}, "at most 64 bits"),
    ({"grid": {"link.h2d_bytes_per_s": [10**30]}}, "at most 64 bits"),
    ({"grid": {"sequences": [[FAR]]}}, "at most 64 bits"),
    ({"grid": {"policy": [{"dali": {"window": FAR}}]}}, "at most 64 bits"),
    ({"grid": {"parameters": [{"window": FAR}]}}, "at most 64 bits"),
    ({"scenario": {**SMALL, "seed": FAR}}, "seed: expected a whole number of at most 64 bits"),
    ({"scenario": {**SMALL, "seed": FAR - 3}, "draws": 4}, "seed: expected room for the 4 draws"),
    ({"scenario": {**SMALL, "parameters": {"window": FAR}}}, "at most 64 bits"),
    ({"grid": {"pcie_gbps": [8, float("nan")]}}, "pcie_gbps.*expected a number, got nan"),
    ({"grid": {"parameters.alpha": [float("inf")]}}, "parameters.alpha.*expected a number, got inf"),
    ({"grid": {"gpu_memory_gb": [float("nan")]}}, "expected a number, got nan"),
    ({"grid": {"hardware": ["\ud800"]}}, "text without NUL"),
    ({"grid": {"link.copies": ["pinned", "a\0b"]}}, "text without NUL"),
    ({"grid": {"pcie": ["\udfff"]}}, "text without NUL"),
    ({"scenario": {**SMALL, "trace": "\ud800"}}, "text without NUL"),
    ({"draws": FAR}, "at most 64 bits"),
    ({"grid": {"parameters.window": [1, {None: 1, 2: 3}]}}, r"grid\.parameters.window\[1\]: expected text"),
    ({"grid": {"pcie": [{None: 1, True: 2, 1.5: 3}]}}, r"grid\.pcie\[0\]: expected text, got null"),
])
def test_values_that_no_table_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(sweep_file, "played_rows", refuse_to_play)
    with pytest.raises(SweepError, match=says):
        sweep({"scenario": SMALL, **changes}, tmp_path / "o.parquet")
    assert list(tmp_path.iterdir()) == []


def test_so_are_those_of_a_grid_that_is_made_in_python() -> None:
    for value in (FAR, float("nan"), "\ud800", [FAR], {"a": float("inf")}):
        with pytest.raises(TrilaneError):
            Grid(axes=({"parameters.window": (1, value)},))


@pytest.mark.parametrize(("name", "values", "kept"), [
    ("parameters.window", (2, "four"), ["2", "four"]),
    ("parameters.window", (2, True), ["2", "true"]),
    ("pcie_gbps", (8.5, 2**60 + 1), [8.5, float(2**60)]),
    ("link.copies", (None, "pinned"), [None, "pinned"]),
    ("parameters.window", ([1], {"a": 1.5}), ["[1]", '{"a":1.5}']),
])
def test_mixed_types_of_an_axis_have_a_column(
    tmp_path: Path, name: str, values: tuple[Any, ...], kept: list[Any]
) -> None:
    grid = {"scenario": SMALL, "grid": {name: list(values)}, "clairvoyant": False}
    frame = sweep(grid, tmp_path / "o.parquet")
    assert frame[name].astype(object).where(frame[name].notna(), None).tolist() == kept


@pytest.mark.parametrize(("changes", "says"), [
    ({"tpot_ms": "fast"}, "a value is not of the type of its column"),
    ({"tpot_ms": float("nan")}, "tpot_ms is infinite"),
    ({"batch": FAR}, "is beyond 64 bits"),
    ({"batch": 1.5e300}, "a value is not of the type"),
    ({"batch": None}, "batch is missing"),
    ({"error": None}, "error is missing"),
    ({"error": 0}, "a value is not of the type"),
    ({"labels": "[" * 9999}, "labels: not plain JSON"),
    ({"hardware": "\ud800"}, "surrogates not allowed"),
    ({"other": 1}, "a row has other columns"),
])
def test_a_journal_with_rows_that_no_sweep_has_made(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    grid = Grid.from_dict({"scenario": SMALL, "clairvoyant": False})
    output, journal = tmp_path / "o.parquet", tmp_path / "o.parquet.journal"
    keep(output, [{**Player().row(points(grid)[0]), **changes}])
    before = journal.read_bytes()
    with pytest.raises(SweepError, match=rf"o\.parquet\.journal: .*{says}.*; move it away"):
        sweep(grid, output)
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(journal, before)]
