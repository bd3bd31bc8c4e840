"""A machine's numbers from its parts: a document in the form of a preset, every number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.machine.assembly import NO_GPU, Assembly
from sim.machine.parts import (
    BoxRates,
    CardPart,
    CpuPart,
    CpuRules,
    GpuPart,
    MemoryPart,
    Number,
    Numbers,
    Rules,
    UnifiedPart,
    part,
    read_fraction,
    rules,
)
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced, least_sure, product
from trilane.common.units import GB, GIB

_X16 = 16
_CHANNEL_BYTES = 8
_OF_OTHER_SECTIONS = (  # numbers of a GPU that do not belong to the section "gpu"
    "board_power_w", "idle_power_w", "busy_power_w", "pcie_generation", "pcie_lanes", "windows_share", "form",
    "released",
)


def assembled(built: Assembly, name: str) -> dict[str, Any]:
    """The machine in the form of a preset's file. Raises HardwareError for parts that do not go together."""
    cpu = built.cpu or _generic_cpu(built)
    _check_fits(built, cpu, f"hardware {name!r}")
    machine = _Machine(built, HostCores(built, cpu, built.memory, rules().cpu), rules())
    numbers = machine.sections().items()
    sections = {section: {key: number._asdict() for key, number in stated.items()} for section, stated in numbers}
    return {"name": name, "about": machine.about(), **sections, "notes": machine.notes()}


def _generic_cpu(built: Assembly) -> CpuPart:
    """The CPU where none is named: the one that such a memory usually has. With a desktop's memory it is a laptop's if
    the GPU is a laptop's, and a server's for more than two channels."""
    if built.memory.cpu != "desktop":
        return part("cpu", built.memory.cpu)
    if built.gpu is not None and built.gpu.name.endswith("-laptop"):
        return part("cpu", "laptop")
    return part("cpu", "server" if (built.channels or 1) > 2 or built.sockets > 1 else "desktop")


def _check_fits(built: Assembly, cpu: CpuPart, where: str) -> None:
    """Refuse memory that the platform does not take, and more cores, channels or sockets than it has."""
    if built.memory.family not in cpu.memory:
        raise HardwareError(
            f"{where}: {cpu.title} takes {' or '.join(cpu.memory)}, not {built.memory.name}; name another memory or CPU"
        )
    if built.sockets > 1 and not cpu.server:
        raise HardwareError(f"{where}: {cpu.title} has 1 socket, got {built.sockets}; name a server's CPU")
    counts = (
        ("cores", built.cores, cpu.most_cores, cpu.cores, built.sockets),
        ("channels", built.channels, cpu.most_channels, cpu.channels, 1),
    )
    for key, count, most, own, times in counts:
        limit = most or own
        if count is not None and limit is not None and count > limit.value * times:
            raise HardwareError(
                f"{where}: {cpu.title} has {'at most ' * (most is not None)}{limit.value * times} {key}, got {count}"
                f"{'; name a CPU that has them' * (most is not None)}"
            )


