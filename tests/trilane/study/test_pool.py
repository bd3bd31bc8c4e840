"""Processes share work: the results and their order are those of ``map``, whoever works."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing import parent_process
from pathlib import Path

import pytest

from trilane.study.pool import WorkerError, shared

PATIENCE_S = 60


def scaled(factor: int, value: int) -> int:
    """A function of a module, as they are handed to other processes."""
    return factor * value


def refuse_odd(value: int) -> int:
    if value % 2:
        raise ValueError(f"not {value}")
    return value


def meet(folder: Path, _: int) -> tuple[int, bool]:
    """Wait until two are here; who came, and whether it is deaf to Ctrl-C."""
    (folder / str(os.getpid())).touch()
    _wait_for(folder, 2)
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def end_elsewhere(folder: Path, _: int) -> None:
    """Another process ends in the middle of its work; this one waits until it has begun."""
    if parent_process() is not None:
        (folder / "begun").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for(folder, 1)


def _wait_for(folder: Path, files: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < files:
        assert time.monotonic() < until, "nobody came"
        time.sleep(0.01)


def test_one_job_is_map_itself() -> None:
    with shared(1) as each:
        assert each is map


def test_several_jobs_give_the_same_results_in_the_same_order() -> None:
    with shared(2) as each:
        assert list(each(partial(scaled, 3), range(50))) == [3 * value for value in range(50)]
        assert list(each(partial(scaled, 3), [])) == []


def test_this_process_and_another_work_at_the_same_time_and_the_other_is_deaf_to_interrupts(tmp_path: Path) -> None:
    with shared(2) as each:
        found = dict(each(partial(meet, tmp_path), range(2)))
    assert found.pop(os.getpid()) is False
    assert list(found.values()) == [True]


def test_an_error_comes_in_its_turn_wherever_it_happened() -> None:
    with shared(2) as each:
        results = each(refuse_odd, range(8))
        assert next(results) == 0
        with pytest.raises(ValueError, match="not 1"):
            next(results)


def test_a_process_that_somebody_ends_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ask for fewer jobs"), shared(2) as each:
        list(each(partial(end_elsewhere, tmp_path), range(2)))
