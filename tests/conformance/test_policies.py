"""Every policy that has a name, held to every law."""

from __future__ import annotations

import pytest

from policies.registry import SYSTEMS
from trilane.testing.policy_laws import PolicyLaws


@pytest.mark.parametrize("entry", SYSTEMS.values(), ids=SYSTEMS)
class TestEveryPolicy(PolicyLaws):
    """One table: a new row of the registry is tested without a word here."""
