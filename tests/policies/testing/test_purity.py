"""What counts as state that two policies must not share."""

from __future__ import annotations

import numpy as np
import pytest

from policies.mechanism.views import ExpertId
from policies.parts.assigners import ResidentOrCpu
from policies.parts.caches import LruCache
from policies.protocols import Budget
from policies.testing.purity import _keeps_state


@pytest.mark.parametrize(("value", "keeps"), [
    (LruCache(), True), ([], True), (np.zeros(1), True), (ResidentOrCpu(), True),
    (ExpertId(0, 1), False), (Budget(4, (10,), 10), False), (np.broadcast_to(0, 2), False), ("text", False),
])
def test_what_can_be_changed_keeps_state(value: object, keeps: bool) -> None:
    assert _keeps_state(value) == keeps
