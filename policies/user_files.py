"""Policies in a user's own file, such as ``my_policy.py`` or, for one of those in it, ``my_policy.py:MINE``."""

from __future__ import annotations

import re
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from policies.registry import SYSTEMS, added, register
from policies.system import ChoiceError, System

_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w+))?")
_loaded: dict[str, str] = {}  # FILE.py or FILE.py:NAME, by the names of the policies


def names_file(text: str) -> bool:
    """Whether ``text`` has the form ``FILE.py`` or ``FILE.py:NAME``, which no name of a policy has."""
    return _FILE.fullmatch(text) is not None


def loaded_policies() -> dict[str, str]:
    """The policies that have been loaded: name, and the argument of ``load_policies`` with an absolute path."""
    return dict(_loaded)


def load_policies(text: str) -> tuple[str, ...]:
    """Import ``FILE.py`` and register the policies in it, or that of ``FILE.py:NAME`` alone; returns their names.

    A policy in a file is a variable of its module that holds a ``System``. The file's folder is searched for what it
    imports. Raises ChoiceError for a file that cannot be imported or that defines no such policy, and for a name that
    is taken.
    """
    match = _FILE.fullmatch(text)
    if match is None:
        raise ChoiceError(f"expected FILE.py or FILE.py:NAME, got {text!r}")
    path = Path(match["file"]).resolve()
    found = _systems(_imported(path, match["file"]))
    if match["name"]:
        found = {match["name"]: _chosen(text, match["name"], found)}
    if not found:
        raise ChoiceError(f"{text}: expected a policy, a variable that holds a System; found none")
    for entry in found.values():
        register(entry)
    names = tuple(dict.fromkeys(entry.name for entry in found.values()))
    _loaded.update(dict.fromkeys(names, f"{path}{text[len(match['file']):]}"))
    return names


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


def _systems(module: ModuleType) -> dict[str, System]:
    """The policies that a module defines, by variable; those that it has from Trilane are not its own."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, System)}
    return {name: entry for name, entry in found.items() if SYSTEMS.get(entry.name) is not entry or added(entry.name)}


def _chosen(text: str, name: str, found: dict[str, System]) -> System:
    if name not in found:
        there = ", ".join(found) or "none"
        raise ChoiceError(f"{text}: expected a policy, a variable that holds a System; the file has {there}")
    return found[name]
