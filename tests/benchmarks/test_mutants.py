"""The planting of faults itself: which places are changed, and which tests are run for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="needs the extra `mutation`")
from benchmarks.mutation.mutants import PACKAGES, Mutant, sample, shares
from benchmarks.mutation.outcomes import Covering, planted, play

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


def test_what_strict_is_stays(root: Path) -> None:
    for package in PACKAGES:
        (root / package / "queue.py").write_text("pairs = zip(range(2), range(2), strict=True)\n", encoding="utf-8")
    drawn = [mutant.source for seed in range(20) for mutant in sample(root, 5, seed)]
    assert len(set(drawn)) > 3
    assert all("strict=True" in source or source == "pairs = None\n" for source in drawn)


def test_shares_add_up() -> None:
    assert shares({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert shares({"a": 98, "b": 2}, 10) == {"a": 10, "b": 0}


@pytest.mark.parametrize(("line", "tests"), [
    (6, ["fast", "slow", "other", NEAR]),  # those of the line, of the function, of the package
    (5, ["other", "fast", "slow", NEAR]),
    (9, ["fast", "other", "slow", NEAR]),
])
def test_a_change_is_tested_by_what_runs_its_line(root: Path, line: int, tests: list[str]) -> None:
    path = f"{PACKAGES[0]}/queue.py"
    seconds = {"slow": 3.0, "fast": 1.0, "other": 2.0, NEAR: 0.1, "tests/sim/test_far.py": 0.1}
    covering = Covering(seconds, {path: {"6": 0, "5": 1}}, sets=[[0, 1], [2]], modules=[])
    mutant = Mutant(path, line, SOURCE)
    assert covering.of(mutant, root, seconds=60) == tests
    assert covering.of(mutant, root, seconds=1.0) == [name for name in tests if name in (tests[0], "fast", NEAR)]


def test_a_fault_is_found_by_a_test_that_fails_or_does_not_end(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "toy.py").write_text("def one():\n    return 1\n", encoding="utf-8")
    (tmp_path / "tests").mkdir()
    test = "from policies.toy import one\ndef test_one():\n    assert one() > 0\n"
    (tmp_path / "tests" / "test_toy.py").write_text(test, encoding="utf-8")

    def outcome(body: str) -> str:
        with planted(Mutant("policies/toy.py", 2, f"def one():\n    {body}\n"), tmp_path):
            return play(["tests/test_toy.py::test_one"], tmp_path, 20, tmp_path / "log.txt")

    assert [outcome("return 2"), outcome("return 0")] == ["passed", "failed"]
    assert play(["tests/test_toy.py::test_one"], tmp_path, 20, tmp_path / "log.txt") == "passed"
    with planted(Mutant("policies/toy.py", 2, "def one():\n    while True: pass\n"), tmp_path):
        assert play(["tests/test_toy.py::test_one"], tmp_path, 3, tmp_path / "log.txt") == "timeout"
