"""A pool of worker processes. Each keeps a state of its own, and tasks of one setting go to one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from trilane.study.setting_queue import PendingCall, SettingQueue
from trilane.study.worker import Worker, WorkerDiedError

S = TypeVar("S")
Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerPool(Generic[S]):
    """``jobs`` processes that share tasks; the results do not depend on their number.

    ``state`` makes what a process keeps from task to task: it is called once in every process, and each task gets its
    result as the first argument. With ``copied`` it is called in this process alone, before the first task, and the
    others, which import the modules of ``imports`` meanwhile, get copies. With ``caller_works`` this process is one of
    the ``jobs``: it works while it waits for results. Without, it works only if ``jobs`` is 1, so that no task can end
    the caller.

    Functions and states go to other processes: those of a module, or partial ones. More than one job needs a caller
    that can be imported (``if __name__ == "__main__"``). Workers end with the ``with`` block, and with this process.
    """

    def __init__(
        self, jobs: int, state: Callable[[], S], *, caller_works: bool = True, copied: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        self._make_state, self._copied, self._imports = state, copied, imports
        self._caller_works = caller_works or jobs <= 1
        self._tasks = SettingQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._last: Hashable = None
        self._workers = [Worker(imports) for _ in range(jobs - self._caller_works)]
        self._threads = [threading.Thread(target=self._drive, args=(place,)) for place in range(len(self._workers))]
        for thread in self._threads:
            thread.start()

    @cached_property
    def state(self) -> S:
        return self._make_state()

    @cached_property
    def _copy(self) -> bytes:
        """That state as it was before the first task, which may change it while a worker still waits for its copy."""
        return bytes(ForkingPickler.dumps(self.state))

    def __enter__(self) -> WorkerPool[S]:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop all tasks and kill the workers: their results are here, or no longer needed."""
        with self._changed:
            self._closed = True
            for task in self._tasks.clear():
                task.future.cancel()
            for worker in self._workers:
                worker.process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- for callers --------------------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Result], *args: Any, setting: Hashable = None) -> Future[Result]:
        """Call ``function(state, *args)`` in one of the processes.

        The future raises what the call raises; WorkerError if the worker is killed, or processes cannot be started, or
        the result cannot be pickled. Of an error of another process that cannot be pickled it raises the text: as a
        WorkerError if it was a TrilaneError, otherwise as a RuntimeError.
        """
        task = PendingCall(function, args, setting, Future())
        if self._copied and self._workers:
            _ = self._copy
        with self._changed:
            if self._failure is None:
                self._tasks.add(task)
                self._changed.notify()
            else:
                task.future.set_exception(self._failure)
        return task.future

    def map(
        self, function: Callable[[S, Item], Result], items: Iterable[Item],
        setting: Callable[[Item], Hashable] = lambda item: None,
    ) -> Iterator[Result]:
        """``function(state, item)`` of all items, which are submitted at once; the results come in their order."""
        return self._in_order([self.submit(function, item, setting=setting(item)) for item in items])

    def as_completed(self, futures: Sequence[Future[Result]]) -> Iterator[Future[Result]]:
        """Futures of this pool in the order in which they finish."""
        finished: SimpleQueue[Future[Result]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(finished.put)
        for _ in futures:
            while finished.empty() and self._work_here():
                pass
            yield finished.get()

    def _in_order(self, futures: Iterable[Future[Result]]) -> Iterator[Result]:
        for future in futures:
            while not future.done() and self._work_here():
                pass
            yield future.result()

    def _work_here(self) -> bool:
        """Run one task in this process, if there is one and this process takes part."""
        if not self._caller_works:
            return False
        with self._changed:
            task = self._tasks.next(self._last)
        if task is None:
            return False
        self._last = task.setting
        _settle(task.future, *_outcome(lambda: task.function(self.state, *task.args)))
        return True

    # --- one thread for each worker -----------------------------------------------------------------------------------

    def _drive(self, place: int) -> None:
        """Hand tasks to the worker at ``place`` until the pool is closed. Where it dies, another takes its place."""
        last = None
        try:
            while task := self._wait_for_task(last):
                last = task.setting
                try:
                    _settle(task.future, *self._worker(place).run(task.function, task.args, self._state_of_a_worker))
                except WorkerDiedError as error:
                    task.future.set_exception(error)
                except Exception as error:
                    task.future.set_exception(error)
                    raise
        except Exception as error:
            self._fail(error)
        finally:
            self._workers[place].end()

    def _wait_for_task(self, last: Hashable) -> PendingCall | None:
        """The next task; None once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._closed)
            return None if self._closed else self._tasks.next(last)

    def _worker(self, place: int) -> Worker:
        """The worker at ``place``, or a new one if it has died."""
        if self._workers[place].dead:
            self._workers[place].end()
            with self._changed:
                if self._closed:
                    raise WorkerDiedError("the pool is closed")
                self._workers[place] = Worker(self._imports)
        return self._workers[place]

    def _state_of_a_worker(self) -> Callable[[], S]:
        """What makes it there."""
        return partial(ForkingPickler.loads, self._copy) if self._copied else self._make_state

    def _fail(self, error: Exception) -> None:
        """No worker can be started: every task that waits, or is submitted later, ends with this error."""
        with self._changed:
            self._failure = error
            for task in self._tasks.clear():
                task.future.set_exception(error)


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _settle(future: Future[Any], result: Any, error: Exception | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
