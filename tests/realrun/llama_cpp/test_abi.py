"""The C library: its structures checked before they are used, and refusals where it is missing."""

from __future__ import annotations

import json
import sys
from ctypes import sizeof
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from realrun.errors import RefusedError
from realrun.llama_cpp.abi import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    ContextParams,
    EngineLog,
    ModelParams,
    check_layout,
    has_library,
    library_version,
    llama_library,
)
from realrun.llama_cpp.bench import (
    VARIABLE,
    BenchPoint,
    BenchSettings,
    LlamaBenchContext,
    bench_program,
    program_times,
    time_points,
)


def default(kind: type[ModelParams] | type[ContextParams], **changes: object) -> bytes:
    defaults = MODEL_DEFAULTS if kind is ModelParams else CONTEXT_DEFAULTS
    return bytes(kind(**{**defaults, **changes}))


def test_structures_of_the_known_build_are_taken() -> None:
    """Two bytes at the end of the model's parameters are padding, and not written."""
    check_layout(ModelParams, MODEL_DEFAULTS, default(ModelParams)[:78])
    check_layout(ContextParams, CONTEXT_DEFAULTS, default(ContextParams))
    assert (sizeof(ModelParams), sizeof(ContextParams)) == (80, 168)


@pytest.mark.parametrize(("written", "found"), [
    (default(ContextParams) + bytes(8), "ContextParams: 176 bytes"),
    (default(ContextParams)[:-8], "ContextParams: 160 bytes"),
    (default(ContextParams, kv_unified=True), "ContextParams: kv_unified = True"),
    (bytes(4) + default(ContextParams)[:-4], "ContextParams: n_ctx = 0"),
])
def test_a_build_with_other_structures_is_refused(written: bytes, found: str) -> None:
    with pytest.raises(RefusedError) as refused:
        check_layout(ContextParams, CONTEXT_DEFAULTS, written)
    assert str(refused.value) == (
        f"llama.cpp: expected the structures of xllamacpp 2026.10.11549, found others ({found}); "
        "install that version: pip install 'xllamacpp==2026.10.11549', or name a library of its source in LLAMA_LIBRARY"
    )


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_LIBRARY", raising=False)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(RefusedError, match=r"expected the package xllamacpp.* -e '\.\[llama\]'`$"):
        llama_library.__wrapped__()


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_named_library_that_cannot_be_loaded_is_refused(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "libllama.so").write_bytes(content)
    monkeypatch.setenv("LLAMA_LIBRARY", str(tmp_path / "libllama.so"))
    assert has_library()
    with pytest.raises(RefusedError, match=r"expected a library of llama.cpp that can be loaded: .*libllama.so"):
        llama_library.__wrapped__()


def test_the_version_of_a_named_library_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_LIBRARY", "/home/me/libllama.so")
    assert library_version() == {"llama.cpp": "own build, with the structures of xllamacpp 2026.10.11549"}


class FakeLibrary:
    def llama_log_set(self, callback: object, user_data: object) -> None:
        self.write = callback


def test_the_log_is_kept_by_lines_and_its_first_complaint_found() -> None:
    library = FakeLibrary()
    log = EngineLog(library)  # type: ignore[arg-type]
    for piece in (b"loading\nread ", b"error: no tensor x\n", b"failed to load\n"):
        library.write(2, piece, None)  # type: ignore[operator]
    assert log.lines == ["loading", "read error: no tensor x", "failed to load"]
    assert (log.complaint(), log.complaint(2), log.complaint(3)) == (
        "read error: no tensor x", "failed to load", "no reason given"
    )


# --- llama-bench, by a program that prints given answers --------------------------------------------------------------


TOKEN, PROMPT = BenchPoint(2, 32, 1), BenchPoint(2, 0, 128)
ANSWER = [
    {"n_prompt": 0, "n_gen": 16, "samples_ns": [160_000, 320_000]},
    {"n_prompt": 128, "n_gen": 0, "samples_ns": [7_000, 8_000]},
]


def program(folder: Path, printed: str, status: int = 0, complaint: str = "") -> str:
    """A llama-bench that keeps its arguments in the file ``asked``."""
    path = folder / "llama-bench"
    (folder / "printed").write_text(printed)
    path.write_text(
        f"#!/bin/sh\ncd {folder}\nprintf '%s ' \"$@\" >> asked\necho >> asked\ncat printed\n"
        f"echo '{complaint}' >&2\nexit {status}\n"
    )
    path.chmod(0o755)
    return str(path)


def times(name: str, settings: BenchSettings | None = None) -> dict[BenchPoint, list[int]]:
    return program_times(name, Path("a.gguf"), settings or BenchSettings(256), [(TOKEN, 2), (PROMPT, 2)])


def test_a_token_is_a_sixteenth_of_those_timed_together_and_a_prompt_is_whole(tmp_path: Path) -> None:
    assert times(program(tmp_path, json.dumps(ANSWER))) == {TOKEN: [10_000, 20_000], PROMPT: [7_000, 8_000]}
    same = "-t 2 -b 512 -ub 512 -ctk f16 -ctv f16 -ngl 0 -dev none "
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"-m a.gguf -o json -r 2 -p 0 -n 16 -d 32 {same}",
        f"-m a.gguf -o json -r 2 -p 128 -n 0 -d 0 {same}",
    ]


def test_on_a_gpu_experts_of_some_layers_stay_on_the_cpu(tmp_path: Path) -> None:
    times(program(tmp_path, json.dumps(ANSWER)), BenchSettings(256, 64, gpu=True, cpu_layers=3, kv="q8_0"))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].endswith("-t 2 -b 64 -ub 64 -ctk q8_0 -ctv q8_0 -ngl 999 -ncmoe 3 ")


def test_a_model_in_memory_of_its_own_is_not_mapped(tmp_path: Path) -> None:
    times(program(tmp_path, json.dumps(ANSWER)), BenchSettings(256, gpu=True, mapped=False))
    assert (tmp_path / "asked").read_text().splitlines()[0].endswith("-ngl 999 -ncmoe 0 -lm none ")


@pytest.mark.parametrize(("printed", "words"), [
    ("| model | t/s |", "what it printed: not plain JSON"),
    ({"n_prompt": 0}, "found 0 such tests"),
    ([], "found 0 such tests"),
    ([7, {"n_prompt": 0, "n_gen": 8, "samples_ns": [1, 2]}], "found 0 such tests"),
    ([ANSWER[0], ANSWER[0]], "found 2 such tests"),
    ([{"n_prompt": 0, "n_gen": 16, "avg_ns": 10}], "without them; take a newer llama-bench"),
    ([{**ANSWER[0], "samples_ns": [1.5, 2]}], "without them"),
    ([{**ANSWER[0], "samples_ns": [True, 2]}], "without them"),
    ([{**ANSWER[0], "samples_ns": [0, 2]}], "without them"),
    ([{**ANSWER[0], "samples_ns": []}], "without them"),
    ([{**ANSWER[0], "samples_ns": [16, 16, 16]}], "expected 2 repeats, found 3"),
])
def test_any_other_answer_is_refused(printed: Any, words: str, tmp_path: Path) -> None:
    text = printed if isinstance(printed, str) else json.dumps(printed)
    with pytest.raises(RefusedError, match=words):
        times(program(tmp_path, text))


def test_a_failed_run_says_what_it_printed_without_control_characters(tmp_path: Path) -> None:
    name = program(tmp_path, "", 3, "unknown argument \x1b[31m-d")
    with pytest.raises(RefusedError, match=r"exit status 3: unknown argument \\x1b\[31m-d$"):
        times(name)


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    for name in ("plain", "missing"):
        with pytest.raises(RefusedError, match=f"{name}: expected llama.cpp's program llama-bench"):
            times(str(tmp_path / name))


def test_the_variable_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path, "")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench_program() == found
    monkeypatch.setenv(VARIABLE, "/elsewhere/llama-bench")
    assert bench_program() == "/elsewhere/llama-bench"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert bench_program() is None


class Cache(LlamaBenchContext):
    """A context that notes what it is asked for."""

    def __init__(self, tokens: int = 0, *, repeats: bool) -> None:
        self.tokens, self.repeats = tokens, repeats
        self.asked: list[str] = []
        self.model = cast("Any", SimpleNamespace(vocabulary=10))

    def decode(self, tokens: Any, **_: bool) -> None:
        self._note("computed", len(tokens))
        self.tokens += len(tokens)

    def repeat(self, tokens: int) -> None:
        self._note("copied", tokens)
        self.tokens += tokens

    def keep(self, tokens: int) -> None:
        self._note("kept", tokens)
        self.tokens = tokens

    def use_threads(self, threads: int) -> None: ...

    def _note(self, what: str, tokens: int) -> None:
        self.asked.append(f"{what} {tokens}")


def filled(*, copies: bool, tokens: int, before: int = 0) -> list[str]:
    cache = Cache(before, repeats=copies)
    cache.fill(tokens)
    assert cache.tokens == tokens
    return cache.asked


def test_every_token_is_computed_in_pieces() -> None:
    assert filled(copies=False, tokens=1300) == ["computed 512", "computed 512", "computed 276"]
    assert filled(copies=False, tokens=1300, before=1200) == ["computed 100"]


def test_copies_double_the_cache_and_a_token_moves_their_keys() -> None:
    assert filled(copies=True, tokens=1300) == [
        "computed 512", "copied 512", "computed 1", "kept 1024", "copied 276", "computed 1", "kept 1300"
    ]


@pytest.mark.parametrize(("before", "asked"), [(0, ["computed 300"]), (100, ["computed 200"])])
def test_few_tokens_are_computed_all_the_same(before: int, asked: list[str]) -> None:
    assert filled(copies=True, tokens=300, before=before) == asked


def test_points_fill_the_cache_further_and_cut_it() -> None:
    cache = Cache(repeats=True)
    time_points(cache, [(BenchPoint(1, depth, 128), 1) for depth in (0, 600, 600, 100)])
    assert cache.asked == [
        "computed 128", "kept 0", "computed 512", "copied 88", "computed 1", "kept 600", "computed 128", "kept 600",
        "computed 128", "kept 600", "kept 100", "computed 128", "kept 100",
    ]
