"""Policies that the calling program has registered: what their results depend on, and who knows them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from policies.registry import SYSTEMS, added
from trilane.study.sweep.axes import SweepError

_COVERED = "policies"  # the package whose files every key covers


def own_source(name: str) -> str | None:
    """Checksum of a registered policy: what it says about itself, and the files in which it builds its parts; None for
    those of Trilane. What such a file imports is not in it. Raises SweepError where there is no file.
    """
    if not added(name):
        return None
    entry = SYSTEMS[name]
    said = (entry.name, entry.summary, entry.source, _place(entry.build), _place(entry.parameters))
    digest = hashlib.sha256("\0".join(said).encode())
    for path in _files(name):
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def check_kept(names: Iterable[str]) -> None:
    """Raises SweepError for a policy of which nobody could tell later whether kept results are still its own."""
    for name in filter(added, names):
        _files(name)


def check_shared(names: Iterable[str], how: str, known: Container[str] = ()) -> None:
    """Raises SweepError for a policy that is not ``known`` to other processes."""
    if own := [name for name in names if added(name) and name not in known]:
        raise SweepError(
            f"policy {own[0]!r} is registered in this process alone, and {how} runs in others; sweep with jobs=1, load "
            f"the policy from a file of its own (trilane.load_policies), or give it a row in policies/registry.py"
        )


def _files(name: str) -> list[Path]:
    """Where a registered policy's parameters and ``build`` are defined, if not in Trilane."""
    entry = SYSTEMS[name]
    modules = dict.fromkeys(_place(made).partition(":")[0] for made in (entry.build, entry.parameters))
    return [_file(name, module) for module in modules if module.split(".")[0] != _COVERED]


def _place(made: Any) -> str:
    """Where a function or a class is defined, as ``module:name``; of an object that is called, its class."""
    while isinstance(made, partial):
        made = made.func
    named = made if hasattr(made, "__qualname__") else type(made)
    return f"{named.__module__}:{named.__qualname__}"


def _file(name: str, module: str) -> Path:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        raise SweepError(
            f"policy {name!r} is defined in no file (in a notebook, perhaps), so that nobody could tell later whether "
            f"kept results are still those of its code; put it into a file of its own and import it, or sweep without "
            f"an output"
        )
    return Path(path)
