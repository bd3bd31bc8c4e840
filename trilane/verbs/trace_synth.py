"""``trilane trace synth``: synthetic routing for a model of which there is no recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trilane.output.pages.output import (
    JsonOption,
    Part,
    check_targets,
    heading,
    legend,
    note,
    number,
    report,
    table,
    working,
)
from trilane.verbs.inputs import read_any
from trilane.verbs.options import OptionError

if TYPE_CHECKING:
    from traces.models.shape import ModelShape
    from traces.synthesis.routing_model import RoutingModel


def synth(
    output: Annotated[str, typer.Option("--output", "-o", metavar="F.safetensors", help="Trace to write.")],
    like: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model whose layers, experts and experts per token the trace has; see "
                                           "[bold]trilane models[/]. mixtral-8x7b:8: its first 8 MoE layers."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="Trace to estimate the routing's parameters from: a trace file, a bundled "
                                           "name or a log to import. Default: the stored estimate nearest to the "
                                           "model."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Number of sequences.")] = 20,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 64,
    generated_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens generated after each prompt.")] = 64,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Another seed gives other sequences of the same synthetic model.")
    ] = 0,
    json: JsonOption = None,
) -> None:
    """Make synthetic routing that is as skewed, persistent and predictable as that of a real trace.

    Prints how close it is to the trace that its parameters were estimated from. Every output calls it synthetic.

    [bold]synthetic:MODEL[/] as the name of a trace does the same without a file.
    """
    if like is None and fit is None:
        raise OptionError("expected --like MODEL, --fit TRACE or both, got neither")
    check_targets(output, json, inputs=[fit])
    with working("making routing"):
        from traces.file import write_trace
        from traces.synthesis.synthetic_trace import Synthesis, synthetic_trace

        shape, routing = _routing(like, fit)
        synthesis = Synthesis(routing, sequences, prompt_tokens, generated_tokens, seed)
        write_trace(synthetic_trace(shape, synthesis), output)
    report(json, {"synthetic": routing.source, "routing": routing.to_dict()}, *_page(shape, routing))
    note(f"synthetic trace: {output}; compare it with published figures: trilane trace stats {output} --published")


def _routing(model: str | None, trace_name: str | None) -> tuple[ModelShape, RoutingModel]:
    """The model whose layers and experts the trace has, and the routing's parameters."""
    from traces.models.catalogue import load_model
    from traces.synthesis.estimate import estimate_routing
    from traces.synthesis.named import nearest_routing

    if trace_name is None:
        assert model is not None
        shape = load_model(model)
        return shape, nearest_routing(shape)
    trace = read_any(trace_name)
    shape = trace.shape if model is None else load_model(model)
    return shape, nearest_routing(shape, estimate_routing(trace, trace_name, trace.shape.name, trace.checksum))


def _page(shape: ModelShape, routing: RoutingModel) -> list[Part]:
    """The statistics of the synthetic routing next to those of the real trace."""
    rows = [
        [row.statistic, "" if row.fitted else "*", *(number(value, 3) for value in (row.real, row.synthetic)),
         f"{row.synthetic - row.real:+.3f}"]
        for row in routing.residuals
    ]
    forecasts = ", ".join(f"{name} {100 * value:.1f}%" for name, value in routing.forecast_accuracy.items())
    return [
        heading(f"synthetic routing for {shape.name}"),
        routing.source,
        f"forecasts, accuracy@k: {forecasts}",
        heading(f"\ncompared with the trace {routing.name}"),
        table(["statistic", "", routing.name, "synthetic", "difference"], rows, text_columns=2),
        legend({"*": "no parameter was fitted to this statistic, nor to the hit rate of any cache"}),
    ]
