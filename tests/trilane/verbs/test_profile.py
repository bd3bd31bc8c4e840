"""``trilane profile``: a file that says what was measured here, and adding to it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import realrun.profiling.profile
from realrun.machine.cores import usable_cores
from realrun.machine.host_lanes import HostLanes
from sim.machine.hardware import Hardware, load_hardware, write_hardware
from tests.kit.commands import ROOT, Trilane
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import OnDevice, install
from tests.kit.hand_measured import toy_machine, toy_profile
from tests.kit.validations import LOCKED, PROFILE, SETS

OUT = "here.yaml"
CUDA = {
    "kind": "cuda", "cpu": "none like this", "lanes_cpu_cores": "any", "lanes_cpu_threads": 6,
    "lanes_memory_bytes": 24_000_000_000, "date": "2026-11-20", "load_average": 0.1,
}


def measured() -> Hardware:
    hardware = load_hardware(OUT)
    assert hardware.profile is not None
    return hardware


def test_a_model_is_measured_and_another_one_added_to_the_same_lanes(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLanes, "remarks", lambda self: (LOCKED,))
    first = trilane("profile", "-o", OUT, *PROFILE, "--link-gb-per-s", "3", "--memory-gb", "2", "--chunk-mb", "2",
                    "--json", "found.json")
    assert first.status == 0, first.err
    assert f"host-lanes: {LOCKED}" in first.err.splitlines()
    for expected in ("here: host-lanes of", "rates against aims", f"written to {OUT}"):
        assert expected in first.out
    last = first.out.splitlines()[-1]
    assert last == (
        f"use it: trilane compare --set hardware={OUT} ...; "
        f"check it: trilane validate examples/validation.yaml --profile {OUT}"
    )
    before = measured()
    assert before.gpu.memory_bytes == 2e9
    assert before.profile is not None
    assert before.profile.machine["lanes_link_bytes_per_s"] == 3e9
    assert before.profile.machine["lanes_chunk_bytes"] == 2_000_000
    assert list(before.profile.plan) == ["fiddler"]

    shape = ("--model", "deepseek-v2-lite:1")
    refused = trilane("profile", "-o", OUT, "--quick", *shape, "--link-gb-per-s", "4")
    assert refused.status == 2
    assert "lanes_link_bytes_per_s 3000000000.0 and not 4000000000.0" in refused.err

    again = trilane("profile", "-o", OUT, *PROFILE, "--json", "-")  # its own kind is no other machine
    assert again.status == 0, again.err
    assert set(again.json) == {"hardware", "aims", "skipped"}
    assert [set(aim) for aim in again.json["aims"]] == [{"what", "share", "wanted", "met"}] * 2
    assert again.json["hardware"] == measured().document()
    assert measured().gpu.memory_bytes == 2e9
    assert measured().origins["gpu.memory_bytes"] == before.origins["gpu.memory_bytes"]
    assert {path.name for path in Path().iterdir()} == {OUT, "found.json"}


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    **{
        f"{option} {value!r}": ((option, value), f"{option}: expected whole numbers from 1 to 1,000,000")
        for option in ("--batch", "--context", "--prompt")
        for value in ("", "0", "1,x", "1.5")
    },
    "no memory": (("--memory-gb", "0"), "--memory-gb: expected a number of GB (10^9 bytes) above 0, got 0"),
    "no host memory": (("--host-memory-gb", "-1"), "--host-memory-gb: expected a number of GB (10^9 bytes) above 0"),
    "little host memory": (
        ("--lanes", "host-lanes", "--host-memory-gb", "0.001"), "0.00 GB are given by --host-memory-gb",
    ),
    "no rate": (("--link-gb-per-s", "nan"), "--link-gb-per-s: expected a number of GB (10^9 bytes) above 0, got nan"),
    "unknown lanes": (("--lanes", "host"), "'host' is not one of 'auto', 'cuda', 'host-lanes'"),
    "no such core": (("--lanes", "host-lanes", "--gpu-core", "4000"), "expected cores among"),
    "a GPU's core": (("--lanes", "cuda", "--gpu-core", "0"), "a GPU core: an option for host lanes only"),
    "a core's result path": (
        ("--lanes", "host-lanes", "--result-path", "h2d"), "a result path: an option for a CUDA GPU only",
    ),
    "no way": (("--result-path", "pigeon"), "'pigeon' is not one of 'direct', 'h2d'"),
    "no threads": (("--cpu-threads", "0"), "Invalid value for '--cpu-threads'"),
    "no device": (("--device", "-1"), "Invalid value for '--device'"),
    "no chunk": (("--chunk-mb", "-1"), "--chunk-mb: expected a number of MB (10^6 bytes) from 0 on, got -1"),
    "threads of another engine": (("--threads", "1", "--rounds", "3"), "--threads, --rounds: expected --engine"),
    "unknown model": (("--model", "eliza"), "eliza"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(trilane: Trilane, name: str) -> None:
    words, expected = BAD[name]
    done = trilane("profile", "-o", OUT, *words)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    assert expected in line
    assert not list(Path().iterdir())


def test_the_environment_says_how_much_host_memory_there_is(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILANE_HOST_MEMORY_GB", "0.001")
    done = trilane("profile", "-o", OUT, *PROFILE)
    assert done.status == 2
    assert "0.00 GB are given by TRILANE_HOST_MEMORY_GB" in done.err
    assert not list(Path().iterdir())


def test_a_file_that_is_no_profile_is_left_alone(trilane: Trilane) -> None:
    preset = (ROOT / "sim/machine/presets/rtx3090-ddr4.yaml").read_text()
    Path(OUT).write_text(preset)
    done = trilane("profile", "-o", OUT, *PROFILE)
    assert done.status == 2
    assert "expected a profile to add to" in done.err
    assert Path(OUT).read_text() == preset


def test_what_no_machine_has_does_not_spoil_the_models_that_are_in_the_file(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may take 50 ms to wake threads up."""
    assert trilane("profile", "-o", OUT, *PROFILE).status == 0
    before, real = Path(OUT).read_bytes(), realrun.profiling.profile.profile

    def busy(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        cpu = replace(found.hardware.cpu, first_expert_ns=50_000_000)
        return replace(found, hardware=replace(found.hardware, cpu=cpu))

    monkeypatch.setattr(realrun.profiling.profile, "profile", busy)
    done = trilane("profile", "-o", OUT, *PROFILE)
    assert done.status == 2
    assert "cpu.first_expert_ns = 5e+07 is outside 0 or 100..1e+07 ns" in done.err
    assert f"measure again without other programs. {OUT} is unchanged" in done.err
    assert Path(OUT).read_bytes() == before
    assert {path.name for path in Path().iterdir()} == {OUT}


def test_lanes_of_another_kind_than_the_profile_has(trilane: Trilane) -> None:
    write_hardware(toy_machine(), OUT)
    done = trilane("profile", "-o", OUT, "--lanes", "cuda")
    assert done.status == 2
    assert "kind 'host-lanes' and not 'cuda'" in done.err
    assert toy_profile() == measured().profile


@pytest.mark.parametrize("verb", [("profile", "-o", OUT, *PROFILE), ("measure", "--lanes", "host-lanes", *SETS)])
def test_lanes_that_are_not_for_fidelity_say_so(trilane: Trilane, monkeypatch: Any, verb: tuple[str, ...]) -> None:
    one = min(usable_cores())
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {one}, raising=False)
    said = "not for fidelity: more threads than cores: 4 threads (GPU, CPU experts, link, host) on 1 physical core"
    done = trilane(*verb)
    assert done.status == 0, done.err
    assert done.err.splitlines().count(f"host-lanes: {said}") == 1
    assert (said in done.out) == (verb[0] == "profile")  # with the machine's other facts


