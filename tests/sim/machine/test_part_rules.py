"""Numbers that follow from parts: links, reads, products; and more on a part's data sheet is more in the machine."""

from __future__ import annotations

import math

import pytest

from sim.machine.devices import Cpu
from sim.machine.dials import DIALS, LINK, PCIE, scaled_numbers, turned
from sim.machine.hardware import hardware_names, load_hardware
from sim.machine.parts import cpu_names, gpu_names, part, read_fraction
from sim.machine.plausibility import LIMITS, HardwareError, check_plausible
from tests.kit.hand_measured import assemble, memory_names
from trilane.common.units import GB


def test_the_slower_of_card_and_slot_decides() -> None:
    assert load_hardware("rtx-4080+ddr5-5600").link.h2d_bytes_per_s == 25 * GB  # 4.0 card, 5.0 board
    assert load_hardware("rtx-5080+ddr4-3200").link.h2d_bytes_per_s == 25 * GB  # 5.0 card, 4.0 board
    assert load_hardware("rtx-5080+ddr5-6000").link.h2d_bytes_per_s == 55 * GB
    assert load_hardware("rtx-5080+ddr4-3200+core-i9-10980xe").link.h2d_bytes_per_s == 13.1 * GB


def test_cards_of_eight_lanes_copy_at_half_the_rate() -> None:
    link = load_hardware("rtx-4060+ddr5-5600").link
    assert (link.theory_bytes_per_s, link.h2d_bytes_per_s) == (15.75 * GB, 12.5 * GB)
    assert load_hardware("rtx-5060+ddr5-5600").link.h2d_bytes_per_s == 27.5 * GB


def test_a_slot_may_be_named() -> None:
    assert load_hardware("rtx-4090+ddr5-6000+pcie-3x16").link.h2d_bytes_per_s == 13.1 * GB
    assert load_hardware("rtx-4090+ddr5-6000+pcie-4x4").link.h2d_bytes_per_s == 6.25 * GB
    assert load_hardware("rtx-4060+ddr5-6000+pcie-5x16").link.h2d_bytes_per_s == 12.5 * GB  # the card has 4.0 x8


@pytest.mark.parametrize(("name", "read"), [
    ("rtx-4090+ddr5-6000", 0.82 * 96),  # all cores of a dual channel
    ("rtx-4090+ddr5-6000+ryzen-5-7600", 64),  # one chiplet, whatever the memory
    ("rtx-4090+ddr5-5200+ryzen-9-7950x", 0.82 * 83.2),  # below the two chiplets' 72.5
    ("rtx-4090+ddr5-6000+ryzen-9-7950x", 72.5),
    ("rtx-4090+ddr4-3200-ecc+threadripper-pro-5955wx+16-cores", 0.4126 * 204.8),
    ("rtx-4090+ddr5-6000+1-core", 30),  # one core does not saturate two channels
    ("rtx-4090+ddr5-6000+1-channel", 0.82 * 48),
    ("rtx-4090+ddr4-3200-ecc+epyc-7452+7-channels", 0.8 * 0.66 * 179.2),  # a slot left empty
    ("rtx-4090+ddr4-3200-ecc+epyc-7452+4-cores", 48),
    ("rtx-4090+ddr5-6400-ecc+epyc-9175f+4-cores", 200),  # each core has a chiplet to itself
])
def test_what_the_cores_can_read(name: str, read: float) -> None:
    machine = load_hardware(name)
    fraction = 0.755 if "5955wx" in name else 0.82  # of 4.5 bits
    assert machine.cpu.read_bytes_per_s * read_fraction("cpu", 4.5) == pytest.approx(read * fraction * GB, rel=1e-3)


