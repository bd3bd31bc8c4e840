"""``trilane trace synth``: routing made up for a model whose routing nobody has recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from trilane.pages.output import (
    JsonOption,
    OutputError,
    check_targets,
    heading,
    legend,
    note,
    number,
    show,
    table,
    working,
    write_json,
)
from trilane.verbs.scenario_options import read_any

if TYPE_CHECKING:
    from traces.models.shape import ModelShape
    from traces.synthesis.routing_model import RoutingModel


def synth(
    output: Annotated[str, typer.Option("--output", "-o", metavar="F.safetensors", help="Trace to write.")],
    like: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model whose layers, experts and experts per token the trace has; see "
                                           "[bold]trilane models[/]. mixtral-8x7b:8 is its first 8 MoE layers."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="Be like this trace: a trace file, a bundled name or a route_trace v1 CSV. "
                                           "Default: the stored fit nearest to the model."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Texts: a batch takes one each.")] = 20,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 64,
    generated_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens generated after each.")] = 64,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Another number gives other texts of the same made-up model.")
    ] = 0,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Make routing up: as skewed, persistent and predictable as a real trace's. Every output calls it synthetic.

    Prints how near the made-up routing comes to the trace that it was fitted to, and what was taken from where.

    [bold]synthetic:MODEL[/] as the name of a trace does the same without a file.
    """
    if like is None and fit is None:
        raise OutputError("expected --like MODEL, --fit TRACE or both, got neither: nothing says what to be like")
    check_targets(output, json, inputs=[fit])
    with working("making routing up"):
        from traces.file import write_trace
        from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace

        shape, routing = _routing(like, fit)
        asked = Synthesis(routing, sequences, prompt_tokens, generated_tokens, seed)
        write_trace(synthetic_trace(shape, asked), output)
    show(json, *_page(shape, routing))
    write_json({"synthetic": routing.source, "routing": routing.to_dict()}, json)
    note(f"synthetic trace: {output}; beside published figures: trilane trace stats {output} --published")


def _routing(model: str | None, trace_name: str | None) -> tuple[ModelShape, RoutingModel]:
    """Whose topology, and the parameters."""
    from traces.models.catalogue import load_model
    from traces.synthesis.estimate import estimate_routing
    from traces.synthesis.nearest import nearest_routing

    if trace_name is None:
        assert model is not None
        shape = load_model(model)
        return shape, nearest_routing(shape)
    trace = read_any(trace_name)
    shape = trace.shape if model is None else load_model(model)
    return shape, nearest_routing(shape, estimate_routing(trace, trace_name, trace.shape.name, trace.checksum))


def _page(shape: ModelShape, routing: RoutingModel) -> list[Table | Text | str]:
    """What it is like, and how near it comes."""
    rows = [
        [row.statistic, "" if row.fitted else "*", *(number(value, 3) for value in (row.real, row.synthetic)),
         f"{row.synthetic - row.real:+.3f}"]
        for row in routing.residuals
    ]  # fmt: skip
    forecasts = ", ".join(f"{name} {100 * value:.1f}%" for name, value in routing.forecast_accuracy.items())
    return [
        heading(f"synthetic routing for {shape.name}"),
        routing.source,
        f"forecasts, accuracy@k: {forecasts}",
        heading(f"\nbeside the trace {routing.name}"),
        table(["statistic", "", routing.name, "synthetic", "difference"], rows, text_columns=2),
        legend({"*": "nothing was fitted to it; nor to the hit rate of any cache"}),
    ]
