"""Probes of everything that computes: attention, gate and the like by the sizes of a step, experts by workload.

What each span of the simulator (``sim.runs.spans``) is measured as. A hand-over between threads or streams takes
time too, and is counted once, with what it delays:

- attention, gate, speculate, shared, combine, expert on the GPU: from start to end, in a queue that is not empty.
- ``routing``: from the gate's end until the ids are readable on the host.
- ``sync``: from there until the host has sorted the tokens by expert and handed the lists to the GPU.
- ``activations``: from the host's decision until the CPU lane begins its first expert.
- ``first_cpu_expert``: what the first expert of an idle CPU lane takes longer than the others.
- ``result``: from the end of the last CPU expert to the end of the sum, less the sum itself (results read in place), or
  until the results have come over the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from realrun.execution.routed_tokens import RoutedTokens, routed
from realrun.machine.lanes import Work
from realrun.profiling.cover import took_ns
from realrun.profiling.lab import Lab
from realrun.profiling.timing import Key, Probe

FORECASTS = ("speculate", "estimator")
Found = Mapping[Key, Sequence[float]]


def kernel_probes(lab: Lab) -> list[Probe]:
    """Of all sizes that the lab's points ask for."""
    points = lab.points
    return [
        *(decode(lab, batch, context) for batch in points.batches for context in points.contexts),
        *(prefill(lab, batch, prompt) for batch in points.batches for prompt in points.prompts),
        *(decode(lab, batch, points.contexts[0], kind) for batch in points.batches for kind in FORECASTS),
        *(prefill(lab, max(points.batches), prompt, kind) for prompt in points.prompts for kind in FORECASTS),
        *(gpu_experts(lab, tokens) for tokens in points.tokens),
        *(cpu_experts(lab, tokens) for tokens in points.tokens),
        *(head(lab, batch) for batch in points.batches),
    ]


def decode(lab: Lab, batch: int, context: int, forecast: str = "") -> Probe:
    """One new token a sequence; ``context`` counts it."""
    return _LayerProbe(lab, (1,) * batch, (context - 1,) * batch, ("attention_decode", batch, context), forecast)


def prefill(lab: Lab, batch: int, prompt: int, forecast: str = "") -> Probe:
    """``prompt`` new tokens a sequence, nothing before them."""
    return _LayerProbe(lab, (prompt,) * batch, (0,) * batch, ("attention_prefill", batch, prompt), forecast)


@dataclass(frozen=True)
class _LayerProbe:
    """A layer outside its routed experts, as a replay launches it; with a ``forecast``, only that counts.

    A forecast is computed while the host reads the routing. Where threads play the lanes, each holds the other up.
    """

    lab: Lab
    new: tuple[int, ...]
    earlier: tuple[int, ...]
    attention: Key
    forecast: str = ""

    def __call__(self) -> Found:
        lab, tokens = self.lab, sum(self.new)
        gpu, model, layer, hidden = lab.machine.gpu, lab.model, lab.next_layer(), lab.hidden[:tokens]
        ids, weights = lab.drawn(tokens)
        normed: list[Tensor] = []
        chosen: list[Tensor] = []
        gpu.submit(lambda: model.begin_step(self.new, self.earlier))
        lab.cover()
        completions = {self.attention: gpu.submit(lambda: normed.append(model.attention(layer, hidden)[1]))}
        gated = completions["gate", tokens] = gpu.submit(lambda: chosen.append(model.gate(layer, *normed)[0]))
        if self.forecast:
            completions[self.forecast, tokens] = gpu.submit(self._work(layer, normed))
        if lab.shape.shared_width:
            completions["shared", tokens] = gpu.submit(lambda: model.shared(layer, *normed))
        here = lab.machine.d2h.submit(
            lambda: lab.chosen_here[:tokens].copy_(chosen[0], non_blocking=True), (gated,)
        )  # fmt: skip
        here.wait()
        sorted_by_expert = routed(ids, weights)
        sync_ns = lab.machine.now_ns() - here.end_ns + lab.start(sorted_by_expert, layer)
        if lab.shape.dense_layers and not self.forecast:
            completions["dense_ffn", tokens] = gpu.submit(lambda: model.dense_ffn(hidden))
        found: dict[Key, Sequence[float]] = {key: [took_ns(completion)] for key, completion in completions.items()}
        if self.forecast:
            return {(self.forecast, tokens): found[self.forecast, tokens]}
        found["routing", tokens] = [here.end_ns - gated.end_ns]
        if len(self.new) == tokens:  # a decode step
            found["sync",] = [sync_ns]
        return found

    def _work(self, layer: int, normed: Sequence[Tensor]) -> Work:
        """The forecast's, on the one tensor ``normed`` when it is there."""
        model = self.lab.model
        learnt = self.forecast == "estimator"
        return (lambda: model.estimate(layer, *normed)) if learnt else (lambda: model.speculate(layer, *normed))


def gpu_experts(lab: Lab, tokens: int) -> Probe:
    """Experts on the GPU one after another, and the sum."""

    def probe() -> Found:
        layer, experts = lab.next_experts(lab.at_once)
        alike = lab.alike(experts, tokens)
        lab.cover()
        lab.start(alike, layer, gpu=experts)
        began = lab.machine.now_ns()
        lab.combine(tokens)
        launched = lab.machine.now_ns() - began
        spans = lab.spans()
        computed = [span.end_ns - span.start_ns for span in spans if (span.lane, span.kind) == ("gpu", "expert")]
        summed = [span.end_ns - span.start_ns for span in spans if span.kind == "combine"]
        launch: Found = {("combine_launch",): [launched]} if tokens in lab.points.batches else {}
        return {("expert_gpu", tokens): computed, ("combine", tokens): summed, **launch}

    return probe


def cpu_experts(lab: Lab, tokens: int) -> Probe:
    """Experts on the CPU one after another, after a rest, and the sum that waits for them."""

    def probe() -> Found:
        layer, experts = lab.next_experts(lab.at_once)
        alike: RoutedTokens = lab.alike(experts, tokens)
        lab.cover().wait()  # as long as the CPU rests in a layer, or nearly
        lab.start(alike, layer, cpu=experts)
        lab.combine(tokens)
        spans = lab.spans()
        computed = [span for span in spans if span.lane == "cpu"]
        [sent] = [span for span in spans if span.kind == "activations"]
        took = [span.end_ns - span.start_ns for span in computed]
        first: Found = {("first_cpu_expert",): [max(0, took[0] - median(took[1:]))]} if tokens == 1 else {}
        way: Key = ("result" if lab.machine.result_path == "h2d" else "result_and_combine", tokens)
        read = next(span for span in spans if span.kind == ("result" if way[0] == "result" else "combine"))
        return {
            ("expert_cpu", tokens): took[1:], **first,
            ("activations", tokens): [computed[0].start_ns - sent.ready_ns],
            way: [read.end_ns - computed[-1].end_ns],
        }  # fmt: skip

    return probe


def head(lab: Lab, batch: int) -> Probe:
    """The language-model head on one row of every sequence."""

    def probe() -> Found:
        gpu, model = lab.machine.gpu, lab.model
        gpu.submit(lambda: model.begin_step((1,) * batch, (0,) * batch))
        lab.cover()
        return {("head", batch): [took_ns(gpu.submit(lambda: model.head(lab.hidden[:batch])))]}

    return probe
