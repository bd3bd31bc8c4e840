"""The drawings of docs/ are those that ``python -m tools.draw_docs`` makes, and their arrows go down."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.draw_docs import DOCS, DRAWINGS, GROUND, PAGE, ROOMS, arrows, drawing, imports, room_of, upward


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_script_reproduces_the_file(name: str) -> None:
    assert drawing(name) == (DOCS / name).read_bytes(), "renew it with: .venv/bin/python -m tools.draw_docs"


def test_the_page_has_the_same_drawing() -> None:
    assert (PAGE / "token.svg").read_bytes() == (DOCS / "token.svg").read_bytes()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_an_svg_without_a_date(name: str) -> None:
    root = ElementTree.fromstring((DOCS / name).read_bytes())
    assert root.tag.endswith("svg")
    assert "date" not in {node.tag.rpartition("}")[2] for node in root.iter()}


def test_no_package_imports_from_a_higher_floor() -> None:
    assert upward(imports()) == []


def test_an_import_from_a_higher_floor_would_be_found() -> None:
    assert upward({"policies": {"sim.runs", GROUND}, "traces": {"policies"}}) == [
        ("policies", "sim.runs"), ("traces", "policies"),
    ]


def test_imports_that_follow_from_others_and_those_of_the_ground_floor_have_no_arrow() -> None:
    found = {"sim.runs": {"sim.costs", "traces", GROUND}, "sim.costs": {"traces"}, "traces": {GROUND}, GROUND: set()}
    assert arrows(found) == [("sim.costs", "traces"), ("sim.runs", "sim.costs")]


@pytest.mark.parametrize(("module", "room"), [
    ("sim.simulate", "sim.timeline"), ("trilane.cli", "trilane.verbs"), ("realrun.replay", "realrun"),
    ("realrun.machine.cores", "realrun.machine"), ("trilane", None), ("simpy", None),
])
def test_modules_are_in_the_room_of_their_package(module: str, room: str | None) -> None:
    assert room_of(module) == room


def test_every_package_with_code_is_drawn() -> None:
    folders = {path.parent for name in ("traces", "policies", "sim", "realrun", "trilane")
               for path in (DOCS.parent / name).rglob("*.py") if path.name != "__init__.py"}
    modules = {".".join(folder.relative_to(DOCS.parent).parts) for folder in folders} - {"trilane", "sim"}
    assert {module for module in modules if room_of(module) is None} == set()
    assert {room_of(module) for module in modules} == set(ROOMS)
