"""Names of parts as people and programs write them: "NVIDIA GeForce RTX 3060", "AMD Ryzen 5 5600X 6-Core Processor".

A name is a set of words, without vendors and clock rates. It means the part that has all of its words: one word more
("Ti", "Max-Q", "48Q") is another part. Left out may be a line that the number implies (rtx, ryzen 5), and what only
tells parts of the same words apart: size of the memory, bus, cores of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

from sim.machine.plausibility import HardwareError
from trilane.common.names import alternatives, either, hints
from trilane.common.part_words import Wording, as_written, names_within, wording_of
from trilane.common.quoting import quoted
from trilane.common.units import GB, GIB

PartKind = Literal["gpu", "memory", "cpu"]
ONE_GPU = "expected one GPU here; several are answered by trilane fit, tune and recommend, and simulated by compare"
LISTED_BY = "trilane hardware --parts"
HOW_TO_ADD = "add a part in sim/machine/presets/parts, or describe the machine in a YAML file of a preset's form"

_LEFT_OUT = tuple(map(frozenset, (  # words that a card's other words imply
    (), ("rtx",), ("gtx",), ("rx",), ("arc",), ("arc", "pro"), ("ai", "pro"), ("apple",), ("blackwell",),
    ("rtx", "blackwell"),
)))
_CPU_LINES = frozenset((
    "ryzen", "threadripper", "epyc", "core", "xeon", "ai", "max", "plus", "pro", "hx", "ultra", "i3", "i5", "i7",
    "i9", "3", "5", "7", "9", "gold", "silver", "platinum",
))
_SLOT = re.compile(r"(?:pcie|pci-e|pci express)?[ -]*(?:gen)?[ -]*([345])(?:\.0)? *x *(\d{1,9})")
_NEAR = 0.15  # relative difference of a card's memory from its part's: the driver keeps some for itself
_NEAREST = 3  # parts that a refusal names
_SLIP = 4  # letters of a word that may be misspelt, at least


class KnownPart(NamedTuple):
    """A part of the catalogue, as names are compared with it. ``cpu_names``: of the CPU that a GPU comes with.

    ``family``: its members have numbers that are no words of its name.
    """

    kind: PartKind
    name: str
    title: str
    memory_bytes: int | None = None
    cpu_names: tuple[str, ...] = ()
    family: bool = False

    def __str__(self) -> str:
        """The name, and what tells it from parts of the same words."""
        asked = _own(self)
        size = [] if self.memory_bytes is None else [f"{self.memory_bytes / GIB:.0f} GB"]
        bus = [] if asked.bus is None else [{"pcie": "PCIe", "sxm": "SXM"}[asked.bus]]
        cores = [] if asked.gpu_cores is None else [f"{asked.gpu_cores} GPU cores"]
        facts = cores or [*size, *bus]
        return f"{self.name} ({', '.join(facts)})" if facts else self.name


class UnknownPartError(HardwareError):
    """A name of no part. ``sentence``: the message without how to get on; ``near``: the catalogue has one like it."""

    def __init__(self, sentence: str, near: bool) -> None:
        super().__init__(f"{sentence}; {HOW_TO_GET_ON}")
        self.sentence, self.near = sentence, near


HOW_TO_GET_ON = f"`{LISTED_BY}` lists them all; {HOW_TO_ADD}"


def letters_and_digits(name: str) -> str:
    """A part's name as the catalogue's are compared: without capitals, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", name.lower())


def resolved(
    kind: PartKind, text: str, known: Sequence[KnownPart], memory_bytes: int | None = None, gpu_cores: int | None = None
) -> KnownPart:
    """The part that ``text`` means. Raises UnknownPartError for none, and for one of several.

    ``memory_bytes`` and ``gpu_cores``: as a driver reports them, where it does.
    """
    if kind == "gpu" and "[" not in text and re.search(r"^\s*\d ?x[ -]?[a-z]|,", text.lower()):
        raise UnknownPartError(f"gpu {quoted(text)}: {ONE_GPU}", True)
    texts = names_within(text)
    askings = [wording_of(one) for one in texts]
    if gpu_cores is not None:
        askings = [asked._replace(gpu_cores=gpu_cores) for asked in askings]
    found = [[one for one in known if _means(one, asked) and _agrees(one, asked)] for asked in askings]
    fitting = [one for of_text in found for one in of_text if _near(one, memory_bytes)]
    plain = [one for one in fitting if wording_of(one.name).plain]
    if len(plain) == len(texts) == 1 and askings[0].plain and memory_bytes is None:
        return plain[0]
    if len(fitting) == 1 and all(found) and not _needs_size(fitting[0], askings[0], memory_bytes):
        return fitting[0]
    where = quoted(text) + (f" with {memory_bytes / GIB:.0f} GiB" if memory_bytes else "")
    if fitting:
        raise UnknownPartError(f"{kind} {where} may be {either(map(str, fitting))}: name the one that it is", True)
    raise _unknown(kind, where, text, askings[0], known)


