"""Cores of threads: physical ones, disjoint for threads that work at the same time, as long as there are enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import psutil
import pytest

from realrun.machine.cores import (
    Team,
    crowding,
    cuda_cores,
    host_lane_cores,
    most_cpu_threads,
    physical_cores,
    usable_cores,
)
from tests.kit.fake_cores import SMT, FakeCores

Make: TypeAlias = Callable[..., FakeCores]
SINGLES = [(core,) for core in range(16)]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes a processor."""

    def make(
        physical: Iterable[Collection[int]], usable: Collection[int] | None = None, *, told: bool = True
    ) -> FakeCores:
        return FakeCores(monkeypatch, tmp_path, physical, usable, told)

    return make


# --- physical cores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("physical", "usable", "expected"), [
    (SMT, None, SMT),
    ([(0, 1), (2, 3)], None, [(0, 1), (2, 3)]),
    (SMT, (0, 8, 1, 10), [(0, 8), (1,), (10,)]),  # of cores 1 and 2 one sibling each
    (SINGLES[:4], (2, 3), [(2,), (3,)]),
    ([(0, 1), (2,), (3,)], None, [(0, 1), (2,), (3,)]),  # cores with and without siblings
])
def test_siblings_are_one_core_and_only_usable_ones_count(
    cores: Make, physical: Any, usable: Any, expected: list[tuple[int, ...]]
) -> None:
    cores(physical, usable)
    assert physical_cores() == expected


def test_where_the_system_says_nothing_every_logical_core_is_one(cores: Make) -> None:
    cores(SMT, told=False)
    assert physical_cores() == SINGLES


def test_on_windows_psutil_has_the_usable_cores_and_on_macos_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_affinity=lambda: [1, 3]))
    assert usable_cores() == {1, 3}
    monkeypatch.setattr(psutil, "Process", SimpleNamespace)
    assert usable_cores() == {0, 1, 2, 3}


def test_a_list_that_makes_no_sense_says_nothing(cores: Make, tmp_path: Path) -> None:
    cores(SINGLES[:2])
    (tmp_path / "cpu0/topology/thread_siblings_list").write_text("?\n")
    (tmp_path / "cpu1/topology/thread_siblings_list").write_text("\n")
    assert physical_cores() == [(0,), (1,)]


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("?", 8)]
)
def test_a_container_has_no_more_cores_than_its_time_is_worth(
    cores: Make, tmp_path: Path, quota: str, count: int
) -> None:
    cores(SMT)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert physical_cores() == SMT[:count]
    assert most_cpu_threads() == max(1, count - 2)


def test_this_computer_has_a_core() -> None:
    listed = [core for siblings in physical_cores() for core in siblings]
    assert sorted(listed) == sorted(usable_cores())


# --- a GPU's machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("physical", "usable", "threads"),
    [(SMT, None, 6), (SINGLES, None, 14), (SINGLES[:4], None, 2), (SINGLES[:3], None, 1), (SINGLES[:2], None, 1),
     (SINGLES[:1], None, 1), (SMT, (0, 1, 2, 3, 8, 9, 10, 11), 2)],
)
def test_as_many_threads_compute_experts_as_there_are_physical_cores_but_two(
    cores: Make, physical: Any, usable: Any, threads: int
) -> None:
    cores(physical, usable)
    assert most_cpu_threads() == threads


def test_threads_on_chosen_cores_are_no_more_than_their_physical_ones(cores: Make) -> None:
    cores(SMT)
    assert most_cpu_threads((0, 8, 1)) == 2
    assert most_cpu_threads(range(16)) == 6


