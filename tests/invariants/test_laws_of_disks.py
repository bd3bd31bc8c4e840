"""Law 13 of docs/design.md, and all others, where a disk holds what the host's memory has no room for."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.depth import examples
from trilane.testing.laws_of_runs import check_run
from trilane.testing.random_worlds import with_disk, worlds
from trilane.testing.worlds import World, play

some = settings(max_examples=examples(125), derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(worlds(), st.integers(0, 2**32 - 1))
def test_laws_1_to_5_12_and_13_above_a_disk(world: World, seed: int) -> None:
    world = with_disk(world, random.Random(seed))
    check_run(world, play(world))
