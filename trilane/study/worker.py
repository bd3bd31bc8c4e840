"""A worker process of a pool: one process at the other end of a pipe, and what it does there."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from policies.user_files import UserFile, load_files, loaded_files
from trilane.common.errors import TrilaneError
from trilane.common.gc_paused import collect_seldom

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