@pytest.mark.parametrize(("cpu", "memory", "bits", "rate"), [
    ("threadripper-pro-5955wx", "ddr4-3200-ecc", 4.5, 63.8),  # nvfp4, FlashML-org/FreeToken PR 232
    ("ryzen-7-7800x3d", "ddr5-6000", 16, 57.6),  # bf16, 58.1 of 64, FlashML-org/FreeToken issue 151
])
def test_experts_are_read_at_the_rate_that_was_measured_with_their_bits(
    cpu: str, memory: str, bits: float, rate: float
) -> None:
    sixteen = assemble("rtx-4090", memory, cpu).cpu.read_bytes_per_s
    assert sixteen * read_fraction("cpu", bits) == pytest.approx(rate * GB, rel=2e-3)


def test_no_expert_is_read_faster_than_the_memory() -> None:
    machine = load_hardware("rtx-4090+ddr5-5600+ryzen-ai-9-hx-370")  # 0.9 measured with Q4_K_M, which reads at 0.88
    assert machine.cpu.read_bytes_per_s == pytest.approx(0.82 * 89.6 * GB, rel=1e-3)


@pytest.mark.parametrize(("parts", "ceiling"), [
    ("ddr5-6000+ryzen-7-7800x3d", 64), ("ddr5-5600+16-cores", 16 * 30), ("ddr4-3200-ecc+8-cores", 8 * 12),
], ids=["the chip", "cores", "cores of a server"])
def test_the_most_that_is_read_of_any_memory_is_the_chips_ceiling_or_the_cores_rate(parts: str, ceiling: int) -> None:
    source = load_hardware(f"rtx-4090+{parts}").origins["cpu.read_ceiling_bytes_per_s"].source
    assert f" of a read of {ceiling:.1f} GB/s" in source


def test_more_than_two_channels_make_a_server_of_a_machine_without_a_cpu() -> None:
    assert load_hardware("rtx-4090+ddr4-3200").cpu.name == "generic desktop CPU"
    assert load_hardware("rtx-4090+ddr4-3200+8-channels").cpu.name == "generic server CPU"
    assert load_hardware("rtx-4090+ddr4-3200-ecc").cpu.name == "generic server CPU"
    assert load_hardware("rtx-4090-laptop+lpddr5x-7467").cpu.name == "generic laptop CPU"


@pytest.mark.parametrize("memory", ["ddr5-5600", "ddr4-3200", "lpddr5x-7467"])
def test_a_laptops_gpu_has_a_laptop_around_it(memory: str) -> None:
    machine = load_hardware(f"rtx-5080-laptop+{memory}")
    assert machine.cpu.name == "generic laptop CPU"
    assert machine.link.h2d_bytes_per_s == 25 * GB  # wired to 4.0 lanes, though the card has 5.0
    assert load_hardware(f"rtx-5080+{memory}").cpu.name == f"generic {'laptop' if 'lp' in memory else 'desktop'} CPU"


def test_a_generic_cpu_takes_as_many_cores_as_such_machines_have() -> None:
    assert load_hardware("rtx-4090+ddr5-6000+24-cores").cpu.cores == 24
    assert load_hardware("rtx-4090+ddr5-6000+desktop+16-cores+2-channels").cpu.cores == 16
    assert load_hardware("rtx-4090+ddr5-4800-ecc+96-cores+12-channels").cpu.cores == 96


def test_products_follow_the_cores_in_use() -> None:
    whole = load_hardware("rtx-3090+ddr4-3200+ryzen-9-5900x").cpu
    half = load_hardware("rtx-3090+ddr4-3200+ryzen-9-5900x+6-cores").cpu
    assert (whole.flops_per_s, half.flops_per_s) == (1.3e12, 0.65e12)
    assert load_hardware("rtx-3090+ddr4-3200+16-cores").cpu.flops_per_s == 16 * 70e9


# --- more on the data sheet is more in the machine --------------------------------------------------------------------

