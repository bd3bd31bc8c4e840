"""The native kernel for experts on the CPU: compiled on first use, compared with torch, and called through ctypes.

The library is compiled for this processor, and kept in the user's cache folder. torch's product of a single bfloat16
row reads its weights at a third of the memory's bandwidth. native/ffn.c reads them at full bandwidth, and computes a
whole expert in one call without the interpreter lock.

It also multiplies weights in blocks (``weight_formats``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.machine.weight_formats import FORMATS, BlockFormat
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
    """The user's, by the XDG base directory specification, which ignores a relative XDG_CACHE_HOME. Raises
    NotCompiledError if there is no home folder."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():
        return chosen / "trilane"
    try:
        return Path.home() / ".cache" / "trilane"
    except RuntimeError as error:
        raise NotCompiledError(f"expected a home folder for compiled code: {error}; set XDG_CACHE_HOME") from None


def compiled(source: Path, extra: Sequence[str] = ()) -> Path:
    """The shared library of a C file, compiled unless it exists for the same sources, compiler, flags and processor.

    It is written under another name and renamed, so that several processes may compile at once. A library that others
    own, or can write, is compiled anew. Raises NotCompiledError, also for such a folder.
    """
    compiler = find_compiler()
    target = cache_folder() / f"{source.stem}-{_fingerprint(source, compiler, extra)}.so"
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(target.parent)
        remove_abandoned(target.parent)  # what was killed may have had another fingerprint
        if not target.exists() or not _is_private(target):
            target.unlink(missing_ok=True)
            _build(source, compiler, extra, target)
    except OSError as error:
        raise NotCompiledError(f"{source.name}: expected to write {target}: {error}") from error
    return target


def _is_private(path: Path) -> bool:
    """True if this user or root owns a file or folder, which is no link and which no others can write."""
    if not hasattr(os, "getuid"):  # Windows, whose user folders are private
        return True
    status = path.lstat()
    return not stat.S_ISLNK(status.st_mode) and status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _check_private(folder: Path) -> None:
    """Raise NotCompiledError where others could put libraries into a folder, or another folder in its place."""
    above = folder.parent.stat().st_mode
    if not _is_private(folder) or (hasattr(os, "getuid") and above & stat.S_IWOTH and not above & stat.S_ISVTX):
        raise NotCompiledError(
            f"{folder}: expected a folder for compiled code that no others can write; others can write this one, "
            f"own it, or replace it; set XDG_CACHE_HOME to a folder of your own"
        )


def find_compiler() -> str:
    """The full path of a C compiler. Raises NotCompiledError if PATH has none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotCompiledError(f"expected a C compiler on PATH, found none of {', '.join(COMPILERS)}; install gcc")
    return compiler


def _build(source: Path, compiler: str, extra: Sequence[str], target: Path) -> None:
    errors = ""
    with atomic_path(target) as aside:
        for tuned in FOR_THIS_CPU if CPU_LIST.exists() else ((),):  # only if the fingerprint contains the processor
            done = _run([compiler, *FLAGS, *tuned, *extra, str(source), "-o", str(aside), "-lm"])
            if done.returncode == 0:
                aside.chmod(0o700)
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


SOURCE = Path(__file__).parent / "native" / "ffn.c"
CHOICE = "TRILANE_CPU_KERNEL"  # torch, native, or not set: native if it compiles
TOLERANCE = 2**-6  # of the largest result: 4 roundings to bfloat16; wrong results are off by far more
BLOCKS_TOLERANCE = 2**-5  # chosen as twice that: inputs and inner values are also rounded to 8 bits
# hidden, width, tokens: every tile
CHECKED = ((32, 48, 1), (70, 33, 3), (130, 64, 7), (96, 160, 40), (64, 32, 2), (256, 512, 4), (512, 256, 7))


class _Expert(ctypes.Structure):
    """``expert_t`` of native/ffn.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "down", "x", "choices", "weights", "out")),
        *((name, ctypes.c_int64) for name in ("hidden", "width", "rows", "top_k")),
        *((name, ctypes.c_int32) for name in ("gated", "scattered", "format")),
    )


