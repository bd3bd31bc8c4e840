"""The work that a command does once its input is read: stopped, so that the fuzzer's time goes into reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any, NoReturn

from sim.timeline.timeline import Timeline

ROOT = Path(__file__).parents[2]

_STOPS = (
    "trilane.study.pool:Worker", "trilane.verbs.trace_capture:_capture_function", "trilane.verbs.profile:_machine",
    "traces.synthesis.synthetic_trace:synthetic_trace", "realrun.replay.replay:measure", "realrun.smoke.smoke:smoke",
    "realrun.generation.generate:generate", "trilane.study.validation.validate:ReplayBench",
    "trilane.verbs.validate:_report",
)


class Begun(BaseException):
    """The work has begun: the input was accepted."""


def stop(*_: Any, **__: Any) -> NoReturn:
    """In place of work."""
    raise Begun


def shorten() -> None:
    """Put stops in place of all work but simulations, in this process and for ever; a machine is none at all."""
    for place in _STOPS:
        module, _, name = place.partition(":")
        setattr(import_module(module), name, stop)
    for package in ("policies", "sim", "trilane"):
        for found in walk_packages([str(ROOT / package)], f"{package}."):
            import_module(found.name)
    measure: Any = import_module("realrun.replay.replay")
    measure.machine_on = lambda *_, **__: SimpleNamespace(close=lambda: None, remarks=lambda: ())


@contextmanager
def simulations(most: int) -> Iterator[None]:
    """In the block, the simulator runs so often; then it stops the command."""
    run, left = Timeline.run, [None] * most

    def counted(timeline: Timeline) -> None:
        if not left:
            raise Begun
        left.pop()
        run(timeline)

    Timeline.run = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Timeline.run = run  # type: ignore[method-assign]
