"""Timelines worked out by hand: SMoE's late forecast and its substitution. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policies.mechanism.views import Forecast
from policies.protocols import Composition
from sim.runs.demand import StepDemand
from tests.kit.hand_worked import Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs


def smoe(placed: Placed) -> Composition:
    """Alpha is 0.25."""
    return replace(registered("smoe"), placement=placed)


def one_token(scores: Sequence[Sequence[float]], ranked: Sequence[int], forecast: Sequence[float]) -> StepDemand:
    """A decode step from each layer's scores; layer 0 foresees ``ranked`` in layer 1, with their scores."""
    chosen = [sorted(range(3), key=lambda e, own=own: -own[e])[:2] for own in scores]  # type: ignore[misc]
    guess = Forecast(1, "partial", tuple(ranked[:2]), (1, 1), [ranked], [forecast])
    demand = step(*(dict.fromkeys(ids, 1) for ids in chosen), forecast=guess)
    routings = tuple(
        routing._replace(token_ids=[ids], token_weights=[[own[e] / sum(own[i] for i in ids) for e in ids]])
        for routing, ids, own in zip(demand.routings, chosen, scores, strict=True)
    )
    return demand._replace(routings=routings, scores=np.array([scores]))


LATE = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  launch L0            # the partial forward pass
  35-36  wait L0 >1           # the forecast comes by itself
  36-37  foresee L0
  37-38  launch L1
  59-60  wait L1
  60-61  plan L1
  61-62  launch L1 E2
  62-63  launch L1 E0
  63-64  launch L1
  64-65  launch L-1
  99-100 wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  22-34  speculate L0 >1 ready=20   # after the expert that is here, before the one that is coming: attention 10, gate 2
  40-45  expert L0 E1
  45-46  combine L0
  46-56  attention L1
  56-58  gate L1
  64-69  expert L1 E2 ready=64
  88-93  expert L1 E0 ready=88
  93-94  combine L1
  94-98  attention L-1
h2d:
  16-40  demand L0 E1         # through staging: the only slot holds 0, which is in use
  45-45  release L0 E1
  40-40  evict L1 E1          # the only member of layer 1's cache, and its forecast score is low
  40-64  prefetch L1 E2 ready=37   # behind the demand load
  64-88  demand L1 E0 ready=61   # second in the queue of prefetches, and no room beside 2: copied when it is missed
  93-93  release L1 E0
d2h:
  13-14  routing L0
  34-35  routing L0 >1
  58-59  routing L1
  98-99  routing L-1
"""


def test_the_forecast_comes_after_the_experts_that_are_here_and_prefetches_wait_for_loads() -> None:
    """Copies take 24. Both experts of both layers are top-score (0.3 > 1.25 x 0.2 and x 0.1): nobody is exchanged."""
    placed = Placed(((0,), (1,)))
    demand = one_token([(0.5, 0.3, 0.2), (0.3, 0.1, 0.6)], (2, 0, 1), (0.6, 0.3, 0.1))
    spans = play(smoe(placed), demand, cache_bytes=placed.bytes, costs=uniform_costs(copy_ns=24))
    assert told(spans, LATE) == lines(LATE)


EXCHANGED = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L0 E2
  0-0    place L1 E0
  0-0    place L1 E1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  22-27  expert L0 E2         # in the place of 1, which is not here
  27-39  speculate L0 >1
  39-40  combine L0
  43-53  attention L1         # the forecast is here at 40, waited for at 41, foresee ends at 42, launched 43
  53-55  gate L1
  59-64  expert L1 E0
  64-69  expert L1 E1
  69-70  combine L1
  70-74  attention L-1
"""


def test_a_low_score_expert_that_misses_is_exchanged_and_nothing_is_copied() -> None:
    """Layer 0: 1 (0.28) is low (at most 1.25 x 0.24), and 2 (0.24 > 0.75 x 0.24) is on the GPU."""
    placed = Placed(((0, 2), (0, 1)))
    demand = one_token([(0.48, 0.28, 0.24), (0.6, 0.3, 0.1)], (0, 1, 2), (0.6, 0.3, 0.1))
    spans = play(smoe(placed), demand, cache_bytes=placed.bytes)
    shown = lane(spans, "gpu") + lane(spans, "cpu") + lane(spans, "h2d")
    assert told(shown, EXCHANGED) == lines(EXCHANGED)
