"""The numbers that decide whether an idea pays: the values that a map varies, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from policies.papers.strata import share_of_link
from sim.machine.dials import DIALS, plausible_range
from sim.runs.prepare import Prepared
from trilane.common.units import GB

Values = tuple[float, ...]
Bounds = tuple[float, float]
_NEAR = 0.4  # of a step: values that are nearer to the machine's own are left out
_MOST_DRAFTS = 64  # that a scenario takes


@dataclass(frozen=True)
class Dimension:
    """One of the two numbers that decide.

    ``axis``: its name in a sweep. ``label``: what is shown, with its unit. ``own``: the machine's value, of a question
    that is prepared with the idea. ``around``: the values of a map, ascending as they are shown, with the machine's own
    among them. ``bounds``: the lowest and the highest value that means something. ``shown``: what is shown of the
    question prepared with a value; None: the value. ``is_share``: in percent. ``in_words``: what a side with a value is
    said to have, where the two sides differ in it.
    """

    axis: str
    label: str
    own: Callable[[Prepared], float]
    around: Callable[[float], Values]
    bounds: Callable[[Prepared], Bounds]
    shown: Callable[[Prepared], float] | None = None
    is_share: bool = False
    in_words: str = ""

    def values(self, prepared: Prepared, own: float, times: float = 1.0) -> Values:
        """Values of a map which are within the bounds, also ``times`` as large; the own one is among them."""
        low, high = self.bounds(prepared)
        return tuple(value for value in self.around(own) if low <= value <= high / times)


def fixed(low: float, high: float) -> Callable[[Prepared], Bounds]:
    """Bounds that are the same for every model and machine."""
    return lambda prepared: (low, high)


def with_own(values: Values, own: float) -> Values:
    """Fixed values and the machine's own, without those next to it."""
    step = (values[-1] - values[0]) / (len(values) - 1)
    return tuple(sorted([own, *(value for value in values if abs(value - own) > _NEAR * step)]))


def multiples(ratio: float, below: int, above: int, own: float) -> Values:
    """The own value times powers of a ratio, ``below`` of them smaller and ``above`` of them larger."""
    return tuple(own * ratio**power for power in range(-below, above + 1))


# --- own values -------------------------------------------------------------------------------------------------------


def _dial(name: str, prepared: Prepared) -> float:
    dial = DIALS[name]
    return float(prepared.hardware.flat()[dial.keys[0]]) / dial.unit


def _share(prepared: Prepared) -> float:
    """The share of the experts that fit the GPU's memory, rounded down so that they do."""
    return prepared.memory.slots * 1000 // (prepared.shape.moe_layers * prepared.shape.experts) / 1000


def _recall(prepared: Prepared) -> float:
    """The recall of forecasts of the next layer."""
    recalls = prepared.scenario.noisy_forecast_recall
    assert recalls is not None  # a question states them
    return recalls[0]


def _deferred(prepared: Prepared) -> int:
    """Half of a token's experts (ours; KTransformers' artefact has 4 of 6, 4 of 8 and 6 of 8: docs/readings.md)."""
    return prepared.shape.top_k // 2


def _up_to_top_k(prepared: Prepared) -> Bounds:
    return 1, prepared.shape.top_k


def _counted(own: float) -> Values:
    """Whole numbers from 1, or six below the own, to one more than that."""
    return tuple(range(max(round(own) - 6, 1), round(own) + 2))


def _pcie_share(prepared: Prepared) -> float:
    """The engine's own before it looked for one: by the link's rate."""
    return round(share_of_link(prepared.costs.experts), 2)


def _half_of_cores(prepared: Prepared) -> int:
    return max(prepared.hardware.cpu.fast_cores // 2, 1)


def _up_to_cores(prepared: Prepared) -> Bounds:
    return 1, max(prepared.hardware.cpu.cores, 2)


def _doubled(own: float) -> Values:
    """The own number, its half, quarter and eighth, and twice and four times it, each a whole number."""
    return tuple(sorted({max(round(own) // 8, 1), max(round(own) // 4, 1), max(round(own) // 2, 1), round(own),
                         2 * round(own), 4 * round(own)}))


def _memory(prepared: Prepared) -> float:
    return prepared.hardware.gpu.memory_bytes / GB


def _plausible(name: str, prepared: Prepared) -> Bounds:
    return plausible_range(prepared.hardware, name)


def upload_us(prepared: Prepared) -> float:
    """Time to copy the mean expert, in us."""
    experts = prepared.costs.experts
    return sum(expert.copy_ns for expert in experts) / len(experts) / 1e3


# --- the dimensions ---------------------------------------------------------------------------------------------------

ACCEPTED = 0.7  # assumed: 42 % were measured (ik_llama.cpp issue 2369), 85 to 90 % published (DeepSeek-V3, 5.4.3)
DRAFTED = 3  # assumed (ours)
_SHARES = fixed(0.0, 1.0)
_LINKS, _DRAMS = partial(_plausible, "pcie_gbps"), partial(_plausible, "dram_gbps")

SHARE = Dimension(
    "cached_share", "experts on the GPU (share of all)", _share, partial(with_own, (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)),
    _SHARES, is_share=True,
)
LINK = Dimension(
    "pcie_gbps", "link, host to GPU (GB/s)", partial(_dial, "pcie_gbps"), partial(multiples, 2.0, 2, 2), _LINKS,
    in_words="{} GB/s",
)
UPLOAD = Dimension(
    "pcie_gbps", "upload of an expert (us)", partial(_dial, "pcie_gbps"), partial(multiples, 0.5, 1, 4), _LINKS,
    upload_us,
)
DRAM = Dimension(
    "dram_gbps", "DRAM bandwidth that CPU experts reach (GB/s)", partial(_dial, "dram_gbps"),
    partial(multiples, 2**0.5, 3, 3), _DRAMS,
)
MEMORY = Dimension(
    "gpu_memory_gb", "GPU memory (GB)", _memory, partial(multiples, 1.25, 3, 3), fixed(0.1, 10_000.0),
    in_words="{} GB",
)
RECALL = Dimension(
    "noisy_forecast_recall", "recall of forecasts (share of the experts)", _recall,
    partial(with_own, (0.2, 0.4, 0.6, 0.8, 1.0)), _SHARES, is_share=True,
)
ACCEPTANCE = Dimension(
    "draft_acceptance", "chance that the next draft is accepted", lambda _: ACCEPTED,
    partial(with_own, (0.2, 0.4, 0.6, 0.8, 0.95)), _SHARES, is_share=True,
)
DRAFTS = Dimension(
    "draft_tokens", "drafts a step", lambda _: DRAFTED, partial(with_own, (1, 2, 4, 6, 8)), fixed(1, _MOST_DRAFTS),
    in_words="{} drafts a step",
)
PCIE_SHARE = Dimension(
    "parameters.pcie_share", "missed experts that cross the link (share)", _pcie_share,
    partial(with_own, (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)), _SHARES, is_share=True, in_words="{} of the misses copied",
)
THREADS = Dimension(
    "threads", "threads for the CPU's experts", _half_of_cores, _doubled, _up_to_cores, in_words="{} threads"
)
DEFERRED = Dimension(
    "parameters.deferred", "deferred experts of a token", _deferred, _counted, _up_to_top_k, in_words="{} deferred"
)
