"""Costs of fitted engines on the CPU by hand: attention, threads, sockets, codings and slow cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.costs.engine import NumaMode, load_engine, load_fitted
from sim.costs.fitted_costs import fitted_costs
from sim.costs.processors import AttentionWork, CpuProcessor, saturated
from tests.kit.fitted import BITS, ENGINE, K_QUANT, REGION_NS, SHAPE, machine
from traces.models.codings import Codings


def attention_cycles(rows: int, bits: float = 16, sequences: int = 1, engine: str = "llama.cpp") -> float:
    """Cycles of attention's products on the CPU: 8 heads of 128, each row to 1,000 keys."""
    numbers = {
        "cpu.flash.products_per_cycle": 4, "cpu.flash.row_products_per_cycle": 8, "cpu.flash.pair_cycles": 100,
        "cpu.flash.unpack_cycles": 0.5,
    }
    work, base = load_fitted(engine).with_numbers(numbers).cpu, machine()
    pairs = 8.0 * rows * 1000
    arithmetic = AttentionWork(4 * 128 * pairs, pairs, 0, bits)
    time_ns = CpuProcessor(base.cpu, work, ENGINE.prompt, 10).attention_ns(arithmetic, "grouped", rows, sequences)
    return time_ns * 2.5 * 10 / pairs  # of ten threads of 2.5 GHz


@pytest.mark.parametrize(("engine", "rows", "bits", "cycles"), [
    ("llama.cpp", 64, 16, 64), ("llama.cpp", 63, 16, 32 + 100), ("llama.cpp", 1, 16, 32 + 100),
    ("llama.cpp", 64, 8.5, 32 + 100 + 128), ("llama.cpp-2025", 1, 16, 64), ("llama.cpp-2025", 512, 8.5, 32 + 100 + 128),
    ("ik_llama.cpp", 1, 16, 64), ("ik_llama.cpp", 512, 8.5, 64), ("ik_llama.cpp-2025", 512, 4.5, 64),
])
def test_attention_on_the_cpu_is_computed_in_tiles_or_of_one_query_after_another(
    engine: str, rows: int, bits: float, cycles: float
) -> None:
    """256 products of a head's query and key take 64 cycles in tiles, alone 32 and 100 more; keys and values of fewer
    bits are unpacked for each. llama.cpp has tiles from 64 rows on, of 16 bits; older builds have none."""
    assert attention_cycles(rows, bits, engine=engine) == pytest.approx(cycles)


def test_rows_of_several_sequences_are_tiles_of_their_own() -> None:
    assert attention_cycles(128, sequences=2) == pytest.approx(64)
    assert attention_cycles(127, sequences=2) == pytest.approx(132)


def test_threads_saturate_the_memory() -> None:
    base, engine = machine(), load_engine("llama.cpp")
    rates = [
        CpuProcessor(base.cpu, engine.cpu, engine.prompt, threads).read_bytes_per_s for threads in (1, 2, 4, 8, 16)
    ]
    assert rates == sorted(rates)
    assert rates[-1] - rates[-2] < 0.1 * rates[0]
    assert saturated(2.0, 2.0) == 1.0
    assert saturated(1.0, 1000.0, power=3) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("repacked", [False, True])
def test_two_threads_of_a_core_compute_no_faster_than_one(repacked: bool) -> None:
    base, engine = machine(), load_engine("ik_llama.cpp")
    half, all_cores, twice = (CpuProcessor(base.cpu, engine.cpu, engine.prompt, n, repacked) for n in (5, 10, 20))
    assert half.flops_per_s(K_QUANT) < all_cores.flops_per_s(K_QUANT) == twice.flops_per_s(K_QUANT)
    assert half.read_bytes_per_s < all_cores.read_bytes_per_s == twice.read_bytes_per_s


