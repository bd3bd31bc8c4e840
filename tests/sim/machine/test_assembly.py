"""Machines of parts: what the rules make of them, names that say them, parts that do not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sim.machine.assembly import assembled_name, parse_assembly
from sim.machine.hardware import Hardware, HardwareError, load_hardware, write_hardware
from sim.machine.part_rules import assembled
from sim.machine.parts import cpu_names, gpu_names, part, read_fraction, unified_names
from sim.machine.plausibility import LIMITS, check_plausible
from tests.kit.hand_measured import assemble, memory_names
from trilane.common.schema import from_dict
from trilane.common.units import GB, GIB


def refusal(name: str) -> str:
    with pytest.raises(HardwareError) as caught:
        load_hardware(name)
    return str(caught.value)


# --- all combinations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", memory_names())
def test_every_gpu_goes_with_every_memory(memory: str) -> None:
    for gpu in gpu_names():
        name = f"{gpu}+{memory}"
        check_plausible(flat(assembled(parse_assembly(name), name)), name)


def flat(document: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    """Every number of a document that has a limit, by dotted key."""
    keys = (key.split(".") for key in LIMITS)
    found = ((s, name, document[s][name]["value"]) for s, name in keys if name in document.get(s, {}))
    return {f"{s}.{name}": from_dict(float, value) for s, name, value in found}


@pytest.mark.parametrize("cpu", cpu_names())
def test_every_cpu_goes_with_all_memory_that_its_platform_takes(cpu: str) -> None:
    for memory in memory_names():
        if part("memory", memory).family in part("cpu", cpu).memory:
            machine = assemble("rtx-4090", memory, cpu)
            assert machine.cpu.name == part("cpu", cpu).title
            assert 0.15 < machine.cpu.read_bytes_per_s / machine.cpu.dram_bytes_per_s < 0.9


@pytest.mark.parametrize("cpu", cpu_names())
def test_cpu_experts_and_copies_never_read_more_together_than_the_memory_gives(cpu: str) -> None:
    memories = {
        "ddr5": "ddr5-6000", "ddr4": "ddr4-3200", "lpddr4x": "lpddr4x-4266", "lpddr5": "lpddr5-6400",
        "lpddr5x": "lpddr5x-8533",
    }
    memory = next(name for family, name in memories.items() if family in part("cpu", cpu).memory)
    machine = assemble("rtx-5090", memory, cpu)
    together = machine.cpu.read_bytes_per_s * machine.contention.cpu_permille
    together += machine.link.h2d_bytes_per_s * machine.contention.copy_permille
    assert together / 1000 <= machine.cpu.read_bytes_per_s / sixteen_bit_fraction(cpu) * 1.001


def sixteen_bit_fraction(cpu: str) -> float:
    """Share of the read rate of experts of 16 bits: the measured one over the cost of unpacking its weights."""
    numbers = part("cpu", cpu).numbers
    if "expert_fraction" not in numbers:
        return 0.82 / read_fraction("cpu", 4.5)
    return min(1.0, float(numbers["expert_fraction"].value / read_fraction("cpu", numbers["expert_bits"].value)))


def test_every_number_of_a_machine_says_where_it_is_from() -> None:
    machine = load_hardware("rtx-4080+ddr5-5600+ryzen-7-7800x3d+32gb")
    assert set(machine.origins) == set(machine.flat())
    for origin in machine.origins.values():
        assert len(origin.source) > 3
        assert origin.confidence in ("high", "medium", "low")


def test_the_least_sure_number_decides_how_sure_a_product_is() -> None:
    machine = load_hardware("rtx-4090+ddr5-6000+ryzen-9-7950x")
    assert machine.origins["cpu.dram_bytes_per_s"].confidence == "medium"  # channels from memory
    assert machine.origins["cpu.read_bytes_per_s"].confidence == "low"  # 72.5 GB/s on two chiplets is an estimate
    source = machine.origins["cpu.read_bytes_per_s"].source
    assert "0.956 of a read of 72.5 GB/s: 0.82 with 4.5 bits, which are read at 0.86 of the rate of 16" in source


# --- presets are machines of parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "name"), [
    ("rtx4090-ddr5", "rtx-4090+ddr5-6000+ryzen-9-7950x"),
    ("rtx3090-ddr4", "rtx-3090+ddr4-3200+ryzen-9-5900x"),
    ("rtx3090-epyc7532", "rtx-3090+ddr4-3200-ecc+epyc-7532+16-cores+256gb"),
    ("a6000-xeon5220r", "rtx-a6000+ddr4-2666-ecc+xeon-gold-5220r+10-cores"),
])
def test_a_preset_on_which_nothing_was_measured_is_the_machine_of_its_parts(preset: str, name: str) -> None:
    assert load_hardware(preset).flat() == load_hardware(name).flat()


def test_of_daops_machine_only_the_power_of_the_platform_is_known() -> None:
    known, made = load_hardware("a6000-i9-10980xe"), load_hardware("rtx-a6000+ddr4-2933+core-i9-10980xe")
    assert known.flat() == {**made.flat(), "power.platform_w": 120}


def test_a_preset_differs_from_its_parts_in_what_was_measured_on_it() -> None:
    known, made = load_hardware("a100-xeon6326"), load_hardware("a100-80gb-pcie+ddr4-3200-ecc+xeon-gold-6326")
    differing = {key for key, value in known.flat().items() if made.flat()[key] != value}
    assert differing == {
        "gpu.bandwidth_fraction", "cpu.read_bytes_per_s", "link.h2d_latency_ns", "link.d2h_latency_ns", "link.copies",
        "link.pageable_fraction",
    }
    assert all("DAOP Table I" in known.origins[key].source for key in differing)


# --- what else a machine says -----------------------------------------------------------------------------------------


def test_traps_of_the_parts_are_notes_of_the_machine() -> None:
    notes = load_hardware("rtx-2080-ti+ddr4-3200+ryzen-9-5900x").notes
    assert any("Run the model in fp16" in text for text in notes)
    assert any("Eight PCIe lanes" in text for text in load_hardware("rtx-4060+ddr5-5600").notes)
    assert load_hardware("rtx4090-ddr5").notes == load_hardware("rtx-4090+ddr5-6000+ryzen-9-7950x").notes


def test_notes_are_a_list_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**load_hardware("rtx4090-ddr5").document(), "notes": "hot"}))
    assert "notes: expected a list (each text), got 'hot'" in refusal(str(path))


def test_host_memory_is_known_only_if_it_was_said() -> None:
    assert load_hardware("rtx-4080+ddr5-5600+64gb").cpu.ram_bytes == 64 * GIB
    assert load_hardware("rtx-4080+ddr5-5600").cpu.ram_bytes is None
    assert load_hardware("rtx4090-ddr5", {"cpu.ram_bytes": 96e9}).cpu.ram_bytes == 96e9


# --- names ------------------------------------------------------------------------------------------------------------


def test_assemble_and_the_name_give_the_same_machine() -> None:
    made = assemble("rtx-3090", "ddr4-3600", "ryzen-9-5950x", cores=8, channels=2, pcie="4x8", ram_gib=64)
    name = "rtx-3090+ddr4-3600+ryzen-9-5950x+8-cores+2-channels+pcie-4x8+64gb"
    assert made == load_hardware(name)
    assert (made.name, made.cpu.cores) == (name, 8)
    assert assembled_name("RTX-3090", "ddr4-3600", pcie="4x8") == "rtx-3090+ddr4-3600+pcie-4x8"


@pytest.mark.parametrize(("parts", "expected"), [
    (("ddr5-5600", "rtx-4090"), "expected a gpu, such as rtx-4080, got 'ddr5-5600', which is a memory"),
    (("rtx-4090", "ryzen-9-7950x"), "expected a memory, such as ddr5-5600, got 'ryzen-9-7950x', which is a cpu"),
    (("rtx-4090", "ddr5-5600", "rtx-4080"), "expected a cpu, such as ryzen-9-7950x, got 'rtx-4080'"),
    (("rtx-4090+ddr5-5600", "ddr5-5600"), "rtx-4090 is another one, without '+', 'ddr5', '5600'"),
    (("rtx-4090", "ddr5-5600+64gb"), "there is no memory 'ddr5-5600+64gb': the size is --ram-gb 64"),
])
def test_what_is_asked_for_by_kind_must_be_of_that_kind(parts: tuple[str, ...], expected: str) -> None:
    with pytest.raises(HardwareError) as caught:
        assemble(*parts, ram_gib=16)
    assert expected in str(caught.value)


def test_parts_after_the_first_may_stand_in_any_order() -> None:
    one, other = load_hardware("rtx-3090+ddr4-3200+8-cores"), load_hardware("8-cores+ddr4-3200+RTX-3090")
    assert one.flat() == other.flat()


def test_a_machine_of_parts_takes_overrides() -> None:
    machine = load_hardware("rtx-4080+ddr5-5600", {"link.copies": "pageable", "link.h2d_bytes_per_s": 20e9})
    assert machine.link.expert_bytes_per_s == 10 * GB
    assert machine.origins["link.copies"].source == "override"


def test_a_machine_of_parts_is_read_back_from_its_document(tmp_path: Path) -> None:
    machine: Hardware = load_hardware("rtx-4080+ddr5-5600+64gb")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(machine.document()))
    assert load_hardware(path) == machine


@pytest.mark.parametrize(("name", "expected"), [
    ("rtx-408+ddr5-5600", "there is no gpu 'rtx-408'; did you mean 'rtx-4080'"),
    ("rtx-4080+ddr5-560", "there is no memory 'ddr5-560'; did you mean 'ddr5-5600'?; a machine of parts is"),
    ("rtx-9090+ddr5-5600", "add a part in sim/machine/presets/parts, or describe the machine in a YAML file"),
    ("rtx-4080+ddr5-5600+zzz", "there is no part 'zzz'; a machine of parts is GPU+MEMORY"),
    ("rtx-4080+ddr5-5600+zzz", "with unified memory gb10; `trilane hardware --parts` lists them all"),
    ("rtx-4090-d-laptop+ddr5-5600", "is another one, without"),
    ("rtx-4080+ddr5-5600+pcie-2x16", "PCIe slot '2x16': expected generation (3, 4 or 5) and lanes"),
    ("none+16-cores", "hardware 'none+16-cores': no memory among the parts"),
    ("none+ddr5-5600+pcie-4x8", "expected no PCIe slot where there is no GPU, got '4x8'"),
    ("none+gb10+ddr5-5600", "two gpu parts, 'none' and 'gb10'"),
    ("gb10+ddr5-5600", "GB10 (DGX Spark) comes with its memory and CPU, got 'ddr5-5600'; leave it out"),
    ("gb10+ryzen-9-7950x", "GB10 (DGX Spark) comes with its memory and CPU, got 'ryzen-9-7950x'; leave it out"),
    ("gb10+24-cores", "GB10's CPU has 20 cores, got 24"),
    ("rtx-4080+ddr5-5600+2-sockets+ryzen-9-7950x", "Ryzen 9 7950X has 1 socket, got 2; name a server's CPU"),
    ("rtx-4080+ddr5-5600-ecc+3-sockets", "there is no part '3-sockets'"),
    ("rtx-4080+ddr4-2666-ecc+xeon-gold-6138+2-sockets+41-cores", "Xeon Gold 6138 has 40 cores, got 41"),
    ("rtx-4080", "hardware 'rtx-4080': no memory among the parts; a machine of parts is GPU+MEMORY"),
    ("ddr5-5600+16-cores", "no gpu among the parts"),
    ("rtx-3090@pcie-3x4+ddr4-3200", "expected parts joined by +, such as +pcie-3x4, got '@'"),
    ("rtx-4080+rtx-4090+ddr5-5600", "expected one GPU here; several are answered by trilane fit, tune and recommend"),
    ("rtx-4080+ddr5-5600+4-cores+8-cores", "two cores parts, '4' and '8'"),
    ("rtx-4080+ddr5-5600+16gb+64gb", "two ram parts, '16' and '64'"),
    ("rtx-4080+ddr5-5600+1000-cores", "generic desktop CPU has at most 32 cores, got 1000; name a CPU"),
    ("rtx-4080+ddr5-5600-ecc+1000-cores", "generic server CPU has at most 128 cores, got 1000"),
    ("rtx-4080+ddr5-5600+24-channels", "generic server CPU has at most 12 channels, got 24"),
    ("rtx-4080-laptop+ddr5-5600+8-channels", "generic laptop CPU has at most 4 channels, got 8"),
    ("rtx-4080+ddr5-5600+0-cores", "cores must be at least 1, got 0"),
    ("rtx-4080+ddr5-5600+pcie-4x3", "a PCIe slot has 1, 2, 4, 8 or 16 lanes, got 3"),
    ("rtx-4080+ddr4-3200+ryzen-9-7950x", "Ryzen 9 7950X takes ddr5, not ddr4-3200"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x+32-cores", "Ryzen 9 7950X has 16 cores, got 32"),
    ("rtx-4080+ddr5-5600+ryzen-9-7950x+4-channels", "Ryzen 9 7950X has 2 channels, got 4"),
    ("rtx-9090", "or parts: rtx-4080+ddr5-5600"),
    ("my+machine.yaml", "no hardware preset or file 'my+machine.yaml'"),
])
def test_what_cannot_be_assembled_is_named(name: str, expected: str) -> None:
    assert expected in refusal(name)


def test_an_unknown_part_of_a_kind_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"no cpu 'ryzen-9-7950'; others of that number: .*7950x, .* add a part"):
        part("cpu", "ryzen-9-7950")


# --- one memory: without a GPU, or with one that reads the host's -----------------------------------------------------


ONE_MEMORY = ["none+ddr5-5600+ryzen-9-7950x", "none+ddr4-2133+core-i3-8100+16gb", *unified_names()]


@pytest.fixture
def desktop() -> Hardware:
    return load_hardware("none+ddr5-5600+ryzen-9-7950x+64gb")


def test_without_a_gpu_the_cpus_numbers_stand_in_its_place(desktop: Hardware) -> None:
    gpu, cpu = desktop.gpu, desktop.cpu
    assert (desktop.cpu_only, desktop.one_memory, gpu.name, cpu.name) == (True, True, "no GPU", "Ryzen 9 7950X")
    assert gpu.read_bytes_per_s == pytest.approx(cpu.read_bytes_per_s)
    assert gpu.bandwidth_bytes_per_s == cpu.dram_bytes_per_s == 89.6 * GB
    assert gpu.effective_flops_per_s == cpu.flops_per_s
    assert gpu.memory_bytes == cpu.ram_bytes == 64 * GIB


def test_without_a_gpu_the_cpu_is_that_of_the_same_machine_with_one(desktop: Hardware) -> None:
    assert desktop.cpu == load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x+64gb").cpu
    assert load_hardware("none+ddr4-3200+4-channels").cpu.name == "generic server CPU"


def test_memory_that_is_not_stated_is_enough() -> None:
    machine = assemble("none", "ddr5-5600")
    assert machine.gpu.memory_bytes == 1e13
    assert machine.origins["gpu.memory_bytes"].confidence == "low"
    assert machine.cpu.ram_bytes is None


@pytest.mark.parametrize("name", unified_names())
def test_a_unified_machine_is_named_by_its_gpu_alone(name: str) -> None:
    machine, memory = load_hardware(name), part("gpu", name).memory_bytes.value
    assert (machine.cpu_only, machine.one_memory, machine.gpu.kind) == (False, True, "unified")
    assert machine.gpu.memory_bytes == machine.cpu.ram_bytes == memory
    assert machine.gpu.bandwidth_bytes_per_s == pytest.approx(machine.cpu.dram_bytes_per_s, rel=0.03)
    assert machine.cpu.read_bytes_per_s < machine.gpu.read_bytes_per_s  # its cores cannot read all
    assert assemble(name) == machine


def test_a_unified_machine_is_sold_with_less_memory() -> None:
    machine = load_hardware("apple-m3-ultra+256gb")
    assert machine.gpu.memory_bytes == machine.cpu.ram_bytes == 256 * GIB


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_in_one_memory_nothing_is_copied_and_nothing_contends(name: str) -> None:
    machine = load_hardware(name)
    assert machine.link.expert_bytes_per_s == machine.cpu.dram_bytes_per_s
    assert (machine.link.h2d_latency_ns, machine.contention.copy_permille, machine.contention.cpu_permille) == (
        100, 1000, 1000,
    )


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_the_power_of_the_chip_is_counted_once(name: str) -> None:
    power = load_hardware(name).power
    assert power is not None
    assert power.gpu_busy_w > power.gpu_idle_w > 0
    assert power.cpu_busy_w == power.cpu_idle_w == 0


def test_a_card_is_of_no_such_kind() -> None:
    machine = load_hardware("rtx-4090+ddr5-5600")
    assert (machine.cpu_only, machine.one_memory, machine.gpu.kind) == (False, False, None)
    assert "gpu.kind" not in machine.flat()


@pytest.mark.parametrize("name", ONE_MEMORY)
def test_it_is_read_back_from_its_file(name: str, tmp_path: Path) -> None:
    machine = load_hardware(name)
    write_hardware(machine, tmp_path / "mine.yaml")
    assert load_hardware(tmp_path / "mine.yaml") == machine
    assert set(machine.origins) == set(machine.flat())


def test_the_kind_of_a_machine_is_not_overridden() -> None:
    with pytest.raises(HardwareError, match="kind only describes the machine"):
        load_hardware("rtx-4090+ddr5-5600", {"gpu.kind": "unified"})


# --- two sockets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", ["xeon-gold-6138", "xeon-gold-6230", "epyc-7452", "server"])
def test_two_sockets_read_half_as_much_again_as_one(cpu: str) -> None:
    one, two = (assemble("rtx-4090", "ddr4-2666-ecc", cpu, sockets=sockets) for sockets in (None, 2))
    assert two.cpu.read_bytes_per_s == pytest.approx(1.5 * one.cpu.read_bytes_per_s, rel=1e-3)
    assert (two.cpu.sockets, two.cpu.cores) == (2, 2 * one.cpu.cores)
    assert two.cpu.dram_bytes_per_s == 2 * one.cpu.dram_bytes_per_s
    assert two.cpu.flops_per_s == pytest.approx(2 * one.cpu.flops_per_s)
    assert two.power is not None
    assert one.power is not None
    assert two.power.cpu_busy_w == 2 * one.power.cpu_busy_w


def test_few_cores_of_two_sockets_read_no_more_than_they_can() -> None:
    machine = load_hardware("none+ddr4-2666-ecc+xeon-gold-6138+2-sockets+8-cores")
    assert machine.cpu.cores == 8
    assert machine.cpu.read_bytes_per_s < 8 * 12 * GB
    assert "DDR4-2666 ECC on 2 sockets x 6 channels" in machine.about