class _Team:
    """Threads of the library that work for one Python thread."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.pointer, self._end = ctypes.c_void_p(library.team_of(threads)), library.team_end
        if not self.pointer:
            raise MemoryError(f"the native CPU kernel: expected {threads} threads, the system has no memory for them")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.pointer and not is_finalizing():  # a thread may still be at work then
            self._end(self.pointer)


class NativeFfn:
    """The compiled kernel. ``name``: its instruction set; ``only_up_to``: rows up to which it is faster than torch."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file is not a library."""
        library = ctypes.CDLL(str(path))
        library.team_of.restype, library.kernel_name.restype = ctypes.c_void_p, ctypes.c_char_p
        library.team_end.argtypes = [ctypes.c_void_p]
        library.compute.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Expert)]
        self._library, self._of_thread = library, threading.local()
        self.name, self.only_up_to = library.kernel_name().decode(), int(library.only_up_to())

    def __call__(
        self, first: Tensor, down: Tensor, x: Tensor, choices: Tensor, weights: Tensor, top_k: int, out: Tensor, *,
        scattered: bool, threads: int, blocks: BlockFormat | None = None,
    ) -> None:
        """Compute one expert's weighted rows with ``threads``, including the calling one.

        ``x`` [N, H] is bfloat16, and so are ``first`` [2 W, H] (gate, then up; without a gate [W, H]) and ``down``
        [H, W], unless their rows are ``blocks``, uint8, with H and W whole blocks.
        ``choices`` int64: number n * top_k + j is row n of ``x`` with the weight ``weights``[number], float32. ``out``
        float32 [.., H]: rows in the order of the choices or, if ``scattered``, each in the row of its number. All
        tensors must be contiguous and in host memory, which is not checked.
        """
        hidden, width = len(down), down.shape[1]
        if blocks is not None:
            width = blocks.weights_of(width)
        expert = _Expert(
            *(tensor.data_ptr() for tensor in (first, down, x, choices, weights, out)),
            hidden, width, len(choices), top_k, len(first) != width, scattered, 0 if blocks is None else blocks.number,
        )
        if self._library.compute(self._team(threads).pointer, expert) != 0:
            raise MemoryError(f"the native CPU kernel: no memory for {len(choices)} rows of an expert")

    def _team(self, threads: int) -> _Team:
        """The calling thread's team of so many, on the cores that it was bound to on its first call."""
        teams: dict[int, _Team] = vars(self._of_thread).setdefault("teams", {})
        if threads not in teams:
            teams[threads] = _Team(self._library, threads)
        return teams[threads]


@lru_cache(1)
def native_ffn() -> NativeFfn | None:
    """The kernel, loaded once in a process; None: torch computes the CPU's experts.

    Raises RefusedError if the environment variable requires the native kernel and there is none, or is not valid.
    """
    chosen = os.environ.get(CHOICE, "")
    if chosen not in ("", "torch", "native"):
        raise RefusedError(f"{CHOICE}: expected torch, native or nothing, got {chosen!r}")
    if chosen == "torch":
        return None
    try:
        return loaded()
    except NotCompiledError as error:
        if chosen:
            raise RefusedError(f"{CHOICE}=native: {error}") from error
        return None


def cpu_kernel() -> str:
    """The kernel of CPU experts in replays, except for float32, as a fact of the machine."""
    ffn = native_ffn()
    return "torch" if ffn is None else ffn.name


def loaded(source: Path = SOURCE, extra: Sequence[str] = ()) -> NativeFfn:
    """The kernel from ``source``, compiled with ``extra`` flags. Raises NotCompiledError, also for wrong results."""
    try:
        ffn = NativeFfn(compiled(source, extra))
    except OSError:  # a damaged file, for example from a full disk
        ffn = _built_anew(source, extra)
    check(ffn)
    return ffn


def _built_anew(source: Path, extra: Sequence[str]) -> NativeFfn:
    compiled(source, extra).unlink(missing_ok=True)
    try:
        return NativeFfn(compiled(source, extra))
    except OSError as error:
        raise NotCompiledError(f"{source.name}: expected a library that can be loaded: {error}") from error


def check(ffn: NativeFfn) -> None:
    """Raises NotCompiledError if results differ from torch's by more than rounding."""
    random = torch.Generator().manual_seed(0)
    formats = (None, *FORMATS.values())
    for (hidden, width, tokens), gated, blocks in product(CHECKED, (True, False), formats):
        if blocks is None or not (hidden % blocks.weights or width % blocks.weights):
            off = _difference(ffn, hidden, width, tokens, gated, blocks, random)
            most = TOLERANCE if blocks is None else BLOCKS_TOLERANCE
            if not off <= most:
                raise NotCompiledError(
                    f"{ffn.name}: expected torch's results within {most:.3f} of the largest, got {off:.3f} for "
                    f"{tokens} tokens of an expert of {hidden} x {width}; report it with processor and compiler"
                )


def _difference(
    ffn: NativeFfn, hidden: int, width: int, tokens: int, gated: bool, blocks: BlockFormat | None,
    random: torch.Generator,
) -> float:
    """The largest difference from torch's results, as a share of the largest result."""
    first, down = (_matrix(shape, blocks, random) for shape in ((width * (1 + gated), hidden), (hidden, width)))
    x = torch.randn(tokens, hidden, generator=random).bfloat16()
    choices = torch.randperm(2 * tokens, generator=random)[:tokens]
    weights, out = torch.rand(2 * tokens, generator=random), torch.full((2 * tokens, hidden), torch.nan)
    ffn(first, down, x, choices, weights, 2, out, scattered=True, threads=2, blocks=blocks)
    if blocks is not None:
        first, down = blocks.unpacked(first), blocks.unpacked(down)
    inner = x[choices // 2] @ first.T
    inner = functional.silu(inner[:, :width]) * inner[:, width:] if gated else functional.silu(inner)
    expected = (inner @ down.T) * weights[choices].unsqueeze(1)
    return float((out[choices] - expected).abs().max() / expected.abs().max())


def _matrix(shape: tuple[int, int], blocks: BlockFormat | None, random: torch.Generator) -> Tensor:
    """Random weights, scaled so that products with values of order 1 are of order 1."""
    rows, columns = shape
    if blocks is None:
        return torch.randn(shape, generator=random).mul_(columns**-0.5).bfloat16()
    return blocks.random(rows, columns, random)
