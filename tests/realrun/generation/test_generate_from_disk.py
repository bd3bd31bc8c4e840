"""Law 11 with experts in a file: the tokens of the unmodified model, whichever experts the host's memory holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realrun.errors import RefusedError
from realrun.experts import file_of_run
from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.machine.host_lanes import HostLanes
from tests.kit.generating import assert_says_the_same, every_slot, expected, hosted, request


def from_disk(policy: str, folder: Path | None) -> GenerateRequest:
    """A run whose host holds half of the experts of mini-moe, and whose GPU holds a quarter."""
    model = hosted("mini-moe")
    asked = request(policy, every_slot(model) // 4, generated=2)
    held_gb = model.shape.routed_bytes / 2 / 1e9
    scenario = asked.scenario.with_(host_expert_gb=held_gb, disk="nvme-4x4")
    return replace(asked, scenario=scenario, experts_folder=folder)


@pytest.mark.parametrize("policy", ["on-demand", "naive-cpu", "hybrimoe"])
def test_tokens_are_those_of_the_unmodified_model(
    policy: str, tmp_path: Path, inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_of_run, "_in_memory", lambda folder: False)  # where temporary files may be
    asked = from_disk(policy, tmp_path)
    assert_says_the_same(hosted("mini-moe"), asked, inline_lanes, expected("mini-moe", generated=2))
    spans = generate_hosted(hosted("mini-moe"), asked, inline_lanes).run.spans
    assert (spans.kind == "read").any()
    assert not list(tmp_path.iterdir())


def test_without_a_folder_it_is_refused(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match="--experts-in DIR"):
        generate_hosted(hosted("mini-moe"), from_disk("on-demand", None), inline_lanes)
