"""Marks of policies, and one look for each in every picture."""

from __future__ import annotations

import pytest

from policies.protocols import PolicyKind
from policies.registry import policy_names
from sim.runs.vocabulary import kind_of
from trilane.output.figures.marks import CLAIRVOYANT, look_of, marked, meanings


@pytest.mark.parametrize(("labels", "expected"), [
    ((), "name"),
    (("synthetic trace",), "name"),
    (("clairvoyant",), "name *"),
    (["synthetic trace", "changes routing"], "name ~"),
    (("changes routing", "clairvoyant"), "name *"),
])
def test_marks(labels: tuple[str, ...], expected: str) -> None:
    assert marked("name", kind_of(labels)) == expected


def test_only_the_marks_of_these_kinds_are_explained() -> None:
    assert list(meanings(set(PolicyKind))) == ["*", "~"]
    assert list(meanings([PolicyKind.CHANGES, PolicyKind.KEEPS])) == ["~"]
    assert meanings([PolicyKind.KEEPS]) == {}


# --- looks ------------------------------------------------------------------------------------------------------------

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "black"}


def test_every_policy_has_a_look_of_its_own() -> None:
    looks = {name: look_of(name) for name in policy_names() if name != "oracle"}
    assert len(set(looks.values())) == len(looks)
    assert {look.colour for look in looks.values()} <= OKABE_ITO


def test_clairvoyant_policies_are_black_and_dashed() -> None:
    assert look_of("anything", PolicyKind.CLAIRVOYANT) == CLAIRVOYANT == ("black", "--", "")


def test_an_unknown_policy_has_a_look_too() -> None:
    assert look_of("mine").colour not in OKABE_ITO
