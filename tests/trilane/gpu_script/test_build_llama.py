"""examples/build_llama.sh: what it unpacks and builds, that it goes on, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.pack_results import LIMIT_BYTES, pack
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


# --- examples/pack_results.py -----------------------------------------------------------------------------------------


def fill(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))


def test_all_but_weights_and_half_written_files_is_packed(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {"report.md": 10, "a/journal/run.parquet": 99, "made.safetensors": 10, ".x.json.1.trilane-part/x.json": 10},
    )
    assert pack(tmp_path, tmp_path / "results.zip") == []
    assert pack(tmp_path, tmp_path / "results.zip") == []  # an archive is no result
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"report.md", "a/journal/run.parquet", "MANIFEST.txt"}
        assert packed.read("MANIFEST.txt").startswith(b"2 files; left out, because of the limit of the archive: none")


def test_the_largest_are_left_out_first_and_named(tmp_path: Path) -> None:
    fill(tmp_path, {"small": 1_000, "large": 50_000, "larger": 60_000, "medium": 20_000})
    out = pack(tmp_path, tmp_path / "results.zip", limit_bytes=40_000)
    assert [file.name for file in out] == ["larger", "large"]
    assert (tmp_path / "results.zip").stat().st_size <= 40_000
    with zipfile.ZipFile(tmp_path / "results.zip") as packed:
        assert set(packed.namelist()) == {"small", "medium", "MANIFEST.txt"}
        lines = packed.read("MANIFEST.txt").decode().splitlines()
    assert lines[1:] == ["      60,000 bytes  larger", "      50,000 bytes  large"]


@pytest.mark.parametrize("limit_bytes", [3_000, 10_000, 37_123])
def test_the_archive_is_never_larger_than_its_limit(tmp_path: Path, limit_bytes: int) -> None:
    fill(tmp_path, {f"folder {n % 3}/{'long name ' * 5}{n}": 10 + 37 * n for n in range(40)})
    pack(tmp_path, tmp_path / "results.zip", limit_bytes)
    assert (tmp_path / "results.zip").stat().st_size <= limit_bytes


def test_the_limit_is_16_mb() -> None:
    assert LIMIT_BYTES == 16_000_000
