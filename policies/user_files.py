"""Policies in a user's own file, such as ``my_policy.py`` or, for one of those in it, ``my_policy.py:MyPolicy``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from policies.registry import SYSTEMS, added
from policies.system import ChoiceError, Policy, wrong_class
from policies.user_errors import PolicyFileError, in_words, line_in
from trilane.common.files import check_no_pipe
from trilane.common.quoting import quoted

_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w+))?")


class UserFile(NamedTuple):
    """A file of policies: its absolute path, and the source that was executed."""

    path: str
    source: bytes


_loaded: dict[str, UserFile] = {}  # by the names of the policies in them


def names_file(text: str) -> bool:
    """True if ``text`` has the form ``FILE.py`` or ``FILE.py:NAME``, which no name of a policy has."""
    return _FILE.fullmatch(text) is not None


def loaded_policies() -> dict[str, str]:
    """The policies that have been loaded from files: names and absolute paths."""
    return {name: file.path for name, file in _loaded.items()}


def loaded_files() -> tuple[UserFile, ...]:
    """The files that have been loaded, in this order, with the sources that the policies come from."""
    return tuple(dict.fromkeys(_loaded.values()))


def load_policies(text: str) -> tuple[str, ...]:
    """Import ``FILE.py``; returns the names of the policies in it, or of the class in ``FILE.py:NAME`` alone.

    A policy in a file is a class with the decorator ``register``. The file's folder is searched for what it imports.
    A file that was edited since it was loaded is executed again; what it imports is not.
    Raises ChoiceError for a file that cannot be imported or that has no such policy.
    """
    match = _FILE.fullmatch(text)
    if match is None:
        raise ChoiceError(f"expected FILE.py or FILE.py:NAME, got {quoted(text)}")
    path = Path(match["file"]).resolve()
    policies = _load(path, match["file"])
    if match["name"] is None:
        return tuple(policies)
    classes = _classes(sys.modules[path.stem])
    chosen = tuple(name for name, policy in policies.items() if policy is classes.get(match["name"]))
    if not chosen:
        has = ", ".join(variable for variable, value in classes.items() if value in policies.values())
        raise ChoiceError(_no_policy(text, has))
    return chosen


def names_of_loaded(text: str) -> tuple[str, ...]:
    """The policies of ``FILE.py`` or ``FILE.py:NAME`` where another file names them.

    Raises ChoiceError for a file that has not been loaded: what a file of settings names is never executed, only what
    the command line names.
    """
    match = _FILE.fullmatch(text)
    assert match is not None
    paths = dict.fromkeys(path for path in loaded_policies().values() if Path(path).match(match["file"]))
    if not paths:
        raise ChoiceError(f"{text} is code, which runs only if the command line names it: add --policies {text}")
    return tuple(name for path in paths for name in load_policies(f"{path}{text.removeprefix(match['file'])}"))


def load_files(files: Iterable[UserFile]) -> None:
    """Load what another process has loaded, with the sources that it has executed. Raises ChoiceError."""
    for file in files:
        _load(Path(file.path), file.path, file.source)


def _load(path: Path, file: str, source: bytes | None = None) -> dict[str, type[Policy]]:
    """The policies of a file by name; it is executed unless that was done with the same source. Raises ChoiceError."""
    module = sys.modules.get(path.stem)
    if module is not None and getattr(module, "__file__", None) != str(path):
        raise ChoiceError(f"{file}: the name {path.stem!r} belongs to another Python module; rename the file")
    read = UserFile(str(path), _read(path, file) if source is None else source)
    before = {name: known for name, known in _loaded.items() if known.path == read.path}
    with _undone_on_error(path.stem):
        if module is None or any(known != read for known in before.values()):
            module = _executed(read, file)
        if not (policies := _policies(module)):
            raise ChoiceError(_no_policy(file, "none"))
        for policy in policies.values():
            _check(policy, path, file)
    for name in before:
        del _loaded[name]
    for name in policies:
        if SYSTEMS[name].file != read.path:
            SYSTEMS[name] = replace(SYSTEMS[name], file=read.path)
    _loaded.update(dict.fromkeys(policies, read))
    return policies


def _read(path: Path, file: str) -> bytes:
    check_no_pipe(file, ChoiceError)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ChoiceError(_in_words(error, path, file)) from error


def _executed(read: UserFile, file: str) -> ModuleType:
    """The file as the module of its name, with policies in place of those that it had. Raises ChoiceError."""
    path = Path(read.path)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    for name in [name for name, entry in SYSTEMS.items() if entry.parameters.__module__ == path.stem]:
        del SYSTEMS[name]
    sys.modules[path.stem] = module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(read.source, read.path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        raise ChoiceError(_in_words(error, path, file)) from error
    return module


@contextmanager
def _undone_on_error(name: str) -> Iterator[None]:
    """Module ``name``, the policies and the search path are as they were if the file cannot be loaded."""
    module, search_path, systems = sys.modules.get(name), list(sys.path), dict(SYSTEMS)
    try:
        yield
    except BaseException:
        sys.path[:] = search_path
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
        SYSTEMS.clear()
        SYSTEMS.update(systems)
        raise


def _in_words(error: BaseException, path: Path, file: str) -> str:
    """Why a file cannot be imported, and in which of its lines."""
    if isinstance(error, FileNotFoundError) and error.filename == str(path):
        return f"{file}: no such file; expected the Python file of a policy"
    place = line_in(error, [str(path)]).removeprefix(str(path)).removesuffix(", in <module>")
    if (line := getattr(error, "lineno", None)) and not place:
        place = f", line {line}"
    return f"{file}{place}: {in_words(error)}"


def _check(policy: type[Policy], path: Path, file: str) -> None:
    """Raise PolicyFileError for a class that cannot be a policy."""
    try:
        wrong = wrong_class(policy)
    except (Exception, SystemExit) as error:
        if line_in(error, [str(path)]):
            raise PolicyFileError(_in_words(error, path, file)) from error
        wrong = in_words(error)
    if wrong:
        _, line = inspect.getsourcelines(policy)
        raise PolicyFileError(f"{file}, line {line}, {policy.__name__}: {wrong}")


def _no_policy(text: str, has: str) -> str:
    return f"{text}: expected a policy, a class with the decorator `register`; the file has {has}"


def _policies(module: ModuleType) -> dict[str, type[Policy]]:
    """The policies of a module that are not Trilane's own, by name."""
    classes = _classes(module).values()
    mine = {name: entry.parameters for name, entry in SYSTEMS.items() if added(name)}
    return {name: policy for name, policy in mine.items() if policy in classes}


def _classes(module: ModuleType) -> dict[str, type]:
    """The variables of a module that hold classes."""
    return {variable: value for variable, value in vars(module).items() if isinstance(value, type)}
