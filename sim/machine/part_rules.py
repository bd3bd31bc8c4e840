"""From parts to a machine's numbers: a document in the form of a preset, where every number says how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from sim.machine.part_names import Assembly
from sim.machine.parts import Number, Part, Rules, part, rules
from sim.machine.plausibility import HardwareError
from sim.machine.sourced_yaml import Origin
from sim.machine.units import GB, GIB
from sim.machine.weight_formats import read_fraction

Numbers = dict[str, Number]
_CHANNEL_BYTES = 8
_X16 = 16
_ORDER = ("high", "medium", "low")


def document_of(built: Assembly, name: str) -> dict[str, Any]:
    """The machine in the form of a preset's file. Raises HardwareError for parts that do not go together."""
    rule = rules()
    cpu = built.cpu or _generic_cpu(built)
    _check_fits(built, cpu, f"hardware {name!r}")
    numbers: dict[str, Numbers] = {
        "gpu": _gpu(built.gpu, rule),
        "cpu": _cpu(built, cpu, rule),
        "link": _link(built, cpu, rule),
        "host": _from_rules("host", rule),
    }
    numbers["contention"] = _contention(numbers["cpu"], numbers["link"], _read(built, cpu, rule), rule)
    numbers["power"] = _power(built.gpu, cpu)
    sections = {section: {key: _entry(n) for key, n in found.items()} for section, found in numbers.items()}
    return {"name": name, "about": _about(built, cpu), **sections, "notes": _notes(built, cpu, rule)}


def _generic_cpu(built: Assembly) -> Part:
    """The CPU where none is named: the one that such a memory usually has; of a desktop's memory, a laptop's where the
    GPU is one's, and a server's for more than two channels."""
    usual = str(built.memory.words["cpu"])
    if usual != "desktop":
        return part("cpu", usual)
    if built.gpu.name.endswith("-laptop"):
        return part("cpu", "laptop")
    return part("cpu", "server" if (built.channels or 1) > 2 else "desktop")


def _check_fits(built: Assembly, cpu: Part, where: str) -> None:
    """Refuse memory that the platform does not take, and more cores or channels than it has. Raises HardwareError."""
    if built.memory.family not in cpu.words["memory"]:
        raise HardwareError(
            f"{where}: {cpu.title} takes {' or '.join(cpu.words['memory'])}, not {built.memory.name}; "
            f"name another memory or CPU"
        )
    for key, asked in (("cores", built.cores), ("channels", built.channels)):
        generic = f"most_{key}" in cpu.numbers
        most = cpu.numbers[f"most_{key}" if generic else key].value
        if asked is not None and asked > most:
            raise HardwareError(
                f"{where}: {cpu.title} has {'at most ' * generic}{most} {key}, asked for {asked}"
                f"{'; name a CPU that has them' * generic}"
            )


# --- GPU --------------------------------------------------------------------------------------------------------------


def _gpu(gpu: Part, rule: Rules) -> Numbers:
    kept = ("memory_bytes", "bandwidth_bytes_per_s", "flops_per_s")
    fractions = ("bandwidth_fraction", "flops_fraction")
    return {
        "name": _given(gpu.title),
        **{key: gpu.numbers[key] for key in kept},
        **{key: gpu.numbers.get(key, rule.numbers[f"gpu.{key}"]) for key in fractions},
        **{key: rule.numbers[f"gpu.{key}"] for key in ("kernel_ns", "reserve_bytes")},
    }


# --- CPU and its memory -----------------------------------------------------------------------------------------------


def _cpu(built: Assembly, cpu: Part, rule: Rules) -> Numbers:
    read, fraction = _read(built, cpu, rule), _expert_fraction(cpu, rule)
    numbers = {
        "name": _given(cpu.title),
        "sockets": _given(1),
        "cores": _cores(built, cpu),
        "dram_bytes_per_s": _theory(built, cpu),
        "read_bytes_per_s": _product(f"{fraction.value:.3g} of a read of {read.value / GB:.1f} GB/s", fraction, read),
        "flops_per_s": _cpu_flops(built, cpu, rule),
        "first_expert_ns": rule.numbers["cpu.first_expert_ns"],
    }
    return numbers if built.ram_bytes is None else {**numbers, "ram_bytes": _given(built.ram_bytes)}


