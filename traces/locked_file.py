"""A file that one process at a time may have open: a lock on what is kept next to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def locked(path: Path) -> int:
    """A descriptor of ``path``, which is made where it is missing; locked until it is closed or the process ends,
    however it ends. The process that has it may remove the file. Windows: not locked.

    Raises BlockingIOError where another process has it.
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
        os.close(descriptor)  # its owner has removed it between our two calls: begin again