def _needs_size(one: KnownPart, asked: Wording, memory_bytes: int | None) -> bool:
    """True if a part's name has the size of its memory, so that others of the same words exist, and none is known."""
    return wording_of(one.name).size_gb is not None and asked.size_gb is None and memory_bytes is None


@cache
def _forms(one: KnownPart) -> list[frozenset[str]]:
    """The sets of words that name a part: its name, and its title without and within parentheses."""
    texts = [one.name, *re.split(r"[()]", one.title), *one.cpu_names]
    return [frozenset(words) for text in texts if (words := wording_of(text).words)]


@cache
def _own(one: KnownPart) -> Wording:
    """The words of a part's title, and facts that its name or title say."""
    name, title = wording_of(one.name), wording_of(one.title)
    return Wording(title.words, None, name.bus or title.bus, name.gpu_cores or title.gpu_cores)


def _means(one: KnownPart, asked: Wording) -> bool:
    """True if the words are those of the part."""
    return any(_implied(one, form, asked) and not _extra(one, form, asked) for form in _forms(one))


def _extra(one: KnownPart, form: frozenset[str], asked: Wording) -> list[str]:
    """Words that a part has not; a member's number belongs to its family."""
    extra = [word for word in asked.words if word not in form]
    return [] if one.family and len(extra) == 1 and re.fullmatch(r"\d{4}[a-z]?", extra[0]) else extra


def _implied(one: KnownPart, form: frozenset[str], asked: Wording) -> bool:
    """True if the words of the part that are left out need not be said."""
    missing, said = form - {*asked.words}, form & {*asked.words}
    if not missing or missing in _LEFT_OUT:
        return not missing or any(re.search(r"\d", word) for word in said)
    of_cpu = one.kind == "cpu" or bool(one.cpu_names)
    return of_cpu and missing <= _CPU_LINES and any(re.search(r"\d{3}", word) for word in said)


def _agrees(one: KnownPart, asked: Wording) -> bool:
    """True if nothing that is said of memory, bus and cores contradicts the part."""
    own = _own(one)
    if one.kind != "gpu" or one.cpu_names:
        return asked.size_gb is None and asked.gpu_cores in (None, own.gpu_cores)
    bus = asked.bus in (None, own.bus or "pcie")
    return bus and (asked.size_gb is None or _has_size(one, asked.size_gb)) and asked.gpu_cores in (None, own.gpu_cores)


def _has_size(one: KnownPart, size_gb: int) -> bool:
    """True if a card has a memory of so many GB, as data sheets have it: of 2^30 or of 10^9 bytes."""
    return any(abs(size_gb * unit / (one.memory_bytes or 1) - 1) < 0.01 for unit in (GB, GIB))


def _near(one: KnownPart, memory_bytes: int | None) -> bool:
    return memory_bytes is None or one.memory_bytes is None or abs(memory_bytes / one.memory_bytes - 1) < _NEAR


def slot(text: str) -> tuple[int, int]:
    """Generation and lanes of a PCIe slot: 4x16, "3.0x16", "PCIe 4.0 x8", "gen4 x4". Raises HardwareError."""
    found = _SLOT.fullmatch(text.strip().lower())
    if found is None:
        expected = "expected generation (3, 4 or 5) and lanes, such as 4x16 or 3.0 x8"
        raise HardwareError(f"PCIe slot {quoted(text)}: {expected}")
    generation, lanes = int(found[1]), int(found[2])
    if lanes not in (1, 2, 4, 8, 16):
        raise HardwareError(f"PCIe slot {quoted(text)}: a PCIe slot has 1, 2, 4, 8 or 16 lanes, got {lanes}")
    return generation, lanes


# --- refusals ---------------------------------------------------------------------------------------------------------


