"""Data files in YAML, read fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, eight times as fast, where PyYAML has it


def read_yaml(path: Path) -> Any:
    """The document in a file that comes with the package. Builds plain values only."""
    return yaml.load(path.read_text(encoding="utf-8"), SafeLoader)
