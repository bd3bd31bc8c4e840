"""Validation of the simulator: scenarios are measured on a machine, and predicted from microbenchmarks alone.

A plan has scenarios that share a base, written as strict YAML:

repeats: 5                                  # measured runs of each scenario, after one that warms up
scenario: {trace: ..., model: ..., ...}     # what all have in common; keys of a Scenario
vary:                                       # every combination of these
  cached_share: [0.25, 0.5]
  batch: [1, 4]
policies:                                   # with each of these
  - fiddler
  - dali: {prefetch: 0}                     # with parameters
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any, NamedTuple

from policies.mechanism.session import Session
from realrun.errors import LaneError, RefusedError
from realrun.execution.call_log import LoggedSession, replay
from realrun.machine.machines import RealMachine
from realrun.profiling.profile import Reprofile, profiled_again
from realrun.replay.replay import Measurement, ReplayBench, room_for
from sim.machine.hardware import Hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from trilane.common.hints import NOT_EMPTY, Constraint, between
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.study.sweep.axes import policy_in
from trilane.study.validation.agreement import Agreement
from trilane.study.validation.comparison import RunComparison
from trilane.study.validation.journal import Kept, ValidationJournal, journal_of, question_of
from trilane.study.validation.parity import answers_of, parity_of_repeats

MOST_SCENARIOS = 10_000
_ELSEWHERE = dict.fromkeys(("policy", "parameters"), "in the list of policies")
_Policy = str | Annotated[Mapping[str, Mapping[str, Any]], Constraint("with one policy", lambda given: len(given) == 1)]


@dataclass(frozen=True)
class _PlanFile:
    """The keys of a plan's file (module docstring)."""

    scenario: Mapping[str, Any]
    policies: Annotated[tuple[_Policy, ...], NOT_EMPTY]
    vary: Mapping[str, Annotated[tuple[Any, ...], NOT_EMPTY]] = field(default_factory=dict)
    repeats: Annotated[int, between(1, 1000)] = 5


@dataclass(frozen=True)
class ValidationPlan:
    """``scenarios``, each to be measured ``repeats`` times."""

    scenarios: tuple[Scenario, ...]
    repeats: int

    @classmethod
    def from_yaml(cls, path: str | Path, changes: Mapping[str, Any]) -> ValidationPlan:
        """Read a plan; ``changes`` are made to the common scenario. Raises RefusedError, ScenarioError."""
        plan = from_dict(_PlanFile, read_yaml(path, RefusedError), str(path), RefusedError)
        _check_free(plan.scenario, f"{path}: scenario", _ELSEWHERE)
        _check_free(plan.vary, f"{path}: vary", {**_ELSEWHERE, **dict.fromkeys(changes, "as an option")})
        count = prod(map(len, plan.vary.values())) * len(plan.policies)
        if count > MOST_SCENARIOS:
            raise RefusedError(f"{path}: expected at most {MOST_SCENARIOS:,} scenarios to measure, got {count:,}")
        varied = [dict(zip(plan.vary, values, strict=True)) for values in product(*plan.vary.values())]
        scenarios = [
            Scenario.from_dict({**plan.scenario, **changes, **values, "policy": name, "parameters": own}, str(path))
            for values in varied for name, own in map(policy_in, plan.policies)
        ]
        return cls(tuple(scenarios), plan.repeats)


def _check_free(keys: Mapping[str, Any], where: str, elsewhere: Mapping[str, str]) -> None:
    """Raises RefusedError for keys of a scenario that are given elsewhere."""
    for key in keys:
        if key in elsewhere:
            raise RefusedError(f"{where}: {key} is given {elsewhere[key]}; leave it out here")


def alternating(scenarios: int, rounds: int) -> Iterator[Sequence[int]]:
    """The order of scenarios in each round: back and forth, so that a drift of the machine affects all equally."""
    for turn in range(rounds):
        yield range(scenarios) if turn % 2 == 0 else range(scenarios)[::-1]


