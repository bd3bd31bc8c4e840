"""The machine at hand, as each system names its parts: nvidia-smi, files of Linux, macOS, Windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sim.machine.assembly import assembled_name
from sim.machine.hardware import load_hardware
from trilane.common.units import GIB, MIB
from trilane.engines.question import FitError
from trilane.engines.tune import cards_found, machine_found
from trilane.engines.tune.machine_found import UnknownCardError, found_machine
from trilane.output.pages.caveats import assumption_text


def found(
    monkeypatch: pytest.MonkeyPatch, smi: str, cpu: str, named_cpu: str | None = None, cores: int = 4,
    system: str = "linux", answers: Mapping[str, str] | None = None,
) -> machine_found.MachineFound:
    """The machine of the answers of a system's programs and a CPU's name, with 31.9 GiB of memory."""
    programs = {"nvidia-smi": smi, **(answers or {})}
    monkeypatch.setattr(cards_found.sys, "platform", system)
    monkeypatch.setattr(cards_found, "answer_of", lambda command: programs.get(command[0], ""))
    monkeypatch.setattr(machine_found, "cpu_name", lambda: cpu)
    monkeypatch.setattr(machine_found, "memory_bytes", lambda: 33_449_000 * 1024)
    monkeypatch.setattr(machine_found, "physical_cores", lambda: [(core,) for core in range(cores)])
    return found_machine(named_cpu)


@pytest.fixture(autouse=True)
def drm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Linux lists its cards, empty, with the files that have names for their numbers."""
    names, pci, cards = tmp_path / "amdgpu.ids", tmp_path / "pci.ids", tmp_path / "drm"
    names.write_text(AMD_NAMES)
    pci.write_text(PCI_NAMES)
    cards.mkdir()
    monkeypatch.setattr(cards_found, "_AMD_NAMES", (tmp_path / "missing", names))
    monkeypatch.setattr(cards_found, "_PCI_NAMES", (pci,))
    monkeypatch.setattr(cards_found, "_DRM", cards)
    return cards


AMD_NAMES = """# List of AMDGPU IDs
1.0.0
744C,\tC8,\tAMD Radeon RX 7900 XTX
744C,\tCC,\tAMD Radeon RX 7900 XT
73BF,\tC3,\tAMD Radeon RX 6800
73FF,\tC3,\tAMD Radeon RX 6600M
164E,\tC1,\tAMD Radeon Graphics
1586,\tC1,\tAMD Radeon 8060S Graphics
"""
PCI_NAMES = """1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t73bf  Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]
\t\t1002 0e3a  Radeon RX 6900 XT
\t7590  Navi 44 [Radeon RX 9060 XT]
8086  Intel Corporation
\te20b  Battlemage G21 [Arc B580]
\ta780  Raptor Lake-S GT1 [UHD Graphics 770]
"""


def put_card(drm: Path, number: int, **values: str) -> None:
    """A card as the kernel lists it."""
    device = drm / f"card{number}" / "device"
    device.mkdir(parents=True)
    for name, value in values.items():
        (device / name).write_text(f"{value}\n")


# --- nvidia-smi, and CPUs ---------------------------------------------------------------------------------------------


def texts(found: machine_found.MachineFound) -> tuple[str, ...]:
    return tuple(map(assumption_text, found.assumed))


def test_a_desktop_is_named_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, "NVIDIA GeForce RTX 3060, 12288, 4, 16\n", "AMD Ryzen 5 5600X 6-Core Processor")
    assert one.parts() == {
        "gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600x", "cores": 4, "pcie": "4x16", "ram_gb": 32,
        "system": "linux",
    }
    assert texts(one) == ("ram: ddr4-3200, which is usual; name the memory modules with --ram",)
    assert one.without("ram").assumed == ()
    assert one.parts(ram="ddr4-3600")["ram"] == "ddr4-3600"


