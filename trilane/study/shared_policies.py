"""Checks that policies that the calling program has registered are registered in other processes, too."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from pathlib import Path

from policies.registry import SYSTEMS, added
from policies.system import ChoiceError
from policies.user_files import loaded_policies


def check_shared(names: Iterable[str], how: str, known: Container[str] = ()) -> None:
    """Raises ChoiceError for a registered policy that is not ``known`` to other processes."""
    if own := [name for name in names if added(name) and name not in known]:
        raise ChoiceError(
            f"policy {own[0]!r} is registered in this process alone, and {how} runs in others; use jobs=1, load the "
            f"policy from a file of its own (trilane.load_policies), or give it a row in policies/registry.py"
        )


def check_workers(names: Iterable[str], jobs: int) -> None:
    """Raises ChoiceError for a registered policy that the worker processes of ``jobs`` would not have."""
    if jobs > 1:
        check_shared((name for name in names if not _from_main(name)), f"jobs={jobs}", known=loaded_policies())


def _from_main(name: str) -> bool:
    """Whether workers register the policy when they import the caller's main file: it is defined there, or in a package
    from which that file imports. A notebook, or code on the command line, has no such file.
    """
    main = sys.modules["__main__"]
    if name not in SYSTEMS or not Path(getattr(main, "__file__", None) or "").is_file():
        return False
    modules = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(main).values())
    packages = {"__main__", *(str(module).split(".")[0] for module in modules)}
    return SYSTEMS[name].parameters.__module__.split(".")[0] in packages
