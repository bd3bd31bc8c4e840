"""The laws that every policy obeys, as a class of pytest tests.

    from my_policy import Mine  # a class with the decorator ``trilane.register``
    from trilane.testing import PolicyLaws

    class TestMine(PolicyLaws):
        policy = Mine

``python -m pytest test_mine.py`` then plays the policy at all sizes and in random worlds, and holds it against laws 1
to 9 and 12 (docs/design.md) and purity: views and answers stay unchanged, and instances share no state. Law 6 plays it
in another process too, which imports the module that defines the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from policies.mechanism.views import Assignment, LayerView
from policies.registry import SYSTEMS, Policy, System
from policies.system import ChoiceError
from policies.testing.purity import check_answers, shared_state, snapshot, watched
from sim.runs.bounds import lower_bound
from sim.runs.prepare import check_needs
from sim.runs.scenario import Scenario, ScenarioError
from trilane.testing.laws_of_runs import (
    check_run,
    law_6_determinism,
    law_7_no_foresight,
    law_8_bound,
    law_9_scaling,
    other_future,
)
from trilane.testing.random_worlds import ORDINARY, SIZES, Size, fixed_world, unsuited, with_drafts, worlds
from trilane.testing.worlds import composition_of, digest, play, play_composition

few = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
SEEDS = st.integers(0, 2**32 - 1)


class PolicyLaws:
    """One test per law. A subclass sets ``policy``, a registered class, or is parametrized by ``entry``, rows of the
    registry."""

    policy: type[Policy]

    @pytest.fixture
    def entry(self) -> System:
        for entry in SYSTEMS.values():
            if entry.parameters is self.policy:
                return entry
        raise ChoiceError(f"{self.policy.__name__} is not registered: decorate it with trilane.register(NAME, SUMMARY)")

    # --- runs ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_laws_1_to_5_and_12_at_every_size(self, entry: System, size: Size) -> None:
        """Or the policy is refused, for the reason that it declares."""
        if reason := unsuited(entry, size):
            _refused(entry, size, reason)
            return
        world = size.world(entry)
        check_run(world, play(world))

    @few
    @given(data=st.data())
    def test_laws_1_to_5_and_12_in_random_worlds(self, entry: System, data: st.DataObject) -> None:
        world = data.draw(worlds([entry]))
        check_run(world, play(world))

    def test_laws_1_to_5_and_12_with_every_choice(self, entry: System) -> None:
        """Each parameter that is a choice, the other way round."""
        for choice in choices(entry):
            try:
                entry.parse(choice)
            except ChoiceError:
                continue  # it goes with other parameters only
            world = ORDINARY.world(entry, **choice)
            try:
                check_run(world, play(world))
            except Exception as error:
                error.add_note(f"policy {entry.name!r} with {choice}")
                raise

    def test_laws_1_to_5_8_and_12_with_drafts(self, entry: System) -> None:
        """Decode steps verify drafts of speculative decoding."""
        world = with_drafts(fixed_world(entry))
        check_run(world, play(world))
        if not entry.needs.changes_routing:
            law_8_bound(world, lower_bound)

    def test_law_6_determinism(self, entry: System) -> None:
        law_6_determinism(entry)

    @few
    @given(data=st.data(), seed=SEEDS)
    def test_law_7_no_foresight(self, entry: System, data: st.DataObject, seed: int) -> None:
        if entry.needs.future:
            pytest.skip("the policy declares that it uses the future")
        law_7_no_foresight(data.draw(worlds([entry], min_decode=2)), seed)

    @few
    @given(data=st.data())
    def test_law_8_no_run_beats_the_lower_bound(self, entry: System, data: st.DataObject) -> None:
        """It bounds runs of the router's own experts."""
        _skip_unbounded(entry)
        law_8_bound(data.draw(worlds([entry])), lower_bound)

    def test_law_8_no_run_beats_the_lower_bound_of_a_fixed_world(self, entry: System) -> None:
        """Here the bound is close; elsewhere a policy that leaves out some work may stay above it."""
        _skip_unbounded(entry)
        law_8_bound(fixed_world(entry), lower_bound)

    @few
    @given(data=st.data(), c=st.integers(2, 9))
    def test_law_9_scaling(self, entry: System, data: st.DataObject, c: int) -> None:
        law_9_scaling(data.draw(worlds([entry], contention=False)), c)

    def test_the_assigner_is_called_once_per_layer(self, entry: System) -> None:
        """By the session alone: an assigner may remember its decisions."""
        world = fixed_world(entry)
        policy = composition_of(world)
        assign, calls = policy.assigner.assign, list[tuple[int, int]]()

        def counted(view: LayerView) -> Assignment:
            calls.append((view.step, view.layer))
            return assign(view)

        policy.assigner.assign = counted  # type: ignore[method-assign]
        planned = list(play_composition(world, policy).session.plans)
        assert calls == planned, f"assign is called once per layer: {len(planned)} layers, {len(calls)} calls"

    # --- purity -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [ORDINARY, Size("a batch of one", sequences=1, prompt=6)], ids=str)
    def test_purity_views_and_answers_stay_as_they_are(self, entry: System, size: Size) -> None:
        world = size.world(entry)
        context = world.context
        before = snapshot(context)
        policy = watched(composition_of(world, context))
        spans = play_composition(world, policy).spans
        check_answers(policy)
        assert snapshot(context) == before, "purity: what the policy was built from has changed"
        assert spans.equals(play(world).spans), "purity: another run when it is watched"

    def test_purity_instances_share_nothing(self, entry: System) -> None:
        """Neither any state that can be found, nor any that shows: in between, another instance plays another world."""
        world = fixed_world(entry)
        context = world.context
        alone = digest(play(world))
        one, two = (composition_of(world, context) for _ in range(2))
        shared = shared_state(one, two, context)
        assert not shared, f"purity: two instances share {', '.join(shared)}"
        other = world if entry.needs.future else replace(world, trace=other_future(world.trace, 1, 0))
        play_composition(other, one)
        assert digest(play_composition(world, two)) == alone, "purity: an instance depends on the runs of another"


def choices(system: System) -> Iterator[dict[str, Any]]:
    """Every parameter that is a switch or a choice of names, with each value that is not its default."""
    hints = get_type_hints(system.parameters)
    for name, _, default in system.parameter_table():
        values = (True, False) if hints[name] is bool else ()
        if get_origin(hints[name]) is Literal:
            values = get_args(hints[name])
        yield from ({name: value} for value in values if value != default)


def _skip_unbounded(entry: System) -> None:
    if entry.needs.changes_routing:
        pytest.skip("the policy declares that it changes the routing, and the bound is of the router's own experts")


def _refused(system: System, size: Size, reason: str) -> None:
    """The simulator says why."""
    shape: Any = SimpleNamespace(name="toy", expert_bytes=size.expert_bytes)
    with pytest.raises(ScenarioError, match=reason):
        check_needs(system.name, system.needs, Scenario(batch=size.sequences), shape)
