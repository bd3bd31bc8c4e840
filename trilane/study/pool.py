"""A pool of worker processes. Each keeps a state of its own, and tasks of one setting go to one worker."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib import import_module
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from policies.user_files import UserFile, load_files, loaded_files
from trilane.common.errors import TrilaneError
from trilane.common.gc_paused import collect_seldom

S = TypeVar("S")
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
        self._calls = SettingQueue()
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
        """This process's state, made when it is first needed."""
        return self._make_state()

    @cached_property
    def _copy(self) -> bytes:
        """That state as it was before the first task, which may change it while a worker still waits for its copy."""
        return bytes(ForkingPickler.dumps(self.state))

    def __enter__(self) -> WorkerPool[S]:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop all tasks and kill the workers: their results have been read, or are no longer needed."""
        with self._changed:
            self._closed = True
            for call in self._calls.clear():
                call.future.cancel()
            for worker in self._workers:
                worker.process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- for callers --------------------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Result], *args: Any, setting: Hashable = None) -> Future[Result]:
        """Call ``function(state, *args)`` in one of the processes. A future that is cancelled while it waits is passed
        over.

        The future raises what the call raises; WorkerError if the worker is killed, or processes cannot be started, or
        the result cannot be pickled. Of an error of another process that cannot be pickled it raises the text: as a
        WorkerError if it was a TrilaneError, otherwise as a RuntimeError.
        """
        call = PendingCall(function, args, setting, Future())
        if self._copied and self._workers:
            _ = self._copy
        with self._changed:
            if self._failure is None:
                self._calls.add(call)
                self._changed.notify()
            else:
                call.future.set_exception(self._failure)
        return call.future

    def as_completed(self, futures: Sequence[Future[Result]]) -> Iterator[Future[Result]]:
        """Futures of this pool in the order in which they finish."""
        finished: SimpleQueue[Future[Result]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(finished.put)
        for _ in futures:
            while finished.empty() and self._work():
                pass
            yield finished.get()

    def result_of(self, future: Future[Result]) -> Result:
        """The result of a future of this pool, once it is done. Raises what the future raises."""
        return next(self.as_completed([future])).result()

    def together(self, tasks: int) -> int:
        """Tasks of one setting that are best submitted as one: processes of this machine take them one by one."""
        return 1

    def _work(self) -> bool:
        """Run one task in this process, if one waits and this process takes part."""
        if not self._caller_works:
            return False
        with self._changed:
            call = self._calls.next(self._last)
        if call is None:
            return False
        self._last = call.setting
        if not call.future.set_running_or_notify_cancel():
            return True
        try:
            call.future.set_result(call.function(self.state, *call.args))
        except Exception as error:
            call.future.set_exception(error)
        return True

    # --- one thread for each worker -----------------------------------------------------------------------------------

    def _drive(self, place: int) -> None:
        """Hand tasks to the worker at ``place`` until the pool is closed. Where it dies, another takes its place."""
        last = None
        try:
            while call := self._wait_for_call(last):
                last = call.setting
                if not call.future.set_running_or_notify_cancel():
                    continue
                try:
                    result, error = self._worker(place).run(call.function, call.args, self._state_of_a_worker)
                except WorkerDiedError as died:
                    result, error = None, died
                except Exception as failure:
                    call.future.set_exception(failure)
                    raise
                if error is None:
                    call.future.set_result(result)
                else:
                    call.future.set_exception(error)
        except Exception as failure:
            self._fail(failure)
        finally:
            self._workers[place].end()

    def _wait_for_call(self, last: Hashable) -> PendingCall | None:
        """The next task; None once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            return None if self._closed else self._calls.next(last)

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
        """The function that makes the state in a worker."""
        return partial(ForkingPickler.loads, self._copy) if self._copied else self._make_state

    def _fail(self, error: Exception) -> None:
        """End every task that waits, or is submitted later, with this error: no worker can be started."""
        with self._changed:
            self._failure = error
            for call in self._calls.clear():
                call.future.set_exception(error)


# --- which task is next -----------------------------------------------------------------------------------------------


