"""Names of parts as people and programs write them: each means its part, or is refused; never another tier.

``names.csv`` has the names as nvidia-smi, lspci, libdrm, Windows, macOS and /proc/cpuinfo print them, with the memory
that a driver reports, and names as people write them.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from sim.machine import part_names
from sim.machine.assembly import assembled_name
from sim.machine.hardware import load_hardware
from sim.machine.part_names import HOW_TO_GET_ON, PartKind, UnknownPartError, slot
from sim.machine.parts import MachinePart, all_parts, is_unified, kind_of, taken
from sim.machine.plausibility import HardwareError
from trilane.common.units import MIB

with (Path(__file__).parent / "names.csv").open(newline="") as file:
    ROWS = [tuple(row.values()) for row in csv.DictReader(file)]
REFUSED = "refused"


def named(kind: PartKind, name: str, mib: str = "") -> str:
    """The part's name, or "refused"."""
    try:
        return taken(kind, name, int(mib) * MIB if mib else None).name
    except HardwareError:
        return REFUSED


@pytest.mark.parametrize(("kind", "name", "mib", "meant"), ROWS)
def test_a_name_means_its_part_or_is_refused(kind: PartKind, name: str, mib: str, meant: str) -> None:
    assert named(kind, name, mib) == meant


def test_the_table_has_the_commonest_cards_and_cpus() -> None:
    counts = Counter(kind for kind, *_ in ROWS)
    assert counts["gpu"] >= 200
    assert counts["cpu"] >= 100
    assert sum(meant == REFUSED for *_, meant in ROWS) >= 100


@pytest.mark.parametrize("known", all_parts(), ids=lambda known: known.name)
def test_every_part_is_known_by_its_name_its_title_and_its_vendor_s_name(known: MachinePart) -> None:
    kind, name, title = known.kind, known.name, known.title
    assert named(kind, name) == name
    assert kind_of(name) == kind
    if not title.startswith(("generic", "CPU of")):
        own = title.replace(" (DGX Spark)", "").replace(" (Radeon 8060S)", "").replace(" GDDR5", "")
        assert named(kind, own) == name
    assert named(kind, f"Intel AMD {name}") == name


WORDS = ["Ti", "SUPER", "Max-Q", "SFF", "D", "XT", "GRE", "NVL", "Server", "48Q", "MIG 1g.10gb", "Laptop GPU", "Mobile"]


@pytest.mark.parametrize("word", WORDS)
def test_one_word_more_is_another_part_or_refused_by_name(word: str) -> None:
    """Law over all cards: no name with a word more means the card without it."""
    for known in all_parts():
        already = word.lower().split()[0].replace("mobile", "laptop") in known.name.split("-") or "max-q" in known.name
        if known.kind == "gpu" and not already and not is_unified(known.name):
            assert named("gpu", f"{known.name} {word}") != known.name


def test_the_law_finds_a_reader_that_drops_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_names, "_extra", lambda one, form, asked: [])
    assert taken.__wrapped__("gpu", "RTX 3090 SUPER").name == "rtx-3090"


def test_a_size_that_contradicts_is_refused() -> None:
    for known in all_parts():
        if known.kind == "gpu" and not is_unified(known.name) and not re.search(r"\dgb", known.name):
            assert named("gpu", f"{known.name} 7GB") == REFUSED


@pytest.mark.parametrize(("kind", "name", "sentence"), [
    ("gpu", "RTX 3090 SUPER", "there is no gpu 'RTX 3090 SUPER': rtx-3090 is another one, without 'SUPER'"),
    ("gpu", "NVIDIA RTX A4000 Laptop GPU", "rtx-a4000 is another one, without 'Laptop'"),
    ("gpu", "RTX 3060 10GB", "the catalogue has rtx-3060-8gb (8 GB), rtx-3060 (12 GB)"),
    ("gpu", "V100 16GB PCIe", "the catalogue has v100 (32 GB, PCIe), v100-sxm2-16gb (16 GB, SXM)"),
    ("gpu", "H100", "gpu 'H100' may be h100-pcie (80 GB, PCIe) or h100-sxm (80 GB, SXM): name the one that it is"),
    ("gpu", "RTX 6000", "others of that number: quadro-rtx-6000, rtx-6000-ada, rtx-pro-6000-blackwell"),
    ("gpu", "rtx-408", "there is no gpu 'rtx-408'; did you mean 'rtx-4080'?"),
    ("gpu", "RTX 1080", "there is no gpu 'RTX 1080'; did you mean 'gtx-1080'?"),
    ("gpu", "strix hallo", "did you mean 'strix-halo'?"),
    ("gpu", "2x RTX 3060", "expected one GPU here; several are answered by trilane fit, tune and recommend"),
    ("gpu", "M4 Max 64GB", "name it apple-m4-max, and its memory with --ram-gb 64"),
    ("cpu", "i9-13900KS", "others of that number: core-i9-13900hk, core-i9-13900k"),
    ("memory", "32", "the size is --ram-gb 32; --ram is kind and speed, such as ddr4-3200"),
    ("memory", "ddr4", "name its speed, too, such as ddr4-2666, ddr4-2933 or ddr4-3200"),
])
def test_a_refusal_names_what_the_name_differs_in(kind: PartKind, name: str, sentence: str) -> None:
    with pytest.raises(UnknownPartError) as caught:
        taken(kind, name)
    assert sentence in caught.value.sentence
    assert str(caught.value).endswith(HOW_TO_GET_ON)


def test_no_hint_has_another_number_and_no_refusal_is_long() -> None:
    for kind, name, mib, meant in ROWS:
        if meant != REFUSED:
            continue
        with pytest.raises(HardwareError) as caught:
            taken(kind, name, int(mib) * MIB if mib else None)  # type: ignore[arg-type]
        message = str(caught.value)
        hints = re.findall(r"'([^']*)'", message.partition("did you mean")[2])
        assert all(number in hint for number in re.findall(r"\d{3,}", name) for hint in hints), message
        assert len(hints) <= 3
        assert len(message) < 420


@pytest.mark.parametrize(("text", "meant"), [
    ("4x16", (4, 16)), ("3.0x16", (3, 16)), ("PCIe 4.0 x8", (4, 8)), ("gen4 x4", (4, 4)), ("PCIe Gen 5 x16", (5, 16)),
    ("PCI Express 3.0 x4", (3, 4)),
])
def test_a_slot_is_read_as_boards_print_it(text: str, meant: tuple[int, int]) -> None:
    assert slot(text) == meant
    name = assembled_name("RTX 3060 12GB", "DDR4-3200 MT/s", "5600x", pcie=text)
    assert name == f"rtx-3060+ddr4-3200+ryzen-5-5600x+pcie-{meant[0]}x{meant[1]}"
    assert load_hardware(name).link.h2d_bytes_per_s > 0


@pytest.mark.parametrize("text", ["x16", "2x16", "4x", "4x16x2", "PCIe", "4x3"])
def test_no_slot_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(HardwareError, match=f"PCIe slot '{text}': .*lanes") as caught:
        slot(text)
    assert len(str(caught.value)) < 120


def test_a_machine_s_name_and_its_file_take_such_names_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("parts: NVIDIA GeForce RTX 3060+DDR4 3200+AMD Ryzen 5 5600\n")
    assert load_hardware(path).flat() == load_hardware("rtx-3060+ddr4-3200+ryzen-5-5600").flat()
    assert load_hardware("RTX 3060 12GB+DDR4 3200").flat() == load_hardware("rtx-3060+ddr4-3200").flat()
