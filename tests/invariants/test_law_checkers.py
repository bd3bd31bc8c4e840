"""Broken twins: the hand-made run is lawful, and every law finds the run that was tampered with to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sim.runs.metrics import metrics_of
from sim.runs.spans import Span, spans_frame
from sim.runs.stalls import Stalls
from tests.kit.hand_made import BUDGET_BYTES, ROUTINGS, change, hand_made, spans_of, without
from trilane.testing import laws
from trilane.testing.laws import (
    check_all,
    law_1_conservation,
    law_2_causality,
    law_3_exclusivity,
    law_4_capacity,
    law_12_accounting,
)
from trilane.testing.work_conservation import law_5_work_conservation

RUN = hand_made()


def test_the_hand_made_run_is_lawful() -> None:
    check_all(RUN, ROUTINGS, BUDGET_BYTES, batch=1, demand_slots=1)
    check_all(spans_frame([tuple(s) for s in RUN]), ROUTINGS, BUDGET_BYTES, batch=1)  # type: ignore[misc]


@pytest.mark.parametrize(("broken", "message"), [
    (without(RUN, "cpu", "expert"), "expert 1 is computed on []"),
    (RUN + spans_of("cpu expert 36 36 40 0 0 -1 0 2 100"), "expert 0 is computed on ['gpu', 'cpu']"),
    (RUN + spans_of("cpu precompute 19 36 40 0 -1 0 1 1 100"), "expert 1 is computed on ['cpu', 'cpu']"),
    (RUN + spans_of("gpu expert 33 33 34 0 0 -1 7 1 100"), "expert 7 is computed on gpu, but no token"),
    (change(RUN, "gpu", "expert", tokens=1), "computes 1 tokens on gpu, 2 were routed"),
    ([s for s in RUN if s.step < 1], "the layers that ran are not those of the demand"),
])
def test_law_1_finds(broken: list[Span], message: str) -> None:
    _refused(lambda: law_1_conservation(broken, ROUTINGS), message)


@pytest.mark.parametrize(("broken", "message"), [
    (change(RUN, "gpu", "expert", nth=1, start_ns=29), "expert 2 runs on the GPU from 29"),
    (without(RUN, "h2d", "demand"), "law 4: experts [(0, 2)] leave GPU memory, but never came"),
    (without(without(RUN, "h2d", "demand"), "h2d", "release"), "expert 2 runs on the GPU"),
    (change(RUN, "h2d", "release", start_ns=32, end_ns=32), "expert 2 runs on the GPU from 30 to 33"),
    (change(RUN, "cpu", "expert", start_ns=18), "the CPU needs the activations"),
    (without(RUN, "d2h", "activations"), "no activations were sent"),
    (change(RUN, "gpu", "expert", start_ns=16), "experts need the plan"),
    (change(RUN, "gpu", "combine", start_ns=37), "combining needs all parts"),
    (change(RUN, "h2d", "result", start_ns=35), "a result is copied once it is computed"),
    (change(RUN, "host", "plan", start_ns=14), "a layer's chain"),
    (change(RUN, "d2h", "routing", start_ns=11), "a layer's chain"),
    (change(RUN, "gpu", "attention", nth=1, start_ns=39), "the head needs the last layer"),
    (change(RUN, "gpu", "attention", nth=2, start_ns=46), "a step needs the one before"),
    (change(RUN, "cpu", "expert", kind="precompute", target_layer=0), "a precompute of layer 0 is for layer 0"),
    (change(RUN, "cpu", "expert", kind="shared"), "shared on the cpu lane"),
    (without(RUN, "host", "plan", nth=1), "expected one plan span, found 0"),
])
def test_law_2_finds(broken: list[Span], message: str) -> None:
    _refused(lambda: law_2_causality(broken), message)


@pytest.mark.parametrize(("broken", "message"), [
    (change(RUN, "gpu", "gate", start_ns=9), "gpu does two things at once"),
    (change(RUN, "host", "launch", nth=1, end_ns=19), "host does two things at once"),
    (change(RUN, "h2d", "prefetch", start_ns=37), "h2d does two things at once"),
    (change(RUN, "d2h", "routing", end_ns=11), "ends before it starts"),
])
def test_law_3_finds(broken: list[Span], message: str) -> None:
    _refused(lambda: law_3_exclusivity(broken), message)


@pytest.mark.parametrize(("broken", "message"), [
    (RUN + spans_of("h2d place 0 0 0 -1 0 -1 5 0 100"), "300 of 200 bytes are held at 17 ns"),
    (without(without(RUN, "h2d", "evict"), "h2d", "release", nth=1), "300 of 200 bytes are held at 76 ns"),
    (change(RUN, "h2d", "evict", start_ns=70, end_ns=70), "expert 0 is active and leaves at 70 ns"),
    (change(RUN, "h2d", "release", start_ns=29, end_ns=29), "leaves at 29 ns, its copy runs until 30"),
    (RUN + spans_of("h2d evict 80 80 80 1 0 -1 0 0 100"), "expert (0, 0) leaves at 80 ns, but is not there"),
    (RUN + spans_of("h2d demand 60 60 61 1 0 -1 0 0 100"), "is copied while it holds memory already"),
])
def test_law_4_finds(broken: list[Span], message: str) -> None:
    _refused(lambda: law_4_capacity(broken, BUDGET_BYTES), message)


@pytest.mark.parametrize(("broken", "message"), [
    (change(RUN, "gpu", "expert", start_ns=19), "its next work is ready at 18, but starts at 19"),
    (change(RUN, "cpu", "expert", start_ns=20), "cpu is free at 0 ns, its next work is ready at 19"),
    (change(RUN, "gpu", "expert", ready_ns=20, start_ns=20), "could have started at 18 ns"),
    (change(RUN, "gpu", "expert", nth=1, ready_ns=31, start_ns=31), "could have started at 30 ns"),
    (change(RUN, "cpu", "expert", ready_ns=21, start_ns=21), "could have started at 19 ns"),
    (change(RUN, "gpu", "combine", ready_ns=39, start_ns=39), "could have started at 38 ns"),
    (change(RUN, "h2d", "result", ready_ns=37, start_ns=37, end_ns=38), "could have started at 36 ns"),
    (change(RUN, "host", "plan", ready_ns=16, start_ns=16), "could have started at 15 ns"),
    (change(RUN, "d2h", "activations", ready_ns=18, start_ns=18), "could have started at 17 ns"),
    (change(RUN, "h2d", "demand", ready_ns=18, start_ns=18), "h2d rests from 17 to 18 ns although the demand load"),
])
def test_law_5_finds(broken: list[Span], message: str) -> None:
    _refused(lambda: law_5_work_conservation(broken), message)


def test_law_5_finds_experts_that_jump_the_queue() -> None:
    """The resident expert waits for the load behind it, and each span by itself is in order."""
    swapped = change(RUN, "gpu", "expert", start_ns=33, end_ns=36)
    swapped = change(swapped, "gpu", "combine", start_ns=38)
    _refused(lambda: law_5_work_conservation(swapped), "experts that arrived at [30, 0] ran in this order")


def test_law_5_lets_the_link_rest_while_the_staging_slots_are_taken() -> None:
    """A second load through the only slot waits until the first has been used; with two slots it need not."""
    waiting = [s for s in RUN if s.step < 1 and s.kind not in ("result", "prefetch")]
    waiting += spans_of("h2d demand 33 33 35 0 0 -1 4 0 100\nh2d release 38 38 38 0 0 -1 4 0 100")
    waiting = change(waiting, "gpu", "combine", ready_ns=36, start_ns=36)
    law_5_work_conservation(waiting, demand_slots=1)
    _refused(lambda: law_5_work_conservation(waiting, demand_slots=2), "1 staging slots are taken")


@pytest.mark.parametrize(
    ("lane", "kind", "wrong"), [("gpu", "combine", {"tokens": -2}), ("d2h", "routing", {"bytes": -4})]
)
def test_law_12_finds_less_than_nothing(lane: str, kind: str, wrong: dict[str, int]) -> None:
    """No metric is made of these two."""
    _refused(lambda: law_12_accounting(change(RUN, lane, kind, **wrong), 1), f"law 12: {kind} has ")


def test_law_12_finds_busy_time_that_counts_twice() -> None:
    """Overlapping spans of one lane: busy and idle no longer make up the makespan."""
    _refused(lambda: law_12_accounting(change(RUN, "gpu", "gate", start_ns=9), 1), "law 12: gpu is busy")


def test_law_12_finds_stalls_that_do_not_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "stalls_of", lambda _: Stalls(8, 3, 23))
    _refused(lambda: law_12_accounting(RUN, 1), "law 12: stalls Stalls(h2d_ns=8, cpu_ns=3, host_ns=23, disk_ns=0)")


@pytest.mark.parametrize("name", ["tpot_ms", "token_hit_rate", "prefetches_used", "pcie_swap_bytes_per_token"])
def test_law_12_finds_a_metric_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "metrics_of", lambda *given: replace(metrics_of(*given), **{name: 0.5}))
    _refused(lambda: law_12_accounting(RUN, 1), f"law 12: {name} is 0.5, worked out anew")


def _refused(check: Callable[[], None], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check()
    assert message in str(caught.value)
