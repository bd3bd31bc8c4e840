"""A validation on a tiny model whose microbenchmarks are measured once, and which policies it ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realrun.machine.host_lanes import HostLanes
from realrun.profiling.lab import Points
from realrun.profiling.profile import Reprofile, profile
from realrun.profiling.timing import Effort, Samples
from realrun.replay.replay import Measurement, ReplayBench
from sim.machine.hardware import write_hardware
from sim.runs.prepare import Prepared
from tests.kit.tiny_bench import machine
from tests.kit.validations import PLAN, ROUND, Validate, as_if_quiet
from traces.models.catalogue import load_model
from trilane.study.validation.validate import Stop, Validated, ValidationPlan, validate


@pytest.fixture(scope="session")
def lanes() -> Iterator[HostLanes]:
    with machine(link_bytes_per_s=4e9) as made:
        yield made


@pytest.fixture(scope="session")
def profiled(lanes: HostLanes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "here.yaml"
    points = Points(batches=(1,), contexts=(4, 6), prompts=(4,))
    effort = Effort(rounds=1, most=1, probe_ns=0)
    found = profile(lanes, [load_model("mini-moe:2")], points, ROUND, name="here", effort=effort)
    write_hardware(as_if_quiet(found.hardware), path)
    return path


@pytest.fixture(scope="module")
def microbenchmarks() -> Iterator[None]:
    """Measured once for all tests: every repetition finds the same."""
    real, found = Reprofile.measure, list[Samples]()

    def measure(self: Reprofile) -> Samples:
        if not found:
            found.append(real(self))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reprofile, "measure", measure)
        yield


@pytest.fixture
def run(lanes: HostLanes, profiled: Path, microbenchmarks: None, tmp_path: Path) -> Validate:
    """Validates with a journal in ``tmp_path``."""

    def validated(text: str = PLAN, stop: Stop | None = None, **changes: Any) -> Validated:
        (tmp_path / "plan.yaml").write_text(text)
        plan = ValidationPlan.from_yaml(tmp_path / "plan.yaml", {"hardware": str(profiled), **changes})
        return validate(plan, lanes, folder=tmp_path / "journal", stop=stop)

    return validated


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies that were run, in order."""
    ran: list[str] = []
    real = ReplayBench.measure

    def measure(self: ReplayBench, prepared: Prepared) -> Measurement:
        ran.append(prepared.scenario.policy)
        return real(self, prepared)

    monkeypatch.setattr(ReplayBench, "measure", measure)
    return ran
