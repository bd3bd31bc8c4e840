"""Each policy has one look in every picture, in colours that readers with any colour vision can tell apart."""

from __future__ import annotations

from policies.protocols import PolicyKind
from policies.registry import policy_names
from trilane.output.figures.policy_style import CLAIRVOYANT, look_of

OKABE_ITO = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "black"}


def test_every_policy_has_a_look_of_its_own() -> None:
    looks = {name: look_of(name) for name in policy_names() if name != "oracle"}
    assert len(set(looks.values())) == len(looks)
    assert {look.colour for look in looks.values()} <= OKABE_ITO


def test_clairvoyant_policies_are_black_and_dashed() -> None:
    assert look_of("anything", PolicyKind.CLAIRVOYANT) == CLAIRVOYANT == ("black", "--", "")


def test_an_unknown_policy_has_a_look_too() -> None:
    assert look_of("mine").colour not in OKABE_ITO