def unpacking(**changed: float) -> CpuProcessor:
    """Ten threads of 2.5 GHz that unpack half a weight of a codebook in a cycle, next to memory without a limit."""
    engine = ENGINE.with_numbers({"cpu.weights_per_cycle.codebook": 0.5, "cpu.ceiling_bytes_per_s": 1e15})
    cpu = machine().with_numbers({"cpu.read_bytes_per_s": 1e15}).cpu
    codings = Codings({"codebook": 1.0}, {"plain": 1.0})
    return CpuProcessor(replace(cpu, **changed), engine.cpu, engine.prompt, 10, codings=codings)


def test_threads_read_no_faster_than_they_unpack() -> None:
    """12.5e9 weights a second, of 3 bits each."""
    one = np.array([1])
    assert unpacking().expert_ns(12.5e9 * 3 / 8, 3, 1, one)[0] == pytest.approx(1e9)
    assert unpacking(vector_bits=256).expert_ns(12.5e9 * 3 / 8, 3, 1, one)[0] == pytest.approx(2e9)
    assert unpacking().read_ns(12.5e9 * 2, 16) < 1e8  # other matrices are plain


def test_a_mix_of_codings_takes_the_time_of_its_parts() -> None:
    mixed = replace(unpacking(), codings=Codings({"codebook": 0.5, "k_quant": 0.5}))
    assert mixed.expert_ns(12.5e9 * 3 / 8, 3, 1, np.array([1]))[0] == pytest.approx(0.5e9, rel=1e-3)


def test_a_parallel_region_takes_longer_with_more_threads() -> None:
    """As a barrier of twelve threads more."""
    regions = [CpuProcessor(machine().cpu, ENGINE.cpu, ENGINE.prompt, n).step_ns for n in (2, 16, 64)]
    assert regions == pytest.approx([REGION_NS * threads / 22 for threads in (14, 28, 76)])


@pytest.mark.parametrize(("threads", "numa", "share"), [(10, None, 0.8), (5, None, 0.4), (10, "distribute", 1.0)])
def test_a_socket_reads_less_of_what_lies_in_the_other_s_memory(
    threads: int, numa: NumaMode | None, share: float
) -> None:
    """Ten cores on two sockets; the threads of one read no more than its half."""
    engine = ENGINE.with_numbers({"cpu.ceiling_bytes_per_s": 1e15})
    cpu = replace(machine().cpu, sockets=2)
    both = CpuProcessor(cpu, engine.cpu, engine.prompt, threads, numa=numa)
    assert both.read_bytes_per_s == pytest.approx(share * 30e9, rel=1e-3)


def test_slow_cores_do_a_part_of_the_work_of_others() -> None:
    """Four fast cores and six of half their work, taken in this order."""
    cpu = replace(machine().cpu, efficiency_cores=6)
    rates = [CpuProcessor(cpu, ENGINE.cpu, ENGINE.prompt, n).flops_per_s(K_QUANT) for n in (4, 5, 10, 16)]
    assert rates == pytest.approx([4e10, 4.5e10, 7e10, 7e10])
    costs, few = (
        fitted_costs(SHAPE, replace(machine(), cpu=cpu), ENGINE, 1, threads=threads).experts[0].cpu_ns[1]
        for threads in (None, 4)
    )
    assert costs == few  # without a number: one a fast core


def test_products_of_an_expert_of_a_prompt_reach_a_share_of_the_rate() -> None:
    engine = ENGINE.with_numbers({"cpu.expert_products": 0.5})
    own, half = (fitted_costs(SHAPE, machine(), one, 1000).experts[0].cpu_ns[1000] for one in (ENGINE, engine))
    assert half == pytest.approx(2 * own, rel=1e-6)


def test_what_the_threads_do_in_a_second_takes_a_second() -> None:
    threads = CpuProcessor(machine().cpu, ENGINE.cpu, ENGINE.prompt, 10)
    assert threads.matrix_ns(1, BITS, threads.flops_per_s({"plain": 1}) / 8, 8) == 1e9
    assert threads.matrix_ns(threads.read_bytes_per_s, BITS, 1, 8) == 1e9