def test_another_cpu_has_its_own_cores_and_memory_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    card, own = "NVIDIA GeForce RTX 3060, 12288, 4, 16\n", "AMD Ryzen 5 5600X 6-Core Processor"
    one = found(monkeypatch, card, own, "core-i9-13900k")
    assert one.parts() == {
        "gpu": "rtx-3060", "ram": "ddr5-5600", "cpu": "core-i9-13900k", "cores": None, "pcie": "4x16", "ram_gb": 32,
        "system": "linux",
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
    with pytest.raises(FitError, match=r"there is no gpu 'NVIDIA RTX 9999' with 12 GiB; name one"):
        found(monkeypatch, f"NVIDIA RTX 9999, {12 * 1024**3 // MIB}, 5, 16\n", "Some CPU")


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "a, b\n", "GPU, [N/A], 4, 16\n"])
def test_answers_of_another_form_are_no_card(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(monkeypatch, text, "Some CPU")
    assert one.gpu == "none"
    assert texts(one)[0] == "gpu: none, since this machine names none; name one with --gpu"


def test_of_several_cards_the_first_is_meant_which_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA GeForce RTX 3060, 12288, 4, 16\nNVIDIA GeForce RTX 4090, 24564, 4, 16\n"
    one = found(monkeypatch, text, "AMD Ryzen 5 5600X 6-Core Processor")
    assert (one.gpu, texts(one)[0]) == ("rtx-3060", "gpu: the first of 2; name another with --gpu")


def test_a_slot_that_the_driver_does_not_know_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "Tesla T4, 15360, [N/A], [N/A]\n", "Some CPU").pcie is None


@pytest.mark.parametrize(("name", "mib", "why"), [
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-blackwell is another one, without 'Server'"),
    ("NVIDIA GeForce RTX 2060 with Max-Q Design", 6144, "rtx-2060 is another one, without 'Max-Q'"),
    ("NVIDIA A40-48Q", 49152, "a40 is another one, without '48Q'"),
    ("GRID T4-16Q", 16384, "t4 is another one, without 'GRID', '16Q'"),
    ("NVIDIA H100 NVL", 95830, "h100-pcie is another one, without 'NVL'"),
    ("NVIDIA GeForce RTX 4080", 12282, r"12 GiB: the catalogue has rtx-4080 \(16 GB\)"),
])
def test_words_that_are_left_over_are_named(
    name: str, mib: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownCardError, match=f"tune: there is no gpu '{name}' with .*{why}; name one like it"):
        found(monkeypatch, f"{name}, {mib}, 4, 16\n", "Some CPU")


@pytest.mark.parametrize(("name", "mib", "gpu"), [
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"), ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb-pcie"),
    ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384, "rtx-3080-ti-laptop"),
    ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", 8192, "rtx-3070-ti-laptop"),
    ("NVIDIA GeForce RTX 2080 SUPER", 8192, "rtx-2080-super"), ("NVIDIA GeForce RTX 4090 D", 24564, "rtx-4090-d"),
    ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "rtx-4000-sff-ada"),
    ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
])
def test_a_longer_name_is_another_card(name: str, mib: int, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, f"{name}, {mib}, 4, 16\n", "Some CPU").gpu == gpu


# --- Linux without nvidia-smi -----------------------------------------------------------------------------------------


