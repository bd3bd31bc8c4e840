"""YAML in which every number says where it is from: ``key: {value: 25e9, source: "...", confidence: high}``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from sim.machine.plausibility import HardwareError
from trilane.common.yaml_files import YamlError, read_yaml

Confidence = Literal["high", "medium", "low"]
_ENTRY = ("value", "source", "confidence")


class Origin(NamedTuple):
    """Where one number is from."""

    source: str
    confidence: str


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML mapping. Raises HardwareError if the file holds anything else."""
    try:
        document = read_yaml(path)
    except YamlError as error:
        raise HardwareError(str(error)) from None
    if not isinstance(document, dict):
        raise HardwareError(f"{path}: expected a mapping of sections, got {document!r:.40}")
    return document


def entries(
    document: Mapping[str, Any], sections: Mapping[str, Iterable[str]], where: str
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Values and origins by dotted key, of every section that is there. Raises HardwareError on unknown keys."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for section, names in sections.items():
        if section not in document:
            continue
        only(_mapping(document[section], f"{where}, {section}"), names, f"{where}, section {section}")
        for name, entry in document[section].items():
            key = f"{section}.{name}"
            values[key], origins[key] = _entry(entry, f"{where}, {key}")
    return values, origins


def _entry(entry: object, where: str) -> tuple[Any, Origin]:
    """One number and its origin."""
    parts = _mapping(entry, where)
    only(parts, _ENTRY, where, complete=True)
    if parts["confidence"] not in get_args(Confidence):
        raise HardwareError(
            f"{where}: confidence must be one of {list(get_args(Confidence))}, got {parts['confidence']!r}"
        )
    return parts["value"], Origin(str(parts["source"]), parts["confidence"])


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise HardwareError(f"{where}: expected a mapping; a number stands as {{{', '.join(_ENTRY)}}}, got {value!r}")
    return value


def only(given: Iterable[str], valid: Iterable[str], where: str, complete: bool = False) -> None:
    """Refuse unknown keys, and missing ones where ``given`` must be ``complete``. Raises HardwareError."""
    given, valid = list(given), list(valid)
    unknown = [str(key) for key in given if key not in valid]
    if unknown:
        raise HardwareError(f"{where}: unknown key {', '.join(unknown)}; valid keys: {', '.join(valid)}")
    missing = [key for key in valid if key not in given]
    if complete and missing:
        raise HardwareError(f"{where}: {', '.join(missing)} missing; needed: {', '.join(valid)}")


def typed(key: str, value: object, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint`` (int, float, str or a Literal). Raises HardwareError if it is not one."""
    if hint is str or get_origin(hint) is Literal:
        return _text(key, value, hint, where)
    try:  # through float, because YAML 1.1 reads 25e9 as text
        number = float("nan") if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if number != number:
        raise HardwareError(f"{where}: {key} must be a number, got {value!r}")
    if hint is int and not number.is_integer():
        raise HardwareError(f"{where}: {key} must be whole (times are ns, sizes bytes, shares permille), got {value!r}")
    return int(number) if hint is int else number


def _text(key: str, value: object, hint: Any, where: str) -> str:
    """Text, one of the ``hint``'s if it is a Literal."""
    if isinstance(value, str) and (hint is str or value in get_args(hint)):
        return value
    expected = "text" if hint is str else f"one of {list(get_args(hint))}"
    raise HardwareError(f"{where}: {key} must be {expected}, got {value!r}")
