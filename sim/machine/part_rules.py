"""From parts to a machine's numbers: a document in the form of a preset, every number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from sim.machine.assembly import Assembly
from sim.machine.devices import Gpu
from sim.machine.parts import BoxRates, CpuPart, Number, Numbers, Rules, part, rules
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Confidence, Sourced
from sim.machine.units import GB, GIB
from sim.machine.weight_formats import read_fraction
from trilane.common.hints import hints_of

_CHANNEL_BYTES = 8
_X16 = 16
_ORDER: tuple[Confidence, ...] = ("high", "medium", "low")


def document_of(built: Assembly, name: str) -> dict[str, Any]:
    """The machine in the form of a preset's file. Raises HardwareError for parts that do not go together."""
    machine = _Machine(built, built.cpu or _generic_cpu(built), rules())
    _check_fits(built, machine.cpu, f"hardware {name!r}")
    numbers = machine.sections().items()
    sections = {section: {key: number._asdict() for key, number in found.items()} for section, found in numbers}
    return {"name": name, "about": machine.about(), **sections, "notes": machine.notes()}


def _generic_cpu(built: Assembly) -> CpuPart:
    """The CPU where none is named: the one that such a memory usually has. With a desktop's memory it is a laptop's if
    the GPU is a laptop's, and a server's for more than two channels."""
    if built.memory.cpu != "desktop":
        return part("cpu", built.memory.cpu)
    if built.gpu.name.endswith("-laptop"):
        return part("cpu", "laptop")
    return part("cpu", "server" if (built.channels or 1) > 2 else "desktop")


def _check_fits(built: Assembly, cpu: CpuPart, where: str) -> None:
    """Refuse memory that the platform does not take, and more cores or channels than it has. Raises HardwareError."""
    if built.memory.family not in cpu.memory:
        raise HardwareError(
            f"{where}: {cpu.title} takes {' or '.join(cpu.memory)}, not {built.memory.name}; name another memory or CPU"
        )
    counts = (
        ("cores", built.cores, cpu.most_cores, cpu.cores),
        ("channels", built.channels, cpu.most_channels, cpu.channels),
    )
    for key, given, most, own in counts:
        limit = most or own
        if given is not None and limit is not None and given > limit.value:
            raise HardwareError(
                f"{where}: {cpu.title} has {'at most ' * (most is not None)}{limit.value} {key}, got {given}"
                f"{'; name a CPU that has them' * (most is not None)}"
            )


