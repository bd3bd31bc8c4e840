"""A whole timeline worked out by hand: an expert that is loaded in fewer bits, and one that is left out.

Notation and costs: ``hand_worked``. A narrow copy has a quarter of the bytes: 25, 5 ns on the link; with 3 experts a
layer, that of 1 has the number 4. One token goes to 0 (0.7 of the weight) and 1 in layer 0, and to 1 (0.95) and 2 in
layer 1.
"""

from __future__ import annotations

import pytest

from policies.mechanism.views import PolicyError
from sim.costs.engine_costs import with_narrow_copies
from sim.runs.demand import StepDemand
from tests.kit.hand_worked import EXPERTS, LAYERS, lines, play, registered, step, told
from tests.kit.toys import uniform_costs

COSTS = with_narrow_copies(uniform_costs(LAYERS), EXPERTS, 0.25)


def demand() -> StepDemand:
    asked = step({0: 1, 1: 1}, {1: 1, 2: 1})
    tokens = (((0, 1), (0.7, 0.3)), ((1, 2), (0.95, 0.05)))
    routings = tuple(
        routing._replace(token_ids=[ids], token_weights=[weights])
        for routing, (ids, weights) in zip(asked.routings, tokens, strict=True)
    )
    return asked._replace(routings=routings)


HOBBIT = """
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E4
  18-19  launch L0
  19-20  launch L1
  60-61  wait L1
  61-62  plan L1
  62-63  launch L1 E1         # 2 has 0.05 of the weight behind 0.95: it is left out
  63-64  launch L1
  64-65  launch L-1
  93-94  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  36-41  expert L0 E0 ready=36 bytes=100
  41-46  expert L0 E4 ready=41 tokens=1 bytes=25   # 1, with its narrow copy
  46-47  combine L0
  47-57  attention L1
  57-59  gate L1
  82-87  expert L1 E1
  87-88  combine L1
  88-92  attention L-1
h2d:
  16-36  demand L0 E0 bytes=100
  36-41  demand L0 E4 bytes=25   # both in the cache: 125 of 150 bytes
  62-62  evict L0 E0 bytes=100   # 25 are free, and 50 without the narrow copy, which has the least scores
  62-62  evict L0 E4 bytes=25
  62-82  demand L1 E1 bytes=100
d2h:
  13-14  routing L0
  59-60  routing L1
  92-93  routing L-1
"""


def test_an_unimportant_miss_takes_a_quarter_of_the_link() -> None:
    spans = play(registered("hobbit", lookahead=0), demand(), cache_bytes=150, costs=COSTS)
    assert told(spans, HOBBIT) == lines(HOBBIT)


def test_without_costs_of_narrow_copies_there_is_no_run() -> None:
    with pytest.raises(PolicyError, match="policy 'hobbit' needs narrow copies of experts: expected costs that have"):
        play(registered("hobbit", lookahead=0), demand(), cache_bytes=150)