def _cores(built: Assembly, cpu: Part) -> Number:
    return cpu.numbers["cores"] if built.cores is None else _given(built.cores)


def _channels(built: Assembly, cpu: Part) -> Number:
    """Those asked for, else the named CPU's, else those that such a memory usually has."""
    return _given(built.channels) if built.channels else cpu.numbers.get("channels", built.memory.numbers["channels"])


def _theory(built: Assembly, cpu: Part) -> Number:
    channels, transfers = _channels(built, cpu), built.memory.numbers["transfers_per_s"]
    how = f"{_counted(channels.value)} x {transfers.value / 1e6:g} MT/s x {_CHANNEL_BYTES} bytes"
    value = channels.value * transfers.value * _CHANNEL_BYTES
    return Number(value, Origin(how, _least(channels, transfers)))


def _read(built: Assembly, cpu: Part, rule: Rules) -> Number:
    """What all cores together can read: the memory's share, the chip's ceiling or the cores', whichever is least."""
    theory, fraction = _theory(built, cpu), cpu.numbers["read_fraction"]
    odd = rule.numbers["cpu.odd_channels_fraction"] if _channels(built, cpu).value in (3, 5, 7, 9, 11) else None
    filled = [theory, fraction] if odd is None else [theory, fraction, odd]
    limits = [_product(f"{fraction.value:g} of the memory's theory", *filled)]
    if "read_ceiling_bytes_per_s" in cpu.numbers:
        limits.append(cpu.numbers["read_ceiling_bytes_per_s"])
    key = "cpu.server_core_read_bytes_per_s" if cpu.words["server"] else "cpu.core_read_bytes_per_s"
    cores = _cores(built, cpu)
    limits.append(_product(f"{cores.value} cores", cores, rule.numbers[key]))
    return min(limits, key=lambda number: float(number.value))


def _expert_fraction(cpu: Part, rule: Rules) -> Number:
    """Of what is read, by an expert of 16 bits: as measured, without what unpacking the measured weights cost."""
    section = cpu.numbers if "expert_fraction" in cpu.numbers else _from_rules("cpu", rule)
    measured, bits = section["expert_fraction"], section["expert_bits"].value
    unpacking = read_fraction("cpu", bits)
    if unpacking == 1.0:
        return measured
    how = f"{measured.value:g} with {bits:g} bits, which are read at {unpacking:.2f} of the rate of 16"
    return Number(min(measured.value / unpacking, 1.0), Origin(f"{how}: {measured.origin.source}", "low"))


def _cpu_flops(built: Assembly, cpu: Part, rule: Rules) -> Number:
    """Matrix products: the chip's, in proportion to the cores in use, or so much a core."""
    cores, each = _cores(built, cpu), rule.numbers["cpu.flops_per_core"]
    if "flops_per_s" not in cpu.numbers:
        return _product(f"{cores.value} cores", cores, each)
    whole, of = cpu.numbers["flops_per_s"], cpu.numbers["cores"].value
    if cores.value == of:
        return whole
    return Number(whole.value * cores.value / of, Origin(f"{cores.value} of {of} cores: {whole.origin.source}", "low"))


# --- link -------------------------------------------------------------------------------------------------------------


