"""Whole timelines worked out by hand: DALI, greedy and exact. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.mechanism.views import Forecast, PolicyError
from policies.protocols import Composition
from sim.costs.engine_costs import with_narrow_copies
from sim.runs.demand import StepDemand
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs
from trilane.testing.worlds import toy_calibration

DALI = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E1
  18-19  launch L0
  19-20  foresee L0           # the forecast is here at 16, the host has launched at 19
  20-21  launch L1
  56-57  wait L1
  57-58  plan L1
  58-59  launch L1 E2
  59-60  launch L1 E0
  60-61  launch L1
  61-62  launch L-1           # no layer follows, so no foresee
  76-77  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  13-15  speculate L0 >1
  17-22  expert L0 E0
  36-41  expert L0 E1 ready=36
  41-43  combine L0           # 1 over at 41, the CPU at 31; 1 + 1
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E2 ready=59   # prefetched: here since 56
  64-69  expert L1 E0         # launched 60, gpu free 64
  69-71  combine L1           # CPU over at 66; 1 + 1
  71-75  attention L-1
cpu:
  17-31  expert L0 E2         # activations 17, 2 tokens
  59-66  expert L1 E1         # 1 token
h2d:
  16-36  demand L0 E1 ready=16   # staging: the window cache admits no loads
  41-41  release L0 E1
  36-56  prefetch L1 E2 ready=20   # foreseen 20, after the demand load
  43-43  evict L0 E0          # end of layer 0: it wants its busiest absent expert (1: 4 tokens) for resident 0 (2),
  43-43  place L0 E1          # and 1 still lies in the staging slot that it was computed from: no copy
  64-64  release L1 E2
  71-71  evict L1 E0          # end of layer 1: 2 (4 tokens) for 0 (3), from the slot that it was prefetched into
  71-71  place L1 E2
d2h:
  13-14  routing L0
  15-16  routing L0 >1 ready=15   # the forecast, computed 15; before the activations
  16-17  activations L0 ready=16
  55-56  routing L1
  58-59  activations L1
  75-76  routing L-1
"""


def test_dali_splits_greedily_uses_a_prefetch_and_swaps_at_the_end_of_each_layer() -> None:
    # Layer 0, (t_gpu, t_cpu): 0 (5, 14), 1 (20, 28), 2 (20, 14). By difference 9, 8, 6:
    # 0 to the GPU (5 <= 14), 1 to the GPU (25 <= 28), 2 to the CPU (45 > 14).
    # Layer 1: 0 (5, 21), 1 (20, 7), 2 (5, 28), since 2 has been prefetched. By difference 23, 16, 13:
    # 2 to the GPU (5 <= 28), 0 to the GPU (10 <= 21), 1 to the CPU (30 > 7).
    placed = Placed(((0,), (0,)))
    policy = replace(registered("dali", window=1, update=1, prefetch=1), placement=placed)
    guess = Forecast(1, "residual", (2, 0, 1), (4, 3, 1))  # of the absent, 2 is the busiest
    demand = step({0: 2, 1: 4, 2: 2}, {0: 3, 1: 1, 2: 4}, forecast=guess)
    spans = play(policy, demand, cache_bytes=placed.bytes)
    assert told(spans, DALI) == lines(DALI)


DALI_ILP = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
  0-0    place L1 E1
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0 E2
  18-19  launch L0
  19-20  launch L1            # no prefetches, so no foresee
  56-57  wait L1
  57-58  plan L1
  58-59  launch L1 E0
  59-60  launch L1 E1
  60-61  launch L1
  61-62  launch L-1
  75-76  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  17-22  expert L0 E0
  36-41  expert L0 E2 ready=36
  41-43  combine L0           # CPU over at 38
  43-53  attention L1
  53-55  gate L1
  59-64  expert L1 E0
  64-69  expert L1 E1
  69-70  combine L1
  70-74  attention L-1
cpu:
  17-38  expert L0 E1         # 3 tokens
