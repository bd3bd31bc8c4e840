"""What an import costs and what it may bring along."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trilane

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "tokenizers")
MAY_USE_TORCH = ("capture*.py", "hf*.py", "mini*.py")  # in traces/


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded once ``code`` has run in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import trilane", "import trilane.cli"])
def test_front_door_is_light(code: str) -> None:
    heavy = {"torch", "transformers", "pandas", "numpy", "matplotlib", "scipy", "simpy", "safetensors"}
    assert not modules_after(code) & heavy


def test_simulator_runs_without_torch_and_pictures() -> None:
    loaded = modules_after("from trilane import Scenario, simulate, load_trace, import_route_trace, trace_statistics")
    assert not loaded & {*HEAVY, "matplotlib"}
    assert {"simpy", "pandas"} <= loaded


@pytest.mark.parametrize("name", trilane.__all__)
def test_public_name(name: str) -> None:
    assert callable(getattr(trilane, name))
    assert name in dir(trilane)


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'simulat'.*simulate"):
        trilane.simulat  # noqa: B018


def test_public_names_survive_the_command_line() -> None:
    """No verb's module may hide the function of the same name."""
    code = "import trilane.cli; from trilane import compare, simulate; assert callable(compare) and callable(simulate)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def files_without_torch() -> list[Path]:
    traces = ROOT / "traces"
    allowed = {path for pattern in MAY_USE_TORCH for path in traces.glob(pattern)}
    folders = [traces, *(ROOT / name for name in ("trilane", "policies", "sim"))]
    return sorted(path for folder in folders for path in folder.rglob("*.py") if path not in allowed)


@pytest.mark.parametrize("path", files_without_torch(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_stays_where_it_may_be(path: Path) -> None:
    """Also inside functions: the simulator's code names torch nowhere."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    assert not imported & set(HEAVY)
