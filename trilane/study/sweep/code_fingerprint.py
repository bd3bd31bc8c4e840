"""Checksums of the code that simulations follow from: results of edited code are never taken for new ones.

One is of Trilane; policies that the calling program has registered have their own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from policies.registry import SYSTEMS, added
from policies.user_files import loaded_files
from trilane.study.sweep.axes import SweepError

_PACKAGES = ("policies", "sim", "traces", "trilane.common")
_SUFFIXES = (".py", ".yaml", ".c", ".h")
_LEFT_OUT = "traces/capture/"  # it records traces: no simulation follows from it
_COVERED = {"policies", *sys.stdlib_module_names}  # whose files every key covers, or that do not change


@cache
def code_fingerprint(*more: str) -> str:
    """Checksum of the code and numbers of traces, policies and simulator, of what they import, and of ``more``
    packages."""
    return fingerprint_of([Path(str(files(package))) for package in (*_PACKAGES, *more)])


def fingerprint_of(folders: list[Path]) -> str:
    """Checksum of names and contents of the sources in some folders and below."""
    digest = hashlib.sha256()
    for name, path in sorted(sources_in(folders).items()):
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources_in(folders: list[Path]) -> dict[str, Path]:
    """The files that count, by their names from the folder on."""
    found = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path
        for folder in folders for path in folder.rglob("*") if path.suffix in _SUFFIXES
    }
    return {name: path for name, path in found.items() if not name.startswith(_LEFT_OUT)}


def own_source(name: str) -> str | None:
    """Checksum of a registered policy: its row of the registry, and the files of its class and of that class's bases;
    None for those of Trilane. Of a file that ``load_policies`` has loaded, the source that was executed counts, however
    the file was edited since. What such a file imports is not in it. Raises SweepError where there is no file.
    """
    if not added(name):
        return None
    entry = SYSTEMS[name]
    policy = entry.parameters
    said = (entry.name, entry.summary, entry.source, f"{policy.__module__}:{policy.__qualname__}")
    digest = hashlib.sha256("\0".join(said).encode())
    executed = dict(loaded_files())
    for path in _files(name):
        digest.update(executed.get(str(path)) or path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def check_kept(names: Iterable[str]) -> None:
    """Raises SweepError for a policy whose code cannot be identified later, so that kept results could be stale."""
    for name in filter(added, names):
        _files(name)


def _files(name: str) -> list[Path]:
    """The files outside Trilane that define a registered policy's class and its bases."""
    modules = dict.fromkeys(kind.__module__ for kind in SYSTEMS[name].parameters.__mro__)
    return [_file(name, module) for module in modules if module.split(".")[0] not in _COVERED]


def _file(name: str, module: str) -> Path:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        raise SweepError(
            f"policy {name!r} is defined in no file (in a notebook, perhaps), so that kept results could not be told "
            f"from those of other code; put it into a file of its own and import it, or sweep without an output"
        )
    return Path(path)
