"""Every policy that has a name, held to every law."""

from __future__ import annotations

import pytest

from policies.registry import SYSTEMS
from tests.kit.depth import thinned
from trilane.testing.policy_laws import PolicyLaws


@pytest.mark.parametrize("entry", SYSTEMS.values(), ids=SYSTEMS)
class TestEveryPolicy(PolicyLaws):
    """One table: a new row of the registry is tested without a word here."""

    test_laws_1_to_5_and_12_at_every_size = thinned(7)(PolicyLaws.test_laws_1_to_5_and_12_at_every_size)
    test_law_8_no_run_beats_the_lower_bound = thinned(2)(PolicyLaws.test_law_8_no_run_beats_the_lower_bound)
    test_law_9_scaling = thinned(2)(PolicyLaws.test_law_9_scaling)