def _unknown(
    kind: PartKind, where: str, text: str, asked: Wording, known: Sequence[KnownPart]
) -> UnknownPartError:
    """The refusal of a name: by what it differs from the parts that are most like it, or the names that are meant."""
    start = f"there is no {kind} {where}"
    if kind == "memory" and (own := _no_memory(asked, known)):
        return UnknownPartError(f"{start}: {own}", True)
    near, extra = _nearest(asked, known)
    if longer := [one.name for one in known if extra and any({*asked.words} < form for form in _forms(one))]:
        return UnknownPartError(f"{start}; others of that number: {', '.join(longer[:_NEAREST])}", True)
    if near and extra and not {*extra} <= {"rtx", "gtx", "rx", "arc"}:
        words = ", ".join(repr(as_written(word, text)) for word in extra)
        return UnknownPartError(f"{start}: {near[0].name} is another one, without {words}", True)
    if near and not extra:
        return UnknownPartError(f"{start}: {_contradiction(near, asked)}", True)
    meant = [one.name for one in near] or hints("-".join(asked.words), _alike(asked, known))
    if not meant and (others := _of_that_number(asked, known)):
        return UnknownPartError(f"{start}; others of that number: {', '.join(others)}", True)
    return UnknownPartError(f"{start}{f'; did you mean {alternatives(meant)}?' if meant else ''}", bool(meant))


def _no_memory(asked: Wording, known: Sequence[KnownPart]) -> str | None:
    """Why a name of memory is none: it is a size, or a family without a speed."""
    size = asked.size_gb or (int(asked.words[0]) if len(asked.words) == 1 and asked.words[0].isdigit() else None)
    if size is not None and size < 2000:
        return f"the size is --ram-gb {size}; --ram is kind and speed, such as ddr4-3200 or ddr5-5600"
    named = {one.name: wording_of(one.name).words for one in known}
    family = [name for name, words in named.items() if asked.words == words[:1] and len(words) == 2]
    if not family:
        return None
    count = len(family)
    return f"name its speed, too, such as {either(family[place] for place in (count // 3, count // 2, 3 * count // 4))}"


def _nearest(asked: Wording, known: Sequence[KnownPart]) -> tuple[list[KnownPart], list[str]]:
    """The parts that have most of the words and need no others, and the words that they have not."""
    near: list[tuple[int, KnownPart, list[str]]] = []
    for one in known:
        for form in _forms(one):
            numbered = any(re.search(r"\d", word) for word in form & {*asked.words})
            if numbered and _implied(one, form, asked):
                near.append((len(form & {*asked.words}), one, _extra(one, form, asked)))
    near.sort(key=lambda found: (-found[0], not _agrees(found[1], asked)))
    best = [(one, extra) for count, one, extra in near if count == near[0][0]]
    return list(dict.fromkeys(one for one, _ in best))[:_NEAREST], best[0][1] if best else []


def _contradiction(near: Sequence[KnownPart], asked: Wording) -> str:
    """The sentence on parts of the same words and another memory or bus."""
    if asked.size_gb is not None and near[0].cpu_names:
        return f"name it {near[0].name}, and its memory with --ram-gb {asked.size_gb}"
    return f"the catalogue has {', '.join(map(str, near))}"


def _alike(asked: Wording, known: Sequence[KnownPart]) -> list[str]:
    """The parts whose name may have been misspelt: with one's numbers, of which one may be unfinished (rtx-408), and
    all words that are no slip, since the catalogue has them. A slip has four letters: X and Ti are none."""
    spelt = {word for one in known for form in _forms(one) for word in form}
    slips = {word for word in asked.words if word.isalpha() and word not in spelt}
    unfinished = any(re.search(r"\d{3}", word) and word not in spelt for word in asked.words)
    if any(len(word) < _SLIP for word in slips) or not (slips or unfinished):
        return []
    kept = {*asked.words} - slips
    return [one.name for one in known if any(all(_has(form, word) for word in kept) for form in _forms(one))]


def _has(form: frozenset[str], word: str) -> bool:
    longer = re.compile(rf"{re.escape(word)}\d")
    return word in form or (bool(re.search(r"\d{3}", word)) and any(map(longer.match, form)))


def _of_that_number(asked: Wording, known: Iterable[KnownPart]) -> list[str]:
    """The parts with the number of a name and other words, or other letters at its end: i9-13900KS, core-i9-13900k."""
    numbers = [found[0] for word in asked.words if (found := re.match(r"\d{3,}", word))]
    same = {
        one.name: len(form & {*asked.words}) for one in known for form in _forms(one)[:1]
        if numbers and all(any(re.match(rf"{number}(?!\d)", word) for word in form) for number in numbers)
    }
    return [name for name, common in same.items() if common == max(same.values())][:_NEAREST]
