"""Kernels' numbers from the times of small models: those of an engine of known kernels come out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from realrun.llama_cpp.bench import BenchContext, BenchPoint, BenchSettings, quartiles, time_points
from realrun.llama_cpp.benchmark_models import ON_GPU, bench_models, measure_samples, split_models
from realrun.llama_cpp.kernel_numbers import KernelError, KernelNumbers, plausible_rates, write_engine
from realrun.llama_cpp.split_numbers import SplitNumbers
from sim.costs.engine import FittedEngine
from sim.costs.kernel_costs import Kernels, SplitKernels
from tests.kit.fake_engine import FakeContext, FakeSplitContext, known_gpu_kernels, known_kernels, known_split

BLOCKS, THREADS = ("q4_0", "q8_0"), (1, 2)


@pytest.fixture(scope="module")
def samples() -> dict[str, dict[BenchPoint, float]]:
    kernels = known_kernels(BLOCKS)
    found = {}
    for model in bench_models(BLOCKS, THREADS):
        times = time_points(FakeContext(model.shape, model.blocks, kernels), model.points)
        found[model.name] = {point: quartiles(each)[0] for point, each in times.items()}
    return found


@pytest.fixture(scope="module")
def found(samples: dict[str, dict[BenchPoint, float]]) -> Kernels:
    return KernelNumbers(samples, BLOCKS, THREADS, "made up").kernels()


def test_rates_of_products_come_out(found: Kernels) -> None:
    for block, rates in known_kernels(BLOCKS).products.items():
        for which in ("experts", "others"):
            known, measured = (getattr(each, which).value for each in (rates, found.products[block]))
            assert measured.rows == known.rows
            np.testing.assert_allclose(measured.flops_per_s, known.flops_per_s, rtol=0.02 if block != "f32" else 0.15)


def test_times_of_chosen_experts_come_out(found: Kernels) -> None:
    assert found.chosen_ns.value == pytest.approx(known_kernels(BLOCKS).chosen_ns.value, rel=0.1)


def test_times_of_attention_come_out(found: Kernels) -> None:
    known = known_kernels(BLOCKS).attention
    assert found.attention.depths == (512, 2048, 8192)
    for name in ("cache_byte_ns", "pair_ns", "width_ns", "tile_pair_ns", "tile_width_ns"):
        measured = getattr(found.attention, name).value
        np.testing.assert_allclose(measured, getattr(known, name).value, rtol=0.03, err_msg=name)
    assert found.attention.tile_rows.value == 64


def test_what_is_left_of_steps_comes_out(found: Kernels) -> None:
    known = known_kernels(BLOCKS)
    assert found.step_ns.value == pytest.approx(known.step_ns.value, rel=0.2)
    for kind in ("grouped", "latent"):
        assert found.layer_ns[kind].value == pytest.approx(known.layer_ns[kind].value, rel=0.2)
        assert found.token_ns[kind].value == pytest.approx(known.token_ns[kind].value, rel=0.2)


def test_more_threads_are_at_most_as_many_times_as_fast(samples: dict[str, dict[BenchPoint, float]]) -> None:
    """A disturbed point, whose rate cannot be, is bounded."""
    disturbed = {**samples, "few-q4_0": {**samples["few-q4_0"], BenchPoint(2, 0, 1): 1e12}}
    rates = KernelNumbers(disturbed, BLOCKS, THREADS, "").kernels().products["q4_0"].experts.value
    one, two = (rates.flops_per_s[place][0] for place in (0, 1))
    assert one <= two <= 2 * one


def test_a_router_within_the_noise_is_no_faster_than_the_fastest_product(
    samples: dict[str, dict[BenchPoint, float]],
) -> None:
    """The model with the larger router took no longer, for one token."""
    few, many = samples["few-rows"], samples["many-rows"]
    same = {point: few[point] if point.tokens == 1 else ns for point, ns in many.items()}
    products = KernelNumbers({**samples, "many-rows": same}, BLOCKS, THREADS, "here").kernels().products
    for place in (0, 1):
        fastest = max(max(products[block].others.value.flops_per_s[place]) for block in BLOCKS)
        rates = products["f32"].others.value.flops_per_s[place]
        assert rates[0] == pytest.approx(fastest)
        assert max(rates[1:]) < 0.9 * fastest
    assert products["f32"].others.confidence == "low"
    assert products["f32"].others.source.endswith("choosing; within noise, and bounded by the fastest product")


def test_times_from_which_nothing_follows_are_refused(samples: dict[str, dict[BenchPoint, float]]) -> None:
    same = dict.fromkeys(samples["few-q4_0"], 1000000000000000.0)
    with pytest.raises(KernelError, match="measure again, without other programs"):
        KernelNumbers({name: dict.fromkeys(each, 1e15) for name, each in samples.items()} | {"few-q4_0": same}, BLOCKS,
                      THREADS, "").kernels()


def test_an_engine_file_is_read_back(found: Kernels, tmp_path: Path) -> None:
    engine = write_engine(found, "an engine", tmp_path / "mine.yaml")
    assert (engine.name, engine.about) == ("mine", "an engine")
    assert isinstance(engine, FittedEngine)
    assert engine.kernels is not None
    assert engine.kernels.threads == (1, 2)
    assert engine.kernels.step_ns.value == pytest.approx(found.step_ns.value, rel=1e-4)


MODEL = next(model for model in bench_models(("q4_0",), (1,)) if model.name == "few-q4_0")
POINT = BenchPoint(1, 0, 1)


def test_a_time_is_the_lower_quartile_of_a_round_and_of_the_rounds_the_median(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each round loads the model, in which steps take 100, 300 or 200 ns; every third one is disturbed."""
    written: list[str] = []
    loads = iter([100, 300, 200])

    class Disturbed(FakeContext):
        steps, ns = 0, 0

        def compute_ns(self, tokens: int) -> int:
            self.steps += 1
            return self.ns * (50 if self.steps % 3 == 0 else 1)

    @contextmanager
    def opened(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
        assert path.read_text() == "weights"
        context = Disturbed(MODEL.shape, MODEL.blocks, known_kernels(("q4_0",)))
        context.ns = next(loads)
        yield context

    def write(shape: object, architecture: str, blocks: object, path: Path) -> None:
        written.append(path.name)
        path.write_text("weights")

    monkeypatch.setattr("realrun.llama_cpp.benchmark_models.write_random_gguf", write)
    found = measure_samples(opened, tmp_path, [MODEL], 3)
    assert found["few-q4_0"][POINT] == 200
    assert written == ["few-q4_0.gguf"]
    assert list(loads) == []


def test_attention_is_timed_with_all_depths_and_the_model_of_few_layers_with_none() -> None:
    models = {model.name: model for model in bench_models(("q4_0",), (1, 2))}
    depths = {name: {point.depth for point, _ in model.points} for name, model in models.items()}
    filled = {"grouped", "many-heads", "no-groups", "narrow-heads", "latent"}
    assert {name for name in models if depths[name] == {0, 512, 2048, 8192}} == filled
    assert all(depths[name] == {0} for name in models.keys() - filled)
    assert all(models[name].settings.copies and models[name].settings.context_tokens > 8192 for name in filled)
    assert {point.tokens for point, _ in models["grouped"].points if point.depth} == {1, 128}
    assert models["few-layers"].shape.layers * 3 == models["grouped"].shape.layers


# --- Numbers of a GPU and of experts that stay with the CPU, from the times of an engine of known kernels -------------


SPLIT_BLOCKS, SPLIT_THREADS = ("q4_0", "q8_0"), (4, 8)


@pytest.fixture(scope="module")
def split_samples() -> dict[str, dict[BenchPoint, float]]:
    gpu, split, found_split = known_gpu_kernels(SPLIT_BLOCKS), known_split(SPLIT_BLOCKS), {}
    for model in (*bench_models(SPLIT_BLOCKS, (1,), ON_GPU), *split_models(SPLIT_BLOCKS, SPLIT_THREADS)):
        times = time_points(FakeSplitContext(model.shape, model.blocks, gpu, split, model.settings), model.points)
        found_split[model.samples_name] = {point: quartiles(each)[0] for point, each in times.items()}
    return found_split


@pytest.fixture(scope="module")
def gpu(split_samples: dict[str, dict[BenchPoint, float]]) -> Kernels:
    return KernelNumbers(split_samples, SPLIT_BLOCKS, (1,), "made up", ON_GPU).kernels()


@pytest.fixture(scope="module")
def found_split(split_samples: dict[str, dict[BenchPoint, float]], gpu: Kernels) -> SplitKernels:
    return SplitNumbers(split_samples, SPLIT_BLOCKS, SPLIT_THREADS, gpu, "made up").kernels()


def test_rates_of_the_gpu_come_out(gpu: Kernels) -> None:
    for block in SPLIT_BLOCKS:
        for which in ("experts", "others"):
            tables = (known_gpu_kernels(SPLIT_BLOCKS), gpu)
            known, measured = (getattr(table.products[block], which).value for table in tables)
            assert measured.rows == known.rows
            np.testing.assert_allclose(measured.flops_per_s, known.flops_per_s, rtol=0.05)


def test_fixed_times_and_attention_of_the_gpu_come_out(gpu: Kernels) -> None:
    known = known_gpu_kernels(SPLIT_BLOCKS)
    assert gpu.layer_ns["grouped"].value == pytest.approx(known.layer_ns["grouped"].value, rel=0.05)
    assert gpu.layer_ns["latent"].value == pytest.approx(known.layer_ns["latent"].value, rel=0.05)
    assert gpu.step_ns.value == pytest.approx(known.step_ns.value, rel=0.2)
    assert gpu.attention.tile_rows.value == 2
    for name in ("cache_byte_ns", "pair_ns", "width_ns", "tile_pair_ns", "tile_width_ns"):
        measured, wanted = (getattr(kernels.attention, name).value for kernels in (gpu, known))
        np.testing.assert_allclose(measured, wanted, rtol=0.1, err_msg=name)


def test_rates_of_experts_on_the_cpu_come_out(found_split: SplitKernels) -> None:
    for block, rates in known_split(SPLIT_BLOCKS).experts.items():
        assert found_split.experts[block].value.rows == rates.value.rows
        np.testing.assert_allclose(found_split.experts[block].value.flops_per_s, rates.value.flops_per_s, rtol=0.03)


def test_the_time_of_handing_over_comes_out(found_split: SplitKernels) -> None:
    known = known_split(SPLIT_BLOCKS)
    assert found_split.threads == (4, 8)
    assert found_split.layer_ns.value == pytest.approx(known.layer_ns.value, rel=0.1)
    assert found_split.chosen_ns.value == pytest.approx(known.chosen_ns.value, rel=0.3)


@pytest.mark.parametrize("memory", ["mapped", "pinned"])
def test_copies_come_out(found_split: SplitKernels, memory: str) -> None:
    copies, known = getattr(found_split, memory), getattr(known_split(SPLIT_BLOCKS), memory)
    assert copies.byte_ns.value == pytest.approx(known.byte_ns.value, rel=0.02)
    assert copies.expert_ns.value == pytest.approx(known.expert_ns.value, rel=0.2)
    assert memory in copies.byte_ns.source


def test_more_threads_are_as_fast_as_fewer_at_least_and_in_proportion_at_most() -> None:
    """With 8 threads: slower than with 4, faster by half, and four times as fast, of which twice is taken."""
    found_split = plausible_rates((1, 2, 4), (4, 8), [[2.0, 3.0, 4.0], [5.0, 2.0, 1.0]], 1e12, "")
    assert found_split.flops_per_s == ((1e9 / 2, 1e9 / 3, 1e9 / 4), (1e9 / 2, 1e9 / 2, 1e9 / 2))


def test_experts_with_more_threads_that_other_programs_held_up_are_as_fast_as_with_fewer(
    split_samples: dict[str, dict[BenchPoint, float]], gpu: Kernels
) -> None:
    slow = {
        name: {point: ns * (3 if point.threads == 8 else 1) for point, ns in times.items()}
        for name, times in split_samples.items()
    }
    found_split = SplitNumbers(slow, SPLIT_BLOCKS, SPLIT_THREADS, gpu, "").kernels()
    for rates in found_split.experts.values():
        few, many = rates.value.flops_per_s
        assert many == few


def test_times_from_which_no_rate_follows_are_refused(
    split_samples: dict[str, dict[BenchPoint, float]], gpu: Kernels
) -> None:
    same = {name: dict.fromkeys(times, 1.0) if "-split" in name else times for name, times in split_samples.items()}
    with pytest.raises(KernelError, match="on the GPU and on the CPU: no rate follows from their times; measure again"):
        SplitNumbers(same, SPLIT_BLOCKS, SPLIT_THREADS, gpu, "").kernels()
