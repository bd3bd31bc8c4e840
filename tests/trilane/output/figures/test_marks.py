"""Marks behind names: made of kinds, explained by one legend."""

from __future__ import annotations

import pytest

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.output.figures.marks import marked, meanings


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((), "name"),
        (("synthetic trace",), "name"),
        (("clairvoyant",), "name *"),
        (["synthetic trace", "changes routing"], "name ~"),
        (("changes routing", "clairvoyant"), "name *"),
    ],
)
def test_marks(labels: tuple[str, ...], expected: str) -> None:
    assert marked("name", kind_of(labels)) == expected


def test_only_the_marks_of_these_kinds_are_explained() -> None:
    assert list(meanings(set(PolicyKind))) == ["*", "~"]
    assert list(meanings([PolicyKind.CHANGES, PolicyKind.KEEPS])) == ["~"]
    assert meanings([PolicyKind.KEEPS]) == {}
