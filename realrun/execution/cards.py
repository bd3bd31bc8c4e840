"""Several GPUs, each with an executor for its block of layers: what replays and generations on them have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from realrun.errors import RefusedError
from realrun.execution.executor import Executor
from realrun.execution.layer_execution import LayerSizes
from realrun.machine.lanes import Completion
from sim.runs.cards import LayerBlock, rows_of_card
from sim.runs.prepare import Prepared
from sim.runs.spans import Row


def check_divided(prepared: Prepared) -> None:
    """Raises RefusedError for a run of several GPUs that is simulated only."""
    scenario = prepared.scenario
    refused = (
        (scenario.split_mode == "expert", "GPUs that compute a layer together: expected split_mode layer"),
        (scenario.host_expert_gb is not None, "GPUs above a disk: leave out one of both (gpus, host_expert_gb)"),
    )
    for holds, what in refused:
        if holds and prepared.gpus > 1:
            raise RefusedError(f"several GPUs are simulated, not run, as {what}")


class Boundary:
    """The way of hidden states from one GPU to the next: down the link of the one, up that of the other.

    ``arrived`` [N, H]: those of the largest step, on the other GPU.
    """

    def __init__(self, card: Executor, following: Executor, sizes: LayerSizes) -> None:
        self._card, self._following, places = card, following, (sizes.tokens, sizes.hidden)
        self._on_host = card.machine.host_tensor(places, sizes.dtype)
        self.arrived = following.machine.gpu_tensor(places, sizes.dtype)

    def cross(self, hidden: Callable[[], Tensor], ready: Completion, layer: int, tokens: int) -> Completion:
        """Hand over the output of the one's last ``layer``, ``hidden()`` [N, H], valid when ``ready`` has ended.

        It has arrived when the returned completion has ended. The other GPU becomes the calling thread's.
        """
        card, following = self._card, self._following
        sent, arrived = self._on_host[:tokens], self.arrived[:tokens]
        down = card.machine.d2h.submit(lambda: sent.copy_(hidden(), non_blocking=True), (ready,))
        card.recorder.add("d2h", down, "hand_over", layer, -1, tokens, sent.nbytes)
        down.wait()
        following.machine.select()
        up = following.copying.send_result(lambda: arrived.copy_(sent, non_blocking=True))
        following.recorder.add("h2d", up, "hand_over", 0, -1, tokens, sent.nbytes)
        return up


@contextmanager
def running(executors: Sequence[Executor]) -> Iterator[None]:
    """A run: see ``Executor.running``. Its clock starts when the residents of all GPUs are in their slots."""
    with ExitStack() as stack:
        for executor in executors:
            stack.enter_context(executor.running())
        for executor in executors:
            executor.recorder.zero_ns = executors[-1].recorder.zero_ns
        yield


def rows_of(executors: Sequence[Executor], blocks: Sequence[LayerBlock]) -> list[Row]:
    """The spans of all GPUs, with the model's layers."""
    return [row for number, (executor, block) in enumerate(zip(executors, blocks, strict=True))
            for row in rows_of_card(executor.recorder.rows, number, block.first)]