# --- the plan ---------------------------------------------------------------------------------------------------------


Say = Callable[[str], None]  # called with what is done next
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ValidationEnd(NamedTuple):
    """The end of a validation: runs in its journal, of how many; why it stopped before the last one; and the error.

    ``changed``: what differed in an earlier journal, in place of which a new one was begun.
    """

    runs: int
    planned: int
    why: str | None = None
    error: LaneError | None = None
    changed: tuple[str, ...] = ()


class Validated(NamedTuple):
    """The agreement, and the machine with the profile from which the predictions were made.

    ``by_file``: the agreement with predictions from the profile in its file. ``remarks``: of the machine. Scenarios
    without a measured run are in neither agreement.
    """

    agreement: Agreement
    hardware: Hardware
    by_file: Agreement
    ended: ValidationEnd
    remarks: tuple[str, ...] = ()


def validate(
    plan: ValidationPlan, machine: RealMachine, progress: Say = lambda _: None, *, folder: Path | None = None,
    stop: Stop | None = None,
) -> Validated:
    """Measure and predict every scenario of the plan, all of one model, on the machine of their profile.

    Each is run ``repeats`` times in alternating order, and once before its first run, to warm up. The microbenchmarks
    of the profile are repeated before every round and after the last, since a machine may be slower for minutes.
    Predictions are made from these alone, while policies plan with the profile in the file.

    ``folder``: of the journal; what it has of the same plan, profile and code is not measured again. ``stop`` is
    checked before every run; a lane that fails also stops the validation. Raises RefusedError if the plan cannot be
    measured, another validation uses the folder, or it was stopped before the first run, and LaneError if a lane failed
    before.
    """
    settings = [prepare(scenario) for scenario in plan.scenarios]
    _check_one_model(settings)
    for setting in settings:
        setting.checked()  # refuse what cannot run before anything is measured
    settings[0].hardware.measured_profile()  # refuse a machine that was not measured
    with (
        nullcontext("") if folder else TemporaryDirectory() as scratch,
        journal_of(folder or Path(scratch, "journal"), question_of(settings) if folder else {}) as journal,
    ):
        rounds = _Rounds(plan, settings, journal, stop or Stop(), progress)
        ended = rounds.measure(machine)
        if not ended.runs:
            raise ended.error or RefusedError(f"validation: nothing was measured: {ended.why}; give it more time")
        return _validated(plan, settings, journal, ended)._replace(remarks=machine.remarks())


class _Rounds(NamedTuple):
    """The measurements of a validation, and their journal."""

    plan: ValidationPlan
    settings: Sequence[Prepared]
    journal: ValidationJournal
    stop: Stop
    progress: Say

    def measure(self, machine: RealMachine) -> ValidationEnd:
        """Measure all that is not in the journal, until it is stopped."""
        why: str | None = None
        error: LaneError | None = None
        try:
            why = self._measure(machine)
        except LaneError as failed:
            why, error = str(failed), failed
        scenarios, repeats = len(self.settings), self.plan.repeats
        done = self.journal.count(scenarios, repeats)
        return ValidationEnd(done, scenarios * repeats, why, error, self.journal.changed)

    def _measure(self, machine: RealMachine) -> str | None:
        """The reason if it was stopped."""
        last, due = self.plan.repeats, list(self._due())
        if not due and self.journal.has_samples(last):
            return None
        self.progress(f"making experts of {self.settings[0].shape.name}")
        bench = ReplayBench(machine, self.settings[0].shape, room_for(self.settings))
        again = Reprofile(machine, self.settings)
        warm: set[int] = set()
        for turn, places in due:
            self._repeat_microbenchmarks(again, turn)
            for place in places:
                why = self.stop.why()
                if why:
                    return why
                self._run(bench, place, turn, warm)
        self._repeat_microbenchmarks(again, last)
        return None

    def _due(self) -> Iterator[tuple[int, list[int]]]:
        """Rounds with the scenarios that are to be measured in them, in order."""
        for turn, order in enumerate(alternating(len(self.settings), self.plan.repeats)):
            places = [place for place in order if not self.journal.has(place, turn)]
            if places:
                yield turn, places

    def _repeat_microbenchmarks(self, again: Reprofile, turn: int) -> None:
        if self.stop.why() is None:
            self.progress(f"microbenchmarks, {turn + 1} of {self.plan.repeats + 1}")
            self.journal.add_samples(turn, again.measure())

    def _run(self, bench: ReplayBench, place: int, turn: int, warm: set[int]) -> None:
        setting = self.settings[place]
        self.progress(f"measuring {setting.scenario.policy}, round {turn + 1} of {self.plan.repeats}")
        if place not in warm:
            bench.measure(setting)
            warm.add(place)
        self.journal.add(place, turn, _kept(setting, bench.measure(setting)))


