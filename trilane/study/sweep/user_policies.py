"""What the results of policies that the calling program has registered depend on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from policies.registry import SYSTEMS, added
from policies.user_files import loaded_files
from trilane.study.sweep.axes import SweepError

_COVERED = {"policies", *sys.stdlib_module_names}  # whose files every key covers, or that do not change


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
    """Where a registered policy's class and its bases are defined, if not in Trilane."""
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
