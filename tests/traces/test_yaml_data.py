"""Data files read by libyaml say what they say to PyYAML's own parser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from traces.yaml_data import SafeLoader, read_yaml

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT) for room in ("traces", "sim", "examples") for path in (ROOT / room).rglob("*.yaml")
)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_both_parsers_read_the_same(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    # repr tells 1 from 1.0 and from True, and keeps the order of keys
    assert repr(read_yaml(ROOT / path)) == repr(yaml.load(text, yaml.SafeLoader))


def test_only_plain_values_are_built(tmp_path: Path) -> None:
    (tmp_path / "code.yaml").write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(yaml.constructor.ConstructorError):
        read_yaml(tmp_path / "code.yaml")
    assert issubclass(SafeLoader, yaml.constructor.SafeConstructor)
