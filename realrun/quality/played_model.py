"""A model run under a policy that is simulated at the same time, on a text that is given (teacher forcing).

The simulator asks the session for a layer's plan; the model, in a thread of its own, waits for it, computes the layer
with the experts and weights that the plan has, and goes on to the next router, whose choice is the simulator's demand.
So changed routing changes all later routing, and what is on the GPU when a layer is routed is what the simulated times
make it. Both wait for each other: results do not depend on the machine's speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from policies.mechanism.score_rows import ScoreRows
from policies.mechanism.session import Session
from policies.mechanism.views import Forecast, LayerInput, Plan, Routing
from policies.protocols import Needs
from realrun.execution.routed_tokens import OwnRouting, RoutedTokens, own_routing, rerouted, scaled_by, weighed_like
from realrun.generation.generate import GenerateRequest, forecasts_for
from realrun.generation.hosted_model import HostedModel, computed_in_place, routed_through
from realrun.generation.live_forecasts import LiveRecorder
from realrun.quality.layer_sum import LayerSums
from realrun.quality.turns import Turns
from sim.runs.demand import StepDemand
from traces.capture.passes import Batch, generate
from traces.capture.record import probabilities


@dataclass(frozen=True)
class GivenText:
    """Tokens of a text: a prompt of ``prompt_tokens``, and those that the model is given one by one."""

    tokens: tuple[int, ...]
    prompt_tokens: int

    @property
    def given_tokens(self) -> int:
        """Tokens that are given one by one. After each, and after the prompt, the model says what comes next."""
        return len(self.tokens) - self.prompt_tokens

    def after(self, step: int) -> Tensor:
        """The token [1, 1] after a step's last one, whatever the model says; after the last step any."""
        place = min(self.prompt_tokens + step, len(self.tokens) - 1)
        return torch.tensor([[self.tokens[place]]])

    def prompt(self) -> Batch:
        """The prompt, as the batch of one sequence."""
        return Batch((0,), torch.tensor([self.tokens[: self.prompt_tokens]]))


@dataclass(frozen=True)
class Said:
    """The output of a model for a text: ``logits`` [1 + given, V] of the next token, and the experts ``ids``
    [1 + given, L, k] that its routers chose for the token before."""

    logits: Tensor
    ids: Tensor


class Planned(NamedTuple):
    """A layer's plan. ``committed``: its routing was decided ahead, without the layer's router."""

    plan: Plan
    committed: bool


class DrivingSession(Session):
    """A session that tells a listener of its calls; see ``PlayedText``."""

    listener: PlayedText

    def begin_step(self, step: int) -> None:
        """As in ``Session``; the model's pass begins."""
        super().begin_step(step)
        self.listener.begin_step(step)

    def plan_layer(self, given: LayerInput) -> Plan:
        """As in ``Session``; the model computes the layer."""
        committed, scores = self.committed is not None, self.listener.scores
        plan = super().plan_layer(given if scores is None else given._replace(scores=scores))
        self.listener.play(Planned(plan, committed))
        return plan


class LiveStep:
    """One step, whose routings and forecasts are filled in while the model runs: ``demand`` refers to them."""

    def __init__(self, index: int, before: int, tokens: int, layers: int) -> None:
        self.routings, self.forecasts = [Routing((), ())] * layers, [list[Forecast]() for _ in range(layers)]
        self.demand = StepDemand(
            index, "decode" if index else "prefill", tokens, (before + tokens,), self.routings, self.forecasts, None,
            (0,) * tokens,
        )


def steps_for(text: GivenText, layers: int) -> list[LiveStep]:
    """The steps of a text: its prompt, then token by token."""
    prompt = text.prompt_tokens
    given = (LiveStep(1 + n, prompt + n, 1, layers) for n in range(text.given_tokens))
    return [LiveStep(0, 0, prompt, layers), *given]


@dataclass
class PlayedModel:
    """A model that runs under one policy, on any number of texts. Use as a context manager.

    ``request``: names the policy and the file of vectors for its forecasts.
    """

    model: HostedModel
    needs: Needs
    request: GenerateRequest
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self.recorder = self._stack.enter_context(LiveRecorder(self.model.loaded.layers))
        self.forecasts = forecasts_for(self.request, self.model, self.needs, self.recorder, self._stack)
        share, bits = self.needs.narrow_share, self.model.loaded.weight_bits
        self.sums = LayerSums(self.model, None if share is None else round(share * bits))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def on(self, text: GivenText) -> PlayedText:
        """The model on one text."""
        return PlayedText(self, text)


