"""Scenarios: strict, typed, resolved; and what cannot be run is refused before the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.protocols import Needs
from sim.runs.checks import check_needs
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import simulate
from trilane.study.compare import compare

SHORT: dict[str, Any] = {"trace": "mini-moe", "model": None, "generated_tokens": 2, "cached_share": 0.5}


def test_yaml_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    lines = (
        "policy: fiddler", "batch: 2", "sequences: [3, 1]", "hardware_overrides: {link.h2d_bytes_per_s: 12.0e+9}",
        "noisy_forecast_recall: [0.9, 1]", "engine_overrides: {software.layer_ns: 1.0e+6, software.serial: true}",
    )
    file.write_text("\n".join(lines))
    read = Scenario.from_yaml(file)
    assert read == Scenario(
        policy="fiddler", batch=2, sequences=(3, 1), hardware_overrides={"link.h2d_bytes_per_s": 12e9},
        noisy_forecast_recall=(0.9, 1), engine_overrides={"software.layer_ns": 1e6, "software.serial": True},
    )
    assert Scenario.from_dict(read.to_dict()) == read


def test_what_a_scenario_need_not_say_is_null() -> None:
    assert {key for key, value in Scenario().to_dict().items() if value is None} == {
        "gpu_memory_gb", "cached_share", "host_expert_gb", "disk", "gpus", "layer_split", "prompt_tokens",
        "generated_tokens", "prefill_chunk_tokens", "sequences",
        "calibration", "noisy_forecast_recall", "sampled_steps", "sampled_prompt_tokens",
        "draft_acceptance", "threads", "draft_offered", "draft_windows", "draft_ns",
    }


def test_lists_in_python_are_tuples() -> None:
    changes: dict[str, Any] = {"sequences": [3, 1], "noisy_forecast_recall": [0.9, 1]}
    kept = Scenario(sequences=(3, 1), noisy_forecast_recall=(0.9, 1))
    assert Scenario(**changes) == Scenario().with_(**changes) == kept
    assert hash(kept.sequences) == hash(Scenario(**changes).sequences)


@pytest.mark.parametrize(("text", "message"), [
    ("polcy: dali", r"there is no key 'polcy'; did you mean 'policy'\? Choose from policy, model"),
    ("batch: 1\nbatch: 2", "duplicate key 'batch'"),
    ("batch: [", "not plain YAML"),
    ("- batch", "expected a mapping"),
    ("batch: true", "batch: expected a whole number >= 1, got True"),
    ("batch: 0", "batch: expected a whole number >= 1, got 0"),
    ("cached_share: abc", "cached_share: expected a number from 0 to 1 or null, got 'abc'"),
    ("cached_share: 1.5", "cached_share: expected a number from 0 to 1 or null, got 1.5"),
    ("gpu_memory_gb: .nan", "gpu_memory_gb: expected a number above 0"),
    ("gpu_memory_gb: .inf", "gpu_memory_gb: expected a number above 0"),
    ("sequences: [a]", r"sequences\[0\]: expected a whole number"),
    ("noisy_forecast_recall: 0.8", "noisy_forecast_recall: expected a list .* got 0.8"),
    ("noisy_forecast_recall: [high]", r"noisy_forecast_recall\[0\]: expected a number"),
    ("noisy_forecast_recall: [1.2]", r"noisy_forecast_recall\[0\]: expected a number from 0 to 1, got 1.2"),
    ("gpu_memory_gb: 8\ncached_share: 0.5", "give gpu_memory_gb or cached_share, not both"),
])
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=message):
        Scenario.from_yaml(file)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="expected YAML in UTF-8"):
        Scenario.from_yaml(file)


def test_the_result_embeds_what_was_left_to_defaults() -> None:
    run = simulate(Scenario(policy="fiddler", **SHORT))
    assert run.scenario.sequences == (0,)
    assert run.scenario.generated_tokens == 2
    assert run.scenario.calibration == "mini-moe-calibration"
    assert run.scenario.parameters == run.to_dict()["parameters"]
    assert run.trace_checksum.startswith("sha256:")


def test_popularity_is_not_counted_on_what_is_evaluated() -> None:
    with pytest.raises(ScenarioError, match="is the trace that is evaluated"):
        simulate(Scenario(policy="fiddler", **SHORT, calibration="mini-moe"))


def test_a_calibration_of_another_model_is_refused() -> None:
    with pytest.raises(ScenarioError, match="calibration 'mini-deepseek' has moe_layers = 26, trace 'mini-moe' has 8"):
        simulate(Scenario(policy="fiddler", **SHORT, calibration="mini-deepseek"))


def test_a_model_of_another_topology_is_refused() -> None:
    with pytest.raises(ScenarioError, match="was recorded with moe_layers = 8, model 'mixtral-8x7b' has 32"):
        simulate(Scenario(**{**SHORT, "model": "mixtral-8x7b"}))
    with pytest.raises(ScenarioError, match=r"has 32: give it .* \(`--set trace=synthetic:mixtral-8x7b`\)"):
        simulate(Scenario(**{**SHORT, "model": "mixtral-8x7b@q4_k_m"}))


@pytest.mark.parametrize(("needs", "message"), [
    (Needs(max_batch=1), "policy 'mine' takes batches of at most 1, got 2"),
    (Needs(uniform_sizes=True), "policy 'mine' needs experts of one size, those of .* have 2 sizes"),
])
def test_what_a_policy_needs_of_batch_and_sizes_is_checked(needs: Needs, message: str) -> None:
    setting = prepare(Scenario(**SHORT, batch=2))
    uneven = replace(setting.shape, expert_bytes=(10, *[20] * 7))
    check_needs("mine", Needs(), setting.scenario, uneven)
    with pytest.raises(ScenarioError, match=message):
        check_needs("mine", needs, setting.scenario, uneven)


def test_a_comparison_embeds_the_resolved_scenario() -> None:
    found = compare(Scenario(policy="fiddler", **SHORT), ["on-demand", "fiddler"])
    assert found.scenario.sequences == (0,)
    assert found.scenario.calibration == "mini-moe-calibration"
    assert found.scenario.policy == "fiddler"
    assert [row["parameters"] for row in found.rows()] == [dict(run.scenario.parameters) for run in found.runs]


def test_a_gigabyte_of_gpu_memory_is_a_milliard_bytes() -> None:
    assert prepare(Scenario(gpu_memory_gb=12)).hardware.gpu.memory_bytes == 12_000_000_000
