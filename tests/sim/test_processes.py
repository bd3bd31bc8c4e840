"""Processes share work: the results and their order are those of ``map``, whoever works."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from sim.processes import WorkerError, shared


def scaled(factor: int, value: int) -> tuple[int, int]:
    """A function of a module, as they are handed to other processes."""
    return factor * value, os.getpid()


def refuse(value: int) -> int:
    raise ValueError(f"not {value}")


def ignores_interrupts(_: int) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def end(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_somebody_ends_is_an_error_of_ours() -> None:
    with pytest.raises(WorkerError, match="ask for fewer jobs"), shared(2) as each:
        list(each(end, range(2)))


def test_one_job_is_map_itself() -> None:
    with shared(1) as each:
        assert each is map


def test_several_jobs_give_the_same_results_in_the_same_order_elsewhere() -> None:
    with shared(2) as each:
        found = list(each(partial(scaled, 3), range(7)))
        assert [value for value, _ in found] == [0, 3, 6, 9, 12, 15, 18]
        assert os.getpid() not in {pid for _, pid in found}
        assert list(each(ignores_interrupts, range(2))) == [True, True]
        with pytest.raises(ValueError, match="not 5"):
            list(each(refuse, [5]))
