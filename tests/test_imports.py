"""The public names, what an import costs, and what it may bring along."""

from __future__ import annotations

import ast
import subprocess
import sys
from inspect import ismodule
from pathlib import Path

import pytest

import trilane
import trilane.parts

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "tokenizers")
MAY_USE_TORCH = ROOT / "traces" / "capture"
ISSUE = {"Scenario", "simulate", "compare", "sweep", "fit", "measure", "register", "System", "Composition"}
BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else found(name, package)
"""


def run(code: str) -> str:
    """What ``code`` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded once ``code`` has run in a fresh interpreter."""
    return set(run(f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))").split())


# --- public names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trilane.__all__)
def test_public_name(name: str) -> None:
    value = getattr(trilane, name)
    assert callable(value) or ismodule(value)
    assert name in dir(trilane)


@pytest.mark.parametrize("name", trilane.parts.__all__)
def test_public_part(name: str) -> None:
    assert callable(getattr(trilane.parts, name))


def test_the_public_names_are_enough_for_a_user() -> None:
    assert set(trilane.__all__) >= ISSUE | {"parts", "figures", "testing"}


@pytest.mark.parametrize("module", [trilane, trilane.parts])
def test_every_name_that_type_checkers_see_is_public(module: object) -> None:
    """The table is read from the source: no line of it may be missed."""
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    names = [alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert names == module.__all__  # type: ignore[attr-defined]


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'simulat'.*simulate"):
        trilane.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_survive_the_command_line() -> None:
    """No verb's module may hide the function of the same name."""
    run("import trilane.cli; from trilane import compare, simulate; assert callable(compare) and callable(simulate)")


WITHOUT_TORCH = set(trilane.__all__) - {"measure", "validate"}


def test_all_names_without_torch() -> None:
    printed = run(f"{BLOCKED}\nbefore = set(globals())\nfrom trilane import *\nprint(*sorted(set(globals()) - before))")
    assert set(printed.split()) - {"before"} == WITHOUT_TORCH


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_all_names_without_a_package_for_tests(package: str) -> None:
    blocked = BLOCKED.replace('"transformers")', f'"{package}")')
    blocked = blocked.replace('name == "torch"', f'name in ("torch", "{package}")')
    printed = run(f"{blocked}\nfrom trilane import *\nimport trilane\nprint(*trilane.__all__)")
    assert set(printed.split()) == WITHOUT_TORCH - {"testing"}


def test_what_needs_torch_says_so() -> None:
    code = "import trilane\ntry:\n    trilane.measure\nexcept ImportError as error:\n    print(error)"
    assert "trilane.measure needs torch" in run(BLOCKED + code)


# --- what is imported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import trilane", "import trilane.cli", "import trilane.parts"])
def test_the_command_line_starts_light(code: str) -> None:
    heavy = {"torch", "transformers", "pandas", "numpy", "matplotlib", "scipy", "simpy", "safetensors", "yaml"}
    assert not modules_after(code) & heavy


def test_the_simulator_needs_neither_torch_nor_pictures() -> None:
    loaded = modules_after(
        "from trilane import Scenario, simulate, load_trace, import_route_trace, trace_statistics\n"
        "import sys, trilane.cli\n"
        "sys.argv = ['trilane', 'simulate', '--set', 'trace=mini-moe:1', '--set', 'model=null']\n"
        "try:\n    trilane.cli.main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert not loaded & {*HEAVY, "matplotlib"}
    assert {"simpy", "pandas"} <= loaded


def test_fit_needs_no_frames() -> None:
    """pandas takes half a second to import, in each process that shares the work."""
    question = "Question('mixtral-8x7b', gpu='rtx-3090', ram='ddr4-3200', prompt_tokens=8, generated=2)"
    answer = "from trilane.fit.fit import fit\nfrom trilane.engines.question import Question\nfit({})"
    loaded = modules_after(f"import trilane.output.pages.fit\n{answer.format(question)}")
    assert not loaded & {"pandas", "pyarrow", "scipy"}


def files_without_torch() -> list[Path]:
    folders = [ROOT / name for name in ("trilane", "policies", "sim", "traces")]
    return sorted(path for folder in folders for path in folder.rglob("*.py") if MAY_USE_TORCH not in path.parents)


def test_torch_stays_where_it_may_be() -> None:
    """Also inside functions: the simulator's code names torch nowhere."""
    found = []
    for path in files_without_torch():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.partition(".")[0] in HEAVY]
    assert found == []
