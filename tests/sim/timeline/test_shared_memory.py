"""The memory that CPU experts, copies and write-backs share: rates, re-timing, and exact ends."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.shared_dram import rate_of_copies
from sim.timeline.clock import Clock
from sim.timeline.lanes import SharedMemory
from tests.kit.clocks import call_at
from tests.kit.toys import uniform_costs

CPU, H2D = SharedMemory.CPU, SharedMemory.H2D


# --- CPU experts and copies -------------------------------------------------------------------------------------------


def ends_of(*jobs: tuple[int, int, int, str], cpu: int = 500, copy: int = 800) -> list[tuple[int, str]]:
    """(end, name) of jobs (at, side, work, name), in the order in which they ended."""
    clock = Clock()
    memory = SharedMemory(clock)
    log: list[tuple[int, str]] = []
    for at, side, work, name in jobs:
        done = partial(lambda name, ends: log.append((ends[-1], name)), name)
        call_at(clock, at, partial(memory.start, side, (work,), done, ((cpu, copy),) if side == CPU else None))
    clock.play()
    return log


def test_a_copy_that_is_over_within_a_ns_ends_with_it_though_an_expert_begins_then() -> None:
    """600 of its 1,000 until 1, the rest by 1.4: at 2 nothing is left that the expert could slow down."""
    jobs = ((0, H2D, 1, "copy"), (0, CPU, 1, "first"), (2, CPU, 5, "second"))
    assert ends_of(*jobs, cpu=1000, copy=600) == [(1, "first"), (2, "copy"), (7, "second")]


def test_alone_a_job_takes_its_work() -> None:
    assert ends_of((0, CPU, 30, "expert"), (50, H2D, 40, "copy")) == [(30, "expert"), (90, "copy")]


def test_together_each_runs_at_its_own_rate() -> None:
    # copy: 40 / 0.8 = 50. CPU: 50 ns at 0.5 do 25 of 30, the last 5 alone
    assert ends_of((0, CPU, 30, "expert"), (0, H2D, 40, "copy")) == [(50, "copy"), (55, "expert")]


def test_a_running_copy_is_re_timed_when_an_expert_starts() -> None:
    # copy: 8 alone, 32 / 0.8 = 40 more. CPU: 8-48 does 20 of 30, the last 10 alone
    assert ends_of((0, H2D, 40, "copy"), (8, CPU, 30, "expert")) == [(48, "copy"), (58, "expert")]


def test_a_running_copy_is_re_timed_when_an_expert_ends() -> None:
    # CPU: 10 / 0.5 = 20, ends 28. copy: 8 alone, 20 x 0.8 = 16, the last 16 alone: 44
    assert ends_of((0, H2D, 40, "copy"), (8, CPU, 10, "expert")) == [(28, "expert"), (44, "copy")]


def test_a_copy_is_re_timed_each_time_an_expert_comes_and_goes() -> None:
    # copy: 0-20 at 0.8 is 16, 20-28 alone is 8, the last 16 at 0.8 take 20: 48, when the second expert ends too
    log = ends_of((0, H2D, 40, "copy"), (0, CPU, 10, "first"), (28, CPU, 10, "second"))
    assert (log[0], sorted(log[1:])) == ((20, "first"), [(48, "copy"), (48, "second")])


@pytest.mark.parametrize("parts", [(30,), (10, 20), (10, 10, 10), (7, 1, 22)])
def test_jobs_one_after_another_are_to_the_other_side_like_one(parts: tuple[int, ...]) -> None:
    for played in (_in_one_series, _one_by_one):
        ends, copies = played(parts, [(0, 64)], 500, 800)
        # experts: 30 / 0.5 = 60, while the copy does 48 of 64; the last 16 alone
        assert (ends[-1], copies) == (60, [76])


@given(
    parts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    copies=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=4),
    cpu=st.integers(100, 1000), copy=st.integers(100, 1000),
)
def test_a_series_ends_as_its_jobs_would_if_each_were_started_at_the_end_of_the_one_before(
    parts: list[int], copies: list[tuple[int, int]], cpu: int, copy: int
) -> None:
    assert _in_one_series(parts, copies, cpu, copy) == _one_by_one(parts, copies, cpu, copy)


def test_what_is_left_of_a_series_is_the_job_at_its_rate_and_the_others_as_if_alone() -> None:
    clock = Clock()
    memory = SharedMemory(clock)
    seen: list[int] = []
    for at in (0, 6, 20, 26, 39):
        call_at(clock, at, lambda: seen.append(memory.remaining_ns(CPU)))
    memory.start(CPU, (10, 7), lambda ends: None, ((500, 800),))
    memory.start(H2D, (40,), lambda ends: None)  # until 50: experts end at 20 and 34
    clock.play()
    assert seen == [20 + 7, 14 + 7, 14, 8, 0]


Played = tuple[list[int], list[int]]  # ends of experts and of copies


def _in_one_series(parts: Sequence[int], copies: Sequence[tuple[int, int]], cpu: int, copy: int) -> Played:
    """Experts from 0 on, as one series; copies (pause before, work) one after another."""
    clock = Clock()
    memory, ends = SharedMemory(clock), list[int]()
    memory.start(CPU, parts, ends.extend, ((cpu, copy),))
    copied = _copy_each(clock, memory, copies)
    clock.play()
    return ends, copied


def _one_by_one(parts: Sequence[int], copies: Sequence[tuple[int, int]], cpu: int, copy: int) -> Played:
    """The same, each expert started when the one before it ends."""
    clock = Clock()
    memory, ends, left = SharedMemory(clock), list[int](), list(parts)

    def next_expert(ended: list[int]) -> None:
        ends.extend(ended)
        if left:
            memory.start(CPU, (left.pop(0),), next_expert, ((cpu, copy),))

    next_expert([])
    copied = _copy_each(clock, memory, copies)
    clock.play()
    return ends, copied


def _copy_each(clock: Clock, memory: SharedMemory, copies: Sequence[tuple[int, int]]) -> list[int]:
    copied, left = list[int](), list(copies)

    def next_copy(ended: list[int]) -> None:
        copied.extend(ended)
        if left:
            pause, work = left.pop(0)
            call_at(clock, clock.now + pause, lambda: memory.start(H2D, (work,), next_copy))

    next_copy([])
    return copied


def written_back(*spans: tuple[int, int], copy_work: int = 0, cpu_work: int = 0) -> dict[int, int]:
    """When a copy and an expert end that begin at 0, while experts are written back: next to these a copy runs at 0.5
    of its rate, next to an expert at 0.8; the expert next to either at 0.5."""
    clock, ends = Clock(), dict[int, int]()
    memory = SharedMemory(clock)
    for start, end in spans:
        memory.write_back(start, end, 500)
    for side, work in ((CPU, cpu_work), (H2D, copy_work)):
        rates = ((500, 800),) if side == CPU else None  # they come with the CPU's jobs
        if work:
            memory.start(side, (work,), lambda ended, side=side: ends.update({side: ended[-1]}), rates)
    clock.play()
    return ends


def test_a_write_back_slows_down_a_copy_while_it_lasts() -> None:
    assert written_back((10, 30), copy_work=40) == {H2D: 50}  # 10 alone, 20 ns do 10, the last 20 alone
    assert written_back((0, 10), (10, 20), copy_work=20) == {H2D: 30}  # one after another
    assert written_back((40, 60), copy_work=40) == {H2D: 40}


def test_a_write_back_takes_from_experts_on_the_cpu_what_a_copy_does() -> None:
    assert written_back((10, 30), cpu_work=40) == {CPU: 50}


def test_three_that_share_the_dram_run_at_the_product_of_their_rates() -> None:
    # 20 ns: the copy at 0.5 x 0.8 does 8 of 16, the expert at 0.5 x 0.5 does 5 of 30. Then 10 ns at 0.8, and 5 at 0.5
    assert written_back((0, 20), copy_work=16, cpu_work=30) == {H2D: 30, CPU: 50}


def test_copies_over_two_links_share_what_the_memory_gives_a_cpu_expert_and_a_copy() -> None:
    """It gives 0.5 of an expert of 20 ns and 0.8 of a copy of 10 ns, 0.105 a ns; two copies want 0.2: 525 permille. The
    expert next to both runs at 0.5 x 0.5, and each copy at 0.8 x 0.525."""
    [costs] = uniform_costs(1, cpu_ns=20, copy_ns=10, cpu_permille=500, copy_permille=800).experts
    assert rate_of_copies(costs, costs) == 525
    assert rate_of_copies(costs._replace(cpu_permille=1000, copy_permille=1000), costs) == 1000
    assert rate_of_copies(costs, costs._replace(copy_ns=40)) == 840  # a slow link takes little
    clock, ends = Clock(), dict[int, int]()
    memory = SharedMemory(clock, [[costs], [costs]])
    for side in (1, 2):
        memory.start(side, (21,), lambda ended, side=side: ends.update({side: ended[-1]}))
    clock.play()
    assert ends == {1: 40, 2: 40}  # 21 / 0.525
    clock, ends = Clock(), {}
    memory = SharedMemory(clock, [[costs], [costs]])
    for side, work in ((1, 42), (2, 42), (CPU, 100)):
        rates = ((500, 800), (500, 800)) if side == CPU else None
        memory.start(side, (work,), lambda ended, side=side: ends.update({side: ended[-1]}), rates)
    clock.play()
    assert ends == {1: 100, 2: 100, CPU: 175}  # 42 / 0.42; 25 by 100, the other 75 alone


def test_full_rates_mean_no_contention() -> None:
    log = ends_of((0, H2D, 41, "copy"), (3, CPU, 17, "expert"), (21, CPU, 5, "next"), cpu=1000, copy=1000)
    assert log == [(20, "expert"), (26, "next"), (41, "copy")]


def test_a_job_that_would_end_between_two_ns_ends_at_the_later() -> None:
    # CPU: 3 / 0.7 = 4.29; copy: 5 x 0.9 = 4.5 of 10, the last 5.5 alone
    assert ends_of((0, CPU, 3, "expert"), (0, H2D, 10, "copy"), cpu=700, copy=900) == [(5, "expert"), (11, "copy")]


def test_what_is_left_is_told_at_the_present_rate() -> None:
    clock = Clock()
    memory = SharedMemory(clock)
    seen: list[tuple[int, int, int]] = []
    for at in (4, 8, 18, 48, 57, 58, 60):
        call_at(clock, at, lambda: seen.append((clock.now, memory.remaining_ns(H2D), memory.remaining_ns(CPU))))
    memory.start(H2D, (40,), lambda ends: None)
    call_at(clock, 8, lambda: memory.start(CPU, (30,), lambda ends: None, ((500, 800),)))
    clock.play()
    assert seen == [
        (4, 36, 0),
        (8, 32, 0),  # looked before the expert started
        (18, 30, 50),  # 24 of work at 0.8; 25 at 0.5
        (48, 0, 20),  # the copy is due now, its end has not been told: the expert still has 10 at 0.5
        (57, 0, 1),
        (58, 0, 0),
        (60, 0, 0),
    ]


@given(
    start=st.integers(0, 60), cpu_work=st.integers(1, 60), copy_work=st.integers(1, 60), cpu=st.integers(100, 1000),
    copy=st.integers(100, 1000),
)
def test_ends_are_whole_ns_never_before_the_exact_ones_and_less_than_two_after(
    start: int, cpu_work: int, copy_work: int, cpu: int, copy: int
) -> None:
    log = ends_of((0, H2D, copy_work, "copy"), (start, CPU, cpu_work, "expert"), cpu=cpu, copy=copy)
    exact = _exact(start, cpu_work, copy_work, Fraction(cpu, 1000), Fraction(copy, 1000))
    assert len(log) == 2
    for end, name in log:
        assert type(end) is int
        assert exact[name] <= end < exact[name] + 2


def _exact(start: int, cpu_work: int, copy_work: int, cpu: Fraction, copy: Fraction) -> dict[str, Fraction]:
    """The fluid pair in fractions: a copy from 0, an expert from ``start``."""
    if copy_work <= start:
        return {"copy": Fraction(copy_work), "expert": Fraction(start + cpu_work)}
    left = copy_work - start
    both = min(left / copy, cpu_work / cpu)
    return {"copy": start + both + (left - both * copy), "expert": start + both + (cpu_work - both * cpu)}