def test_an_amd_card_is_known_by_its_device_and_revision(drm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(drm, 0, vendor="0x1002", device="0x164e", revision="0xc1", mem_info_vram_total="536870912")
    put_card(drm, 1, vendor="0x1002", device="0x744c", revision="0xc8", mem_info_vram_total=str(24 * GIB))
    one = found(monkeypatch, "", "AMD Ryzen 9 7950X 16-Core Processor", cores=16)
    assert (one.gpu, one.cpu, one.ram, one.pcie) == ("rx-7900-xtx", "ryzen-9-7950x", "ddr5-5600", None)
    assert [assumption.part for assumption in one.assumed] == ["ram"]


def test_the_size_tells_cards_of_one_name_apart(drm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(drm, 0, vendor="0x1002", device="0x7590", revision="0xc0", mem_info_vram_total=str(16 * GIB))
    assert found(monkeypatch, "", "Some CPU").gpu == "rx-9060-xt-16gb"


def test_an_intel_card_is_known_and_a_cpu_s_own_graphics_are_none(drm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(drm, 0, vendor="0x8086", device="0xa780", revision="0x04")
    assert found(monkeypatch, "", "Some CPU").gpu == "none"
    put_card(drm, 1, vendor="0x8086", device="0xe20b", revision="0x00")
    assert found(monkeypatch, "", "Some CPU").gpu == "arc-b580"


@pytest.mark.parametrize(("device", "revision", "why"), [
    ("0x73bf", "0xff", "may be rx-6800 .16 GB., rx-6800-xt .16 GB. or rx-6900-xt .16 GB.: name the one that it is"),
    ("0x73ff", "0xc3", "there is no gpu 'AMD Radeon RX 6600M'"),
])
def test_a_card_that_stands_for_several_or_is_unknown_is_refused(
    device: str, revision: str, why: str, drm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_card(drm, 0, vendor="0x1002", device=device, revision=revision, mem_info_vram_total=str(16 * GIB))
    with pytest.raises(UnknownCardError, match=why):
        found(monkeypatch, "", "Some CPU")


def test_a_chip_with_its_gpu_brings_memory_and_cpu(drm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_card(drm, 0, vendor="0x1002", device="0x1586", revision="0xc1", mem_info_vram_total="536870912")
    one = found(monkeypatch, "", "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", cores=16)
    assert one.parts() == {
        "gpu": "strix-halo", "ram": None, "cpu": None, "cores": None, "pcie": None, "ram_gb": 32,
        "system": "linux",
    }
    assert one.assumed == ()


def test_unified_memory_has_no_size_in_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "NVIDIA GB10, [N/A], 5, 1\n", "").gpu == "gb10"


# --- macOS and Windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "cores", "gpu"), [
    ("Apple M3 Max", 40, "apple-m3-max"), ("Apple M3 Max", 30, "apple-m3-max-30-core"), ("Apple M4", 10, "apple-m4"),
])
def test_a_mac_is_known_by_its_chip_and_the_cores_of_its_gpu(
    chip: str, cores: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    displays = f"Graphics/Displays:\n\n    {chip}:\n\n      Chipset Model: {chip}\n      Type: GPU\n" \
               f"      Bus: Built-In\n      Total Number of Cores: {cores}\n      Vendor: Apple (0x106b)\n"
    one = found(monkeypatch, "", chip, system="darwin", answers={"system_profiler": displays})
    assert (one.gpu, one.ram, one.cpu, one.ram_gb, one.assumed) == (gpu, None, None, 32, ())
    assert load_hardware(assembled_name(one.gpu, ram_gib=one.ram_gb)).one_memory


def test_windows_names_its_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = "AMD Radeon(TM) Graphics\r\nParsec Virtual Display Adapter\r\nAMD Radeon RX 7900 XT\r\n"
    cpu = "AMD Ryzen 5 7600X 6-Core Processor             "
    one = found(monkeypatch, "", cpu, system="win32", answers={"powershell": adapters})
    assert (one.gpu, one.cpu, one.ram) == ("rx-7900-xt", "ryzen-5-7600x", "ddr5-5600")


def test_a_card_that_nvidia_smi_names_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = "NVIDIA GeForce RTX 3060\r\nIntel(R) UHD Graphics 770\r\n"
    one = found(
        monkeypatch, "NVIDIA GeForce RTX 3060, 12288, 4, 16\n", "12th Gen Intel(R) Core(TM) i5-12400F",
        system="win32", answers={"powershell": adapters},
    )
    assert (one.gpu, one.cpu) == ("rtx-3060", "core-i5-12400f")
    assert [assumption.part for assumption in one.assumed] == ["ram"]
