"""Launches of the host on a GPU: its spans are its own work, on a clock that stands still while it works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from policies.mechanism.views import ExpertId, Plan, Routing
from realrun.execution import layer_execution
from realrun.execution.layer_execution import LayerExecution, LayerSizes, RoutedInput
from realrun.execution.recorder import MachineRecorder
from realrun.execution.routed_tokens import routed, routing_of
from realrun.experts.ffn import SwiGlu
from realrun.experts.store import (
    ExpertLayout,
    ExpertStore,
    GpuSlots,
    Slab,
)
from realrun.machine.cuda_lanes import CudaLanes
from realrun.machine.lanes import Completion
from realrun.machine.thread_lane import ThreadCompletion
from sim.runs.spans import Span
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine

pytestmark = pytest.mark.timeout(30)
COPY_NS, CPU_NS, HOST_NS, HIDDEN = 3_000_000, 5_000_000, 1000, 8
IDS = torch.tensor([[2, 0], [1, 2]]).numpy()


@dataclass
class Delivery:
    """A copy that the copy thread begins only ``COPY_NS`` after somebody asks for it."""

    cuda: FakeCuda
    machine: CudaLanes
    ready_ns = start_ns = end_ns = 0

    def issued(self) -> Completion:
        self.cuda.now_ns += COPY_NS
        return self.machine.link.submit(lambda: None)

    def wait_known(self) -> None: ...


@pytest.fixture(params=["direct", "h2d"])
def machine(cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[CudaLanes]:
    with fake_machine(cuda, result_path=request.param) as machine:
        yield machine


def parts_on(machine: CudaLanes, cuda: FakeCuda, recorder: MachineRecorder) -> LayerExecution:
    layout = ExpertLayout.from_shape(HIDDEN, 4, torch.float32)
    store = ExpertStore([Slab.allocated(layout, 3, lambda n: torch.zeros(n, dtype=torch.uint8))])
    slots = GpuSlots(torch.zeros(3, layout.size_bytes, dtype=torch.uint8), 0, 0)
    for expert in range(3):
        slots.place(ExpertId(0, expert))

    copying: Any = SimpleNamespace(
        used=lambda id: None, expert_bytes=lambda layer: 100, send_result=lambda work: Delivery(cuda, machine)
    )
    return LayerExecution(
        machine, copying, store, slots, [SwiGlu()], recorder, LayerSizes(2, 2, HIDDEN, torch.float32, torch.float32),
    )


class SlowCpu(SwiGlu):
    """Its time passes on the host's clock. Nobody else is at work meanwhile."""

    cuda: FakeCuda

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.cuda.now_ns += CPU_NS
        return super()._apply_gate(gate_up)


def test_work_that_waits_says_how_long_it_held_its_caller(cuda: FakeCuda, machine: CudaLanes) -> None:
    free = machine.gpu.submit(lambda: None)
    held = machine.gpu.submit(lambda: None, (Delivery(cuda, machine),))  # type: ignore[arg-type]
    assert (free.blocked_ns, held.blocked_ns) == (0, COPY_NS)


def test_launches_do_not_count_what_the_host_waited_for_copies(
    cuda: FakeCuda, machine: CudaLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = MachineRecorder()
    parts, tokens = parts_on(machine, cuda, recorder), routed(IDS, torch.full((2, 2), 0.5))
    hidden, ready = torch.zeros(2, HIDDEN), machine.gpu.submit(lambda: None)
    launch = machine.gpu._launch  # type: ignore[attr-defined]

    def slow_launch(*given: Any) -> None:
        cuda.now_ns += HOST_NS
        launch(*given)

    monkeypatch.setattr(machine.gpu, "_launch", slow_launch)
    futures: Any = {ExpertId(0, 2): Delivery(cuda, machine)}
    plan = Plan(0, Routing((0, 1, 2), (1, 1, 2)), (0, 1, 2), (), (2,), (), (), (), (), (), (), 0)
    with cuda.held():
        parts.start(plan, tokens, RoutedInput(lambda: hidden, tokens.weights, ready), futures)
        parts.combine(torch.clone, lambda _: None)
    assert lasting(recorder) == {0: HOST_NS, 1: HOST_NS, 2: HOST_NS, -1: HOST_NS}


def test_nor_for_experts_on_the_cpu(cuda: FakeCuda, machine: CudaLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = MachineRecorder()
    parts, tokens = parts_on(machine, cuda, recorder), routed(IDS, torch.full((2, 2), 0.5))
    parts._kernels = [SlowCpu()]
    monkeypatch.setattr(SlowCpu, "cuda", cuda, raising=False)
    hidden, ready = torch.zeros(2, HIDDEN), machine.gpu.submit(lambda: None)
    plan = Plan(0, Routing((0, 1, 2), (1, 1, 2)), (), (0, 1, 2), (), (), (), (), (), (), (), 0)
    wait = ThreadCompletion.wait

    def wait_at_last(completion: ThreadCompletion) -> None:
        cuda.release()
        wait(completion)

    monkeypatch.setattr(ThreadCompletion, "wait", wait_at_last)
    with cuda.held():  # the activations do not come before the host waits for the CPU
        parts.start(plan, tokens, RoutedInput(lambda: hidden, tokens.weights, ready), {})
        began_ns = cuda.now_ns
        parts.combine(torch.clone, lambda _: None)
        waited_ns = cuda.now_ns - began_ns
    if machine.result_path == "direct":  # the stream waits for the CPU in the host's place
        assert waited_ns == 0
    else:
        assert waited_ns >= 3 * CPU_NS
    assert lasting(recorder) == {-1: 0}


def test_an_expert_of_one_row_takes_five_kernels_and_nothing_else_is_launched(
    cuda: FakeCuda, machine: CudaLanes
) -> None:
    parts, tokens = parts_on(machine, cuda, MachineRecorder()), routed(IDS[:1], torch.tensor([[0.5, 0.25]]))
    hidden, ready = torch.ones(1, HIDDEN), machine.gpu.submit(lambda: None)
    plan = Plan(0, Routing((0, 2), (1, 1)), (0, 2), (), (), None, (), (), (), (), (), 0)
    parts.start(plan, tokens, RoutedInput(lambda: hidden, tokens.weights, ready), {})
    kernels = [entry[2] for entry in cuda.log if entry[:2] == ("do", "gpu")]
    assert kernels == 2 * ["matmul", "silu", "mul", "matmul", "mul"]


@pytest.mark.parametrize("ids", [IDS[:1], IDS], ids=["one token", "two tokens"])
def test_lists_go_to_the_gpu_for_experts_of_several_rows_alone(
    cuda: FakeCuda, machine: CudaLanes, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[int]] = []

    def noted(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(values.tolist())
        return values

    monkeypatch.setattr(layer_execution, "upload", noted)
    parts, tokens = parts_on(machine, cuda, MachineRecorder()), routed(ids, torch.full(ids.shape, 0.5))
    hidden, ready = torch.ones(len(ids), HIDDEN), machine.gpu.submit(lambda: None)
    routing = routing_of(tokens)
    plan = Plan(0, routing, routing.active, (), (), None, (), (), (), (), (), 0)
    parts.start(plan, tokens, RoutedInput(lambda: hidden, tokens.weights, ready), {})
    assert sent == ([] if len(ids) == 1 else [[0, 3]])  # both tokens chose expert 2


def lasting(recorder: MachineRecorder) -> dict[int, int]:
    """Durations in ns of each expert's launch, and of the sum's."""
    recorder.flush()
    spans = map(Span._make, recorder.rows)
    return {span.expert: span.end_ns - span.start_ns for span in spans if span.kind == "launch"}