@pytest.mark.parametrize("reads", [True, False])
def test_a_gpu_that_does_not_read_pinned_memory_is_used_all_the_same(
    trilane: Trilane, monkeypatch: Any, reads: bool
) -> None:
    """As far as a machine can be made here: its settings are those of the command line."""
    made: list[Any] = []

    def measure(machine: Any, *rest: Any) -> None:
        made.append(machine.settings)
        machine.close()
        raise ValueError("no model fits a fake")

    monkeypatch.setattr("trilane.verbs.profile._measured", measure)
    cuda = FakeCuda()
    cuda.maps_pinned_memory = reads
    with OnDevice(cuda):
        install(monkeypatch, cuda)
        words = ("profile", "-o", OUT, "--lanes", "cuda", "--cpu-threads", "1", "--device", "1", "--chunk-mb", "16")
        with pytest.raises(ValueError, match="no model fits") as raised:
            trilane(*words)
        refused = trilane(*words, "--result-path", "direct") if not reads else None
    assert raised
    assert [(each.cpu_threads, each.device_index, each.chunk_bytes) for each in made] == [(1, 1, 16_000_000)]
    assert made[0].result_path == ("direct" if reads else "h2d")
    assert refused is None or "choose --result-path h2d, or leave it out" in refused.err


def test_a_gpu_s_profile_is_added_to_with_its_own_kind_and_memory(trilane: Trilane, monkeypatch: Any) -> None:
    """As examples/gpu.sh does: the number of CPU threads, found by the first run, is taken from the file."""
    made: list[dict[str, Any]] = []

    def cuda(settings: dict[str, Any]) -> None:
        made.append(dict(settings))
        raise ValueError("no GPU here")

    monkeypatch.setattr("realrun.machine.machines._cuda", cuda)
    write_hardware(replace(load_hardware("rtx3090-ddr4"), profile=toy_profile(machine=CUDA), power=None), OUT)
    with pytest.raises(ValueError, match="no GPU here"):
        trilane("profile", "-o", OUT, "--lanes", "cuda", "--memory-gb", "24", "--quick")
    assert made == [{"cpu_cores": None, "cpu_threads": 6, "memory_bytes": 24_000_000_000}]
    refused = trilane("profile", "-o", OUT, "--lanes", "cuda", "--memory-gb", "12", "--quick")
    assert "lanes_memory_bytes 24000000000 and not 12000000000" in refused.err


def test_a_policy_that_there_is_not_is_refused_before_anything_is_measured(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrun.profiling.profile.profile", lambda *_, **__: pytest.fail("it was measured"))
    done = trilane("profile", "-o", OUT, *PROFILE, "--policies", "fiddler,eliza")
    assert (done.status, "eliza" in done.err) == (2, True)
    assert not Path(OUT).exists()