_GENERATIONS = {
    "Pascal": [
        *("gtx-1050-ti", "gtx-1060-3gb", "gtx-1060-6gb", "gtx-1070", "gtx-1070-ti", "gtx-1080", "gtx-1080-ti", "p40"),
        "p100",
    ],
    "Turing": [
        *("gtx-1650", "gtx-1650-gddr6", "gtx-1650-super", "gtx-1660", "gtx-1660-super", "gtx-1660-ti", "rtx-2060"),
        *("rtx-2060-12gb", "rtx-2060-super", "rtx-2070", "rtx-2070-super", "rtx-2080", "rtx-2080-super", "rtx-2080-ti"),
        *("titan-rtx", "t4", "quadro-rtx-5000", "quadro-rtx-6000", "gtx-1650-laptop", "gtx-1650-ti-laptop"),
        *("gtx-1660-ti-laptop", "rtx-2060-laptop", "rtx-2070-laptop"),
    ],
    "Volta": ["v100", "v100-sxm2-16gb", "v100-sxm2-32gb"],
    "Ampere": [
        *(f"rtx-{n}" for n in ("3050-6gb", "3050", "3060-8gb", "3060", "3060-ti", "3070", "3070-ti", "3080")),
        *(f"rtx-{n}" for n in ("3080-12gb", "3080-ti", "3090", "3090-ti", "a1000", "a2000-12gb", "a4000", "a4500")),
        *(f"rtx-{n}-laptop" for n in ("3050", "3050-ti", "3060", "3070", "3070-ti", "3080", "3080-ti", "a3000-12gb")),
        *("rtx-a5000", "rtx-a6000", "a10", "a40", "a100-40gb-pcie", "a100-80gb-pcie", "a100-40gb-sxm"),
        "a100-80gb-sxm",
    ],
    "Ada": [
        *("rtx-4060", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4070-super", "rtx-4070-ti"),
        *("rtx-4070-ti-super", "rtx-4080", "rtx-4080-super", "rtx-4090-d", "rtx-4090", "rtx-4050-laptop"),
        *("rtx-4060-laptop", "rtx-4070-laptop", "rtx-4080-laptop", "rtx-4090-laptop", "rtx-2000-ada"),
        *("rtx-4000-sff-ada", "rtx-4000-ada", "rtx-5000-ada", "rtx-6000-ada", "l4", "l40", "l40s"),
    ],
    "Hopper": ["h100-pcie", "h100-sxm", "h20", "h200-sxm"],
    "Blackwell": [
        *("rtx-5050", "rtx-5060", "rtx-5060-ti-8gb", "rtx-5060-ti-16gb", "rtx-5070", "rtx-5070-ti", "rtx-5080"),
        *("rtx-5090", "rtx-5050-laptop", "rtx-5060-laptop", "rtx-5070-laptop", "rtx-5070-ti-laptop"),
        *("rtx-5080-laptop", "rtx-5090-laptop", "rtx-pro-2000-blackwell", "rtx-pro-4000-blackwell"),
        *("rtx-pro-4500-blackwell", "rtx-pro-5000-blackwell", "rtx-pro-6000-blackwell", "rtx-pro-6000-blackwell-max-q"),
    ],
    "GCN": ["rx-580", "mi50-16gb", "mi50-32gb"],
    "RDNA 1": ["rx-5700-xt"],
    "RDNA 2": [
        *("rx-6600", "rx-6600-xt", "rx-6650-xt", "rx-6700", "rx-6700-xt", "rx-6750-xt", "rx-6800", "rx-6800-xt"),
        *("rx-6900-xt", "rx-6950-xt"),
    ],
    "RDNA 3": ["rx-7600", "rx-7600-xt", "rx-7700-xt", "rx-7800-xt", "rx-7900-gre", "rx-7900-xt", "rx-7900-xtx"],
    "RDNA 4": ["rx-9060-xt-8gb", "rx-9060-xt-16gb", "rx-9070", "rx-9070-xt", "radeon-ai-pro-r9700"],
    "Alchemist": ["arc-a750", "arc-a770"],
    "Battlemage": ["arc-b570", "arc-b580", "arc-pro-b50", "arc-pro-b60", "arc-pro-b70"],
}


def test_every_gpu_is_of_one_generation() -> None:
    assert sorted(name for names in _GENERATIONS.values() for name in names) == sorted(gpu_names())


def out_of_order(pairs: list[tuple[float, float, str]], margin: float = 1.0) -> list[str]:
    """Pairs of (on paper, effective, name): ``margin`` times more on paper than the other, and no more in effect."""
    return [f"{a} {b}" for more, got, a in pairs for less, have, b in pairs if more > margin * less and got <= have]


@pytest.mark.parametrize("generation", _GENERATIONS)
def test_within_a_generation_a_faster_gpu_reads_and_multiplies_faster(generation: str) -> None:
    machines = [assemble(name, "ddr5-6000").gpu for name in _GENERATIONS[generation]]
    assert not out_of_order([(gpu.bandwidth_bytes_per_s, gpu.read_bytes_per_s, gpu.name) for gpu in machines])
    cool = [gpu for gpu in machines if gpu.name != "T4"]  # held to 70 W, below its data sheet
    products = [(gpu.flops_per_s, gpu.effective_flops_per_s, gpu.name) for gpu in cool]
    assert not out_of_order(products, margin=1.1)  # measured fractions of professional cards are a tenth lower


def test_over_generations_a_tenth_more_bandwidth_reads_faster() -> None:
    machines = [assemble(name, "ddr5-6000").gpu for name in gpu_names()]
    reads = [(gpu.bandwidth_bytes_per_s, gpu.read_bytes_per_s, gpu.name) for gpu in machines]
    assert not out_of_order(reads, margin=1.1)


def test_a_whole_models_rate_in_place_of_a_kernels_would_be_out_of_order() -> None:
    paper = [(1008e9, 1008e9 * 0.61, "RTX 4090"), (960e9, 960e9 * 0.85, "RTX 6000 Ada")]
    assert out_of_order(paper) == ["RTX 4090 RTX 6000 Ada"]


@pytest.mark.parametrize("cpu", cpu_names())
def test_faster_memory_more_channels_and_more_cores_are_never_slower(cpu: str) -> None:
    numbers, taken = part("cpu", cpu).numbers, part("cpu", cpu).memory
    fitting = [name for name in memory_names() if part("memory", name).family in taken]
    memories = sorted(fitting, key=lambda name: float(part("memory", name).transfers_per_s.value))
    channels, cores = ((numbers.get(f"most_{key}") or numbers[key]).value for key in ("channels", "cores"))
    even = [1, *range(2, channels + 1, 2)]  # an odd number is a slot left empty
    for machines in (
        [assemble("rtx-4090", name, cpu, channels=min(channels, 2)).cpu for name in memories],
        [assemble("rtx-4090", memories[0], cpu, channels=count).cpu for count in even],
        [assemble("rtx-4090", memories[0], cpu, cores=count).cpu for count in (1, 2, 4, cores)],
    ):
        assert_never_slower(machines)


def assert_never_slower(cpus: list[Cpu]) -> None:
    for rate in ("dram_bytes_per_s", "read_bytes_per_s", "flops_per_s"):
        rates = [getattr(cpu, rate) for cpu in cpus]
        assert rates == sorted(rates), rate


# --- Dials scale what belongs together --------------------------------------------------------------------------------


MACHINE = load_hardware("rtx3090-ddr4")


@pytest.mark.parametrize("dial", DIALS)
def test_a_dial_sets_its_first_number_and_the_others_keep_their_ratio(dial: str) -> None:
    keys, unit = DIALS[dial].keys, DIALS[dial].unit
    numbers, changed = MACHINE.flat(), turned(MACHINE, dial, 20)
    assert set(changed) == set(keys)
    assert changed[keys[0]] == pytest.approx(20 * unit)
    ratio = 20 * unit / numbers[keys[0]]
    assert [changed[key] / numbers[key] for key in keys] == pytest.approx([ratio] * len(keys))


def test_a_slot_is_named_by_generation_and_lanes() -> None:
    changed = turned(MACHINE, PCIE, "3x8")  # 8 GT/s, 128b/130b
    assert changed[LINK[0]] == pytest.approx(8 * 8e9 * 128 / 130 / 8)
    assert set(changed) == set(LINK)


@pytest.mark.parametrize(("dial", "value", "message"), [
    (PCIE, "6x16", "pcie: expected generation x lanes such as 3x16"),
    (PCIE, "4x3", "got '4x3'"),
    ("pcie_gbps", 0, "pcie_gbps: expected a number above 0, got 0"),
    ("gpu_tflops", True, "got True"),
    ("dram_gbps", "fast", "got 'fast'"),
])
def test_what_a_dial_cannot_be_set_to(dial: str, value: object, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        turned(MACHINE, dial, value)


def test_a_better_part_is_a_plausible_machine_whose_whole_numbers_stay_whole() -> None:
    better = MACHINE.with_numbers(scaled_numbers(MACHINE, ("gpu.memory_bytes", "gpu.kernel_ns", *LINK), 1.25))
    assert (better.gpu.memory_bytes, better.gpu.kernel_ns) == (MACHINE.gpu.memory_bytes * 5 // 4, 3750)
    assert better.link.h2d_bytes_per_s == MACHINE.link.h2d_bytes_per_s * 1.25
    check_plausible(better.flat(), "better")


def test_a_preset_was_not_measured() -> None:
    assert not MACHINE.measured
    with pytest.raises(HardwareError, match="'rtx3090-ddr4': expected a measured profile; make one: trilane profile"):
        MACHINE.measured_profile()


# --- Physical limits --------------------------------------------------------------------------------------------------


def refused(key: str, value: float, **others: float) -> str:
    """The message that ``key`` = ``value`` gives."""
    with pytest.raises(HardwareError) as caught:
        check_plausible({key: value, **others}, "box")
    return str(caught.value)


@pytest.mark.parametrize("name", hardware_names())
def test_every_preset_is_plausible(name: str) -> None:
    check_plausible(load_hardware(name).flat(), name)


def test_every_number_of_a_machine_has_a_limit() -> None:
    numbers = {k for k, v in load_hardware("rtx-3090+ddr4-3200+64gb").flat().items() if isinstance(v, int | float)}
    few_have = {"cpu.efficiency_cores", "cpu.vector_bits", *(name for name in LIMITS if name.startswith("disk."))}
    assert numbers == set(LIMITS) - few_have - {"power.platform_w"}  # which no part states


def test_of_a_cpu_with_slow_cores_the_fast_ones_are_taken_first() -> None:
    whole, few = (load_hardware(f"rtx-4090+ddr5-5600+core-i7-13700k{cores}").cpu for cores in ("", "+8-cores"))
    assert (whole.cores, whole.efficiency_cores, whole.fast_cores) == (16, 8, 8)
    assert (few.cores, few.efficiency_cores, few.fast_cores) == (8, None, 8)


@pytest.mark.parametrize("key", sorted(LIMITS))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_no_number_is_negative_or_not_finite(key: str, value: float) -> None:
    assert f"box: {key} = {value:g} is outside" in refused(key, value)


@pytest.mark.parametrize("key", sorted(LIMITS))
def test_zero_only_where_it_means_no_such_cost(key: str) -> None:
    if LIMITS[key].zero:
        check_plausible({key: 0}, "box")
    else:
        assert f"{key} = 0 is outside" in refused(key, 0)


@pytest.mark.parametrize(("key", "value", "hint"), [
    ("link.h2d_bytes_per_s", 25, "it looks like GB/s typed as bytes/s: write 2.5e+10"),
    ("link.d2h_bytes_per_s", 25000, "it looks like MB/s typed as bytes/s: write 2.5e+10"),
    ("gpu.bandwidth_bytes_per_s", 0.936, "it looks like TB/s typed as bytes/s: write 9.36e+11"),
    ("gpu.memory_bytes", 24, "it looks like GB typed as bytes: write 2.4e+10"),
    ("gpu.flops_per_s", 71.2, "it looks like TFLOP/s typed as flop/s: write 7.12e+13"),
    ("cpu.flops_per_s", 1300, "it looks like GFLOP/s typed as flop/s: write 1.3e+12"),
    ("host.launch_ns", 2.5, "it looks like us typed as ns: write 2500"),
    ("gpu.bandwidth_fraction", 80, "it looks like percent typed as fraction: write 0.8"),
    ("contention.cpu_permille", 0.85, "it looks like a fraction typed as permille: write 850"),
])
def test_slipped_units_are_named(key: str, value: float, hint: str) -> None:
    assert hint in refused(key, value)


@pytest.mark.parametrize(("key", "value"), [
    ("link.h2d_bytes_per_s", 9e11),  # above NVLink-C2C
    ("gpu.bandwidth_bytes_per_s", 1.1e13),
    ("cpu.flops_per_s", 1e15),
    ("link.h2d_latency_ns", 11_000_000),
    ("host.sync_ns", 11_000_000),
    ("contention.copy_permille", 1001),
    ("cpu.first_expert_ns", 50),
])
def test_numbers_beyond_physics_are_refused(key: str, value: float) -> None:
    limit = LIMITS[key]
    assert f"{limit.low:g}..{limit.high:g} {limit.unit}" in refused(key, value)


def test_effective_rates_stay_below_theory() -> None:
    text = refused("link.h2d_bytes_per_s", 40e9, **{"link.theory_bytes_per_s": 31.5e9})
    assert "link.h2d_bytes_per_s = 4e+10 exceeds link.theory_bytes_per_s = 3.15e+10" in text
    text = refused("cpu.read_bytes_per_s", 60e9, **{"cpu.dram_bytes_per_s": 51.2e9})
    assert "what the memory channels can carry; correct one of the two" in text


def test_copies_back_are_bounded_by_a_link_where_there_is_one() -> None:
    """On host lanes they are memory copies without a pace."""
    rates = {"link.theory_bytes_per_s": 4e9, "link.h2d_bytes_per_s": 4e9, "link.d2h_bytes_per_s": 20e9}
    check_plausible(rates, "box", "host-lanes")
    for kind in ("cuda", None):
        with pytest.raises(HardwareError, match=r"link.d2h_bytes_per_s = 2e\+10 exceeds link.theory_bytes_per_s"):
            check_plausible(rates, "box", kind)
    with pytest.raises(HardwareError, match=r"link.h2d_bytes_per_s = 5e\+09 exceeds link.theory_bytes_per_s"):
        check_plausible({**rates, "link.h2d_bytes_per_s": 5e9}, "box", "host-lanes")


def test_dram_bandwidth_is_a_socket_s() -> None:
    assert "1.2e+12 a socket, above 1e+12 bytes/s" in refused("cpu.dram_bytes_per_s", 1.2e12)
    check_plausible({"cpu.dram_bytes_per_s": 1.2e12, "cpu.sockets": 2}, "box")


def test_reserve_fits_the_card() -> None:
    assert "gpu.reserve_bytes = 5e+10 exceeds" in refused("gpu.reserve_bytes", 50e9, **{"gpu.memory_bytes": 24e9})


def test_unknown_keys_and_text_are_left_to_the_loader() -> None:
    check_plausible({"gpu.name": "RTX", "my.own": -5}, "box")


def test_load_hardware_checks_overrides() -> None:
    with pytest.raises(HardwareError, match=r"hardware 'rtx3090-ddr4': link.h2d_bytes_per_s = 25 .* GB/s typed as"):
        load_hardware("rtx3090-ddr4", {"link.h2d_bytes_per_s": 25})
