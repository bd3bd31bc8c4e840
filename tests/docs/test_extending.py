"""The examples of docs/extending.md work, with the files that the page names and no others."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from policies.protocols import Composition
from tests.kit.commands import ROOT, overlay, run_in

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = {  # by the file that is changed or new
    match["path"]: match
    for match in re.finditer(
        r"^```\w+\n# (?P<path>[\w/.-]+)(?P<end>, at the end)?\n(?P<text>.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
}


def with_example(folder: Path, *paths: str) -> Path:
    """The source tree with some of the page's examples in it."""
    texts = {}
    for path in paths:
        old = (ROOT / path).read_text(encoding="utf-8") if EXAMPLES[path]["end"] else ""
        texts[path] = old + "\n" + EXAMPLES[path]["text"]
    return overlay(folder, texts)


def test_a_policy_of_ones_own_obeys_the_laws(tmp_path: Path) -> None:
    for name in ("my_cache.py", "test_my_cache.py"):
        (tmp_path / name).write_text(EXAMPLES[name]["text"])
    some = "law_8 or purity"  # all of them take a minute
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, "test_my_cache.py"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_model_is_a_block_in_one_file(tmp_path: Path) -> None:
    shown = run_in(with_example(tmp_path, "traces/models/models.yaml"), "models", "my-moe-12b")
    assert "example/My-MoE-12B config.json" in shown


def test_a_part_is_a_block_in_one_file(tmp_path: Path) -> None:
    folder = with_example(tmp_path, "sim/machine/presets/parts/gpus.yaml")
    assert "My GPU 24GB" in run_in(folder, "hardware", "my-gpu-24gb+ddr5-5600")


def test_the_weights_of_the_example_model_are_those_that_it_states(tmp_path: Path) -> None:
    text = EXAMPLES["traces/models/models.yaml"]["text"]
    number = {key: float(value) for key, value in re.findall(r"^  (\w+): ([\d.e+]+)", text, re.MULTILINE)}
    experts = number["experts"] * 3 * number["hidden"] * number["expert_width"]
    gate, embeddings = number["experts"] * number["hidden"], 2 * number["vocab"] * number["hidden"]
    total = number["moe_layers"] * (experts + gate + number["attention_params"]) + embeddings
    assert total == pytest.approx(number["published_params"], rel=0.01)


def test_a_policy_is_a_new_file_and_a_line_in_the_registry(tmp_path: Path) -> None:
    new, registry = "policies/papers/everything_stays.py", "policies/registry.py"
    listed = (ROOT / registry).read_text(encoding="utf-8").replace(
        '    "policies.mix",\n', '    "policies.mix",\n    "policies.papers.everything_stays",\n'
    )
    folder = overlay(tmp_path, {new: EXAMPLES[new]["text"], registry: listed})
    assert "everything-stays" in run_in(folder, "policies", "everything-stays")


def test_an_importer_is_a_new_file_and_a_line_in_the_list(tmp_path: Path) -> None:
    new, importers = "traces/importers/json_lines.py", "traces/importers/__init__.py"
    old = (ROOT / importers).read_text(encoding="utf-8")
    line = """    "json-lines": Format("json_lines.import_json_lines", (".jsonl",), '"experts"'),"""
    listed = old.replace("FORMATS = {\n", f"FORMATS = {{\n{line}\n")
    folder = overlay(tmp_path, {new: EXAMPLES[new]["text"], importers: listed})
    weights = [[0.6, 0.4], [0.75, 0.25]]
    rows = [{"sequence": 0, "decode": n > 1, "experts": [[3, 1], [0, n]], "weights": weights} for n in range(1, 4)]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_in(folder, "trace", "import", "log.jsonl", "--model", "mini-moe:2", "-o", "log.safetensors")
    assert "mini-moe:2" in run_in(folder, "trace", "info", "log.safetensors")


# --- CITATION.cff and the templates of issues agree with what they are about ------------------------------------------


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