def _link(built: Assembly, cpu: Part, rule: Rules) -> Numbers:
    """The slower of card and slot decides, in generation and in lanes."""
    gpu, board = built.gpu.numbers, cpu.numbers.get("pcie_generation", built.memory.numbers["pcie_generation"])
    slot = built.pcie or (board.value, _X16)
    generation, lanes = min(gpu["pcie_generation"].value, slot[0]), min(gpu["pcie_lanes"].value, slot[1])
    why = f"PCIe {generation}.0 x{lanes}: the card has {gpu['pcie_generation'].value}.0 x{gpu['pcie_lanes'].value}, "
    why += f"the slot {slot[0]}.0 x{slot[1]} ({'as asked' if built.pcie else board.origin.source})"
    rates = {key: _of_lanes(number, lanes, why) for key, number in rule.pcie[generation].items()}
    return {**rates, **_from_rules("link", rule)}


def _of_lanes(x16: Number, lanes: int, why: str) -> Number:
    """A rate of sixteen lanes on fewer: in proportion, by definition or because nobody has measured it."""
    share, confidence = "", x16.origin.confidence
    if lanes < _X16:
        share, confidence = f"{lanes}/16 of ", "high" if confidence == "high" else "low"
    return Number(x16.value * lanes / _X16, Origin(f"{why}; {share}{x16.origin.source}", confidence))


# --- what parts cost each other ---------------------------------------------------------------------------------------


def _contention(cpu: Numbers, link: Numbers, read: Number, rule: Rules) -> Numbers:
    """Shares of the measured box that reads most like this one, both less where the memory could not carry the two."""
    box = min(rule.contention, key=lambda each: abs(float(each["read_bytes_per_s"].value - read.value)))
    drawn = sum(
        rates.value * box[share].value / 1000
        for rates, share in ((cpu["read_bytes_per_s"], "cpu_permille"), (link["h2d_bytes_per_s"], "copy_permille"))
    )
    fits = min(1.0, read.value / drawn)
    note = f"; times {fits:.2f}: together they read no more than {read.value / GB:.1f} GB/s" if fits < 1 else ""
    return {
        key: Number(
            max(1, int(box[key].value * fits)), Origin(f"closest measured box: {box[key].origin.source}{note}", "low")
        )
        for key in ("cpu_permille", "copy_permille")
    }


def _power(gpu: Part, cpu: Part) -> Numbers:
    board = gpu.numbers["board_power_w"]
    limit = Number(board.value, Origin("board power limit", board.origin.confidence))
    return {
        "gpu_idle_w": gpu.numbers["idle_power_w"],
        "gpu_busy_w": gpu.numbers.get("busy_power_w", limit),
        "cpu_idle_w": cpu.numbers["idle_power_w"],
        "cpu_busy_w": cpu.numbers["busy_power_w"],
    }


# --- words ------------------------------------------------------------------------------------------------------------


def _about(built: Assembly, cpu: Part) -> str:
    ram = f", {built.ram_bytes / GIB:g} GB" if built.ram_bytes else ""
    channels = _counted(_channels(built, cpu).value)
    return f"Assembled: {built.gpu.title}, {cpu.title}, {built.memory.title} on {channels}{ram}."


def _counted(channels: int) -> str:
    return f"{channels} channel{'s' * (channels > 1)}"


def _notes(built: Assembly, cpu: Part, rule: Rules) -> list[str]:
    return [*built.gpu.notes, *built.memory.notes, *cpu.notes, *rule.notes]


def _from_rules(section: str, rule: Rules) -> Numbers:
    named = ((key.partition("."), number) for key, number in rule.numbers.items())
    return {key: number for (found, _, key), number in named if found == section}


def _given(value: object) -> Number:
    return Number(value, Origin("the machine's parts", "high"))


def _product(how: str, *factors: Number) -> Number:
    """A product, to four digits, as sure as its least sure factor."""
    value = prod(float(factor.value) for factor in factors)
    sources = "; ".join(factor.origin.source for factor in factors)
    return Number(float(f"{value:.4g}"), Origin(f"{how}: {sources}", _least(*factors)))


def _least(*numbers: Number) -> str:
    return max((number.origin.confidence for number in numbers), key=_ORDER.index)


def _entry(number: Number) -> Mapping[str, Any]:
    return {"value": number.value, **number.origin._asdict()}
