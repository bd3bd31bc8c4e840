"""CPU experts and copies share what the DRAM gives by what each asks of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.shared_dram import rates_together
from policies.mechanism.views import ExpertCosts

RATE = st.integers(100, 1000)
TIME = st.integers(1, 10**7)


def machine(read_ns: int, copy_ns: int, cpu_permille: int, copy_permille: int) -> ExpertCosts:
    return ExpertCosts((0, 1), (0, read_ns), 0, copy_ns, 1, cpu_permille=cpu_permille, copy_permille=copy_permille)


MACHINES = st.builds(machine, TIME, TIME, RATE, RATE)


def test_the_rates_of_a_machine_are_those_of_an_expert_that_only_reads() -> None:
    assert rates_together(machine(100, 100, 600, 800), 100, 100) == (600, 800)


def test_an_expert_that_computes_twice_as_long_as_it_reads_is_slowed_only_below_half_of_its_bandwidth() -> None:
    assert rates_together(machine(100, 100, 600, 800), 200, 100) == (1000, 900)  # draws 0.5, and leaves 0.1
    assert rates_together(machine(100, 100, 400, 800), 200, 100) == (800, 800)  # gets 0.4 of the 0.5 that it would draw
    assert rates_together(machine(100, 300, 600, 800), 200, 100) == (1000, 1000)  # the link needs a third of the 0.3


@given(MACHINES, TIME)
def test_work_takes_as_long_as_its_reading_at_the_contended_rate_or_as_its_arithmetic(
    costs: ExpertCosts, more: int
) -> None:
    read_ns = costs.cpu_ns[1]
    cpu, _ = rates_together(costs, read_ns + more, read_ns)
    exact = max(read_ns * 1000 / costs.cpu_permille, read_ns + more)
    assert exact <= (read_ns + more) * 1000 / cpu <= exact * (1 + 1 / cpu) + 1


@given(MACHINES, TIME, TIME)
def test_both_never_draw_more_than_they_do_where_both_are_bound_by_the_dram(
    costs: ExpertCosts, more: int, scale: int
) -> None:
    """In units of the bandwidth of an expert of one token; a rate is never above 1 nor below the contended one."""
    read_ns = costs.cpu_ns[1]
    cpu, copy = rates_together(costs, read_ns + more, read_ns)
    assert costs.cpu_permille <= cpu <= 1000
    assert costs.copy_permille <= copy <= 1000
    copies_draw = read_ns / costs.copy_ns / 1000
    drawn = cpu / 1000 * read_ns / (read_ns + more) + copy * copies_draw
    assert drawn <= costs.cpu_permille / 1000 + costs.copy_permille * copies_draw + 0.002


@given(MACHINES, TIME, st.integers(2, 9))
def test_the_unit_of_time_does_not_matter(costs: ExpertCosts, more: int, c: int) -> None:
    scaled = costs._replace(cpu_ns=(0, costs.cpu_ns[1] * c), copy_ns=costs.copy_ns * c)
    read_ns = costs.cpu_ns[1]
    assert rates_together(costs, read_ns + more, read_ns) == rates_together(scaled, (read_ns + more) * c, read_ns * c)
