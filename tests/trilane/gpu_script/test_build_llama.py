"""examples/build_llama.sh: what it unpacks and builds, that it goes on, and what it refuses."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.kit.commands import ROOT
from tests.kit.gpu_script import tools

SCRIPT = ROOT / "examples" / "build_llama.sh"


def build(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``build_llama.sh`` with compilers that do nothing, for sources that have their own checksum."""
    script = SCRIPT.read_text()
    sources = folder / "sources.tar.gz"
    with tarfile.open(sources, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("xllamacpp-2026.10.11549/thirdparty/llama.cpp/CMakeLists.txt"))
    [line] = [line for line in script.splitlines() if line.startswith("sha256=")]
    digest = hashlib.sha256(sources.read_bytes()).hexdigest()
    (folder / "build.sh").write_text(script.replace(line, f"sha256={digest}"))
    environment = {"PATH": str(tools(folder, "cmake", "c++", "nvcc", "curl")), "JOBS": "3", **changes}
    return subprocess.run(["bash", "build.sh", *words], cwd=folder, env=environment, capture_output=True, text=True,
                          check=False)


def test_the_sources_are_unpacked_and_built_for_the_cards_that_are_there(tmp_path: Path) -> None:
    done = build(tmp_path, "made", "sources.tar.gz")
    assert (done.returncode, done.stdout) == (0, "LLAMA_LIBRARY=made/bin/libllama.so\n"), done.stderr
    assert (tmp_path / "made" / "source" / "CMakeLists.txt").exists()
    configured, built = (tmp_path / "called").read_text().splitlines()
    assert configured.startswith(
        "cmake -S made/source -B made -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_CUDA=ON"
    )
    assert configured.endswith("-DLLAMA_BUILD_APP=OFF -DCMAKE_CUDA_ARCHITECTURES=native")
    assert built == "cmake --build made --target llama --parallel 3"


def test_a_build_that_runs_out_of_time_goes_on(tmp_path: Path) -> None:
    (slow := tmp_path / "slow").mkdir()
    (slow / "cmake").write_text('#!/bin/sh\n[ "$1" != --build ] || exec sleep 60\n')
    (slow / "cmake").chmod(0o755)
    path = f"{slow}:{tools(tmp_path, 'c++', 'nvcc')}"
    assert build(tmp_path, "made", "sources.tar.gz", BUILD_SECONDS="0.2", PATH=path).returncode == 3
    assert build(tmp_path, "made", "sources.tar.gz").returncode == 0


@pytest.mark.parametrize(("words", "changes", "why"), [
    ((), {}, "expected a folder to build in, got ''"),
    (("made", "none.tar.gz"), {}, "expected the sources of xllamacpp-2026.10.11549, found no file none.tar.gz"),
    (("made", "build.sh"), {}, "expected the sources of xllamacpp-2026.10.11549, got another file: build.sh"),
    (("made",), {"CURL_STATUS": "6"}, "could not download the sources; carry xllamacpp-2026.10.11549.tar.gz here"),
    (("made",), {"CUDA": "yes"}, "expected CUDA=ON or CUDA=OFF, got yes"),
])
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, words: tuple[str, ...], changes: dict[str, str], why: str
) -> None:
    done = build(tmp_path, *words, **changes)
    assert done.returncode == 2
    assert why in done.stderr
    assert "cmake" not in ((tmp_path / "called").read_text() if (tmp_path / "called").exists() else "")
