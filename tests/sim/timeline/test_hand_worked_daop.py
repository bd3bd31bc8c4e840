"""Whole timelines worked out by hand: DAOP's precomputation and its swaps. Notation and costs: ``hand_worked``."""

from __future__ import annotations

from dataclasses import replace

from policies.mechanism.views import Forecast
from policies.protocols import Composition
from sim.runs.demand import StepDemand
from tests.kit.hand_worked import EXPERTS, LAYERS, TOP_K, Placed, lane, lines, play, registered, step, told
from tests.kit.toys import uniform_costs
from trilane.testing.worlds import toy_calibration


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
