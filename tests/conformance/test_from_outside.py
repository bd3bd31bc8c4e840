"""The suite is of use to a policy that lives elsewhere: in a folder of its own, with a checkout on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.protocols import Needs
from tests.invariants.laws_of_runs import law_6_determinism
from tests.kit.twins import twin

ROOT = Path(__file__).parents[2]
LAWS = "law_6 or law_7 or (every_size and ordinary) or instances"
MINE = """
from policies.baselines.on_demand import OnDemand
from policies.registry import System
from tests.conformance.policy_laws import PolicyLaws


def made_by_a_factory(name, **needs):
    class Mine(OnDemand):
        pass

    return System(name, "mine", "ours", Mine)


MINE = made_by_a_factory("mine")


class TestMine(PolicyLaws):
    system = MINE
"""


def test_a_policy_in_a_folder_of_its_own_is_held_to_the_laws(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(MINE)
    words = [sys.executable, "-m", "pytest", "test_mine.py", "-p", "no:cacheprovider", "-k", LAWS, "-rs"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert "skipped" not in done.stdout


def test_law_6_says_what_it_expects_of_a_system_that_no_module_has() -> None:
    with pytest.raises(AssertionError, match=r"law 6: expected 'hidden' as a variable of a module"):
        law_6_determinism(twin("hidden", Needs()))
