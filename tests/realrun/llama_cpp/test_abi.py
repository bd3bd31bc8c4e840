"""The C library: its structures checked before they are used, and refusals where it is missing."""

from __future__ import annotations

import sys
from ctypes import sizeof
from pathlib import Path

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
