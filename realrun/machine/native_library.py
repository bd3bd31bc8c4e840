"""Compilation of a C file on first use, for this processor; the library is kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path, remove_abandoned

CPU_LIST = Path("/proc/cpuinfo")
COMPILERS = ("cc", "gcc", "clang")  # the first of them on PATH
FLAGS = ("-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
FOR_THIS_CPU = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler accepts
TIMEOUT_S = 120


class NotCompiledError(TrilaneError):
    """Code that cannot be compiled for this computer; the message says why."""


def cache_folder() -> Path:
    """The user's, by the XDG base directory specification. Raises NotCompiledError if there is no home folder."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen, "trilane")
    try:
        return Path.home() / ".cache" / "trilane"
    except RuntimeError as error:
        raise NotCompiledError(f"expected a home folder for compiled code: {error}; set XDG_CACHE_HOME") from None


def compiled(source: Path, extra: Sequence[str] = ()) -> Path:
    """The shared library of a C file, compiled unless it exists for the same sources, compiler, flags and processor.

    It is written under another name and renamed, so that several processes may compile at once. Raises
    NotCompiledError.
    """
    compiler = find_compiler()
    target = cache_folder() / f"{source.stem}-{_fingerprint(source, compiler, extra)}.so"
    remove_abandoned(target.parent)  # what was killed may have had another fingerprint
    if not target.exists():
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _build(source, compiler, extra, target)
        except OSError as error:
            raise NotCompiledError(f"{source.name}: expected to write {target}: {error}") from error
    return target


def find_compiler() -> str:
    """The full path of a C compiler. Raises NotCompiledError if PATH has none."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise NotCompiledError(f"expected a C compiler on PATH, found none of {', '.join(COMPILERS)}; install gcc")
    return found


def _build(source: Path, compiler: str, extra: Sequence[str], target: Path) -> None:
    errors = ""
    with atomic_path(target) as aside:
        for tuned in FOR_THIS_CPU if CPU_LIST.exists() else ((),):  # only if the fingerprint contains the processor
            done = _run([compiler, *FLAGS, *tuned, *extra, str(source), "-o", str(aside), "-lm"])
            if done.returncode == 0:
                return
            errors = done.stderr.strip()
        raise NotCompiledError(f"{compiler} does not compile {source.name}: {errors[-2000:]}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotCompiledError(f"{command[0]}: stopped after {TIMEOUT_S} s") from error


def _fingerprint(source: Path, compiler: str, extra: Sequence[str]) -> str:
    version = _run([compiler, "--version"]).stdout
    texts = [path.read_bytes() for path in sorted(source.parent.glob("*.[ch]"))]
    known = (*texts, compiler.encode(), version.encode(), repr((FLAGS, extra)).encode(), _cpu().encode())
    return hashlib.sha256(b"\0".join(known)).hexdigest()[:20]


def _cpu() -> str:
    """The first processor's model and instructions."""
    lines = CPU_LIST.read_text().split("\n\n")[0].splitlines() if CPU_LIST.exists() else []
    kept = [line for line in lines if line.split("\t")[0].strip() in ("model name", "model", "flags", "Features")]
    return "\n".join([platform.machine(), *kept])
