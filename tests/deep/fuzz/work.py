"""The work that a command does once its input is read: stopped, so that the fuzzer's time goes into reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any, NoReturn

from sim.engine.engine import Engine

ROOT = Path(__file__).parents[3]

_STOPS = (
    "trilane.study.pool:Worker", "trilane.verbs.trace_capture:_capture_function", "trilane.verbs.profile:_machine",
    "traces.synthesis.synthetic_trace:synthetic_trace", "realrun.replay.measure:measure", "realrun.smoke.smoke:smoke",
    "realrun.generation.generate:generate", "trilane.study.validation.validate:ReplayBench",
    "trilane.verbs.validate:_report",
)  # fmt: skip


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
    measure: Any = import_module("realrun.replay.measure")
    measure.machine_on = lambda *_, **__: SimpleNamespace(close=lambda: None, remarks=lambda: ())


@contextmanager
def simulations(most: int) -> Iterator[None]:
    """In the block, the simulator runs so often; then it stops the command."""
    run, left = Engine.run, [None] * most

    def counted(engine: Engine) -> None:
        if not left:
            raise Begun
        left.pop()
        run(engine)

    Engine.run = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine.run = run  # type: ignore[method-assign]
