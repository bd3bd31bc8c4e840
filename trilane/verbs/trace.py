"""``trilane trace``: inspect routing traces, import them, and capture them from real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.output.pages.output import JsonOption, check_targets, heading, note, pairs, report, working
from trilane.verbs.inputs import read_any, trace_in_words
from trilane.verbs.options import Verb, help_of
from trilane.verbs.trace_capture import capture, check_trace_target
from trilane.verbs.trace_stats import stats
from trilane.verbs.trace_synth import synth

if TYPE_CHECKING:
    from traces.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Routing traces: inspect them, import them, make them, capture them.")

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="Trace file, bundled name such as mini-deepseek, or a log that can be imported."
    ),
]


def info(trace: TraceArgument, json: JsonOption = None) -> None:
    """What is in a trace: model, tokens, forecasts, and where it came from."""
    check_targets(json, inputs=[trace])
    read = read_any(trace)
    facts = facts_of(read)
    title = heading(f"trace {trace_in_words(trace, read)}")
    report(json, facts, title, pairs((name.replace("_", " "), _text(fact)) for name, fact in facts.items()))


def facts_of(trace: Trace) -> dict[str, Any]:
    """A trace described, JSON-ready."""
    shape = trace.shape
    prefill = int((trace.phase == 0).sum())
    return {
        "model": shape.name,
        "moe_layers": shape.moe_layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": sorted(set(shape.expert_bytes_by_layer)),
        "sequences": len(set(trace.sequence.tolist())),
        "tokens": len(trace),
        "prefill_tokens": prefill,
        "decode_tokens": len(trace) - prefill,
        "scores": trace.scores is not None,
        "forecasts": [str(key) for key in trace.forecasts],
        "provenance": dict(trace.provenance),
        "checksum": trace.checksum,
    }


def _text(value: Any) -> str:
    """A fact in words."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text(part).replace(chr(10), ', ')}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value))) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def import_(
    log: Annotated[str, typer.Argument(metavar="LOG", help="File or folder that another program wrote.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Trace file to write (.safetensors).")],
    log_format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Default: that of the log's suffix and beginning.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="Recorded model; needed if the log lacks its sizes."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="For logs that have prompts only: length of each prompt; later tokens are marked as decode."),
    ] = None,
) -> None:
    """Turn a routing log of another program into a trace file.

    Formats: route-trace, llama-cpp and moe-beyond (CSV), vllm (JSON or .npz), sglang (JSON), sglang-recorder (.npz),
    megatron (.jsonl), moe-cache-eval and parquet-layers (folders). How to record them: docs/traces.md.
    """
    check_trace_target(output, inputs=[log])
    with working(f"reading {log}"):
        from traces.file import write_trace
        from traces.importers import import_trace

        trace = import_trace(log, log_format, model=model, prompt_tokens=prompt_tokens)
        write_trace(trace, output)
    facts = facts_of(trace)
    note(f"{trace_in_words(output, trace)}: {facts['sequences']:,} sequence{'s' * (facts['sequences'] != 1)} of "
         f"{facts['model']}, {facts['prefill_tokens']:,} prompt and {facts['decode_tokens']:,} decode tokens, "
         f"{'with' if facts['forecasts'] else 'no'} forecasts")


_VERBS: dict[str, Verb] = {"info": info, "stats": stats, "synth": synth, "import": import_, "capture": capture}
for name, verb in _VERBS.items():
    app.command(name, help=help_of(verb))(verb)
