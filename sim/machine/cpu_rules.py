"""What the cores of a machine of parts read and compute, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass

from sim.machine.assembly import Assembly
from sim.machine.part_kinds import CpuPart, CpuRules, MemoryPart, Number, Numbers
from sim.machine.sourced import Sourced, least_sure, product
from sim.machine.weight_formats import read_fraction
from trilane.common.units import GB

_CHANNEL_BYTES = 8


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
            "first_expert_ns": self.rules.first_expert_ns,
        }
        ram = self.built.ram_bytes
        return numbers if ram is None else {**numbers, "ram_bytes": given(ram)}

    @property
    def cores(self) -> Number:
        """In use, all sockets together."""
        if self.built.cores is not None:
            return given(self.built.cores)
        return self.of_all_sockets(self.cpu.cores)

    @property
    def channels(self) -> Number:
        """Of a socket: those in the machine's name, else the named CPU's, else those that such a memory usually has."""
        return given(self.built.channels) if self.built.channels else self.cpu.channels or self.memory.channels

    @property
    def theory(self) -> Number:
        """What the memory of all sockets carries on paper."""
        channels, transfers, sockets = self.channels, self.memory.transfers_per_s, self.built.sockets
        how = f"{self.populated} x {transfers.value / 1e6:g} MT/s x {_CHANNEL_BYTES} bytes"
        value = channels.value * transfers.value * _CHANNEL_BYTES * sockets
        return Sourced(value, how, least_sure(channels, transfers))

    @property
    def populated(self) -> str:
        """``2 channels``, or ``2 sockets x 6 channels``."""
        count, sockets = self.channels.value, self.built.sockets
        return f"{f'{sockets} sockets x ' * (sockets > 1)}{count} channel{'s' * (count > 1)}"

    def of_all_sockets(self, each: Number) -> Number:
        """A number of one socket times their count."""
        sockets = self.built.sockets
        if sockets == 1:
            return each
        return Sourced(each.value * sockets, f"{sockets} sockets: {each.source}", each.confidence)

    @property
    def read(self) -> Number:
        """What all cores together can read: the memory's share, or less where they cannot."""
        return min(self._over_sockets(self._filled()), self.ceiling, key=lambda number: float(number.value))

    @property
    def ceiling(self) -> Number:
        """The most that they read of any memory: the chip's ceiling, or the cores' rate."""
        cores, rule = self.cores, self.rules
        usual = rule.server_core_read_bytes_per_s if self.cpu.server else rule.core_read_bytes_per_s
        limits = [
            *([self._over_sockets(most)] if (most := self.cpu.read_ceiling_bytes_per_s) else []),
            product(f"{cores.value} cores", cores, self.cpu.core_read_bytes_per_s or usual),
        ]
        return min(limits, key=lambda number: float(number.value))

    def _filled(self) -> Number:
        """The share of one socket's memory that its cores read."""
        channels, fraction = self.channels, self.cpu.read_fraction
        theory = Sourced(self.theory.value / self.built.sockets, self.theory.source, self.theory.confidence)
        odd = [self.rules.odd_channels_fraction] if channels.value in (3, 5, 7, 9, 11) else []
        return product(f"{fraction.value:g} of the memory's theory", theory, fraction, *odd)

    def _over_sockets(self, read: Number) -> Number:
        """What one socket reads, or two of them."""
        if self.built.sockets == 1:
            return read
        return product("two sockets", read, self.rules.two_sockets_read)

    @property
    def expert_read(self) -> Number:
        """What an expert's matrix-vector product reads."""
        return self._of_experts(self.read)

    def _of_experts(self, read: Number) -> Number:
        """The share of a rate that an expert's matrix-vector product reaches."""
        fraction = self._expert_fraction()
        return product(f"{fraction.value:.3g} of a read of {read.value / GB:.1f} GB/s", fraction, read)

    def _expert_fraction(self) -> Number:
        """Of what is read, by an expert of 16 bits: as measured, without the cost of unpacking the measured weights."""
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
        """Matrix products: the chip's, in proportion to the cores in use, or a rate per core."""
        cores, whole, own = self.cores, self.cpu.flops_per_s, self.cpu.cores.value
        if whole is None:
            return product(f"{cores.value} cores", cores, self.rules.flops_per_core)
        if cores.value == own:
            return whole
        return Sourced(whole.value * cores.value / own, f"{cores.value} of {own} cores: {whole.source}", "low")


def given(value: object) -> Number:
    """What the name of the machine says."""
    return Sourced(value, "the machine's parts", "high")
