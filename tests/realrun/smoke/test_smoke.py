"""The smoke test passes on host lanes and on the fake GPU, and each check fails where what it is about is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policies.registry import SYSTEMS
from realrun.execution.layer_execution import LayerExecution
from realrun.machine.cuda_lanes import CudaLanes
from realrun.machine.cuda_streams import StreamCompletion
from realrun.machine.host_lanes import HostLanes
from realrun.smoke import Check, SkippedError, checked, generation_checks
from realrun.smoke import smoke as smoke_module
from realrun.smoke.generation_checks import ON_TWO
from realrun.smoke.smoke import machine_checks, smoke
from tests.kit.depth import DEEP
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import Deferred, fake_machine
from tests.kit.tiny_bench import Instead, machine, tiny_lanes

SOME = ("on-demand", "fiddler", "dali", "smoe", "oracle")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take no time."""
    sizes = {"cuda": 1 << 16, "host-lanes": 1 << 16}
    monkeypatch.setattr(smoke_module, "COPIED_BYTES", sizes)
    monkeypatch.setattr(smoke_module, "PINNED_BYTES", sizes)


@pytest.fixture(scope="module")
def lanes() -> Iterator[HostLanes]:
    with machine() as made:
        yield made


def failed(checks: Iterator[Check]) -> list[str]:
    """The first words of those that failed."""
    return [check.name.partition(":")[0] for check in checks if check.outcome == "failed"]


def named(checks: Iterator[Check], name: str) -> Check:
    return next(check for check in checks if check.name.startswith(name))


def test_host_lanes_pass_every_check_of_the_machine(lanes: HostLanes) -> None:
    found = list(machine_checks(lanes))
    assert [(check.outcome, check.why) for check in found] == [("ok", "")] * 7
    assert all(check.figure for check in found)


def test_policies_that_keep_the_routing_are_exact_and_others_run(inline_lanes: HostLanes) -> None:
    loaded, *found = generation_checks.generation_checks(inline_lanes, SOME)
    assert loaded.outcome == "ok"
    assert [check.name for check in found] == [
        *[f"mini-moe under {policy}" for policy in SOME if policy != "oracle"],
        "mini-moe on two GPUs under on-demand", "mini-moe on two GPUs under fiddler",
    ]
    assert [check.outcome for check in found] == ["ok"] * 6
    exact = [check.figure.startswith("same tokens, logits within") for check in found]
    assert exact == [True, True, True, False, True, True]


def test_every_policy_that_can_generate_is_checked(inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_checks, "_make", lambda _, into: into.append((None, None)) or "made")
    monkeypatch.setattr(generation_checks, "_is_exact", lambda policy, *_, **__: policy)
    monkeypatch.setattr(generation_checks, "_runs", lambda policy, *_: policy)
    checks = list(generation_checks.generation_checks(inline_lanes))
    live = [name for name, entry in SYSTEMS.items() if entry.needs.live]
    assert [check.figure for check in checks[1:]] == [*live, *(name for name in live if name in ON_TWO)]


def test_both_halves_run_each_on_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[bool, HostLanes]] = []

    def make(inline: bool) -> HostLanes:
        made.append((inline, HostLanes(tiny_lanes(), inline=inline)))
        return made[-1][1]

    monkeypatch.setattr(generation_checks, "generation_checks", lambda machine: iter([Check("generation", "ok")]))
    assert [check.name for check in smoke(make)][-1] == "generation"
    assert [inline for inline, _ in made] == [False, True]


# --- on the fake GPU --------------------------------------------------------------------------------------------------


def test_the_fake_gpu_passes_every_check_of_the_machine(cuda: FakeCuda) -> None:
    with fake_machine(cuda) as gpu:
        found = list(machine_checks(gpu))
    assert failed(iter(found)) == []
    assert named(iter(found), "zero-copy").outcome == "ok"
    assert "page-locked" in named(iter(found), "host memory").figure


def test_law_11_on_the_fake_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = generation_checks.output_of_executor

    def on_the_current_stream(*given: Any) -> Any:
        with Deferred(cuda.stream("gpu")):  # what the host thread does goes there, as on a GPU
            return ours(*given)

    monkeypatch.setattr(generation_checks, "output_of_executor", on_the_current_stream)
    cuda.devices = 1
    with fake_machine(cuda) as gpu:
        policies = ("on-demand", "fiddler") if DEEP else ("on-demand",)
        assert failed(generation_checks.generation_checks(gpu, policies)) == []
        monkeypatch.setattr(StreamCompletion, "hold_up", lambda self, stream: None)
        assert failed(generation_checks.generation_checks(gpu, ("on-demand",))) == ["mini-moe under on-demand"]


