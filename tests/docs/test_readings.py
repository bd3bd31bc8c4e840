"""docs/readings.md has what sources and docstrings cite, and names parameters that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policies.registry import SYSTEMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "readings.md").read_text(encoding="utf-8")
HEADINGS = set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
CITED = re.compile(r"docs/readings\.md[,#] ?([A-Z][\w.-]+(?: [A-Z][\w-]+)?)")


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_policy_has_a_source(name: str) -> None:
    assert SYSTEMS[name].source


def test_sections_that_are_cited_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "policies").rglob("*.py")]
    cited = {section for text in texts for section in CITED.findall(text)}
    assert cited
    assert cited <= HEADINGS


def test_parameters_that_are_named_with_a_value_exist() -> None:
    known = {parameter for entry in SYSTEMS.values() for parameter, _, _ in entry.parameter_table()}
    named = set(re.findall(r"`(\w+): [^`]+`", PAGE)) - {"model"}  # a key of the scenario
    assert named
    assert named <= known