@pytest.mark.parametrize(("physical", "usable", "expected"), [
    (SMT, None, {"cpu_threads": 6, "cpu_cores": (1, 2, 3, 4, 5, 6), "copy_core": 7, "host_core": 0}),
    (SMT, (4, 12, 5, 6, 7), {"cpu_threads": 2, "cpu_cores": (5, 6), "copy_core": 7, "host_core": 4}),
    (SINGLES[:3], None, {"cpu_threads": 1, "cpu_cores": (1,), "copy_core": 2, "host_core": 0}),
    (SINGLES[:2], None, {"cpu_threads": 1, "cpu_cores": None, "copy_core": None, "host_core": None}),
    ([(0, 1), (2, 3)], None, {"cpu_threads": 1, "cpu_cores": None, "copy_core": None, "host_core": None}),
    (SINGLES[:1], None, {"cpu_threads": 1, "cpu_cores": None, "copy_core": None, "host_core": None}),
])
def test_host_copies_and_experts_have_cores_of_their_own_beside_a_gpu(
    cores: Make, physical: Any, usable: Any, expected: dict[str, Any]
) -> None:
    cores(physical, usable)
    assert cuda_cores() == expected


def test_cores_chosen_for_experts_are_left_to_them_with_their_siblings(cores: Make) -> None:
    cores(SMT)
    assert cuda_cores((8, 1, 2)) == {"cpu_threads": 3, "cpu_cores": (8, 1, 2), "copy_core": 7, "host_core": 3}
    assert cuda_cores(tuple(range(7))) == {
        "cpu_threads": 6, "cpu_cores": tuple(range(7)), "copy_core": None, "host_core": None,
    }


# --- host lanes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("physical", "expected"), [
    (SINGLES[:1], (0, (0,), None, None)),
    (SINGLES[:2], (0, (1,), None, None)),
    (SINGLES[:3], (0, (1,), 2, 2)),
    (SINGLES[:4], (0, (1,), 2, 3)),
    (SINGLES[:6], (0, (1, 2, 3), 4, 5)),
    (SMT, (0, (1, 2, 3, 4, 5), 6, 7)),
    ([(0, 1), (2, 3)], (0, (2,), None, None)),  # four logical cores, but two threads would share each
])
def test_lanes_are_spread_over_physical_cores(cores: Make, physical: Any, expected: tuple[Any, ...]) -> None:
    cores(physical)
    assert tuple(host_lane_cores().values()) == expected
    assert list(host_lane_cores()) == ["gpu_core", "cpu_cores", "copy_core", "host_core"]


@pytest.mark.parametrize(("physical", "chosen", "expected"), [
    (SINGLES[:4], (2, None), (2, (0,), 1, 3)),
    (SINGLES[:4], (None, (0,)), (1, (0,), 2, 3)),
    (SINGLES[:4], (0, (1, 2)), (0, (1, 2), 3, 3)),
    (SINGLES[:2], (None, (0, 1)), (0, (0, 1), None, None)),
    (SMT, (8, (1, 9)), (8, (1, 9), 6, 7)),
    (SMT, (None, tuple(range(1, 8))), (0, tuple(range(1, 8)), None, None)),
])
def test_the_others_avoid_cores_that_were_chosen(
    cores: Make, physical: Any, chosen: tuple[Any, Any], expected: tuple[Any, ...]
) -> None:
    cores(physical)
    assert tuple(host_lane_cores(*chosen).values()) == expected


# --- more threads than cores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("physical", "teams", "says"), [
    (SINGLES[:4], {"a": Team(1, (0,)), "b": Team(2, (1, 2)), "c": Team(1, (3,))}, ""),
    (SINGLES[:4], {"a": Team(1, (0,)), "b": Team(1, None)}, ""),
    (SMT, {"a": Team(1, (0,)), "b": Team(1, (8,))}, "2 threads (a, b) on 1 physical core"),
    (SMT, {"a": Team(4, (1, 9, 2))}, "4 threads (a) on 2 physical cores"),
    (SINGLES[:2], {"a": Team(2, None), "b": Team(1, None)}, "3 threads (a, b) on 2 physical cores"),
    (SMT, {"a": Team(1, (0,)), "b": Team(1, (0,)), "c": Team(1, None)}, "3 threads (a, b, c) on 2 physical cores"),
])
def test_more_threads_than_cores_are_told(cores: Make, physical: Any, teams: dict[str, Team], says: str) -> None:
    cores(physical)
    assert crowding(teams) == (f"not for fidelity: more threads than cores: {says}" if says else "")