def _kept(setting: Prepared, measured: Measurement) -> Kept:
    pairs = zip(measured.sessions, setting.sessions_of(Session), strict=True)
    replayed = all(replay(session.log, fresh) is None for session, fresh in pairs)
    return Kept(measured.run, answers_of(*measured.sessions), replayed)


def _validated(
    plan: ValidationPlan, settings: Sequence[Prepared], journal: ValidationJournal, ended: ValidationEnd
) -> Validated:
    hardware = profiled_again(settings[0], journal.samples())
    runs = [journal.runs(place, plan.repeats, setting.hardware.power) for place, setting in enumerate(settings)]
    pairs = [(setting, kept) for setting, kept in zip(settings, runs, strict=True) if kept]
    by_file = settings[0].hardware
    return Validated(_agreement(pairs, hardware), hardware, _agreement(pairs, by_file), ended)


def _agreement(pairs: Sequence[tuple[Prepared, list[Kept]]], hardware: Hardware) -> Agreement:
    return Agreement(tuple(_comparison(setting, kept, hardware) for setting, kept in pairs))


def _check_one_model(settings: Sequence[Prepared]) -> None:
    for setting in settings:
        if setting.shape != settings[0].shape:
            raise RefusedError(
                f"validation: expected scenarios of one model, got {settings[0].shape.name!r} and "
                f"{setting.shape.name!r}; write a plan for each"
            )


def _comparison(setting: Prepared, measured: Sequence[Kept], hardware: Hardware) -> RunComparison:
    """The comparison of measured runs with the prediction, including their answers."""
    elsewhere = setting.on(hardware, planner=setting.costs)
    sessions = elsewhere.sessions_of(LoggedSession)
    predicted = play(elsewhere, *sessions)
    parity = parity_of_repeats([(each.answers, each.replayed) for each in measured], answers_of(*sessions))
    return RunComparison(tuple(each.run for each in measured), predicted, parity)


# --- reasons to stop --------------------------------------------------------------------------------------------------


class Stop:
    """A check that is made before every run. ``limit_s``: seconds from now; None: no limit."""

    def __init__(self, limit_s: float | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now_s, self._began_s = limit_s, now_s, now_s()
        self.signal: signal.Signals | None = None

    def why(self) -> str | None:
        """The reason to stop, if there is one."""
        if self.signal is not None:
            return f"{self.signal.name} was received"
        if self._limit_s is not None and self._now_s() - self._began_s >= self._limit_s:
            return f"the time limit of {self._limit_s:g} s is used up"
        return None


@contextmanager
def stopping(limit_s: float | None = None) -> Iterator[Stop]:
    """A Stop that records the first SIGINT or SIGTERM; a second one ends the process as usual.

    Outside the main thread, where Python cannot handle signals, only the time limit applies.
    """
    stop = Stop(limit_s)
    before: dict[signal.Signals, signal._HANDLER] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, _frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        before |= {each: signal.signal(each, handle) or signal.SIG_DFL for each in SIGNALS}
    try:
        yield stop
    finally:
        restore()