h2d:
  16-36  demand L0 E2
  41-41  release L0 E2
d2h:
  13-14  routing L0
  16-17  activations L0
  55-56  routing L1
  74-75  routing L-1
"""
# Layer 0, (t_gpu, t_cpu): 0 (5, 7), 1 (20, 21), 2 (20, 28).
# Greedy, by difference 8, 2, 1: 2 to the GPU (20 <= 28), 0 to the CPU (25 > 7), 1 to the CPU (40 > 28): makespan 28.
# Exact: 0 and 2 to the GPU, 1 to the CPU: max(25, 21) = 25. The other splits take 26 or more.
# Layer 1: 0 and 1 (5, 28): both on the GPU, 10.
UNEVEN = step({0: 1, 1: 3, 2: 4}, {0: 4, 1: 4})


def test_dali_ilp_finds_the_split_that_greedy_misses() -> None:
    placed = Placed(((0,), (0, 1)))
    policy = replace(registered("dali-ilp", prefetch=0), placement=placed)
    spans = play(policy, UNEVEN, cache_bytes=placed.bytes)
    assert told(spans, DALI_ILP) == lines(DALI_ILP)


def test_greedy_takes_the_longer_way_on_the_same_layer() -> None:
    placed = Placed(((0,), (0, 1)))
    policy = replace(registered("dali", prefetch=0), placement=placed)
    spans = play(policy, UNEVEN, cache_bytes=placed.bytes)
    expected = """
    cpu:
      17-24 expert L0 E0      # in the order of the differences: 1 token
      24-45 expert L0 E1      # 3 tokens, over at 45 where the exact split has 38
    """
    assert told(lane(spans, "cpu"), expected) == lines(expected)
    (combine,) = (span for span in spans if span.kind == "combine" and span.layer == 0)
    assert (combine.ready_ns, combine.end_ns) == (45, 47)


# --- Whole timelines worked out by hand -------------------------------------------------------------------------------


def daop(placed: Placed) -> Composition:
    """Of the two layers the second is predicted."""
    calibration = toy_calibration(LAYERS, EXPERTS, TOP_K)
    return replace(registered("daop", calibration=calibration, first_predicted_block=2), placement=placed)


def predicted(ranked: tuple[int, ...]) -> StepDemand:
    """One token goes to 0 and 2 in layer 0; its own gate would send it to 1 and 2 in layer 1, were it asked."""
    demand = step({0: 1, 2: 1}, {1: 1, 2: 1}, forecast=Forecast(1, "gate", (), (), [ranked]))
    ids = ((0, 2), (1, 2))
    routings = tuple(
        routing._replace(token_ids=[chosen], token_weights=[(0.5, 0.5)])
        for routing, chosen in zip(demand.routings, ids, strict=True)
    )
    return demand._replace(routings=routings)


PLACED = Placed(((0,), (0,)))
AHEAD = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E0
host:
  0-1    launch L0
  14-15  wait L0
  15-16  plan L0
  16-17  launch L0 E0
  17-18  launch L0
  18-19  foresee L0           # forecast here at 16, host free at 18
  19-20  launch L1
  26-27  plan L1              # committed: no routing to wait for; layer 0 ends at 26
  27-28  launch L1 E0
  28-29  launch L1
  29-30  launch L-1
  48-49  wait L-1
gpu:
  1-11   attention L0
  11-13  gate L0
  13-15  speculate L0 >1      # layer 1's gate on layer 0's activations
  17-22  expert L0 E0
  24-26  combine L0           # CPU over at 24; 1 + 1
  26-36  attention L1         # and no gate
  36-41  expert L1 E0
  41-43  combine L1 ready=31  # 1 was ready long ago
  43-47  attention L-1
cpu:
  17-24  expert L0 E2
  24-31  precompute L0 E1 >1 ready=19   # under layer 1's attention; foreseen 19, the CPU is free at 24
d2h:
  13-14  routing L0
  15-16  routing L0 >1
  16-17  activations L0       # once, for the expert and for what is computed ahead
  47-48  routing L-1
"""


