"""A profile as a file: written, read back the same, and refused wherever something is not as it should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from realrun.profiling.timing import measured_grid, measured_rate, measured_table, measured_time
from sim.machine.hardware import HardwareError, load_hardware, write_hardware
from sim.machine.interpolation import DecodeGrid, Measured, Table
from sim.machine.plan_costs import PlanCost
from sim.machine.profile import MeasuredRate, Profile
from tests.kit.hand_measured import TOY, decode_grid, table, toy_machine, toy_model, toy_profile
from trilane.common.schema import from_dict, to_dict
from trilane.testing.worlds import toy_shape


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The toy machine's file."""
    write_hardware(toy_machine(), tmp_path / "lanes.yaml")
    return tmp_path / "lanes.yaml"


def spoilt(path: Path, place: str, value: object) -> str:
    """The error after ``measured`` was changed at ``place``, a dotted key; None takes the key away."""
    document = yaml.safe_load(path.read_text())
    *way, last = place.split(".")
    part = document["measured"]
    for key in way:
        part = part[key]
    part[last] = value
    if value is None:
        del part[last]
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(HardwareError) as caught:
        load_hardware(path)
    return str(caught.value)


# --- written and read back --------------------------------------------------------------------------------------------


def test_a_written_profile_is_read_back_unchanged(path: Path) -> None:
    assert load_hardware(path) == toy_machine()


def test_a_document_is_plain_yaml(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(toy_machine().document()))
    assert load_hardware(tmp_path / "machine.yaml") == toy_machine()