class PendingCall(NamedTuple):
    """A call to make, the setting that it shares with others, and where its result goes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    setting: Hashable
    future: Future[Any]


class SettingQueue:
    """Tasks by setting: a worker stays with a setting while it has tasks, and the last setting is shared."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[PendingCall]] = {}
        self._begun: set[Hashable] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, call: PendingCall) -> None:
        """Put a task behind the others of its setting."""
        self._waiting.setdefault(call.setting, deque()).append(call)

    def next(self, last: Hashable = None) -> PendingCall | None:
        """The next task for a worker whose last setting was ``last``; None if the queue is empty.

        A task of the same setting; else of a setting that no worker has begun; else of the one with most tasks left.
        """
        if not self._waiting:
            return None
        setting = last if last in self._waiting else self._other()
        self._begun.add(setting)
        calls = self._waiting[setting]
        call = calls.popleft()
        if not calls:
            del self._waiting[setting]
        return call

    def clear(self) -> list[PendingCall]:
        """Remove all tasks, and return them."""
        left = [call for calls in self._waiting.values() for call in calls]
        self._waiting.clear()
        return left

    def _other(self) -> Hashable:
        fresh = next((setting for setting in self._waiting if setting not in self._begun), None)
        return max(self._waiting, key=lambda setting: len(self._waiting[setting])) if fresh is None else fresh


# --- one process at the other end of a pipe ---------------------------------------------------------------------------


DIED = "a worker process was killed in the middle of its task: if memory ran out, use fewer jobs"
NOT_BEGUN = (
    "a worker process ended before it began; a program of your own must start more than one job under "
    '`if __name__ == "__main__":`'
)


class WorkerError(TrilaneError):
    """A worker process ended before its task did, or could not be started."""


class WorkerDiedError(WorkerError):
    """A worker process was killed in the middle of a task."""


class Worker:
    """One process at the other end of a pipe."""

    def __init__(self, imports: Sequence[str]) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._began = self.dead = False
        self.process = context.Process(target=_work, args=(theirs, loaded_files(), imports), daemon=True)
        with interrupts_held():
            self.process.start()
        theirs.close()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], state: Callable[[], Callable[[], Any]]
    ) -> tuple[Any, Exception | None]:
        """The outcome of a call; ``state``: what makes the process's state, told with its first one. Raises
        WorkerDiedError if the process dies, WorkerError if it never began."""
        try:
            if not self._began:
                self._began = bool(self._pipe.recv())
                self._pipe.send(state())
            self._pipe.send((function, args))
            result: tuple[Any, Exception | None] = self._pipe.recv()
        except (EOFError, OSError):
            self.dead = True
            raise WorkerDiedError(DIED) if self._began else WorkerError(NOT_BEGUN) from None
        return result

    def end(self) -> None:
        """At once, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A process that is started meanwhile never receives Ctrl-C, from its first import on; this one does afterwards."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it would be started within, and would unblock interrupts again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in a worker process ----------------------------------------------------------------------------------------------


def _work(pipe: Connection[Any, Any], files: Iterable[UserFile], imports: Iterable[str]) -> None:
    """Run tasks for as long as the parent sends them. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()
    collect_seldom()
    with suppress(EOFError, OSError):
        pipe.send("began")
        for module in imports:
            import_module(module)
        state, failure = _run(partial(_with_user_policies, files, pipe.recv()))
        while True:
            function, args = pipe.recv()
            _send(pipe, *(_run(partial(function, state, *args)) if failure is None else (None, failure)))
            gc.collect(0)  # what the task has left


def _with_user_policies(files: Iterable[UserFile], make_state: Callable[[], Any]) -> Any:
    """The state of a process, which first loads the policies that the parent has loaded from files."""
    load_files(files)
    return make_state()


def _run(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a call, or its error with the traceback, which pickle leaves out, as a note."""
    try:
        return call(), None
    except Exception as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return None, error


def _send(pipe: Connection[Any, Any], result: Any, error: Exception | None) -> None:
    try:
        outcome = ForkingPickler.dumps((result, error))
        if error is not None:
            ForkingPickler.loads(outcome)  # exceptions whose class takes other arguments are written, but not read
    except Exception as refused:  # raised by pickle, or by a method of what is pickled
        unsent = WorkerError(f"the result of a worker process cannot be sent: {refused}")
        outcome = ForkingPickler.dumps((None, unsent if error is None else _as_text(error)))
    pipe.send_bytes(outcome)


def _as_text(error: Exception) -> Exception:
    """An error that can be pickled, with the class name, message and notes of one that cannot."""
    kind = WorkerError if isinstance(error, TrilaneError) else RuntimeError  # bad input, or a bug
    message, *notes = traceback.format_exception_only(error)
    text = kind(message.strip())
    text.add_note("".join(notes).strip())
    return text


def _end_with_parent() -> None:
    """However the parent ends: a task may take long, and its result is no longer needed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
