"""The cache of experts as a setting: its size, hit rates against those that were logged, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.costs.engine import load_engine
from sim.machine.assembly import assembled_name
from sim.machine.hardware import load_hardware
from traces.batches import LayerUse, layer_uses
from trilane.common.units import MIB
from trilane.engines.question import FitError, Question
from trilane.engines.routing import routing_for
from trilane.engines.tune import machine_found
from trilane.engines.tune.expert_cache import CachedSpeed, HitCurve, lru_hit_rate
from trilane.engines.tune.machine_found import found_machine
from trilane.output.pages.caveats import assumption_text
from trilane.study.cache_curve import CacheCurve

# logged on an R9700: repository audiagentic/bigcherry, patch 1337 (docs/planning, BCOP39)
FLASH_NEXT = {0.0427: 0.454, 0.0853: 0.61, 0.171: 0.79, 0.256: 0.879, 0.299: 0.902}
CURVE = HitCurve((0.5, 1.0), (0.8, 1.0))
ASKED = Question(
    model="deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, generated=16, ubatch=512, n_cpu_moe=27
)


def speed(question: Question = ASKED, memory_gib: float = 12) -> CachedSpeed:
    hardware = load_hardware(question.hardware).with_numbers({"gpu.memory_bytes": memory_gib * 2**30})
    return CachedSpeed(question, question.model_shape, hardware, load_engine("llama.cpp-cache"), curve=CURVE)


def test_hit_rates_are_near_those_that_were_logged() -> None:
    curve = CacheCurve(routing_for(Question(model="qwen3-next-80b-a3b", gpu="rtx-3060", ram="ddr4-3200")).trace)
    size = curve.trace.shape.routed_bytes
    for share, logged in FLASH_NEXT.items():
        assert curve.point("lru", round(share * size)).hit_rate_decode == pytest.approx(logged, abs=0.05)


def test_rates_between_two_sizes_are_on_a_straight_line() -> None:
    held = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    assert CURVE.rates(held).tolist() == pytest.approx([0.0, 0.4, 0.8, 0.9, 1.0])


def test_all_memory_that_is_left_is_the_cache_but_for_a_spare_slot() -> None:
    own = speed(memory_gib=8)
    memory, shape = own.splitter.memory(own.split), own.shape
    left = -memory.missing_bytes
    assert own.cache_mib == left // MIB
    assert own.split.cache is not None
    spare = shape.expert_bytes_by_layer[0]
    assert own.split.cache.held == pytest.approx((own.cache_mib * MIB - spare) / memory.host_bytes)
    assert own.split.cache.hit_rate == CURVE.rates(np.array([own.split.cache.held]))[0]
    assert own.words[-1] == f"--moe-cache-mib {own.cache_mib}"


def test_a_cache_is_no_larger_than_what_it_caches() -> None:
    own = speed(memory_gib=80)
    assert own.split.cache is not None
    assert own.split.cache.held == 1.0
    assert own.cache_mib * MIB <= 1.1 * own.splitter.memory(own.split).host_bytes


def test_experts_of_less_than_a_mib_have_no_cache() -> None:
    asked = Question(model="mini-moe", weights="q4_0", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, n_cpu_moe=1)
    with pytest.raises(FitError, match="no room for a cache of the experts of one token"):
        _ = speed(asked).split
    two = speed(replace(asked, n_cpu_moe=4))
    assert two.cache_mib == 1
    assert two.words[-1] == "--moe-cache-mib 1"


@pytest.mark.parametrize(("slots", "runs"), [(6.9, False), (7.1, True)], ids=["six experts", "and a spare slot"])
def test_no_room_for_the_experts_of_a_token_is_refused(slots: float, runs: bool) -> None:
    large = speed()
    memory = large.splitter.memory(large.split)
    held = memory.gpu_bytes + memory.missing_bytes
    own = speed(memory_gib=(held + slots * large.shape.expert_bytes_by_layer[0]) / 2**30)
    if runs:
        assert own.split.cache is not None
        return
    with pytest.raises(FitError, match="no room for a cache of the experts of one token"):
        _ = own.split


@pytest.mark.parametrize("model", ["deepseek-v2-lite:4", "mixtral-8x7b:3", "gpt-oss-20b:4"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6, 1.0])
def test_hit_rates_are_those_of_the_simulators_lru_cache(model: str, share: float) -> None:
    curve = CacheCurve(routing_for(Question(model=model, gpu="rtx-3060", ram="ddr4-3200")).trace)
    shape = curve.trace.shape
    size = round(share * shape.routed_bytes)
    rate = lru_hit_rate(layer_uses(curve.trace), shape.expert_bytes_by_layer, size)
    assert rate == curve.point("lru", size).hit_rate_decode


def test_an_lru_cache_by_hand() -> None:
    """Room for two experts of layer 0, or one of layer 1: A B, C, A, then both layers in turn."""
    uses = [
        LayerUse(0, 0, "prefill", (0, 1), (1, 1)), LayerUse(1, 0, "decode", (1,), (1,)),  # hit
        LayerUse(2, 0, "decode", (2,), (1,)),  # in place of 0
        LayerUse(3, 0, "decode", (1, 2), (1, 1)),  # two hits
        LayerUse(3, 1, "decode", (5,), (1,)),  # in place of both
        LayerUse(4, 0, "decode", (0, 1, 2), (1, 1, 1)),  # room for two, none of which makes room for the third
        LayerUse(5, 0, "decode", (0, 2), (1, 1)),  # one hit
    ]
    assert lru_hit_rate(uses, (10, 20), 20) == 4 / 10


# --- the machine at hand ----------------------------------------------------------------------------------------------


def found(
    monkeypatch: pytest.MonkeyPatch, smi: str, cpu: str, named_cpu: str | None = None, cores: int = 4
) -> machine_found.MachineFound:
    """The machine of a driver's answer and a CPU's name, with 31.9 GiB of memory."""
    monkeypatch.setattr(machine_found, "cpu_name", lambda: cpu)
    monkeypatch.setattr(machine_found, "memory_bytes", lambda: 33_449_000 * 1024)
    monkeypatch.setattr(machine_found, "_answer", lambda command: smi)
    monkeypatch.setattr(machine_found, "physical_cores", lambda: [(core,) for core in range(cores)])
    return found_machine(named_cpu)


def texts(found: machine_found.MachineFound) -> tuple[str, ...]:
    return tuple(map(assumption_text, found.assumed))


def test_a_desktop_is_named_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, "NVIDIA GeForce RTX 3060, 12288, 4, 16\n", "AMD Ryzen 5 5600X 6-Core Processor")
    assert one.parts() == {
        "gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600x", "cores": 4, "pcie": "4x16", "ram_gb": 32,
    }
    assert texts(one) == ("ram: ddr4-3200, which is usual; name the memory modules with --ram",)
    assert one.without("ram").assumed == ()
    assert one.parts(ram="ddr4-3600")["ram"] == "ddr4-3600"


def test_another_cpu_has_its_own_cores_and_memory_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    card, own = "NVIDIA GeForce RTX 3060, 12288, 4, 16\n", "AMD Ryzen 5 5600X 6-Core Processor"
    one = found(monkeypatch, card, own, "core-i9-13900k")
    assert one.parts() == {
        "gpu": "rtx-3060", "ram": "ddr5-5600", "cpu": "core-i9-13900k", "cores": None, "pcie": "4x16", "ram_gb": 32,
    }
    assert texts(one) == ("ram: ddr5-5600, which is usual; name the memory modules with --ram",)


def test_a_machine_without_a_gpu_and_with_an_unknown_cpu_has_generic_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, "", "Some CPU")
    assert (one.gpu, one.cpu, one.ram, one.pcie) == ("none", None, "ddr4-3200", None)
    assert [assumption.part for assumption in one.assumed] == ["gpu", "ram", "cpu"]


def test_an_unknown_cpu_of_more_cores_than_a_desktop_has_is_a_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    most, more = (found(monkeypatch, "", "Some CPU", cores=cores) for cores in (32, 33))
    assert (most.cpu, more.cpu) == (None, "server")
    assert texts(more)[-1] == (
        "cpu: a generic server's, for its 33 cores, since this one is not in the catalogue; name one like it with --cpu"
    )
    for one in (most, more):
        assert load_hardware(assembled_name(one.gpu, one.ram, one.cpu, cores=one.cores)).cpu.cores == one.cores


@pytest.mark.parametrize(("name", "mib", "gpu"), [
    ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
    ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx-4060-ti-8gb"),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188, "rtx-4070-laptop"),
    ("NVIDIA GeForce RTX 2060", 12288, "rtx-2060-12gb"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx-4070-ti-super"), ("Tesla V100-PCIE-32GB", 32768, "v100"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx-pro-6000-blackwell-max-q"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm"), ("NVIDIA H200", 143771, "h200-sxm"),
])
def test_a_card_is_known_by_its_words_and_its_memory(
    name: str, mib: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(monkeypatch, f"{name}, {mib}, 4, 16\n", "Some CPU").gpu == gpu


@pytest.mark.parametrize(("name", "cpu", "ram"), [
    ("AMD Ryzen 7 5800X3D 8-Core Processor", "ryzen-7-5800x3d", "ddr4-3200"),
    ("Intel(R) Core(TM) i9-13900K", "core-i9-13900k", "ddr5-5600"),
    ("Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", "xeon-gold-6230", "ddr4-3200"),
    ("AMD EPYC 7532 32-Core Processor", "epyc-7532", "ddr4-3200"),
])
def test_a_cpu_is_known_by_its_name(name: str, cpu: str, ram: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, "", name)
    assert (one.cpu, one.ram) == (cpu, ram)


def test_a_card_that_is_not_in_the_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FitError, match=r"the GPU 'NVIDIA RTX 9999' with 12 GiB is not in the catalogue; name one"):
        found(monkeypatch, f"NVIDIA RTX 9999, {12 * 1024**3 // MIB}, 5, 16\n", "Some CPU")


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "a, b\n", "GPU, [N/A], 4, 16\n"])
def test_answers_of_another_form_are_no_card(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, text, "Some CPU")
    assert one.gpu == "none"
    assert texts(one)[0] == "gpu: none, since nvidia-smi names none; name one with --gpu"


def test_of_several_cards_the_first_is_meant_which_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA GeForce RTX 3060, 12288, 4, 16\nNVIDIA GeForce RTX 4090, 24564, 4, 16\n"
    one = found(monkeypatch, text, "AMD Ryzen 5 5600X 6-Core Processor")
    assert (one.gpu, texts(one)[0]) == ("rtx-3060", "gpu: the first of 2; name another with --gpu")


def test_a_slot_that_the_driver_does_not_know_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "Tesla T4, 15360, [N/A], [N/A]\n", "Some CPU").pcie is None