def test_law_11_on_two_fake_gpus(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, select = generation_checks.output_of_executor, CudaLanes.select

    def on_the_selected_device(*given: Any) -> Any:
        with Deferred(cuda.stream("gpu")) as host:

            def follow(lanes: CudaLanes) -> None:
                select(lanes)
                host.stream = cuda.stream(f"gpu{lanes.device.index or ''}")

            monkeypatch.setattr(CudaLanes, "select", follow)
            return ours(*given)

    monkeypatch.setattr(generation_checks, "output_of_executor", on_the_selected_device)
    with fake_machine(cuda) as gpu:
        found = list(generation_checks.generation_checks(gpu, ("fiddler",)))
        assert [check.outcome for check in found] == ["ok"] * 3
        assert ("set_device", "cuda:1") in cuda.log
        monkeypatch.setattr(StreamCompletion, "hold_up", lambda self, stream: None)
        assert "mini-moe on two GPUs under fiddler" in failed(generation_checks.generation_checks(gpu, ("fiddler",)))


def test_one_gpu_is_said_to_be_one_and_the_rest_goes_on(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.devices = 1
    with fake_machine(cuda) as gpu:
        found = list(generation_checks.generation_checks(gpu, ("on-demand",)))[-1]
    assert found.outcome == "skipped"
    assert "expected gpus 1 at most, the devices that torch finds, got 2" in found.why


def test_a_gpu_that_does_not_wait_for_copies_fails(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamCompletion, "hold_up", lambda self, stream: None)
    with fake_machine(cuda) as gpu:
        cuda.stream("link").op_ns = 10**9
        assert failed(machine_checks(gpu)) == ["streams"]


def test_a_gpu_that_reads_no_host_memory_in_place_is_said_to_and_goes_on(cuda: FakeCuda) -> None:
    with fake_machine(cuda, result_path="h2d") as gpu:
        found = named(machine_checks(gpu), "zero-copy")
    assert found.outcome == "skipped"
    assert "copied over the link (result_path h2d)" in found.why


# --- broken twins -----------------------------------------------------------------------------------------------------


def test_a_view_that_is_a_copy_fails(lanes: HostLanes) -> None:
    stale = Instead(lanes, readable=lambda host: host.clone())
    assert failed(machine_checks(stale)) == ["zero-copy"]


def test_a_clock_that_runs_backwards_fails(lanes: HostLanes) -> None:
    times = iter(range(10**15, 0, -(10**6)))
    assert "events" in failed(machine_checks(Instead(lanes, now_ns=lambda: next(times))))


def test_a_host_that_waits_for_the_cpu_is_said_to_and_goes_on(inline_lanes: HostLanes) -> None:
    found = named(machine_checks(inline_lanes), "flags")
    assert found.outcome == "skipped"
    assert "the host waits for CPU experts instead of the stream" in found.why


def test_a_wrong_sum_of_experts_fails(inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    combine = LayerExecution.combine

    def wrong(self: LayerExecution, finish: Any, keep: Any) -> Any:
        return combine(self, lambda parts: finish(parts * 1.01), keep)

    monkeypatch.setattr(LayerExecution, "combine", wrong)
    assert failed(generation_checks.generation_checks(inline_lanes, ("fiddler",))) == [
        "mini-moe under fiddler", "mini-moe on two GPUs under fiddler"
    ]


def test_without_a_model_no_policy_is_tried(inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_checks, "MODEL", "nowhere")
    [only] = generation_checks.generation_checks(inline_lanes)
    assert only.outcome == "failed"


def test_an_error_is_one_line_with_its_name() -> None:
    def fails() -> str:
        raise RuntimeError("CUDA error:\n  misaligned address")

    def lacks() -> str:
        raise SkippedError("the host does it")

    assert checked("it", fails) == Check("it", "failed", why="RuntimeError: CUDA error: misaligned address")
    assert checked("it", lacks) == Check("it", "skipped", why="the host does it")


def test_a_tf32_product_would_be_noticed(inline_lanes: HostLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 keeps 10 bits of the mantissa."""
    combine = LayerExecution.combine

    def rounded(self: LayerExecution, finish: Any, keep: Any) -> Any:
        return combine(self, lambda parts: finish((parts.view(torch.int32) & ~0x1FFF).view(torch.float32)), keep)

    monkeypatch.setattr(LayerExecution, "combine", rounded)
    assert failed(generation_checks.generation_checks(inline_lanes, ("naive-cpu",))) == ["mini-moe under naive-cpu"]