@dataclass(frozen=True)
class _Machine:
    """Parts that go together, and the numbers that follow from them."""

    built: Assembly
    cpu: CpuPart
    rules: Rules

    def sections(self) -> dict[str, Numbers]:
        """All numbers, by section."""
        return {
            "gpu": self._gpu(), "cpu": self._cpu(), "link": self._link(), "host": self.rules.host,
            "contention": self._contention(), "power": self._power(),
        }  # fmt: skip

    def about(self) -> str:
        """The machine in one line."""
        built = self.built
        ram = f", {built.ram_bytes / GIB:g} GiB" if built.ram_bytes else ""
        memory = f"{built.memory.title} on {_counted(self._channels)}"
        return f"Assembled: {built.gpu.title}, {self.cpu.title}, {memory}{ram}."

    def notes(self) -> list[str]:
        """The notes of its parts."""
        return [*self.built.gpu.notes, *self.built.memory.notes, *self.cpu.notes, *self.rules.notes]

    # --- GPU ----------------------------------------------------------------------------------------------------------

    def _gpu(self) -> Numbers:
        gpu = self.built.gpu
        stated = {key: number for key, number in gpu.numbers.items() if key in hints_of(Gpu)}
        return {"name": _given(gpu.title), **self.rules.gpu, **stated}

    def _power(self) -> Numbers:
        board = self.built.gpu.board_power_w
        return {
            "gpu_idle_w": self.built.gpu.idle_power_w,
            "gpu_busy_w": self.built.gpu.busy_power_w or board._replace(source="board power limit"),
            "cpu_idle_w": self.cpu.idle_power_w,
            "cpu_busy_w": self.cpu.busy_power_w,
        }

    # --- CPU and its memory -------------------------------------------------------------------------------------------

    def _cpu(self) -> Numbers:
        numbers = {
            "name": _given(self.cpu.title), "sockets": _given(1), "cores": self._cores,
            "dram_bytes_per_s": self._theory(), "read_bytes_per_s": self._expert_read(),
            "flops_per_s": self._cpu_flops(),
            "first_expert_ns": self.rules.cpu.first_expert_ns,
        }  # fmt: skip
        ram = self.built.ram_bytes
        return numbers if ram is None else {**numbers, "ram_bytes": _given(ram)}

    @property
    def _cores(self) -> Number:
        return self.cpu.cores if self.built.cores is None else _given(self.built.cores)

    @property
    def _channels(self) -> Number:
        """Those in the machine's name, else the named CPU's, else those that such a memory usually has."""
        return _given(self.built.channels) if self.built.channels else self.cpu.channels or self.built.memory.channels

    def _theory(self) -> Number:
        """What the memory carries on paper."""
        channels, transfers = self._channels, self.built.memory.transfers_per_s
        how = f"{_counted(channels)} x {transfers.value / 1e6:g} MT/s x {_CHANNEL_BYTES} bytes"
        return Sourced(channels.value * transfers.value * _CHANNEL_BYTES, how, _least(channels, transfers))

    def _read(self) -> Number:
        """What all cores together can read: the least of the memory's share, the chip's ceiling and the cores' rate."""
        fraction, rule, cores = self.cpu.read_fraction, self.rules.cpu, self._cores
        filled = [self._theory(), fraction]
        if self._channels.value in (3, 5, 7, 9, 11):
            filled.append(rule.odd_channels_fraction)
        usual = rule.server_core_read_bytes_per_s if self.cpu.server else rule.core_read_bytes_per_s
        limits = [
            _product(f"{fraction.value:g} of the memory's theory", *filled),
            *([self.cpu.read_ceiling_bytes_per_s] if self.cpu.read_ceiling_bytes_per_s else []),
            _product(f"{cores.value} cores", cores, self.cpu.core_read_bytes_per_s or usual),
        ]
        return min(limits, key=lambda number: float(number.value))

    def _expert_read(self) -> Number:
        """What an expert's matrix-vector product reads."""
        read, fraction = self._read(), self._expert_fraction()
        return _product(f"{fraction.value:.3g} of a read of {read.value / GB:.1f} GB/s", fraction, read)

    def _expert_fraction(self) -> Number:
        """Of what is read, by an expert of 16 bits: as measured, without the cost of unpacking the measured weights."""
        stated = self.cpu if self.cpu.expert_fraction and self.cpu.expert_bits else self.rules.cpu
        measured, bits = stated.expert_fraction, stated.expert_bits
        assert measured is not None
        assert bits is not None
        unpacking = read_fraction("cpu", bits.value)
        if unpacking == 1.0:
            return measured
        how = f"{measured.value:g} with {bits.value:g} bits, which are read at {unpacking:.2f} of the rate of 16"
        return Sourced(min(measured.value / unpacking, 1.0), f"{how}: {measured.source}", "low")

    def _cpu_flops(self) -> Number:
        """Matrix products: the chip's, in proportion to the cores in use, or a rate per core."""
        cores, whole, own = self._cores, self.cpu.flops_per_s, self.cpu.cores.value
        if whole is None:
            return _product(f"{cores.value} cores", cores, self.rules.cpu.flops_per_core)
        if cores.value == own:
            return whole
        return Sourced(whole.value * cores.value / own, f"{cores.value} of {own} cores: {whole.source}", "low")

    # --- link ---------------------------------------------------------------------------------------------------------

    def _link(self) -> Numbers:
        """The slower of card and slot decides, in generation and in lanes."""
        gpu, board = self.built.gpu, self.cpu.pcie_generation or self.built.memory.pcie_generation
        slot = self.built.pcie or (board.value, _X16)
        generation, lanes = min(gpu.pcie_generation.value, slot[0]), min(gpu.pcie_lanes.value, slot[1])
        why = f"PCIe {generation}.0 x{lanes}: the card has {gpu.pcie_generation.value}.0 x{gpu.pcie_lanes.value}, "
        why += f"the slot {slot[0]}.0 x{slot[1]} ({'as named' if self.built.pcie else board.source})"
        rates = {key: _of_lanes(rate, lanes, why) for key, rate in self.rules.pcie[generation].items()}
        return {**rates, **self.rules.link}

    # --- what parts cost each other -----------------------------------------------------------------------------------

    def _contention(self) -> Numbers:
        """Shares of the measured box with the closest read rate, both less where the memory could not carry the two."""
        read, expert, copies = self._read(), self._expert_read(), self._link()["h2d_bytes_per_s"]
        box: BoxRates = min(
            self.rules.contention.values(), key=lambda each: abs(float(each.read_bytes_per_s.value - read.value))
        )
        drawn = expert.value * box.cpu_permille.value / 1000 + copies.value * box.copy_permille.value / 1000
        fits = min(1.0, read.value / drawn)
        note = f"; times {fits:.2f}: together they read no more than {read.value / GB:.1f} GB/s" if fits < 1 else ""
        return {
            key: Sourced(max(1, int(share.value * fits)), f"closest measured box: {share.source}{note}", "low")
            for key, share in (("cpu_permille", box.cpu_permille), ("copy_permille", box.copy_permille))
        }


def _of_lanes(x16: Number, lanes: int, why: str) -> Number:
    """A rate of sixteen lanes on fewer: in proportion, by definition or because it was not measured."""
    share, confidence = "", x16.confidence
    if lanes < _X16:
        share, confidence = f"{lanes}/16 of ", "high" if confidence == "high" else "low"
    return Sourced(x16.value * lanes / _X16, f"{why}; {share}{x16.source}", confidence)


def _counted(channels: Number) -> str:
    return f"{channels.value} channel{'s' * (channels.value > 1)}"


def _given(value: object) -> Number:
    return Sourced(value, "the machine's parts", "high")


def _product(how: str, *factors: Number) -> Number:
    """A product, to four digits, with the confidence of its least certain factor."""
    value = prod(float(factor.value) for factor in factors)
    sources = "; ".join(factor.source for factor in factors)
    return Sourced(float(f"{value:.4g}"), f"{how}: {sources}", _least(*factors))


def _least(*numbers: Number) -> Confidence:
    return max((number.confidence for number in numbers), key=_ORDER.index)
