"""The question that people ask most: what will this model do on that machine?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.costs.runtimes import RUNTIMES, Runtime
from sim.machine.assembly import assembled_name
from sim.machine.hardware import load_hardware
from traces.models.catalogue import load_model

USUAL_WEIGHTS = "q4_k_m"
UNQUANTISED_BITS = 16


class FitError(ValueError):
    """A question without an answer: what was asked is incomplete, or cannot run; the message says by how many GB."""


@dataclass(frozen=True)
class Question:
    """A model, a machine, and what is to be done there.

    The machine is made of parts (``gpu``, ``ram``, and ``cpu`` or ``cores``), or a preset or profile (``machine``).
    ``weights``: a quantisation; None: q4_k_m, or the model's own where it is published in fewer than 16 bits or the
    machine is a profile, which was measured with these.
    ``context``: prompt tokens; ``generated``: tokens of the answer; of each of ``batch`` sequences. ``ram_gb``: all
    memory of the host in GB of 2^30 bytes, as it is sold; None: enough. ``trace``, and ``calibration``, one of
    other prompts that policies may know: None: see ``fit.routing``. ``policies``: those to choose from; None:
    those of ``trilane.study.fit.candidates``. ``runtime``: see ``sim.costs.runtimes``.
    """

    model: str
    gpu: str | None = None
    ram: str | None = None
    cpu: str | None = None
    cores: int | None = None
    channels: int | None = None
    pcie: str | None = None
    machine: str | None = None
    ram_gb: int | None = None
    weights: str | None = None
    context: int = 4096
    generated: int = 256
    batch: int = 1
    trace: str | None = None
    calibration: str | None = None
    policies: tuple[str, ...] | None = None
    runtime: Runtime = "graphs"

    def __post_init__(self) -> None:
        """Counts are counts, the machine is named once, and a question can be the key to its answer."""
        if self.policies is not None:
            object.__setattr__(self, "policies", tuple(self.policies))
        for name in ("context", "generated", "batch", "cores", "channels", "ram_gb"):
            _check_count(name, getattr(self, name))
        if self.runtime not in RUNTIMES:
            raise FitError(f"fit: runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        if "@" in self.model and self.weights is not None:
            raise FitError(f"fit: model {self.model!r} with weights {self.weights!r} names its weights twice")
        parts = [name for name in ("gpu", "ram", "cpu", "cores", "channels", "pcie") if getattr(self, name) is not None]
        if self.machine is not None and parts:
            raise FitError(f"fit: expected a machine or its parts, got machine {self.machine!r} and {_and(parts)}")
        if self.machine is None and not (self.gpu and self.ram):
            raise FitError(
                "fit: expected gpu and ram (such as rtx-4080 and ddr5-5600), or machine, a preset or a profile's file"
            )

    @property
    def hardware(self) -> str:
        """The machine's name, as ``load_hardware`` knows it. Raises HardwareError for a part that is none."""
        if self.machine is not None:
            return self.machine
        return assembled_name(
            self.gpu or "", self.ram or "", self.cpu, cores=self.cores, channels=self.channels, pcie=self.pcie
        )

    @property
    def shape(self) -> str:
        """The name of the model with its weights, as ``load_model`` knows it."""
        if self.weights is not None:
            return with_weights(self.model, self.weights)
        own = "@" in self.model or load_model(self.model).weight_bits < UNQUANTISED_BITS
        return self.model if own or self._measured else with_weights(self.model, USUAL_WEIGHTS)

    @property
    def _measured(self) -> bool:
        return self.machine is not None and load_hardware(self.machine).measured

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, prompt and answer: what the KV cache holds in the end."""
        return self.context + self.generated


def with_weights(model: str, weights: str) -> str:
    """The name of a model in a quantisation."""
    whole, cut = parted(model)
    return f"{whole}@{weights}{cut}"


def parted(model: str) -> tuple[str, str]:
    """The name of the whole model in its own weights, and ``:N`` if it is cut after N layers."""
    whole, colon, layers = model.partition(":")
    return whole.partition("@")[0], colon + layers


def _check_count(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise FitError(f"fit: {name} must be a whole number >= 1, got {value!r}")


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
