"""The engines' files, written again with numbers that were fitted: one whole, the others as what differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.costs.engine import FittedEngine
from sim.machine.sourced import Sourced
from trilane.common.files import atomic_path

FOLDER = Path(str(files("sim.costs"))) / "engines"
HEADER = "# Written by tools/fit_engines.py: numbers with a source that ends in 'fitted from' are not edited by hand.\n"
DIGITS = 3
TRAITS = (
    "program", "superseded_by", "back_end", "vendors", "reads", "splits", "dialect", "copies_at_once", "options",
    "cache_costs", "fit",
)


def write_engines(engines: Mapping[str, FittedEngine], sources: Mapping[str, str]) -> None:
    """Rewrite the files of ``engines``; ``sources``: by a number's key, or by engine:key. The first is their base."""
    (base_name, base), *others = ((name, _rounded(engine, sources)) for name, engine in engines.items())
    _write(base_name, _lines(base, None))
    for name, engine in others:
        _write(name, [f"like: {base_name}\n", *_lines(engine, base)])


def _rounded(engine: FittedEngine, sources: Mapping[str, str]) -> FittedEngine:
    """Its fitted numbers to three digits, and their sources."""
    own = f"{engine.name}:"
    said = {key: sources.get(own + key, sources.get(key)) for key in engine.flat()}
    fitted = {key: float(f"{engine.flat()[key].value:.{DIGITS}g}") for key, text in said.items() if text}
    return engine.with_numbers(fitted).with_sources({key: text for key, text in said.items() if text})


def _lines(engine: FittedEngine, base: FittedEngine | None) -> list[str]:
    """The file's lines; without what the base has, too."""
    lines = [f'about: "{engine.about}"\n', *_traits(engine, base)]
    if base is None:
        lines += [f"starts: {engine.starts}\n", f"decides: {str(engine.decides).lower()}\n"]
    known, open_sections = {} if base is None else base.flat(), list[str]()
    for key, number in engine.flat().items():
        if key in known and known[key].value == number.value:
            continue
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:\n")
                open_sections = sections[: depth + 1]
        lines.append(f"{'  ' * len(sections)}{name}: {_number(number)}\n")
    return lines


def _traits(engine: FittedEngine, base: FittedEngine | None) -> list[str]:
    """Lines of the traits that are not those of the base, or without one not the usual ones."""
    usual = {field.name: field.default for field in fields(FittedEngine)} if base is None else vars(base)
    own = {key: getattr(engine, key) for key in TRAITS if getattr(engine, key) != usual[key]}
    return [f"{key}: {_trait(value)}\n" for key, value in own.items()]


def _trait(value: str | tuple[str, ...]) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else value


def _number(number: Sourced[Any]) -> str:
    value = number.value
    text = f"{value:.3e}".replace("e+0", "e+") if isinstance(value, float) and value >= 1e9 else str(value)
    return f'{{value: {text}, source: "{number.source}", confidence: {number.confidence}}}'


def _write(name: str, lines: list[str]) -> None:
    with atomic_path(FOLDER / f"{name}.yaml") as temporary:
        temporary.write_text(HEADER + "".join(lines), encoding="utf-8")
