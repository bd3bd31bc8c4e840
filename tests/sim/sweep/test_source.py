"""An edited, renamed or new source is other code; a compiled file is not."""

from __future__ import annotations

from pathlib import Path

from sim.sweep.source import checksum_of, source_checksum


def test_sources_and_their_names_count(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    one = tmp_path / "policies" / "lru.py"
    checksums = []
    for text in ("a = 1", "a = 2"):
        one.write_text(text)
        checksums.append(checksum_of([tmp_path]))
    (tmp_path / "costs.yaml").write_text("a = 2")
    checksums.append(checksum_of([tmp_path]))
    one.rename(tmp_path / "lru.py")
    checksums.append(checksum_of([tmp_path]))
    assert len(set(checksums)) == 4
    (tmp_path / "lru.pyc").write_bytes(b"compiled")
    assert checksum_of([tmp_path]) == checksums[-1]


def test_it_is_the_same_in_the_whole_process() -> None:
    assert source_checksum() == source_checksum()
