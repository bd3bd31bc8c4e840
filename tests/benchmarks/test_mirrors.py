"""The tests that a planted fault is tried on by its place."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutation.mirrors import mirrors

ROOT = Path(__file__).parents[2]


def test_the_nearest_tests_come_first_and_each_file_once() -> None:
    near, folder, room, printed = mirrors("trilane/engines/tune/drafts.py", ROOT)
    assert near[0] == "tests/trilane/engines/tune/test_measured_settings.py"
    assert all(file.startswith("tests/trilane/engines/tune/") for file in folder)
    assert "tests/trilane/engines/test_memory.py" in room
    assert printed[-1] == "tests/trilane/test_readme.py"
    names = [*near, *folder, *room, *printed]
    assert len(names) == len(set(names))


def test_a_test_of_the_same_name_is_the_nearest() -> None:
    assert mirrors("trilane/engines/memory.py", ROOT)[0][0] == "tests/trilane/engines/test_memory.py"
