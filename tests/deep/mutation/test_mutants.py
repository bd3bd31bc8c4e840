"""The planting of faults itself: which places are changed, and which tests are run for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="needs the extra `mutation`")
from tests.deep.mutation.covering import Covering
from tests.deep.mutation.mutants import PACKAGES, Mutant, sample, shares

SOURCE = """
def queued(demand: int | None, swaps: int = 0) -> int:
    assert demand is not None
    if demand > 8:
        return swaps
    return demand + swaps

class Copy:
    slots = 2
"""


NEAR = "tests/policies/test_near.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for package in PACKAGES:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "queue.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_a_sample_is_the_same_for_the_same_seed_and_has_every_package(root: Path) -> None:
    drawn = sample(root, 25, seed=1)
    assert drawn == sample(root, 25, seed=1)
    assert drawn != sample(root, 25, seed=2)
    assert [sum(mutant.path == f"{package}/queue.py" for mutant in drawn) for package in PACKAGES] == [5] * 5


def test_defaults_comparisons_and_fields_are_changed_types_and_assertions_are_not(root: Path) -> None:
    drawn = sample(root, 5 * 100, seed=1)
    changes = {line for mutant in drawn for line in mutant.diff(root).splitlines() if line.startswith("+")}
    assert {"+    return demand - swaps", "+    if demand >= 8:", "+    slots = 3"} <= changes
    assert not any("&" in line or "assert" in line for line in changes)


def test_shares_add_up() -> None:
    assert shares({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert shares({"a": 98, "b": 2}, 10) == {"a": 10, "b": 0}


@pytest.mark.parametrize(
    ("line", "tests"),
    [
        (6, ["fast", "slow", "other", NEAR]),  # those of the line, of the function, of the package
        (5, ["other", "fast", "slow", NEAR]),
        (9, ["fast", "other", "slow", NEAR]),
    ],
)
def test_a_change_is_tested_by_what_runs_its_line(root: Path, line: int, tests: list[str]) -> None:
    path = f"{PACKAGES[0]}/queue.py"
    seconds = {"slow": 3.0, "fast": 1.0, "other": 2.0, NEAR: 0.1, "tests/sim/test_far.py": 0.1}
    covering = Covering(seconds, {path: {"6": ["slow", "fast"], "5": ["other"]}}, [])
    mutant = Mutant(path, line, SOURCE)
    assert covering.of(mutant, root, seconds=60) == tests
    assert covering.of(mutant, root, seconds=0.5) == tests[:1]
