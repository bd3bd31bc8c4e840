"""CITATION.cff and the templates of issues agree with what they are about."""

from __future__ import annotations

import csv
import re
import tomllib

import pytest
import yaml

from policies.protocols import Composition
from tests.kit.commands import ROOT

TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


def test_the_citation_has_what_its_format_requires() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    assert cited["authors"] == [{"name": "The Trilane authors"}]
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize("name", ["measured_speeds.md", "new_policy.md"])
def test_a_template_has_a_name_and_says_what_it_is_for(name: str) -> None:
    _, head, _ = (TEMPLATES / name).read_text(encoding="utf-8").split("---\n", 2)
    assert {"name", "about"} <= set(yaml.safe_load(head))


def test_the_columns_of_the_template_are_those_of_the_rows() -> None:
    with (ROOT / "trilane/engines/accuracy/measured_speeds.csv").open(encoding="utf-8") as file:
        columns = set(next(csv.reader(file)))
    page = (TEMPLATES / "measured_speeds.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {"id", "model", "machine", "engine", "cpu_layers"} <= named <= columns


def test_the_template_asks_for_every_part_of_a_policy() -> None:
    page = (TEMPLATES / "new_policy.md").read_text(encoding="utf-8")
    parts = set(re.findall(r"^\| (\w+): ", page, re.MULTILINE))
    assert parts == {"placement", "router", "assigner", "prefetcher", "cache"}
    assert parts <= set(Composition.__dataclass_fields__)
