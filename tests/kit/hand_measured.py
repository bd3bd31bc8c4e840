"""A profile typed by hand: a toy model on host lanes, with numbers that a reader can interpolate in the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.machine.assembly import assembled_name
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.interpolation import DecodeGrid, Measured, PrefillGrid, Table
from sim.machine.parts import all_parts
from sim.machine.plan_costs import PlanCost
from sim.machine.profile import MeasuredModel, MeasuredRate, MeasuredSizes, Profile
from traces.models.shape import ModelShape
from trilane.testing.worlds import toy_shape

TOY = toy_shape(3, 4, 2, shared_width=4, dense_layers=2, dense_width=16, kv_width=8, attention_params=256)
FACTS = {"kind": "host-lanes", "cpu": "two slow cores", "cpu_threads": 2, "date": "2026-11-20", "load": 0.25}


def table(*points: tuple[int, int]) -> Table:
    """A table through (at, ns), whose quartiles are 1 ns off."""
    at, ns = zip(*points, strict=True)
    return Table(at, ns, tuple(n - 1 for n in ns), tuple(n + 1 for n in ns))


def level(ns: int) -> Table:
    """A table with one time for every size."""
    return table((1, ns))


def decode_grid(batch: tuple[int, ...], context: tuple[int, ...], *ns: tuple[int, ...]) -> DecodeGrid:
    """A grid whose quartiles are all the median."""
    return DecodeGrid(batch, context, ns, ns, ns)


def prefill_grid(batch: tuple[int, ...], tokens: tuple[int, ...], *ns: tuple[int, ...]) -> PrefillGrid:
    """A grid of prompts, whose quartiles are all the median."""
    return PrefillGrid(batch, tokens, ns, ns, ns)


def time(ns: int) -> Measured:
    """A time that came out the same every time."""
    return Measured(ns, ns, ns)


def toy_model(shape: ModelShape = TOY, **parts: Any) -> MeasuredModel:
    """``shape`` measured; ``parts`` replaces some tables."""
    model = MeasuredModel(
        sizes=MeasuredSizes.of(TOY), expert_gpu=table((1, 100), (2, 140), (4, 120), (8, 200)),
        expert_cpu=table((1, 1000), (3, 1500)), gate=level(20), speculate=level(21), estimator=level(22),
        combine=level(30), head=table((1, 400), (4, 700)), routing=level(40), activations=level(50), result=level(60),
        attention_decode=decode_grid((1, 2), (10, 110), (1000, 1500), (1400, 2400)),
        attention_prefill=prefill_grid((1, 2), (8, 16), (3000, 6000), (5000, 11000)),
        copy=time(7000), writeback=time(8000), first_cpu_expert=time(300), launch=time(70), expert_launch=time(71),
        combine_launch=time(72), head_launch=time(73), sync=time(80), cpu_permille=MeasuredRate(800, 790, 810),
        copy_permille=MeasuredRate(900, 890, 910), gpu_permille=MeasuredRate(1000, 990, 1000),
        shared=table((1, 90), (11, 190)), dense_ffn=level(500),
        dense_launch=time(74), launch_lead=time(25), launch_tail=time(9),
        gpu_with_cpu_permille=MeasuredRate(970, 960, 980), cpu_with_gpu_permille=MeasuredRate(880, 870, 890),
    )
    return replace(model, sizes=MeasuredSizes.of(shape), **parts)


def toy_profile(**parts: Any) -> Profile:
    """Two policies and one model measured; ``parts`` replaces some of it."""
    profile = Profile(
        machine=FACTS, plan={"dali": PlanCost(11.0, 2.0)}, foresee={"default": PlanCost(5.0, 0.0)},
        rates={"pinned_copy_bytes_per_s": 12e9}, models={"toy": toy_model()},
    )
    return replace(profile, **parts)


def toy_machine(**parts: Any) -> Hardware:
    """A machine with a profile: a core that plays the GPU, a copy paced to 1 GB/s; ``parts`` as of ``toy_profile``."""
    plain = load_hardware("rtx3090-ddr4")
    return replace(
        plain, name="lanes", about="Host lanes.", profile=toy_profile(**parts), power=None,
        gpu=replace(plain.gpu, bandwidth_bytes_per_s=1e10, flops_per_s=1e11, memory_bytes=10**9, reserve_bytes=0),
        link=replace(plain.link, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9),
        origins={key: origin for key, origin in plain.origins.items() if not key.startswith("power.")},
    )


# --- machines of parts ------------------------------------------------------------------------------------------------

def assemble(gpu: str, memory: str | None = None, cpu: str | None = None, **counts: Any) -> Hardware:
    """The machine with these parts; ``counts`` as ``assembled_name`` has them."""
    return load_hardware(assembled_name(gpu, memory, cpu, **counts))


def memory_names() -> list[str]:
    """Names of the memories in the catalogue."""
    return [part.name for part in all_parts() if part.kind == "memory"]
