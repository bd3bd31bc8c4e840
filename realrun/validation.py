"""Validation: scenarios measured on a machine, and predicted from its profile alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from policies.session import Session
from realrun.call_log import LoggedSession, plans_changed, replay
from realrun.errors import RefusedError
from realrun.lanes import Machine
from realrun.replay_bench import Measurement, ReplayBench, room_for
from realrun.validation_plan import ValidationPlan, alternating
from sim.agreement import Agreement
from sim.agreement_pairing import Counts, Pairing, Parity
from sim.simulate import Prepared, Setting, compose_policy, play, prepare, setting_of

Progress = Callable[[str], None]


def validate(plan: ValidationPlan, machine: Machine, progress: Progress = lambda _: None) -> Agreement:
    """Measure and predict every scenario of the plan, all of one model.

    Each is run once to warm up, then ``repeats`` times in alternating order. Raises RefusedError before the first run,
    LaneError during one.
    """
    settings = [setting_of(scenario) for scenario in plan.scenarios]
    _check_one_model(settings)
    prepared = [_prepared(setting) for setting in settings]  # refuse what cannot run before anything is measured
    progress(f"making experts of {settings[0].shape.name}")
    bench = ReplayBench(machine, settings[0].shape, room_for(prepared))
    measured: dict[int, list[Measurement]] = defaultdict(list)
    for count, place in enumerate(alternating(len(settings), plan.repeats + 1)):
        scenario = plan.scenarios[place]
        progress(f"measuring {scenario.policy}, {count + 1} of {len(settings) * (plan.repeats + 1)}")
        measured[place].append(bench.measure(settings[place], scenario.policy, scenario.parameters))
    return Agreement(tuple(_pairing(settings[place], measured[place][1:]) for place in range(len(settings))))


def _check_one_model(settings: Sequence[Setting]) -> None:
    for setting in settings:
        if setting.shape != settings[0].shape:
            raise RefusedError(
                f"validation: expected scenarios of one model, got {settings[0].shape.name!r} and "
                f"{setting.shape.name!r}; write a plan for each"
            )


def _prepared(setting: Setting, session: type[Session] = LoggedSession) -> Prepared:
    scenario = setting.scenario
    return prepare(setting, compose_policy(setting, scenario.policy, scenario.parameters), session)


def _pairing(setting: Setting, measured: Sequence[Measurement]) -> Pairing:
    """Measured runs beside the prediction; the logs of the last one are compared."""
    prepared = _prepared(setting)
    predicted, session = play(prepared), prepared.session
    assert isinstance(session, LoggedSession)
    parity = parity_of(measured[-1].session, session, lambda: _prepared(setting, Session).session)
    return Pairing(tuple(each.run for each in measured), predicted, parity)


def parity_of(measured: LoggedSession, predicted: LoggedSession, fresh: Callable[[], Session]) -> Parity:
    """DESIGN, law 10, in both its parts."""
    changed = plans_changed(measured, predicted)
    copies = [*measured.copies(), *predicted.copies()]
    return Parity(
        replay_identical=replay(measured.log, fresh()) is None,
        logs_identical=changed == 0 and measured.copies() == predicted.copies(),
        timing_free=all(copy.kind == "demand" for copy in copies),
        changed_plans_share=changed,
        measured=_counts(measured),
        predicted=_counts(predicted),
    )


def _counts(session: LoggedSession) -> Counts:
    copies, plans = session.copies(), session.plans().values()
    return Counts(sum(len(plan.resident) for plan in plans), len(copies), sum(copy.bytes for copy in copies))
