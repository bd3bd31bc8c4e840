"""Checks that policy, batch, model and trace belong together."""

from __future__ import annotations

from policies.mechanism.views import PolicyError
from policies.protocols import Needs
from sim.runs.scenario import Scenario, ScenarioError
from traces.models.catalogue import model_names
from traces.models.names import parted
from traces.models.shape import ModelShape


def check_needs(policy: str, needs: Needs, scenario: Scenario, shape: ModelShape) -> None:
    """Check a policy's needs against batch and model (against the trace: ``demand_of``).

    Raises PolicyError or ScenarioError.
    """
    batch, sizes = scenario.batch, set(shape.expert_bytes)
    if needs.changes_routing and not needs.tokens:
        raise PolicyError(f"policy {policy!r} changes the routing, token by token: declare Needs(tokens=True) too")
    if needs.max_batch is not None and batch > needs.max_batch:
        raise ScenarioError(f"policy {policy!r} takes batches of at most {needs.max_batch}, got {batch}")
    if scenario.draft_tokens and any(kind == "token" for kind, _ in needs.forecasts):
        raise ScenarioError(
            f"policy {policy!r} needs forecasts of the next tokens, of which a step with drafts computes several: "
            f"expected draft_tokens 0, got {scenario.draft_tokens}; set it to 0, or choose a policy without "
            f"such forecasts"
        )
    if needs.uniform_sizes and len(sizes) > 1:
        raise ScenarioError(
            f"policy {policy!r} needs experts of one size, those of {shape.name!r} have {len(sizes)} sizes"
        )


def check_topology(scenario: Scenario, traced: ModelShape, shape: ModelShape) -> None:
    """Check that the model has the topology of the trace's. Raises ScenarioError."""
    for name in ("moe_layers", "experts", "top_k"):
        if getattr(traced, name) != getattr(shape, name):
            own = parted(shape.name)._replace(weights=None)
            raise ScenarioError(
                f"trace {scenario.trace!r} was recorded with {name} = {getattr(traced, name)}, model {shape.name!r} "
                f"has {getattr(shape, name)}: give it routing of its own (`--set trace=synthetic:{own}`), or "
                f"choose a model of the same topology "
                f"(`--set model={traced.name if traced.name in model_names() else 'null'}`; null: the trace's own)"
            )