class PlayedText:
    """One text. ``demand`` is that of a simulation, whose session has this object as its listener."""

    def __init__(self, played: PlayedModel, text: GivenText) -> None:
        self._played, self._text = played, text
        self._steps = steps_for(text, len(played.model.loaded.layers))
        self._step = self._steps[0]
        self.demand = [step.demand for step in self._steps]
        self.scores: ScoreRows | None = None  # of the layer that is planned next, if the policy needs them
        self._heard = Heard()
        self._turns: Turns[Planned] = Turns(self._run)

    def begin_step(self, index: int) -> None:
        """Run the model up to the first router."""
        self._step = self._steps[index]
        self._turns.resume()

    def play(self, planned: Planned) -> None:
        """Compute the layer of a plan, and run the model up to the next router or the end of the pass."""
        self._turns.resume(planned)

    def said(self) -> Said:
        """The output of the model, after the last step."""
        self._turns.resume()
        return self._heard.said()

    def close(self) -> None:
        """End the run where it is."""
        self._turns.close()

    # --- in the model's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        played, text = self._played, self._text
        with torch.inference_mode(), routed_through(played.model.loaded.layers, self._layer):
            self._begin_pass(text.prompt().tokens)
            for _ in generate(played.model.loaded.model, text.prompt(), text.given_tokens, self._pick):
                played.recorder.take()

    def _begin_pass(self, tokens: Tensor) -> None:
        self._played.sums.begin_pass()
        self._played.forecasts.begin_pass(tokens)

    def _pick(self, logits: Tensor, _sequences: Sequence[int], step: int) -> Tensor:
        self._heard.end_pass(logits)
        self._turns.pause()
        token = self._text.after(step)
        if step < self._text.given_tokens:
            self._begin_pass(token)
        return token.to(logits.device)

    def _layer(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = self._arrive(layer, ids, weights)
        planned = self._turns.pause()
        assert planned is not None
        tokens = self._tokens(planned, own)
        output = self._played.sums.of_plan(planned.plan, hidden, tokens)
        self._forecast(layer, (planned.plan, hidden, tokens))
        return output

    def _arrive(self, layer: int, ids: Tensor, weights: Tensor) -> OwnRouting:
        """Put the router's own choice, and what is known of the next layers, into the demand."""
        played, scores = self._played, None
        if played.needs.scores:
            scores = probabilities(played.recorder.record(layer).logits, played.model.facts.rule).half()
        own = own_routing(ids.cpu(), weights.cpu(), scores, played.needs)
        self._step.routings[layer] = own.routing
        self.scores = None if scores is None else ScoreRows(scores.numpy())
        self._heard.router(ids)
        self._forecast(layer)
        return own

    def _tokens(self, planned: Planned, own: OwnRouting) -> RoutedTokens:
        """The routing in force, with the weights that the model computes with."""
        facts, (plan, committed) = self._played.model.facts, planned
        if plan.routing is own.routing:
            return own.tokens
        weigh = scaled_by(facts.scales[plan.layer]) if committed else weighed_like(own, facts.norm_topk)
        return rerouted(weigh(plan.routing), own.tokens.top_k, own.tokens.weights.dtype)

    def _forecast(self, layer: int, computed: tuple[Plan, Tensor, RoutedTokens] | None = None) -> None:
        """Make the forecasts that are due at a layer; those from its experts on the GPU when it has been
        ``computed``."""
        forecasts, step = self._played.forecasts, self._step
        for key in forecasts.due(layer, late=computed is not None):
            ids, scores = forecasts.make(key, layer, None if computed is None else self._on_gpu(*computed))
            made = ids.to(torch.int16).cpu().numpy(), scores.half().cpu().numpy()
            step.forecasts[layer] += forecasts.for_session(key, layer, step.demand.phase, *made)

    def _on_gpu(self, plan: Plan, hidden: Tensor, tokens: RoutedTokens) -> Tensor:
        here = [e for e in plan.gpu if e not in plan.loads and e not in plan.awaited]
        return self._played.sums.of_experts(plan.layer, here, hidden, tokens)


class Heard:
    """Collects what a model says, pass by pass."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._ids: list[list[Tensor]] = [[]]

    def router(self, ids: Tensor) -> None:
        """A router has chosen ``ids`` [N, k]."""
        self._ids[-1].append(ids[-1].sort().values.clone())

    def end_pass(self, logits: Tensor) -> None:
        """A pass has ended with ``logits`` [1, V]."""
        self._logits.append(logits[0].float().clone())
        self._ids.append([])

    def said(self) -> Said:
        return Said(torch.stack(self._logits), torch.stack([torch.stack(ids) for ids in self._ids[:-1]]))


def said_exactly(model: HostedModel, text: GivenText) -> Said:
    """The output of a model for a text with the routing of its own routers, in the same passes."""
    heard, exact = Heard(), computed_in_place(model.loaded.layers, model.store)

    def call(layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        heard.router(ids)
        return exact(layer, hidden, ids, weights)

    def pick(logits: Tensor, _sequences: Sequence[int], step: int) -> Tensor:
        heard.end_pass(logits)
        return text.after(step).to(logits.device)

    with torch.inference_mode(), routed_through(model.loaded.layers, call):
        deque(generate(model.loaded.model, text.prompt(), text.given_tokens, pick), maxlen=0)
    return heard.said()
