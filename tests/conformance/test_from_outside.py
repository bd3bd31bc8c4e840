"""The suites work for policies and caches that live elsewhere: in a bare folder, with Trilane installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.protocols import Needs
from policies.system import ChoiceError
from tests.kit.broken import Recent, twin
from trilane.testing import PolicyLaws
from trilane.testing.laws_of_runs import law_6_determinism

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "realrun", "sim", "traces", "trilane")
LAWS = "law_6 or law_7 or (every_size and ordinary) or instances or Cache"
MINE = """
from dataclasses import dataclass

from policies.parts.assigners import CostRule
from policies.parts.caches import LfuCache
from policies.parts.placements import NoPlacement
from policies.registry import Policy, register
from policies.protocols import Composition


@register("mine", "loads what the GPU finishes sooner; LFU")
@dataclass(frozen=True)
class Mine(Policy):
    history: bool = True

    def compose(self, context):
        return Composition(placement=NoPlacement(), assigner=CostRule(), cache=LfuCache(self.history))
"""
TEST_MINE = """
from mine import Mine
from trilane.testing import PolicyLaws

class TestMine(PolicyLaws):
    policy = Mine
"""
TEST_MY_CACHE = """
from policies.parts.caches import LfuCache
from trilane.testing import CacheLaws

class TestMyCache(CacheLaws):
    def fresh(self, scenario):
        return LfuCache()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages, and without the tests of the checkout."""
    folder = tmp_path / "site"
    folder.mkdir()
    for package in PACKAGES:
        (folder / package).symlink_to(ROOT / package)
    return folder


def run(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "").replace(str(ROOT), "")]))
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )


def test_five_lines_hold_a_policy_or_a_cache_against_the_laws(tmp_path: Path, installed: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, text in {"mine.py": MINE, "test_mine.py": TEST_MINE, "test_my_cache.py": TEST_MY_CACHE}.items():
        (mine / name).write_text(text)
    done = run(mine, installed, "-m", "pytest", "-p", "no:cacheprovider", "-k", LAWS, "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_without_its_packages_the_suite_says_what_to_install(tmp_path: Path, installed: Path, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import trilane.testing"
    done = run(tmp_path, installed, "-c", code)
    assert done.returncode != 0
    assert "pip install trilane[test]" in done.stderr


def test_a_class_that_is_not_registered_is_refused() -> None:
    class TestRecent(PolicyLaws):
        policy = Recent

    with pytest.raises(ChoiceError, match=r"Recent is not registered: decorate it with trilane\.register"):
        TestRecent.entry.__wrapped__(TestRecent())  # type: ignore[attr-defined]


def test_law_6_says_what_it_expects_of_a_system_that_no_module_has() -> None:
    with pytest.raises(AssertionError, match=r"law 6: expected 'hidden' in a module that another process can import"):
        law_6_determinism(twin("hidden", Needs()))