def test_a_predicted_expert_is_computed_ahead_and_its_layer_is_not_routed() -> None:
    # Predicted are 1 and 0: 1 is on the CPU and computed ahead. That the own gate would choose 1 and 2 nobody asks.
    spans = play(daop(PLACED), predicted((1, 0, 2)), cache_bytes=PLACED.bytes)
    assert told(spans, AHEAD) == lines(AHEAD)


def test_graceful_degradation_gives_the_same_timeline() -> None:
    # Predicted are 1 and 2, both on the CPU: the lower-scored 2 gives way to 0, which is on the GPU.
    spans = play(daop(PLACED), predicted((1, 2, 0)), cache_bytes=PLACED.bytes)
    assert told(spans, AHEAD) == lines(AHEAD)


def test_a_layer_waits_for_what_is_not_yet_computed() -> None:
    expected = """
    cpu:
      17-37  expert L0 E2         # 20 a token
      37-57  precompute L0 E1 >1
    gpu:
      1-11   attention L0
      11-13  gate L0
      13-15  speculate L0 >1
      17-22  expert L0 E0
      37-39  combine L0
      39-49  attention L1
      49-54  expert L1 E0
      57-59  combine L1 ready=57   # for the CPU
      59-63  attention L-1
    """
    spans = play(daop(PLACED), predicted((1, 0, 2)), cache_bytes=PLACED.bytes, costs=uniform_costs(cpu_ns=20))
    shown = lane(spans, "cpu") + lane(spans, "gpu")
    assert told(shown, expected) == lines(expected)


SWAPPED = """
h2d, step -1:
  0-0    place L0 E0
  0-0    place L1 E1
cpu:
  17-31  expert L0 E1         # 1 is on its way to the GPU, and not there: in its old place. Two tokens
  31-45  expert L0 E2
  63-70  expert L1 E0         # attention from 47: planned 62, activations 63
gpu:
  1-11   attention L0
  11-13  gate L0
  45-47  combine L0
  47-57  attention L1
  57-59  gate L1
  63-68  expert L1 E1
  70-72  combine L1
  72-76  attention L-1
h2d:
  15-15  evict L0 E0
  15-35  swap L0 E1 ready=15  # from the moment at which the layer is routed
"""


def test_a_prompt_swaps_when_it_is_routed_and_an_expert_counts_as_there_when_it_has_arrived() -> None:
    """Half of three experts is one swap. Layer 0: 1 (2 tokens, the lower of two equals) for 0 (none). Layer 1: 0 has 1
    token, and 1 has 3."""
    placed = Placed(((0,), (1,)))
    prompt = step({1: 2, 2: 2}, {0: 1, 1: 3}, phase="prefill")
    spans = play(daop(placed), prompt, cache_bytes=placed.bytes)
    shown = [span for span in spans if span.lane in ("cpu", "gpu", "h2d")]
    assert told(shown, SWAPPED) == lines(SWAPPED)


def test_a_resident_that_the_layer_uses_leaves_when_the_layer_is_over() -> None:
    """1 (3 tokens) for 0 (1 token), who is pinned until layer 0 ends."""
    placed = Placed(((0,), (1,)))
    prompt = step({0: 1, 1: 3}, {0: 1, 1: 3}, phase="prefill")
    spans = play(daop(placed), prompt, cache_bytes=placed.bytes)
    (combine,) = (span for span in spans if span.kind == "combine" and span.layer == 0)
    (swap,) = (span for span in spans if span.kind == "swap")
    # launch 1, attention 11, gate 13, routing 14, wait 15, plan 16, activations 17, CPU 21 -> 38, combine 2 -> 40
    assert (combine.end_ns, swap.start_ns, swap.end_ns) == (40, 40, 60)


# --- A whole timeline worked out by hand ------------------------------------------------------------------------------


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
