"""The native kernel of experts: compiled once, kept, chosen; or torch itself."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from realrun.errors import RefusedError
from realrun.experts.ffn import ExpertShape, SwiGlu
from realrun.machine import native_ffn as native
from realrun.machine.machines import facts_of
from realrun.machine.native_ffn import (
    CHOICE,
    SOURCE,
    NativeFfn,
    NotCompiledError,
    cache_folder,
    check,
    compiled,
    cpu_kernel,
    find_compiler,
    loaded,
)
from tests.kit.depth import thinned
from tests.kit.tiny_bench import machine
from tests.realrun.experts.test_store import TOY
from trilane.common.files import ASIDE

ROOT = Path(__file__).parents[3]
QUICK = ("-O1",)  # to compile


def has_compiler() -> bool:
    try:
        find_compiler()
    except NotCompiledError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler on PATH")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a process that has not chosen its kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CHOICE, raising=False)
    native.native_ffn.cache_clear()
    yield tmp_path / "trilane"
    native.native_ffn.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A C file that is compiled in no time."""
    return written(tmp_path / "source", "int one(void) { return 1; }")


def written(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "one.c").write_text(text)
    return folder / "one.c"


class TestChoice:
    @needs_compiler
    def test_is_the_native_kernel_and_a_fact_of_the_machine(self, cache: Path) -> None:
        assert cpu_kernel().startswith("native-")
        with machine() as lanes:
            assert facts_of(lanes)["cpu_kernel"] == cpu_kernel()

    def test_is_torch_where_asked_for(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CHOICE, "torch")
        assert cpu_kernel() == "torch"
        assert type(ExpertShape.of(TOY).kernel) is SwiGlu
        assert not cache.exists()

    def test_is_torch_without_a_compiler(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert cpu_kernel() == "torch"

    def test_is_torch_where_nothing_can_be_kept(self, cache: Path) -> None:
        cache.write_text("a file")
        assert cpu_kernel() == "torch"

    def test_that_cannot_be_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv(CHOICE, "native")
        with pytest.raises(RefusedError, match="TRILANE_CPU_KERNEL=native: expected a C compiler on PATH, found none"):
            cpu_kernel()

    def test_of_something_else_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CHOICE, "fast")
        with pytest.raises(RefusedError, match="TRILANE_CPU_KERNEL: expected torch, native or nothing, got 'fast'"):
            cpu_kernel()


TWINS = {  # file, what stands there, and what does in its place
    "no SiLU": ("ffn.c", "silu(rounded(gate[row - first]", "(rounded(gate[row - first]"),
    "the rest of a row left out": ("products.h", "if (at < length)", "if (0)"),
    "another token's row": ("ffn.c", "/ e->top_k *", "/ (e->top_k + 1) *"),
    "not weighted": ("ffn.c", "= e->weights[choice]", "= 1"),
    "a vector taken for another": ("products.h", "token * stride + at", "0 * stride + at"),
    "blocks not scaled": ("blocks.h", "(scales * tile->vectors->scales[place])", "scales"),
    "blocks of another format": ("ffn.c", "->down, job->expert->format", "->down, job->expert->format % 3 + 1"),
    "upper halves of bytes taken for lower ones": ("lanes.h", "bytes >> 4 &", "bytes &"),
    "weights too large by 8": ("blocks.h", "format == Q4_0 ? 8", "format == Q4_0 ? 0"),
    "minima left out": ("blocks.h", "sums[token] -= least", "sums[token] -= 0 * least"),
    "a band taken for another": ("blocks.h", "(first + row / BAND * BAND)", "first"),
    "the last row of a piece left out": ("ffn.c", "row = first; row < end;", "row = first; row < end - 1;"),
}


def changed(folder: Path, file: str, before: str, after: str) -> Path:
    """A copy of the kernel with another text in one of its files."""
    shutil.copytree(SOURCE.parent, folder)
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    return folder / SOURCE.name


