"""The DRAM under CPU experts and copies: the rates at which both run while they run together.

A machine's two rates are those of an expert of one token, which takes as long as its weights take to read, next to a
copy. An expert of more tokens reads the same bytes in more time, so it draws a smaller share of that bandwidth: it is
slowed down only as far as less is left to it than it draws, and what it does not draw goes to the copy.
"""

from __future__ import annotations

from policies.mechanism.views import ExpertCosts


def rate_of_copies(costs: ExpertCosts, others: ExpertCosts) -> int:
    """Rate in permille of a copy next to one over another GPU's link, of which ``others`` are the costs.

    The DRAM gives both copies together what it gives a CPU expert and a copy together, in equal shares of their rates;
    where those two do not slow each other down, copies do not either.
    """
    cpu_permille, copy_permille, read_ns = costs.cpu_permille, costs.copy_permille, costs.cpu_ns[1]
    if cpu_permille == copy_permille == 1000:
        return 1000
    drawn = cpu_permille * costs.copy_ns + copy_permille * read_ns  # permille of 1 / (copy_ns x read_ns)
    asked = read_ns * (costs.copy_ns + others.copy_ns)
    return min(drawn * others.copy_ns // asked, 1000)


def rates_together(costs: ExpertCosts, cpu_ns: int, read_ns: int) -> tuple[int, int]:
    """Rates in permille of CPU work and of copies while both run, for CPU work that takes ``cpu_ns`` alone.

    ``read_ns``, at most ``cpu_ns``: what its weights take to read, ``cpu_ns[1]`` for each expert.
    """
    cpu_permille, copy_permille = costs.cpu_permille, costs.copy_permille
    if cpu_ns <= read_ns:
        return cpu_permille, copy_permille
    cpu_rate, left = cpu_permille * cpu_ns // read_ns, cpu_permille - read_ns * 1000 // cpu_ns
    if left > 0:  # of the bandwidth of an expert of one token
        copy_permille += left * costs.copy_ns // costs.cpu_ns[1]
    return cpu_rate if cpu_rate < 1000 else 1000, copy_permille if copy_permille < 1000 else 1000
