"""Writing of measured machines: hardware files with a section ``measured``, in tables that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sim.machine.hardware import Hardware
from trilane.common.files import atomic_path


class _Lines(dict[str, Any]):
    """A mapping with one line per key."""


class _Dumper(yaml.SafeDumper):
    """Writes lists of numbers on one line each, and so innermost mappings other than ``_Lines``."""


_Dumper.add_representer(
    _Lines, lambda dumper, lines: dumper.represent_mapping("tag:yaml.org,2002:map", lines, flow_style=False)
)


def write_profile(hardware: Hardware, path: str | Path) -> None:
    """Write a machine and its profile as YAML, whole or not at all; ``load_hardware`` reads it back.

    Raises OSError if the file cannot be written.
    """
    document = hardware.document()
    measured = document["measured"]
    document["measured"] = {**measured, **{name: _Lines(measured[name]) for name in ("machine", "rates")}}
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
