"""``trilane engines``: the software that machines are asked about, and every number of it with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.output.pages.output import JsonOption, Part, check_targets, heading, pairs, report, table

if TYPE_CHECKING:
    from sim.costs.engine import InferenceEngine

_NOTE = """
fitted   its times of layers and shares of rates are fitted to speeds that other people measured (`trilane accuracy`)
counted  its kernels are counted, with times of the machine; engines of papers add the overheads of their programs

`trilane engines NAME` shows every number with its source; a file like those in sim/costs/engines is an engine, too."""


def engines(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="One engine, with the sources of its numbers.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Engines: the software that runs a model, as numbers that say how fast a machine is with it."""
    from sim.costs.engine import FittedEngine, engine_names, load_engine

    check_targets(json, inputs=(name,))
    chosen = [load_engine(one) for one in ([name] if name else engine_names())]
    rows = [[one.name, "fitted" if isinstance(one, FittedEngine) else "counted", one.about] for one in chosen]
    page = _page(chosen[0]) if name else [table(["name", "numbers", "what it is"], rows, 3), _NOTE]
    report(json, {"engines": [_facts(one, fitted=isinstance(one, FittedEngine)) for one in chosen]}, *page)


def _page(engine: InferenceEngine) -> list[Part]:
    numbers = [[key, f"{n.value:g}" if isinstance(n.value, int | float) else str(n.value), n.confidence, n.source]
               for key, n in engine.flat().items()]
    numbers_table = table(["number", "value", "confidence", "source"], numbers, 4, widest={"source": 90})
    facts = [("what it is", engine.about), *([("set by", ", ".join(engine.set_by))] if engine.set_by else [])]
    return [heading(engine.name), pairs(facts), "", *([numbers_table] if numbers else [])]


def _facts(engine: InferenceEngine, *, fitted: bool) -> dict[str, Any]:
    numbers = {key: number._asdict() for key, number in engine.flat().items()}
    facts = {"name": engine.name, "about": engine.about, "fitted": fitted, "set_by": list(engine.set_by)}
    return {**facts, "numbers": numbers}
