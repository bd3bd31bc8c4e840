"""Validation: scenarios measured on a machine, and predicted from microbenchmarks alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.session import Session
from realrun.errors import RefusedError
from realrun.execution.call_log import LoggedSession, plans_changed, replay
from realrun.machine.machines import RealMachine
from realrun.profiling.profile_again import Reprofile
from realrun.replay.replay_bench import Measurement, ReplayBench, room_for
from realrun.validation.validation_plan import ValidationPlan, alternating
from sim.agreement.agreement import Agreement
from sim.agreement.pairing import Counts, Pairing, Parity
from sim.machine.hardware import Hardware
from sim.simulate import Prepared, Setting, compose_policy, play_in, prepare, setting_of

Progress = Callable[[str], None]


class Validated(NamedTuple):
    """Measured beside predicted, and the machine with the profile that the predictions were made from.

    ``by_file``: the same beside predictions from the profile as it was in its file; ``remarks``: the machine's.
    """

    agreement: Agreement
    hardware: Hardware
    by_file: Agreement
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What the machine is no good for, how predictions were made, and what the file alone would have given."""
        found = self.by_file.summary
        return [
            *self.remarks,
            "predictions: medians of microbenchmarks repeated before every round of runs and after the last; decision "
            "costs, and what planners believe, are the file's",
            f"predicted from the profile as it was in its file, measured before: median TPOT error "
            f"{found.median_error:.1%}, worst {found.worst_error:.1%}, tau "
            f"{'-' if found.tau is None else format(found.tau, '.2f')}",
        ]


def validate(plan: ValidationPlan, machine: RealMachine, progress: Progress = lambda _: None) -> Validated:
    """Measure and predict every scenario of the plan, all of one model, on the machine of their profile.

    Each is run once to warm up, then ``repeats`` times in alternating order. The microbenchmarks of the profile are
    repeated before every round and after the last, since a machine may be slower for minutes; predictions are made from
    these alone, while planners believe in the profile as it was. Raises RefusedError before the first run, LaneError
    during one.
    """
    settings = [setting_of(scenario) for scenario in plan.scenarios]
    _check_one_model(settings)
    prepared = [_prepared(setting) for setting in settings]  # refuse what cannot run before anything is measured
    progress(f"making experts of {settings[0].shape.name}")
    bench, again = ReplayBench(machine, settings[0].shape, room_for(prepared)), Reprofile(machine, settings)
    measured: dict[int, list[Measurement]] = defaultdict(list)
    for turn, order in enumerate(alternating(len(settings), plan.repeats + 1)):
        progress(f"microbenchmarks, round {turn + 1} of {plan.repeats + 2}")
        again.measure()
        for place in order:
            scenario = plan.scenarios[place]
            progress(f"measuring {scenario.policy}, round {turn + 1} of {plan.repeats + 1}")
            measured[place].append(bench.measure(settings[place], scenario.policy, scenario.parameters))
    again.measure()
    hardware = again.hardware()
    runs = [measured[place][1:] for place in range(len(settings))]
    by_file = _agreement(settings, runs, settings[0].hardware)
    return Validated(_agreement(settings, runs, hardware), hardware, by_file, machine.remarks())


def _agreement(
    settings: Sequence[Setting], measured: Sequence[Sequence[Measurement]], hardware: Hardware
) -> Agreement:
    return Agreement(tuple(_pairing(*each, hardware) for each in zip(settings, measured, strict=True)))


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


def _pairing(setting: Setting, measured: Sequence[Measurement], hardware: Hardware) -> Pairing:
    """Measured runs beside the prediction; the logs of all are compared with its."""
    prepared = _prepared(setting)
    predicted, session = play_in(prepared, hardware), prepared.session
    assert isinstance(session, LoggedSession)
    sessions = [each.session for each in measured]
    parity = parity_of_repeats(sessions, session, lambda: _prepared(setting, Session).session)
    return Pairing(tuple(each.run for each in measured), predicted, parity)


def parity_of_repeats(
    repeats: Sequence[LoggedSession], predicted: LoggedSession, fresh: Callable[[], Session]
) -> Parity:
    """Of the first repeat that breaks law 10, or else of the last."""
    found = [parity_of(each, predicted, fresh) for each in repeats]
    return next((parity for parity in found if not parity.held), found[-1])


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
