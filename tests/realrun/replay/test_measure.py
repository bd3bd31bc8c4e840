"""The bench of replayed runs: kernels as the model's shape asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from realrun.errors import RefusedError
from realrun.machine.host_memory import host_memory_given
from realrun.profiling.lab import Lab, Points
from tests.kit.tiny_bench import bench_for, choices_of, machine, prepared, run, tiny_setting


def test_experts_without_a_gate_are_computed_without_one() -> None:
    setting = tiny_setting(generated=2)
    setting = replace(setting, shape=replace(setting.shape, matrices_per_expert=2))
    with machine() as lanes:
        bench = bench_for(lanes, [prepared(setting, "fiddler")])
        assert [part.name for part in bench.layout.parts] == ["up_proj", "down_proj"]
        run(bench, setting, "fiddler")
    assert len(bench.played) == 3 * 3  # layers in a prefill and two decode steps
    for played in bench.played:
        for token, choices in enumerate(choices_of(played)):
            for place, (expert, weight) in enumerate(choices):
                views = bench.store.layouts[0].views(bench.store.buffer(played.plan.layer, expert))
                expected = views["down_proj"] @ functional.silu(views["up_proj"] @ played.hidden[token]) * weight
                torch.testing.assert_close(played.parts[token, place], expected, rtol=1e-4, atol=1e-5)


def test_experts_that_do_not_fit_the_host_are_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = tiny_setting(generated=2)
    with machine() as lanes:
        monkeypatch.setattr(lanes, "host_tensor", lambda *_: pytest.fail("memory was allocated"))
        with host_memory_given(1e-6), pytest.raises(RefusedError, match=r"need 0\.00 GB of host memory"):
            bench_for(lanes, [prepared(setting, "fiddler")])
        with host_memory_given(1e-6), pytest.raises(RefusedError, match=r"of host memory"):
            Lab(lanes, setting.shape, Points())
