"""``trilane trace synth``: routing made up for a model whose routing nobody has recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.output import check_targets, note, working


def synth(
    like: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Model whose layers, experts and experts per token the trace has; see "
                                           "[bold]trilane models[/]. mixtral-8x7b:8 is its first 8 MoE layers."),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="F.safetensors", help="Trace to write.")],
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Texts: a batch takes one each.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each prompt.")] = 64,
    generated_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens generated after each.")] = 64,
    skew: Annotated[
        float,
        typer.Option(min=0, metavar="X", help="How much some experts are liked better than others, by all tokens "
                                              "alike. 0: not at all; 1: as much as tokens differ from each other."),
    ] = 1.0,
    persistence: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="X", help="How much a token chooses as the one before it did. 0: no more "
                                                     "than any two; 1: every token of a text chooses alike."),
    ] = 0.7,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Another number gives another trace of the same kind.")
    ] = 0,
) -> None:  # fmt: skip
    """Make routing up: skewed and persistent as asked, fitted to no model. Every output calls it synthetic."""
    from traces.catalogue import load_model
    from traces.synthetic import Synthesis, synthetic_trace
    from traces.trace_file import write_trace

    check_targets(output)
    with working("making routing up"):
        asked = Synthesis(sequences, prompt_tokens, generated_tokens, skew, persistence, seed)
        write_trace(synthetic_trace(load_model(like), asked), output)
    note(f"synthetic trace: {output}")
