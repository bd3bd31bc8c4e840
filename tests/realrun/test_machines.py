"""A machine from its profile's facts: the same again, or refused."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from realrun.errors import RefusedError  # noqa: E402
from realrun.host_lanes import HostLanes  # noqa: E402
from realrun.machine_facts import usable_cores  # noqa: E402
from realrun.machines import Facts, check_same, facts_of, machine_for, machine_of  # noqa: E402
from sim.profile import Profile  # noqa: E402
from tests.realrun.tiny_bench import tiny_lanes  # noqa: E402


def profile_of(facts: Facts) -> Profile:
    return Profile({**facts, "date": "2026-11-20", "load_average": 3.5}, {}, {}, {}, {})


def facts(**changes: object) -> Facts:
    """Of tiny host lanes."""
    machine = HostLanes(tiny_lanes(**changes))
    machine.close()
    return facts_of(machine)


def test_the_same_machine_is_built_again() -> None:
    made = machine_of(profile_of(facts(link_bytes_per_s=3.5e9, chunk_bytes=4096)))
    made.close()
    assert asdict(made.settings) == asdict(tiny_lanes(link_bytes_per_s=3.5e9, chunk_bytes=4096))


def test_facts_are_plain_text_and_numbers() -> None:
    assert all(type(value) in (str, int, float) for value in facts().values())
    assert facts()["kind"] == "host-lanes"


@pytest.mark.parametrize("fact", ["cpu", "cores", "kernel", "torch"])
def test_another_machine_is_refused_by_what_differs(fact: str) -> None:
    other = profile_of({**facts(), fact: "another"})
    with pytest.raises(RefusedError, match=f"{fact} 'another' and not"):
        machine_of(other)


def test_date_and_load_are_no_part_of_a_machine() -> None:
    check_same({**facts(), "date": "2020-01-01", "load_average": 0.0}, facts(), "this computer")


def test_options_of_host_lanes() -> None:
    core = min(usable_cores())
    machine = machine_for("host", gpu_core=core, cpu_cores=[core], link_gb_per_s=2.5)
    machine.close()
    assert isinstance(machine, HostLanes)
    assert machine.settings == replace(machine.settings, gpu_core=core, cpu_cores=(core,), link_bytes_per_s=2.5e9)


def test_by_default_the_gpu_has_a_core_of_its_own_where_there_are_two() -> None:
    machine = machine_for("host")
    machine.close()
    assert isinstance(machine, HostLanes)
    alone = machine.settings.gpu_core not in machine.settings.cpu_cores
    assert alone == (len(usable_cores()) > 1)


def test_cores_that_are_not_there_are_refused() -> None:
    with pytest.raises(RefusedError, match="expected cores among"):
        machine_for("host", cpu_cores=[10_000])


def test_a_gpu_takes_no_options_of_host_lanes() -> None:
    with pytest.raises(RefusedError, match="host lanes only"):
        machine_for("cuda", link_gb_per_s=4.0)
