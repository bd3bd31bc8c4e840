"""``trilane hardware FILE`` of a measured profile, and scenarios that name one."""

from __future__ import annotations

import pytest

from sim.machine.hardware import write_hardware
from tests.kit.commands import SHORT, Trilane
from tests.kit.hand_measured import time, toy_machine, toy_model


@pytest.fixture
def lanes(trilane: Trilane) -> str:
    """A profile in the folder that the command runs in."""
    write_hardware(toy_machine(), "lanes.yaml")
    return "lanes.yaml"


def lines_of(out: str, start: str) -> list[str]:
    """The lines that begin so, with single spaces."""
    return [" ".join(line.split()) for line in out.splitlines() if line.startswith(start)]


def line_of(out: str, start: str) -> list[str]:
    """The words of the only line that begins so."""
    [line] = lines_of(out, start)
    return line.split()


def test_a_profile_says_what_it_was_measured_on(trilane: Trilane, lanes: str) -> None:
    out = trilane("hardware", lanes).out
    assert "a measured profile: times come from its tables" in out
    assert line_of(out, "kind") == ["kind", "host-lanes"]
    assert line_of(out, "date") == ["date", "2026-11-20"]
    assert line_of(out, "pinned_copy_bytes_per_s") == ["pinned_copy_bytes_per_s", "1.2e+10"]


def test_a_profile_says_which_models_were_measured(trilane: Trilane) -> None:
    model = toy_model(launch_lead=time(2500), launch_tail=time(900))
    write_hardware(toy_machine(models={"toy": model}), "lanes.yaml")
    times, rates = lines_of(trilane("hardware", "lanes.yaml").out, "toy ")
    assert times == "toy 0.1 (0.1-0.1) 1.0 (1.0-1.0) 7.0 (7.0-7.0) 2.5 (2.5-2.5) 0.9 (0.9-0.9) 1-8"
    assert rates == "toy 80% (79-81) 90% (89-91) 100% (99-100) 97% (96-98) 88% (87-89)"


def test_what_an_earlier_profile_lacks_is_a_dash(trilane: Trilane) -> None:
    later = ("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille")
    earlier = {"toy": toy_model(**dict.fromkeys(later))}
    write_hardware(toy_machine(models=earlier), "earlier.yaml")
    times, rates = lines_of(trilane("hardware", "earlier.yaml").out, "toy ")
    assert times.endswith("7.0 (7.0-7.0) - - 1-8")
    assert rates == "toy 80% (79-81) 90% (89-91) 100% (99-100) - -"


def test_decisions_that_were_measured_are_named(trilane: Trilane, lanes: str) -> None:
    out = trilane("hardware", lanes).out
    assert line_of(out, "dali ")[1:3] == ["11", "2"]
    assert "Measured on this machine, and not scaled: dali, default." in out


def test_json_holds_all_of_the_profile(trilane: Trilane, lanes: str) -> None:
    [fact] = trilane("hardware", lanes, "--json", "-").json["hardware"]
    assert fact["measured"] == toy_machine().document()["measured"]


def test_a_preset_is_no_profile(trilane: Trilane) -> None:
    done = trilane("hardware", "rtx3090-ddr4")
    assert "measured profile" not in done.out
    assert "not scaled" not in done.out


def test_a_model_that_was_not_measured_is_refused_in_one_sentence(trilane: Trilane, lanes: str) -> None:
    done = trilane("simulate", *SHORT, "--set", f"hardware={lanes}", "--set", "model=deepseek-v2-lite")
    assert done.status == 2
    assert "profile 'lanes': model 'deepseek-v2-lite' has not been measured; measured: toy; add it: " in done.err
    assert "trilane profile --model deepseek-v2-lite -o FILE" in done.err
