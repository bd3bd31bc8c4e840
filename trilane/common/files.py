"""Files that appear whole or not at all, and files that one process at a time holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path next to ``path``, renamed to ``path`` when the block ends.

    If the block raises, an earlier file at ``path`` stays as it was, and nothing half-written remains.
    """
    target = Path(path)
    temporary = target.with_name(f"{target.name}.part")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def lock_file(path: Path) -> int:
    """Open ``path``, created if missing, and lock it; returns the file descriptor.

    The lock ends when the descriptor is closed or the process ends, however it ends. Its owner may remove the file.
    Raises BlockingIOError if another process holds the lock. On Windows nothing is locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it between the two calls: start again


@contextmanager
def locked(path: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock ``path``, a file that is removed at the end. Raises ``busy`` if another process holds it."""
    try:
        descriptor = lock_file(path)
    except BlockingIOError:
        raise busy from None
    try:
        yield
    finally:
        with suppress(PermissionError):  # Windows removes no open file
            path.unlink(missing_ok=True)  # before the lock ends: afterwards it may be another process's
        os.close(descriptor)
