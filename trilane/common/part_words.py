"""Words of a part's name, as people and programs write it, without vendors and clock rates; and what it says besides:
size of the memory, bus, cores of the GPU.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_NOT_WORDS = frozenset((
    "nvidia", "geforce", "amd", "ati", "radeon", "intel", "apu", "corporation", "graphics", "gpu", "card", "series",
    "generation", "edition", "workstation", "with", "design", "lite", "hash", "rate", "tesla", "cpu", "processor",
    "of", "s", "sdram", "dimm", "udimm", "sodimm", "ram", "memory",
))
_REWRITTEN = tuple((re.compile(pattern), text) for pattern, text in (
    (r"\((r|tm|c)\)|[®™]", " "),
    (r"@.*|\(rev \w+\)|\b(w/|with) radeon.*", " "),  # a clock rate, a PCI revision, a CPU's own graphics
    (r"\bryzen threadripper\b", "threadripper"),
    (r"\b\d+(st|nd|rd|th) gen\b|\b[a-z0-9]+-core (processor|cpu)\b|\b\d+-cores\b", " "),
    (r"\b(macbook pro|macbook air|mac mini|mac studio|mac pro|imac)\b", " "),
    (r"\bmig \d+g\.\d+gb", "mig"), (r"\bmax[- ]q\b", "maxq"), (r"\b(mobile|notebook)\b", "laptop"),
    (r"\bsxm\d\b|\bhbm3\b", "sxm"),  # "H100 80GB HBM3" is how nvidia-smi calls the SXM
    (r"(?<=\d) ?(mt/?s|mhz)\b|\bcl\d\d\b", " "), (r"\b(rdimm|lrdimm|registered)\b", "ecc"),
    (r"\+", " plus "), (r"(?<=\d)(ti|super|xtx|xt|gre)\b", r" \1"), (r"\b(rtx|gtx|rx|ddr[345])(?=a?\d{4})", r"\1 "),
))
_SIZE = re.compile(r"\b(\d+) ?(?:gb|gib)\b")
_GPU_CORES = re.compile(r"\b(\d+)[- ](?:core gpu|gpu cores?|core)\b")
_BUS = re.compile(r"\b(pcie|sxm)\b")


class Wording(NamedTuple):
    """Words of a name, and facts besides; None: not said."""

    words: tuple[str, ...]
    size_gb: int | None
    bus: str | None
    gpu_cores: int | None

    @property
    def plain(self) -> bool:
        """True if a name consists of words alone."""
        return self[1:] == (None, None, None)


def names_within(text: str) -> list[str]:
    """The names in ``text``: the list of PCI devices has one for all cards of a chip, ``[Radeon RX 6800/6800 XT]``."""
    text = re.sub(r"\b(w/|with) radeon.*|mt/s", "", text.lower())
    text = re.sub(r"\b(max-q / mobile|mobile / max-q)\b", "mobile", text)  # one card, "Laptop GPU" of nvidia-smi
    inside = re.findall(r"\[([^\]]*)\]", text)
    first, *others = (inside[-1] if inside else text).split("/")
    line = re.match(r"[^\d]*", first)
    return [first, *(f"{line[0] if line and one.strip()[:1].isdigit() else ''}{one}" for one in others)]


@cache
def wording_of(text: str) -> Wording:
    """The words of a name, and what it says besides."""
    text = text.lower()
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    size, cores, bus = _SIZE.search(text), _GPU_CORES.search(text), _BUS.search(text)
    for pattern in (_SIZE, _GPU_CORES, _BUS):
        text = pattern.sub(" ", text)
    words = [word for word in re.findall(r"[a-z0-9.]+", text) if word not in _NOT_WORDS]
    return Wording(
        tuple(dict.fromkeys(words)), int(size[1]) if size else None, bus[1] if bus else None,
        int(cores[1]) if cores else None,
    )


def as_written(word: str, text: str) -> str:
    """A word as it stands in the name."""
    pattern = {"maxq": "max[- ]q", "laptop": "laptop|mobile|notebook", "plus": r"\+", "ecc": "ecc|l?rdimm|registered"}
    found = re.search(pattern.get(word, re.escape(word)), text, re.IGNORECASE)
    return found[0] if found else word
