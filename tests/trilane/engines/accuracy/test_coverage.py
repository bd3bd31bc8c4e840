"""Rows inside the band of other machines, with errors that are known."""

from __future__ import annotations

from tests.kit.results import row
from trilane.engines.accuracy.coverage import inside_of_kept, inside_of_others
from trilane.engines.accuracy.errors import Speeds, kept_errors

GPUS = ("rtx-3060", "rtx-3080", "rtx-3090", "rtx-4080", "rtx-4090", "rtx-5090")
ROWS = [row(str(n), 100.0, machine=f"{gpu}+ddr5-5600", cpu_layers=14) for n, gpu in enumerate(GPUS)]


def test_the_band_is_that_of_other_machines() -> None:
    """Five are 20 % too fast: their band is 20 % without the one that is twice too slow, and with it as well."""
    predicted = {each.id: Speeds(120.0) for each in ROWS[:-1]} | {"5": Speeds(50.0)}
    assert inside_of_others(ROWS, predicted) == {"0": True, "1": True, "2": True, "3": True, "4": True, "5": False}


def test_a_row_has_no_part_in_its_own_band() -> None:
    predicted = {each.id: Speeds(100.0) for each in ROWS} | {"0": Speeds(130.0), "1": Speeds(120.0)}
    assert inside_of_others(ROWS, predicted) == {str(n): n > 1 for n in range(6)}


def test_one_machine_has_no_others() -> None:
    assert inside_of_others(ROWS[:1], {"0": Speeds(100.0)}) == {}


def test_the_band_that_is_printed() -> None:
    widest = max(each.band for each in kept_errors())
    speeds = {"0": Speeds(100.0), "1": Speeds(100 * (1.1 + widest)), "2": Speeds(100 / (1.1 + widest))}
    assert inside_of_kept(ROWS[:3], speeds) == {"0": True, "1": False, "2": False}
