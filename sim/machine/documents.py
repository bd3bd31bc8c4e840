"""From a machine's name to its document: a preset, a file of the same form, or a name that is made of parts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.machine.assembly import is_assembly, parse_assembly
from sim.machine.part_rules import assembled
from sim.machine.plausibility import HardwareError
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml

_PRESETS = Path(str(files("sim.machine"))) / "presets"


def hardware_names() -> list[str]:
    """Names of the presets that come with the simulator, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def document_of(name_or_path: str | Path) -> dict[str, Any]:
    """The document of a preset, a file or a name made of parts, with its name. Raises HardwareError."""
    name, path = str(name_or_path), Path(name_or_path)
    if name in hardware_names():
        path = _PRESETS / f"{name}.yaml"
    elif not path.is_file():
        if is_assembly(name):
            return assembled(parse_assembly(name), name.lower())
        raise HardwareError(
            f"no hardware preset or file {quoted(name)}; presets: {', '.join(hardware_names())}; or give the path of a "
            f"YAML file of the same form, or parts: rtx-4080+ddr5-5600 (`trilane hardware --parts` lists them)"
        )
    document = read_yaml(path, HardwareError)
    if not isinstance(document, dict):
        raise HardwareError(f"{path}: expected a mapping of sections, got {quoted(document)}")
    document = {**document, "name": document.get("name", path.stem)}
    return document if "parts" not in document else _completed(document, f"hardware {quoted(str(document['name']))}")


def _completed(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a file says, and what the ``parts`` that it names say of all else. Raises HardwareError."""
    parts = from_dict(str, document["parts"], f"{where}: parts", HardwareError)
    made = assembled(parse_assembly(parts), str(document["name"]))
    stated = {key: value for key, value in document.items() if key != "parts"}
    sections = {
        key: {**made[key], **value}
        for key, value in stated.items()
        if isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
    }
    return {**made, **stated, **sections}