def test_a_table_is_a_few_lines_and_every_fact_one(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert "ns: [100, 140, 120, 200]" in lines
    assert "- [1400, 2400]" in lines
    assert "copy: {ns: 7000, low: 7000, high: 7000}" in lines
    assert "date: '2026-11-20'" in lines


def test_only_the_whole_file_takes_the_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fails(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(b"name: half of")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(OSError, match="disk full"):
        write_hardware(toy_machine(), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_model_has_only_the_tables_that_its_sizes_ask_for(tmp_path: Path) -> None:
    plain = toy_shape(2, 4, 2)
    machine = toy_machine(models={"plain": toy_model(plain, shared=None, dense_ffn=None, dense_launch=None)})
    write_hardware(machine, tmp_path / "plain.yaml")
    assert load_hardware(tmp_path / "plain.yaml") == machine
    assert "shared:" not in (tmp_path / "plain.yaml").read_text()


def test_a_profile_of_before_what_was_measured_later_is_read_without_it(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    later = ("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille")
    for name in later:
        del document["measured"]["models"]["toy"][name]
    path.write_text(yaml.safe_dump(document))
    assert load_hardware(path) == toy_machine(models={"toy": toy_model(**dict.fromkeys(later))})
    write_hardware(load_hardware(path), path)
    assert "launch_lead" not in path.read_text()


samples = st.lists(st.floats(0, 1e9), min_size=1, max_size=5)
sizes = st.integers(1, 4096)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
names = texts.filter(bool).map(lambda text: text[:8])


@st.composite
def grids(draw: st.DrawFn) -> DecodeGrid:
    batch, length = (draw(st.sets(sizes, min_size=1, max_size=3)) for _ in range(2))
    return measured_grid(DecodeGrid, {(b, n): draw(samples) for b in batch for n in length})


@given(
    table=st.dictionaries(sizes, samples, min_size=1).map(measured_table),
    grid=grids(),
    copy=samples.map(measured_time),
    share=st.lists(st.floats(0, 2000), min_size=1).map(measured_rate),
    facts=st.dictionaries(
        names, st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts
    ),
    rates=st.dictionaries(names, st.floats(0, 1e15)),
    plan=st.dictionaries(names, st.builds(PlanCost, st.floats(0, 1e9), st.floats(0, 1e9))),
)
def test_whatever_was_measured_survives_the_way_through_yaml(
    table: Table, grid: DecodeGrid, copy: Measured, share: MeasuredRate, facts: Any, rates: Any, plan: Any
) -> None:
    model = toy_model(expert_gpu=table, shared=table, attention_decode=grid, copy=copy, copy_permille=share)
    profile = toy_profile(
        machine={**facts, "kind": "cuda"}, rates=rates, plan=plan, foresee=plan, models={"a b:c": model}
    )
    text = yaml.safe_dump(to_dict(profile, nulls=False))
    assert from_dict(Profile, yaml.safe_load(text)) == profile


# --- refused ----------------------------------------------------------------------------------------------------------

MODEL = "models.toy"


@pytest.mark.parametrize(("place", "value", "expected"), [
    ("rates", None, "hardware 'lanes': measured: missing key: rates"),
    ("speed", {}, "hardware 'lanes': measured: there is no key 'speed'; choose from machine, plan"),
    ("models", [], "measured.models: expected a mapping (`key: value`), got []"),
    ("machine.kind", None, "measured: machine.kind: expected 'host-lanes' or 'cuda', got None"),
    ("machine.kind", "tpu", "machine.kind: expected 'host-lanes' or 'cuda', got 'tpu'"),
    ("machine.cores", [1, 2], "machine.cores: expected text or a whole number or a number, got [1, 2]"),
    ("machine.load", float("nan"), "machine.load: expected text or a whole number or a number, got nan"),
    ("rates.read", -1.0, "measured.rates.read: expected a number >= 0, got -1.0"),
    ("plan.dali", 3, "measured.plan.dali: expected a mapping with the keys base_ns, per_active_expert_ns, got 3"),
    ("plan.dali", {"base_ns": 3}, "measured.plan.dali: missing key: per_active_expert_ns"),
    ("foresee.default.base_ns", -3, "foresee.default.base_ns: expected a number >= 0, got -3"),
    (f"{MODEL}.sizes", None, "measured.models.toy: missing key: sizes"),
    (f"{MODEL}.sizes.hidden", None, "models.toy.sizes: missing key: hidden"),
    (f"{MODEL}.sizes.hidden", 8.5, "models.toy.sizes.hidden: expected a whole number, got 8.5"),
    (f"{MODEL}.sizes.shared_width", 0, "models.toy: shared: the model has no such part, by its shared_width of 0"),
    (f"{MODEL}.launch_tail", None, "models.toy: missing key: launch_tail"),
    (f"{MODEL}.gate", None, "models.toy: missing key: gate"),
    (f"{MODEL}.dense_launch", None, "models.toy: missing key: dense_launch"),
    (f"{MODEL}.attention", {}, "models.toy: there is no key 'attention'; did you mean 'attention_"),
    (f"{MODEL}.gate.at", None, "models.toy.gate: missing key: at"),
    (f"{MODEL}.gate.ns", 20, "models.toy.gate.ns: expected a list (each a whole number from 0 to 1e+15), got 20"),
    (f"{MODEL}.head.ns", [1, 2, 3], "models.toy.head: expected 2 entries of ns, low and high, one for each point"),
    (f"{MODEL}.head.ns", [400, "slow"], "models.toy.head.ns[1]: expected a whole number from 0 to"),
    (f"{MODEL}.head.ns", [400.5, 700], "models.toy.head.ns[0]: expected a whole number from 0 to 1e+15, got 400.5"),
    (f"{MODEL}.head.low", [-1, 700], "models.toy.head.low[0]: expected a whole number from 0 to 1e+15, got -1"),
    (f"{MODEL}.head.low", [401, 700], "models.toy.head: expected low <= median <= high, got 401, 400, 401"),
    *((f"{MODEL}.head.at", at, "models.toy.head.at") for at in ([4, 1], [1, 1], [0, 1], [])),
    (f"{MODEL}.copy.ns", -7, "models.toy.copy.ns: expected a whole number from 0 to 1e+15, got -7"),
    (f"{MODEL}.copy.ns", True, "models.toy.copy.ns: expected a whole number from 0 to 1e+15, got True"),
    (f"{MODEL}.copy.high", 6000, "models.toy.copy: expected low <= median <= high, got 7000, 7000, 6000"),
    (f"{MODEL}.cpu_permille.high", 1001, "cpu_permille.high: expected a whole number from 1 to 1000, got 1001"),
    (f"{MODEL}.attention_decode.tokens", [1], "attention_decode: there is no key 'tokens'; choose from batch"),
    (f"{MODEL}.attention_prefill.tokens", None, "attention_prefill: missing key: tokens"),
    (f"{MODEL}.attention_prefill.ns", [[3000, 6000]], "attention_prefill: expected 2 entries of ns, low and high"),
    (f"{MODEL}.attention_prefill.ns", [[3000, 6000], [5000]], "attention_prefill: expected 2 entries of ns"),
    (f"{MODEL}.attention_prefill.low", [[1, 2], [9999, 4]], "expected low <= median <= high, got 9999, 5000, 5000"),
])
def test_what_is_not_as_it_should_be_is_named(path: Path, place: str, value: object, expected: str) -> None:
    assert expected in spoilt(path, place, value)


# --- overrides and limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["link.h2d_bytes_per_s", "cpu.flops_per_s", "host.sync_ns", "contention.cpu_permille"])
def test_numbers_that_the_tables_decide_cannot_be_overridden(path: Path, key: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_hardware(path, {key: 900})
    assert f"hardware 'lanes', overrides: this machine is a measured profile, whose tables replace {key}" in (
        str(caught.value)
    )
    assert "these can be overridden: gpu.memory_bytes, gpu.reserve_bytes, link.result_path" in str(caught.value)


def test_memory_and_the_way_of_results_can_be_overridden(path: Path) -> None:
    machine = load_hardware(
        path, {"gpu.memory_bytes": 5e8, "cpu.ram_bytes": 64e9, "link.result_path": "h2d", "host.plan_factor": 2}
    )
    assert (machine.gpu.memory_bytes, machine.link.result_path) == (500_000_000, "h2d")
    assert machine.cpu.ram_bytes == 64_000_000_000
    assert machine.decisions.of("plan", "dali") == PlanCost(11, 2)
    assert machine.decisions.of("observe", "dali") == PlanCost(0, 0)  # it is in the plan's measured time
    assert machine.decisions.of("observe", "hybrimoe") == machine.plan_costs.of("observe", "hybrimoe").scaled(2)
    assert machine.decisions.of("plan", "fiddler") == machine.plan_costs.of("plan", "fiddler").scaled(2)


def test_a_core_may_be_slow_where_it_plays_the_gpu_but_no_cuda_device_is(tmp_path: Path) -> None:
    machine = toy_machine(machine={"kind": "cuda"})
    write_hardware(machine, tmp_path / "gpu.yaml")
    with pytest.raises(HardwareError, match=r"gpu\.bandwidth_bytes_per_s = 1e\+10 is outside 5e\+10"):
        load_hardware(tmp_path / "gpu.yaml")


def test_a_core_that_plays_the_gpu_has_limits_too(tmp_path: Path) -> None:
    machine = toy_machine()
    write_hardware(replace(machine, gpu=replace(machine.gpu, flops_per_s=100.0)), tmp_path / "slip.yaml")
    with pytest.raises(HardwareError, match=r"gpu\.flops_per_s = 100 is outside .* it looks like GFLOP/s typed as"):
        load_hardware(tmp_path / "slip.yaml")


def test_sizes_are_those_of_the_shape() -> None:
    sizes = toy_model().sizes
    assert (sizes.hidden, sizes.shared_width, sizes.expert_bytes) == (TOY.hidden, TOY.shared_width, 192)


# --- Tables of measured times -----------------------------------------------------------------------------------------


THREE = table((2, 100), (4, 140), (8, 160))
FOUR = decode_grid((1, 3), (10, 20), (100, 200), (300, 600))


@pytest.mark.parametrize(
    ("size", "ns"), [(1, 100), (2, 100), (3, 120), (4, 140), (5, 145), (8, 160), (10, 170), (2.5, 110)]
)
def test_lines_between_points_and_on_beyond_the_last(size: float, ns: float) -> None:
    assert THREE(size) == ns


def test_a_last_segment_that_falls_goes_on_level() -> None:
    assert table((1, 50), (2, 90), (4, 70))(100) == 70


def test_one_point_is_level_everywhere() -> None:
    assert [table((4, 70))(size) for size in (1, 4, 400)] == [70, 70, 70]


@pytest.mark.parametrize(("batch", "length", "ns"), [
    (1, 10, 100), (3, 20, 600),  # points
    (1, 15, 150), (2, 10, 200), (2, 15, 300),  # between: 150 and 450 at length 15
    (1, 1, 100), (0.5, 15, 150),  # below
    (1, 30, 300), (5, 10, 500), (5, 30, 1500),  # beyond: 300 and 900 at length 30, 300 a sequence
])
def test_a_grid_is_lines_both_ways(batch: float, length: float, ns: float) -> None:
    assert FOUR(batch, length) == ns


def points(rising: bool) -> st.SearchStrategy[Table]:
    """A table of 1 to 6 points."""
    pairs = st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**12)), min_size=1, max_size=6)

    def made(pairs: list[tuple[int, int]]) -> Table:
        at = tuple(sorted({point for point, _ in pairs}))
        ns = [time for _, time in pairs][: len(at)]
        return table(*zip(at, sorted(ns) if rising else ns, strict=True))

    return pairs.map(made)


@given(points(rising=False))
def test_a_table_hits_its_points(some: Table) -> None:
    assert [some(size) for size in some.at] == list(some.ns)


@given(points(rising=True), st.lists(st.integers(1, 2 * 10**6), min_size=2))
def test_a_rising_table_rises_between_and_beyond_its_points(some: Table, sizes: list[int]) -> None:
    times = [some(size) for size in sorted(sizes)]
    assert times == sorted(times)


@given(points(rising=False), st.integers(1, 2 * 10**6))
def test_nothing_lies_below_the_least_measured_time(some: Table, size: int) -> None:
    assert some(size) >= min(some.ns)
