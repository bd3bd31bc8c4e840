"""Playing tasks in this process, or in others on this machine. Rows come in the order in which they finish."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from trilane.study.pool import interrupts_held, leave_interrupts_to_the_parent
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.point import Player, Row, failed
from trilane.study.sweep.setting_queue import Task, Turns

_COLLECT = (200_000, 20, 100)  # a run keeps 100,000 spans and more: to search them for garbage again and again, and not
# once at its end, costs a tenth of the time
DIED = "WorkerDiedError: the process that played this point died, and died again when it played it alone"


def play_here(tasks: Sequence[Task]) -> Generator[Row, None, None]:
    """One after the other, setting by setting."""
    player, turns, task = Player(), Turns(tasks), None
    while task := turns.next(task):
        yield player.row(task.point, task.key)


def play_in_processes(tasks: Sequence[Task], jobs: int) -> Generator[Row, None, None]:
    """Over ``jobs`` processes, which end with this generator, and with this process.

    Where one dies, its point is tried once more at the end, alone; if that dies too, it is an error of the point.
    Raises SweepError if processes cannot be started.
    """
    lost: list[Task] = []
    yield from _rows(tasks, jobs, lost)
    for task in lost:
        again: list[Task] = []
        yield from _rows([task], 1, again)
        if again:
            yield failed(task.point, task.key, DIED)


def _rows(tasks: Sequence[Task], jobs: int, lost: list[Task]) -> Generator[Row, None, None]:
    """Rows as they finish; tasks whose process has died become ``lost``."""
    crew = _Crew(tasks, jobs, lost)
    try:
        while crew.working:
            for pipe in wait(list(crew.working)):
                if (row := crew.hear(pipe)) is not None:
                    yield row
    finally:
        crew.end()


class _Crew:
    """Processes that share the tasks; ``working``: by their pipe, those that have not run out of them."""

    def __init__(self, tasks: Sequence[Task], jobs: int, lost: list[Task]) -> None:
        self._turns = Turns(tasks)
        self._lost = lost
        self._all: list[_Worker] = []
        self.working: dict[Any, _Worker] = {}
        for _ in range(min(jobs, self._turns.left)):
            self._hire()

    def hear(self, pipe: Any) -> Row | None:
        """What a worker has to say: a row, if it is not its first word or its last. It has its next task before we
        look at the row."""
        worker = self.working.pop(pipe)
        try:
            row = worker.receive()
        except (EOFError, OSError):
            self._lost.append(worker.lost())
            if self._turns.left:
                self._hire()
            return None
        if worker.give(self._turns.next(worker.task)):
            self.working[pipe] = worker
        return row

    def end(self) -> None:
        """They have nothing to lose: their rows are here, their tasks will be played again."""
        for worker in self._all:
            worker.end()

    def _hire(self) -> None:
        worker = _Worker()
        self._all.append(worker)
        self.working[worker.pipe] = worker


class _Worker:
    """One process, and the task that it has in hand."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.task: Task | None = None
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        with interrupts_held():
            self.process.start()
        theirs.close()

    def receive(self) -> Row | None:
        """A row, or None at the start. Raises EOFError or OSError if the process has died."""
        row: Row | None = self.pipe.recv()
        return row

    def give(self, task: Task | None) -> bool:
        """Hand out the next task, if there is one."""
        self.task = task
        if task is not None:
            with suppress(OSError):  # dead: the next ``receive`` will find out
                self.pipe.send(task)
        return task is not None

    def lost(self) -> Task:
        """What it had in hand when it died. Raises SweepError if it never began."""
        if self.task is None:
            raise SweepError(
                "a worker process ended before it began; in a program of your own, start the sweep under "
                "`if __name__ == '__main__':`"
            )
        return self.task

    def end(self) -> None:
        """At once, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection[Any, Any]) -> None:
    """A worker process: plays what it is given, as long as there is somebody to give it."""
    leave_interrupts_to_the_parent()
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    player = Player()
    with suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            task = pipe.recv()
            pipe.send(player.row(task.point, task.key))
            gc.collect()


def _end_with_the_parent() -> None:
    """However the parent ends: a point may take long, and nobody waits for its row any more."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