@needs_compiler
class TestCheck:
    @thinned(3)
    @pytest.mark.parametrize("twin", TWINS)
    def test_rejects_a_kernel_that_computes_something_else(self, twin: str, cache: Path, tmp_path: Path) -> None:
        broken = changed(tmp_path / "twin", *TWINS[twin])
        with pytest.raises(NotCompiledError, match=r"expected torch's results within 0\.0.. of the largest, got"):
            loaded(broken, QUICK)

    def test_of_a_broken_kernel_leaves_torch(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = changed(tmp_path / "twin", *TWINS["not weighted"])
        monkeypatch.setattr(native, "loaded", lambda: loaded(broken, QUICK))
        assert cpu_kernel() == "torch"

    def test_fails_for_results_that_are_no_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ffn = NativeFfn.__new__(NativeFfn)
        ffn.name = "idle"
        monkeypatch.setattr(NativeFfn, "__call__", lambda *_, **__: None)
        with pytest.raises(NotCompiledError, match=r"idle: expected torch's results within 0\.016 .*, got nan"):
            check(ffn)


@needs_compiler
class TestCache:
    def test_keeps_one_library_for_the_next_time(self, cache: Path, source: Path) -> None:
        path = compiled(source)
        assert [path] == list(cache.iterdir())
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        built = path.stat().st_mtime_ns
        assert compiled(source) == path
        assert path.stat().st_mtime_ns == built

    def test_does_not_keep_what_was_left_by_a_kill(self, cache: Path, source: Path) -> None:
        (cache / f".one-0.so.abc{ASIDE}").mkdir(parents=True)
        path = compiled(source)
        (cache / f".{path.name}.abc{ASIDE}").mkdir()
        compiled(source)
        assert [path] == list(cache.iterdir())

    def test_tells_sources_headers_flags_and_processors_apart(
        self, cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, processor = written(tmp_path / "other", "int one(void) { return 2; }"), tmp_path / "cpuinfo"
        paths = [compiled(source), compiled(source, QUICK), compiled(other)]
        (other.parent / "steps.h").write_text("")
        paths.append(compiled(other))
        processor.write_text("processor\t: 0\nmodel name\t: Another\nflags\t\t: sse2\n")
        monkeypatch.setattr(native, "CPU_LIST", processor)
        paths.append(compiled(source))
        assert len(set(paths)) == 5

    def test_builds_a_damaged_library_anew(self, cache: Path) -> None:
        path = compiled(SOURCE, QUICK)
        path.write_bytes(b"cut off")
        assert loaded(SOURCE, QUICK).name.startswith("native-")

    def test_serves_processes_that_ask_at_once(self, cache: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from realrun.machine.native_ffn import compiled\n"
            "print(compiled(Path(sys.argv[1]), sys.argv[2:]))"
        )
        command = [sys.executable, "-c", code, str(SOURCE), *QUICK]
        asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
        paths = [Path(process.communicate()[0].strip()) for process in asking]
        assert paths[0] == paths[1]
        assert list(cache.iterdir()) == paths[:1]

    def test_keeps_nothing_of_what_does_not_compile(self, cache: Path, tmp_path: Path) -> None:
        broken = changed(tmp_path / "other", "ffn.c", "return KERNEL", "return wrong")
        with pytest.raises(NotCompiledError, match=r"does not compile ffn.c: (?s:.*)wrong"):
            compiled(broken)
        assert not list(cache.iterdir())

    @pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
    def test_does_not_use_a_library_that_others_can_write(self, cache: Path, source: Path, mode: int) -> None:
        path = compiled(source)
        path.write_bytes(b"planted")
        path.chmod(mode)
        assert compiled(source) == path
        assert path.read_bytes() != b"planted"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def test_does_not_follow_a_link_to_a_library(self, cache: Path, source: Path, tmp_path: Path) -> None:
        path = compiled(source)
        path.rename(planted := tmp_path / "planted.so")
        path.symlink_to(planted)
        assert not compiled(source).is_symlink()

    def test_takes_no_library_of_another_user(
        self, cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor anything of the folder in which it lies: here this user is another one than the owner."""
        compiled(source)
        monkeypatch.setattr(native.os, "getuid", lambda: 4242)
        owner = os.stat(cache).st_uid
        if owner == 0:  # root's files are trusted
            os.chown(cache, 1000, -1)
        with pytest.raises(NotCompiledError, match="own it, or replace it; set XDG_CACHE_HOME"):
            compiled(source)

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
    def test_refuses_a_folder_that_others_can_write(self, cache: Path, source: Path, mode: int) -> None:
        cache.mkdir(parents=True)
        cache.chmod(mode)
        with pytest.raises(NotCompiledError, match="no others can write"):
            compiled(source)
        assert not list(cache.iterdir())

    def test_refuses_a_folder_that_others_can_replace(self, cache: Path, source: Path) -> None:
        compiled(source)
        cache.parent.chmod(0o777)
        with pytest.raises(NotCompiledError, match="or replace it"):
            compiled(source)
        cache.parent.chmod(0o1777)  # as /tmp
        assert compiled(source).exists()

    @pytest.mark.parametrize("chosen", [None, "", "relative", "./cache"])
    def test_is_in_the_users_home_by_default(self, monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
        """A relative path is ignored: the working folder would supply code."""
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if chosen is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", chosen)
        monkeypatch.setenv("HOME", os.sep + "home-of-tests")
        assert cache_folder() == Path(os.sep, "home-of-tests", ".cache", "trilane")


def test_the_source_is_installed_with_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["realrun"]
    assert any(SOURCE.relative_to(ROOT / "realrun").match(pattern) for pattern in data)
