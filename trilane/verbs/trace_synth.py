"""``trilane trace synth``: routing made up for a model whose routing nobody has recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.output import check_targets, note, working


def synth(
    like: Annotated[str, typer.Option(metavar="MODEL", help="Model whose layers, experts and top-k it has.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="F.safetensors", help="Trace to write.")],
    sequences: Annotated[int, typer.Option(min=1, metavar="N")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of each sequence.")] = 64,
    generated_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of each sequence.")] = 64,
    skew: Annotated[
        float, typer.Option(min=0, metavar="X", help="A layer's preference for some experts, over what drifts.")
    ] = 1.0,
    persistence: Annotated[
        float, typer.Option(min=0, max=1, metavar="X", help="Correlation of a token's router with the one before.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(min=0, metavar="N")] = 0,
) -> None:
    """Make routing up: skewed and persistent as asked, fitted to no model. Every output calls it synthetic."""
    from traces.catalogue import load_model
    from traces.synthetic import Synthesis, synthetic_trace
    from traces.trace_file import write_trace

    check_targets(output)
    with working("making routing up"):
        asked = Synthesis(sequences, prompt_tokens, generated_tokens, skew, persistence, seed)
        write_trace(synthetic_trace(load_model(like), asked), output)
    note(f"synthetic trace: {output}")