@dataclass(frozen=True)
class _Machine:
    """Parts that go together, and the numbers that follow from them."""

    built: Assembly
    host: HostCores
    rules: Rules

    def sections(self) -> dict[str, Numbers]:
        """All numbers, by section."""
        return {
            "gpu": self._gpu(), "cpu": self.host.section(), "link": self._link(), "host": self.rules.host,
            "contention": self._contention(), "power": self._power(),
        }

    def about(self) -> str:
        """The machine in one line."""
        built = self.built
        ram = f", {built.ram_bytes / GIB:g} GiB" if built.ram_bytes else ""
        memory = f"{built.memory.title} on {self.host.populated}"
        return f"Assembled: {self.gpu.title}, {self.host.cpu.title}, {memory}{ram}."

    def notes(self) -> list[str]:
        """The notes of its parts."""
        if isinstance(self.built.gpu, UnifiedPart):
            return [*self.gpu.notes]
        return [*self.gpu.notes, *self.built.memory.notes, *self.host.cpu.notes]

    # --- GPU ----------------------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> GpuPart:
        """The GPU, or the CPU in its place."""
        return self.built.gpu or self._no_gpu()

    def _gpu(self) -> Numbers:
        gpu, ram = self.gpu, self.built.ram_bytes
        stated = {key: number for key, number in gpu.numbers.items() if key not in _OF_OTHER_SECTIONS}
        if isinstance(gpu, CardPart):
            return {"name": given(gpu.title), **self.rules.gpu, **stated}
        memory = {} if ram is None else {"memory_bytes": given(ram)}
        rules = {**self.rules.gpu, **self.rules.one_memory["gpu"]}
        kind = given("unified" if self.built.gpu else "cpu")
        return {"name": given(gpu.title), "kind": kind, **rules, **stated, **memory}

    def _no_gpu(self) -> UnifiedPart:
        """The CPU and its memory in place of a GPU."""
        host, theory, read = self.host, self.host.theory, self.host.expert_read
        fraction = Sourced(read.value / theory.value, read.source, read.confidence)
        return UnifiedPart(
            name=NO_GPU, title="no GPU", memory=self.built.memory.name, cpu=host.cpu.name,
            bandwidth_bytes_per_s=theory, bandwidth_fraction=fraction,
            flops_per_s=host.flops, flops_fraction=Sourced(1.0, "as the CPU's own rate", "high"),
            board_power_w=host.of_all_sockets(host.cpu.busy_power_w),
            idle_power_w=host.of_all_sockets(host.cpu.idle_power_w),
            memory_bytes=self.rules.no_gpu["memory_bytes"], kernel_ns=self.rules.no_gpu["kernel_ns"],
        )

    def _power(self) -> Numbers:
        gpu, host = self.gpu, self.host
        busy = gpu.busy_power_w or gpu.board_power_w._replace(source="board power limit")
        numbers = {"gpu_idle_w": gpu.idle_power_w, "gpu_busy_w": busy}
        if isinstance(gpu, UnifiedPart):
            return {**numbers, **self.rules.one_memory["power"]}
        cpu = {"cpu_idle_w": host.cpu.idle_power_w, "cpu_busy_w": host.cpu.busy_power_w}
        return {**numbers, **{key: host.of_all_sockets(number) for key, number in cpu.items()}}

    # --- link ---------------------------------------------------------------------------------------------------------

    def _link(self) -> Numbers:
        """The slower of card and slot decides, in generation and in lanes. In one memory nothing is copied."""
        gpu, board = self.gpu, self.host.cpu.pcie_generation or self.built.memory.pcie_generation
        if not isinstance(gpu, CardPart):
            rates = dict.fromkeys(self.rules.pcie[board.value], self.host.theory)
            return {**self.rules.link, **rates, **self.rules.one_memory["link"]}
        slot = self.built.pcie or (board.value, _X16)
        generation, lanes = min(gpu.pcie_generation.value, slot[0]), min(gpu.pcie_lanes.value, slot[1])
        why = f"PCIe {generation}.0 x{lanes}: the card has {gpu.pcie_generation.value}.0 x{gpu.pcie_lanes.value}, "
        why += f"the slot {slot[0]}.0 x{slot[1]} ({'as named' if self.built.pcie else board.source})"
        rates = {key: _of_lanes(rate, lanes, why) for key, rate in self.rules.pcie[generation].items()}
        return {**rates, **self.rules.link}

    # --- what parts cost each other -----------------------------------------------------------------------------------

    def _contention(self) -> Numbers:
        """Shares of the measured box with the closest read rate, both less where the memory could not carry the two."""
        if isinstance(self.gpu, UnifiedPart):
            return self.rules.one_memory["contention"]
        read, expert, copies = self.host.read, self.host.expert_read, self._link()["h2d_bytes_per_s"]
        box: BoxRates = min(
            self.rules.contention.values(), key=lambda rates: abs(float(rates.read_bytes_per_s.value - read.value))
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


# --- CPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostCores:
    """The processor of a machine of parts with its memory: as many cores, channels and sockets as are in use."""

    built: Assembly
    cpu: CpuPart
    memory: MemoryPart
    rules: CpuRules

    def section(self) -> Numbers:
        """The section ``cpu`` of the machine."""
        numbers = {
            "name": given(self.cpu.title), "sockets": given(self.built.sockets), "cores": self.cores,
            "dram_bytes_per_s": self.theory, "read_bytes_per_s": self.expert_read,
            "read_ceiling_bytes_per_s": self._of_experts(self.ceiling), "flops_per_s": self.flops,
            "first_expert_ns": self.rules.first_expert_ns, "clock_hz": self.cpu.clock_hz,
            "instructions": self.cpu.instructions,
        }
        if self.cpu.vector_bits:
            numbers["vector_bits"] = self.cpu.vector_bits
        if self.efficiency_cores:
            numbers["efficiency_cores"] = self.efficiency_cores
        ram = self.built.ram_bytes
        return numbers if ram is None else {**numbers, "ram_bytes": given(ram)}

    @property
    def cores(self) -> Number:
        """Cores in use, all sockets together."""
        if self.built.cores is not None:
            return given(self.built.cores)
        return self.of_all_sockets(self.cpu.cores)

    @property
    def efficiency_cores(self) -> Number | None:
        """Slow cores in use: those that are left when the fast ones are taken. None: none."""
        slow = self.cpu.efficiency_cores
        if slow is None:
            return None
        left = max(self.cores.value - (self.cpu.cores.value - slow.value), 0)
        return slow._replace(value=left) if left else None

    @property
    def channels(self) -> Number:
        """Channels of a socket: as in the machine's name, else the named CPU's, else what such a memory usually has."""
        return given(self.built.channels) if self.built.channels else self.cpu.channels or self.memory.channels

    @property
    def theory(self) -> Number:
        """Bandwidth on paper of the memory of all sockets, in bytes/s."""
        channels, transfers, sockets = self.channels, self.memory.transfers_per_s, self.built.sockets
        how = f"{self.populated} x {transfers.value / 1e6:g} MT/s x {_CHANNEL_BYTES} bytes"
        value = channels.value * transfers.value * _CHANNEL_BYTES * sockets
        return Sourced(value, how, least_sure(channels, transfers))

    @property
    def populated(self) -> str:
        """``2 channels``, or ``2 sockets x 6 channels``."""
        count, sockets = self.channels.value, self.built.sockets
        return f"{f'{sockets} sockets x ' * (sockets > 1)}{count} channel{'s' * (count > 1)}"

    def of_all_sockets(self, number: Number) -> Number:
        """A number of one socket times the count of sockets."""
        sockets = self.built.sockets
        if sockets == 1:
            return number
        return Sourced(number.value * sockets, f"{sockets} sockets: {number.source}", number.confidence)

    @property
    def read(self) -> Number:
        """Rate at which all cores together read, in bytes/s: the memory's share, or less where they cannot."""
        return min(self._over_sockets(self._filled()), self.ceiling, key=lambda number: float(number.value))

    @property
    def ceiling(self) -> Number:
        """Highest rate at which the cores read any memory, in bytes/s: the chip's ceiling, or the cores' own."""
        cores, rule = self.cores, self.rules
        usual = rule.server_core_read_bytes_per_s if self.cpu.server else rule.core_read_bytes_per_s
        limits = [
            *([self._over_sockets(most)] if (most := self.cpu.read_ceiling_bytes_per_s) else []),
            product(f"{cores.value} cores", cores, self.cpu.core_read_bytes_per_s or usual),
        ]
        return min(limits, key=lambda number: float(number.value))

    def _filled(self) -> Number:
        """Rate at which the cores of one socket read its memory, in bytes/s."""
        channels, fraction = self.channels, self.cpu.read_fraction
        theory = Sourced(self.theory.value / self.built.sockets, self.theory.source, self.theory.confidence)
        odd = [self.rules.odd_channels_fraction] if channels.value in (3, 5, 7, 9, 11) else []
        return product(f"{fraction.value:g} of the memory's theory", theory, fraction, *odd)

    def _over_sockets(self, read: Number) -> Number:
        """Rate of all sockets, from that of one."""
        if self.built.sockets == 1:
            return read
        return product("two sockets", read, self.rules.two_sockets_read)

    @property
    def expert_read(self) -> Number:
        """Rate at which an expert's matrix-vector product reads, in bytes/s."""
        return self._of_experts(self.read)

    def _of_experts(self, read: Number) -> Number:
        """The share of a rate that an expert's matrix-vector product reaches."""
        fraction = self._expert_fraction()
        return product(f"{fraction.value:.3g} of a read of {read.value / GB:.1f} GB/s", fraction, read)

    def _expert_fraction(self) -> Number:
        """Share of the read rate that an expert of 16 bits reaches: as measured, less the cost of unpacking."""
        stated = self.cpu if self.cpu.expert_fraction and self.cpu.expert_bits else self.rules
        measured, bits = stated.expert_fraction, stated.expert_bits
        assert measured is not None
        assert bits is not None
        unpacking = read_fraction("cpu", bits.value)
        if unpacking == 1.0:
            return measured
        how = f"{measured.value:g} with {bits.value:g} bits, which are read at {unpacking:.2f} of the rate of 16"
        return Sourced(min(measured.value / unpacking, 1.0), f"{how}: {measured.source}", "low")

    @property
    def flops(self) -> Number:
        """Rate of matrix products in flop/s: the chip's, in proportion to the cores in use, or a rate per core."""
        cores, whole, own = self.cores, self.cpu.flops_per_s, self.cpu.cores.value
        if whole is None:
            return product(f"{cores.value} cores", cores, self.rules.flops_per_core)
        if cores.value == own:
            return whole
        return Sourced(whole.value * cores.value / own, f"{cores.value} of {own} cores: {whole.source}", "low")


def given(value: object) -> Number:
    """A value that the name of the machine states."""
    return Sourced(value, "the machine's parts", "high")
