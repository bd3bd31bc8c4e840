"""Pack a folder of results into one archive of limited size: python3 examples/pack_results.py FOLDER ARCHIVE.zip

Weights, traces and incomplete files are left out. If the rest is above the limit, the largest files are left out and
listed in MANIFEST.txt, which is in the archive.
"""

from __future__ import annotations

import sys
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

LIMIT_BYTES = 16_000_000
NOT_PACKED = (".safetensors", ".gguf", ".zip")
HALF_WRITTEN = ".trilane-part"  # the end of the name of a folder in which Trilane writes a file
MANIFEST = "MANIFEST.txt"
HEADERS_BYTES = 150  # per file, plus twice its name (zip: a local header of 30 bytes, a central one of 46, extras)


def pack(folder: Path, archive: Path, limit_bytes: int = LIMIT_BYTES) -> list[Path]:
    """Write ``archive`` under another name and rename it; returns the files left out for their size, largest first."""
    found = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix not in NOT_PACKED)
    files = [file for file in found if not file.parent.name.endswith(HALF_WRITTEN)]
    sizes = {file: _packed_bytes(file, folder) for file in files}
    by_size = sorted(files, key=lambda file: sizes[file])
    names_bytes = sum(len(_line(file, folder).encode()) for file in files)
    left, packed = limit_bytes - names_bytes - 2 * HEADERS_BYTES, []
    for file in by_size:
        left -= sizes[file]
        if left < 0:
            break
        packed.append(file)
    out = by_size[len(packed) :][::-1]
    with TemporaryDirectory(HALF_WRITTEN, dir=archive.parent) as made:
        aside = Path(made, archive.name)
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as into:
            into.writestr(MANIFEST, manifest(out, len(packed), folder))
            for file in sorted(packed):
                into.write(file, file.relative_to(folder))
        aside.replace(archive)
    return out


def manifest(out: list[Path], packed: int, folder: Path) -> str:
    """The number of files in the archive, and a list of those left out, largest first."""
    head = f"{packed} files; left out, because of the limit of the archive: {len(out) or 'none'}\n"
    return head + "".join(_line(file, folder) for file in out)


def _line(file: Path, folder: Path) -> str:
    return f"{file.stat().st_size:>12,} bytes  {file.relative_to(folder)}\n"


def _packed_bytes(file: Path, folder: Path) -> int:
    name = str(file.relative_to(folder)).encode()
    return len(zlib.compress(file.read_bytes())) + 2 * len(name) + HEADERS_BYTES


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("expected a folder and an archive: pack_results.py FOLDER ARCHIVE.zip")
    left_out = pack(Path(sys.argv[1]), Path(sys.argv[2]))
    size = Path(sys.argv[2]).stat().st_size
    print(f"{sys.argv[2]}: {size / 1e6:.1f} MB, {len(left_out)} files left out (see {MANIFEST} in it)")
