"""Policies in a user's own file, such as ``my_policy.py`` or, for one of those in it, ``my_policy.py:MyPolicy``."""

from __future__ import annotations

import re
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from policies.registry import SYSTEMS, added
from policies.system import ChoiceError

_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w+))?")
_loaded: dict[str, str] = {}  # the absolute paths of files, by the names of the policies in them


def names_file(text: str) -> bool:
    """Whether ``text`` has the form ``FILE.py`` or ``FILE.py:NAME``, which no name of a policy has."""
    return _FILE.fullmatch(text) is not None


def loaded_policies() -> dict[str, str]:
    """The policies that have been loaded from files: names and absolute paths."""
    return dict(_loaded)


def load_policies(text: str) -> tuple[str, ...]:
    """Import ``FILE.py``; returns the names of the policies in it, or of the class in ``FILE.py:NAME`` alone.

    A policy in a file is a class with the decorator ``register``. The file's folder is searched for what it imports.
    Raises ChoiceError for a file that cannot be imported or that has no such policy.
    """
    match = _FILE.fullmatch(text)
    if match is None:
        raise ChoiceError(f"expected FILE.py or FILE.py:NAME, got {text!r}")
    path = Path(match["file"]).resolve()
    found = _policies(_imported(path, match["file"]))
    _loaded.update({name: str(path) for name in found})
    chosen = tuple(name for name, variable in found.items() if match["name"] in (None, variable))
    if not chosen:
        classes = ", ".join(found.values()) or "none"
        raise ChoiceError(f"{text}: expected a policy, a class with the decorator `register`; the file has {classes}")
    return chosen


def _imported(path: Path, file: str) -> ModuleType:
    """The file as the module of its name, imported once. Raises ChoiceError."""
    there = sys.modules.get(path.stem)
    if there is not None:
        if getattr(there, "__file__", None) == str(path):
            return there
        raise ChoiceError(f"{file}: the name {path.stem!r} belongs to another Python module; rename the file")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise ChoiceError(_in_words(error, path, file)) from error
    return module


def _in_words(error: Exception, path: Path, file: str) -> str:
    """Why a file cannot be imported, and in which of its lines."""
    if isinstance(error, FileNotFoundError) and error.filename == str(path):
        return f"{file}: no such file; expected the Python file of a policy"
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        line = frame.lineno if frame.filename == str(path) else line
    return f"{file}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"


def _policies(module: ModuleType) -> dict[str, str]:
    """The policies of a module that are not Trilane's own: their names, and the variables that hold their classes."""
    variables = {value: variable for variable, value in vars(module).items() if isinstance(value, type)}
    mine = {name: entry.parameters for name, entry in SYSTEMS.items() if added(name)}
    return {name: variables[policy] for name, policy in mine.items() if policy in variables}
