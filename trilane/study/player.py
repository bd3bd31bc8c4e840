"""The player of points: many simulations over several processes, those of one setting on the same one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from policies.registry import SYSTEMS, added
from policies.system import ChoiceError
from policies.user_files import loaded_policies
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from trilane.study.pool import WorkerDiedError, WorkerPool

Item = TypeVar("Item")
Result = TypeVar("Result")


class Progress(NamedTuple):
    """The progress of a study in points. ``kept``: points that an earlier, interrupted study has done; they count as
    ``done``. ``failed``: those that ended with an error. ``what``: the part of the study that is played."""

    total: int
    done: int
    kept: int = 0
    failed: int = 0
    what: str = ""


Watch: TypeAlias = Callable[[Progress], None]  # called whenever a point is done


class Pool(Protocol):
    """Processes of this machine (``WorkerPool``) or of a cluster (``sweep.cluster.DaskPool``)."""

    def submit(self, function: Callable[..., Any], *args: Any, setting: Hashable = None) -> Any: ...

    def as_completed(self, futures: Sequence[Any]) -> Iterator[Any]: ...

    def together(self, tasks: int) -> int: ...


def play(
    function: Callable[[LastPrepared, Item], Result], items: Sequence[Item], setting: Callable[[Item], Hashable],
    jobs: int = 1, watch: Watch | None = None,
) -> Iterator[tuple[int, Result]]:
    """Call ``function(prepared, item)`` of every item over ``jobs`` processes, of which this one is the first.

    Yields places and results as they finish. Items with one ``setting`` follow each other in one process, which
    prepares the setting once. Processes end with this generator. Raises what ``function`` raises, and WorkerError.
    """
    if not items:
        return
    with WorkerPool(min(jobs, len(items)), LastPrepared) as pool:
        for done, (place, result) in enumerate(play_in(pool, function, items, setting), 1):
            if watch is not None:
                watch(Progress(len(items), done))
            yield place, result


def play_in(
    pool: Pool, function: Callable[[Any, Item], Result], items: Sequence[Item],
    setting: Callable[[Item], Hashable] = lambda item: None, died: Callable[[Item], Result] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Call ``function(state, item)`` in processes that the caller has started; otherwise as ``play``.

    ``died``: the result of an item whose process died, and died again when it played that item alone; without it,
    WorkerDiedError is raised.
    """
    lost: list[int] | None = None if died is None else []
    yield from _finished(pool, function, items, _pieces(items, setting, pool.together(len(items))), setting, lost)
    for place in lost or ():
        again: list[int] = []
        yield from _finished(pool, function, items, [[place]], setting, again)
        if again and died is not None:
            yield place, died(items[place])


def _pieces(items: Sequence[Item], setting: Callable[[Item], Hashable], most: int) -> list[list[int]]:
    """Places of items of one setting, at most ``most`` together."""
    by_setting: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        by_setting.setdefault(setting(item), []).append(place)
    return [places[first : first + most] for places in by_setting.values() for first in range(0, len(places), most)]


def _finished(
    pool: Pool, function: Callable[[Any, Item], Result], items: Sequence[Item], pieces: Sequence[list[int]],
    setting: Callable[[Item], Hashable], lost: list[int] | None,
) -> Iterator[tuple[int, Result]]:
    """Places and results as they finish; places of a piece whose worker has died become ``lost``."""
    waiting = {
        pool.submit(_results, function, [items[place] for place in piece], setting=setting(items[piece[0]])): piece
        for piece in pieces
    }
    for future in pool.as_completed(list(waiting)):
        piece = waiting.pop(future)
        try:
            yield from zip(piece, future.result(), strict=True)
        except WorkerDiedError:
            if lost is None:
                raise
            lost.extend(piece)


def _results(state: Any, function: Callable[[Any, Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(state, item) for item in items]


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Results in the order of their places, each as soon as those before it have come."""
    early: dict[int, Result] = {}
    place = 0
    for finished, result in results:
        early[finished] = result
        while place in early:
            yield early.pop(place)
            place += 1


# --- what points of one setting share ---------------------------------------------------------------------------------


class LastPrepared:
    """Prepares scenarios. Those in a row that differ in policy and parameters alone share all that they can."""

    def __init__(self) -> None:
        self._last: Prepared | None = None

    def of(self, scenario: Scenario) -> Prepared:
        """The scenario, prepared. Raises what ``prepare`` raises."""
        if self._last is None or not self.shares(scenario):
            self._last = prepare(scenario)
        return self._last.with_policy(scenario.policy, scenario.parameters)

    def shares(self, scenario: Scenario) -> bool:
        """True if the scenario differs from the last one in policy and parameters alone."""
        return self._last is not None and _of_any_policy(self._last.scenario) == _of_any_policy(scenario)


def _of_any_policy(scenario: Scenario) -> Scenario:
    return scenario.with_(policy="", parameters={})


# --- policies that other processes have -------------------------------------------------------------------------------


def check_shared(names: Iterable[str], how: str, known: Container[str] = ()) -> None:
    """Raise ChoiceError for a registered policy that is not ``known`` to other processes."""
    if own := [name for name in names if added(name) and name not in known]:
        raise ChoiceError(
            f"policy {own[0]!r} is registered in this process alone, and {how} runs in others; use jobs=1, load the "
            f"policy from a file of its own (trilane.load_policies), or give it a row in policies/registry.py"
        )


def check_workers(names: Iterable[str], jobs: int) -> None:
    """Raise ChoiceError for a registered policy that the worker processes of ``jobs`` would not have."""
    if jobs > 1:
        check_shared((name for name in names if not _from_main(name)), f"jobs={jobs}", known=loaded_policies())


def _from_main(name: str) -> bool:
    """True if workers register the policy when they import the caller's main file: it is defined there, or in a package
    from which that file imports. A notebook, or code on the command line, has no such file.
    """
    main = sys.modules["__main__"]
    if name not in SYSTEMS or not Path(getattr(main, "__file__", None) or "").is_file():
        return False
    modules = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(main).values())
    packages = {"__main__", *(str(module).split(".")[0] for module in modules)}
    return SYSTEMS[name].parameters.__module__.split(".")[0] in packages
