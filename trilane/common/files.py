"""Files that appear whole or not at all, and files that one process at a time holds."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from tempfile import mkdtemp

from trilane.common.errors import ErrorClass, TrilaneError

if sys.platform != "win32":
    import fcntl
    import resource

ASIDE = ".trilane-part"  # the end of the name of a hidden folder in which a file is being written
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)


class OutputError(TrilaneError):
    """A result that cannot be written to the file that was named."""


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A path in a new hidden folder next to ``path``; the file written there becomes ``path`` when the block ends.

    If the block raises, an earlier file at ``path`` stays as it was, and nothing half-written remains. What a killed
    process has left is removed when ``path`` is written again. A file that is replaced passes on its permissions.
    Raises OutputError if ``path`` is a symbolic link, device or pipe, and OSError, which names ``path``, if it cannot
    be written.
    """
    target = plain_target(Path(path))
    with errors_name(target), _folder_for(target) as folder:
        aside = folder / target.name
        yield aside
        _sync(aside, os.O_RDWR)
        if target.exists():
            aside.chmod(stat.S_IMODE(target.stat().st_mode))
        aside.replace(target)
        with suppress(OSError):  # Windows opens no folder, and some file systems sync none
            _sync(target.parent, _FOLDER)


def plain_target(path: Path) -> Path:
    """``path``, the name of a file or of nothing yet.

    Raises OutputError if it is a symbolic link, whose target may be a file that someone else has chosen, or a device or
    pipe, which a rename would replace.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(f"{path}: expected the name of a file, this is a device or a pipe")
    if path.is_symlink():
        link = f"this is a symbolic link to {os.path.realpath(path)}"
        raise OutputError(f"{path}: expected a file, {link}; remove it, or name that file")
    return path


def ending_of(path: str | Path, *endings: str) -> str:
    """The one of these that a name ends in. Raises OutputError where it is none of them."""
    found = next((ending for ending in endings if str(path).lower().endswith(ending)), None)
    if found is None:
        raise OutputError(f"{path}: expected the name of a file, ending in {' or '.join(endings)}")
    return found


def check_no_pipe(path: str | Path, error: ErrorClass = TrilaneError) -> None:
    """Raise ``error`` for a pipe, where reading would wait for a writer, perhaps for ever."""
    if Path(path).is_fifo():
        raise error(f"{path}: expected a file, this is a pipe; write its content into a file first")


def check_folder_of(path: Path, error: ErrorClass = OutputError) -> None:
    """Raise ``error`` where there is no folder for a file at ``path``."""
    if not path.parent.is_dir():
        raise error(f"{path}: the folder {path.parent} does not exist; create it first")


def full_disk(path: Path) -> OSError:
    """The error of a file that can grow no more: because of the limit on the size of files, or of the disk."""
    limited = sys.platform != "win32" and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    number = errno.EFBIG if limited and shutil.disk_usage(path.parent).free > 2**20 else errno.ENOSPC
    return OSError(number, os.strerror(number), str(path))


@contextmanager
def errors_name(target: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as that of a full disk, with the name ``target`` unless it has another."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and ASIDE not in str(error.filename):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, reason, str(target)) from error


@contextmanager
def _folder_for(target: Path) -> Iterator[Path]:
    """A folder for this process alone, removed at the end."""
    remove_abandoned(target.parent, escape(_short(target)))
    folder, descriptor = _new_folder(target)
    try:
        yield folder
    finally:
        _remove(folder, descriptor)


def remove_abandoned(folder: Path, name: str = "*") -> None:
    """Remove what killed processes have left next to files of this name, a pattern, in ``folder``."""
    for left in folder.glob(f".{name}.*{ASIDE}"):
        with suppress(OSError):  # such as BlockingIOError: another process is writing there
            _remove(left, _lock(left, _FOLDER))


def _short(target: Path) -> str:
    """The beginning of a file's name, which leaves room for the rest of its folder's."""
    return target.name[:50]


def _new_folder(target: Path) -> tuple[Path, int | None]:
    """A new folder next to ``target``, and the descriptor of its lock."""
    while True:
        folder = Path(mkdtemp(ASIDE, f".{_short(target)}.", target.parent))
        try:
            if (descriptor := _lock(folder, _FOLDER)) is not None:
                return folder, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # before it was locked, another process took it for an abandoned one
        except OSError:
            return folder, None  # Windows opens no folder, and some network file systems have no locks


def _remove(folder: Path, descriptor: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def _sync(path: Path, flags: int) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- locks ------------------------------------------------------------------------------------------------------------


def lock_file(path: Path) -> int:
    """Open ``path``, an empty file, which is created if missing, and lock it; returns the file descriptor.

    The lock ends when the descriptor is closed or the process ends, however it ends. Its owner may remove the file.
    Raises BlockingIOError if another process holds the lock, OutputError if there is some other file. On Windows
    nothing is locked.
    """
    while (descriptor := _lock(plain_target(path), os.O_RDWR | os.O_CREAT)) is None:
        pass  # its owner removed it
    status = os.fstat(descriptor)
    if status.st_size or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OutputError(f"{path}: expected no file or an empty one, which serves as a lock; move it away")
    return descriptor


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock a path; None if meanwhile it was removed. Raises BlockingIOError if another process holds it."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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
