"""What comes over to the host in a replay, on a fake GPU: each ids of its own, and nobody goes on without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.mechanism.views import Forecast
from realrun.execution.recorder import MachineRecorder
from realrun.machine.cuda_lanes import CudaLanes
from realrun.machine.lanes import Completion
from realrun.replay.replay import Launched, Replay
from tests.kit.fake_cuda import FakeCuda
from tests.kit.fake_torch import fake_machine

pytestmark = pytest.mark.timeout(30)
HIDDEN, TOKENS, SLOW_NS = 4, 3, 10_000_000


class Model:
    """The gate says 7, a forecast 9, the head 5."""

    shape = SimpleNamespace(moe_layers=2, top_k=2, shared_width=0)

    def embed(self) -> Tensor:
        return torch.zeros(TOKENS, HIDDEN)

    def dense(self, hidden: Tensor) -> Tensor:
        return hidden

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden.clone()

    def gate(self, layer: int, hidden: Tensor) -> tuple[Tensor, None]:
        return torch.full((TOKENS, 2), 7), None

    def speculate(self, layer: int, hidden: Tensor) -> tuple[Tensor, None]:
        return torch.full((TOKENS, 2), 9), None

    def head(self, hidden: Tensor, every: bool = False) -> Tensor:
        return torch.full((TOKENS,), 5)


class Host:
    """In place of an executor: waits, and foresees nothing."""

    def __init__(self, machine: CudaLanes) -> None:
        self.machine, self.recorder = machine, MachineRecorder()
        self.session = SimpleNamespace(committed=None)
        self.waits: list[tuple[int, int]] = []

    @contextmanager
    def waiting(self, completion: Completion, layer: int, target_layer: int = -1, tokens: int = 0) -> Iterator[None]:
        self.waits.append((layer, target_layer))
        completion.wait()
        yield

    def record(self, kind: str, since_ns: int, layer: int) -> None: ...

    def foresee(self, *given: Any) -> None: ...


@pytest.fixture
def replay(cuda: FakeCuda) -> Iterator[Replay]:
    with fake_machine(cuda) as machine:
        cuda.stream("d2h").op_ns = SLOW_NS
        replay: Any = Replay(Host(machine), Model(), max_tokens=8)  # type: ignore[arg-type]
        forecasts: list[list[Forecast]] = [[Forecast(1, "gate", (), ())], []]
        replay._demand = SimpleNamespace(tokens=TOKENS, generated=TOKENS, drafted=0, forecasts=forecasts)
        replay._routing = SimpleNamespace(weights=torch.zeros(1))
        yield replay


def test_the_gate_is_read_though_a_forecast_was_computed_since(replay: Replay) -> None:
    launched = replay._launch(0)
    assert launched.gated is not None
    with replay._reading(launched.gated, 0):
        assert replay._here[: 2 * TOKENS].tolist() == [7] * (2 * TOKENS)


def foreseen(replay: Replay, launched: Launched) -> list[int]:
    """The ids that are here when the policy foresees."""
    here: list[int] = []
    replay._executor.foresee = lambda *_: here.extend(replay._here[: 2 * TOKENS].tolist())  # type: ignore[method-assign]
    replay._foresee(launched, replay._demand.forecasts[0])
    return here


def test_nobody_foresees_before_the_forecast_is_here(replay: Replay) -> None:
    """One that comes with the layer's own routing is waited for, too, but it is no wait of its own."""
    launched = replay._launch(0)
    assert launched.gated is not None
    with replay._reading(launched.gated, 0):
        pass
    assert foreseen(replay, launched) == [9] * (2 * TOKENS)
    assert replay._executor.waits == [(0, -1)]  # type: ignore[attr-defined]


def test_the_forecast_of_a_committed_layer_is_waited_for(replay: Replay) -> None:
    replay._executor.session.committed = object()  # type: ignore[assignment]
    launched = replay._launch(0)
    assert launched.gated is None
    assert foreseen(replay, launched) == [9] * (2 * TOKENS)
    assert replay._executor.waits == [(0, 1)]  # type: ignore[attr-defined]


def test_what_comes_lies_in_one_piece(replay: Replay, cuda: FakeCuda) -> None:
    """A copy from the GPU to rows that are not next to each other goes by way of another copy, and waits."""
    replay._hidden = torch.zeros(TOKENS, HIDDEN)
    with replay._reading(replay._launch_head(), -1):
        assert replay._here[: TOKENS + 1].tolist() == [5, 5, 5, 0]
