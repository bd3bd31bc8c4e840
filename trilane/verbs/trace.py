"""``trilane trace``: inspect routing traces, import them, make them, and capture them from real models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces.capture.settings import FORECASTS, CaptureError
from trilane.common.files import OutputError
from trilane.output.pages.output import (
    JsonOption,
    Part,
    check_targets,
    heading,
    legend,
    note,
    number,
    pairs,
    progress,
    report,
    table,
    working,
)
from trilane.verbs.inputs import DECODE_HINT, read_any, trace_in_words
from trilane.verbs.options import OptionError, Verb, help_of, model_named, processes

if TYPE_CHECKING:
    from traces.models.shape import ModelShape
    from traces.synthesis.routing_model import RoutingModel
    from traces.trace import Trace


# --- capture ----------------------------------------------------------------------------------------------------------

VECTORS_HELP = (
    "Vectors of an earlier calibration, instead of calibration prompts: a file written by "
    "[bold]python -m tools.train_estimator[/], which estimator@1 needs. Default: computed from the calibration prompts."
)
FORECASTS_HELP = (
    "Kinds, with commas: gate@N; residual@1, quasi_hidden@1, partial@1, estimator@1. Default: those of "
    f"{', '.join(FORECASTS)} that the model supports."
)


def capture(
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts, one per line; or JSON Lines with text and domain.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Trace file to write (.safetensors).")],
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="Folder or Hugging Face id of an MoE model.")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="FILE", help="A GGUF file instead, for llama.cpp; if split, its first part.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Other prompts, to calibrate forecasts on. Default: 12 bundled ones."),
    ] = None,
    vectors: Annotated[str | None, typer.Option(metavar="FILE", help=VECTORS_HELP)] = None,
    forecasts: Annotated[str | None, typer.Option(help=FORECASTS_HELP)] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Cut longer prompts to this number of tokens.")] = 64,
    generated_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a --model that run together. Default: 8.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.8,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="With a GGUF file. Default: one per core.")] = None,
    gpu_layers: Annotated[
        int | None, typer.Option(min=-1, help="With a GGUF file: layers on the GPU, -1 for all. Default: none.")
    ] = None,
) -> None:
    """Run a model on prompts and record what it routes, with forecasts for later layers.

    A --model needs torch and transformers, a --gguf the package xllamacpp. In Trilane's folder, this installs them:

    [bold].venv/bin/pip install -c constraints.txt -e '.\\[torch,llama]'[/]

    Without a GPU, add [bold]--extra-index-url https://download.pytorch.org/whl/cpu[/] to it.
    """
    check_trace_target(output, inputs=[prompts, calibration, vectors, model, gguf])
    settings: dict[str, Any] = {
        "prompt_tokens": prompt_tokens, "generated_tokens": generated_tokens, "temperature": temperature, "seed": seed,
        "forecasts": [name.strip() for name in forecasts.split(",")] if forecasts is not None else None,
    }
    with as_file(files("trilane") / "calibration_prompts.txt") as bundled:
        if gguf is not None:
            of_a_model = {"model": model, "vectors": vectors, "dtype": dtype if dtype != "auto" else None}
            _check_alone("gguf", of_a_model | {"batch-size": batch_size})
            from realrun.llama_cpp.capture import capture_gguf

            with working(f"loading {gguf}") as say:
                capture_gguf(gguf, prompts, output, calibration_prompts=calibration or str(bundled), progress=say,
                             threads=processes(threads), gpu_layers=gpu_layers or 0, **settings)
        elif model is not None:
            _check_alone("model", {"threads": threads, "gpu-layers": gpu_layers})
            others = calibration if vectors else calibration or str(bundled)
            settings |= {} if batch_size is None else {"batch_size": batch_size}
            _check_capture(model, dtype, prompts, others, vectors, settings)
            with working(f"loading {model}") as say:
                _capture_function()(model, prompts, output, calibration_prompts=others, vectors=vectors, dtype=dtype,
                                    progress=say, **settings)
        else:
            raise CaptureError("expected --model PATH_OR_ID or --gguf FILE, got neither")
    note(f"written: {output}; look at it with `trilane trace info {output}`")


def _check_alone(option: str, others: Mapping[str, object]) -> None:
    """Refuse what ``option`` has no use for, where it is given. Raises CaptureError."""
    for name, value in others.items():
        if value is not None:
            raise CaptureError(f"expected --{option} without --{name}, got --{name} {value}; leave it out")


def check_trace_target(output: str, inputs: Sequence[str | None]) -> None:
    """Refuse a trace file that cannot be written. Raises OutputError."""
    check_targets(output, inputs=inputs)
    if not output.endswith(".safetensors"):
        raise OutputError(f"{output}: expected the name of a trace file, ending in .safetensors")


def _check_capture(
    model: str, dtype: str, prompts: str, calibration: str | None, vectors: str | None, settings: Mapping[str, Any]
) -> None:
    """Refuse what capture would refuse, before torch is imported. Raises CaptureError."""
    from traces.capture.prompts import read_prompts
    from traces.capture.settings import CaptureSettings, check_model
    from traces.capture.vectors import known_vectors

    CaptureSettings(**settings)
    check_model(model, dtype)
    known_vectors(read_prompts(prompts), read_prompts(calibration) if calibration else None, vectors)


def _capture_function() -> Any:
    """``traces.capture.capture.capture``, with fewer torch threads."""
    from realrun.machine.thread_lane import limit_torch_threads
    from traces.capture.capture import capture as run

    limit_torch_threads()
    return run


# --- the other verbs --------------------------------------------------------------------------------------------------

app = typer.Typer(no_args_is_help=True, help="Routing traces: inspect them, import them, make them, capture them.")
TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="Trace file, bundled name such as mini-deepseek, or a log that can be imported."
    ),
]


def stats(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Trace files, bundled names, or logs to import.")
    ],
    published: Annotated[
        bool, typer.Option("--published", help="Add the figures that papers and other projects publish.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the comparison as Markdown.")] = False,
    json: JsonOption = None,
) -> None:
    """How skewed, how repetitive and how predictable the routing is.

    Several traces are shown side by side, in one table.
    """
    check_targets(json, inputs=traces)
    if len(traces) > 1 or published or markdown:
        _compare(traces, published, markdown, json)
        return
    with working("counting"):
        from traces.statistics import trace_statistics
        from trilane.output.pages.trace_stats import description

        trace = read_any(traces[0])
        values = trace_statistics(trace)
    report(json, values, *description(trace_in_words(traces[0], trace), values))


def _compare(names: Sequence[str], published: bool, markdown: bool, json: str | None) -> None:
    from traces.models.catalogue import published_figures
    from trilane.common.schema import to_dict
    from trilane.output.pages.trace_stats import comparable_statistics, comparison

    statistics = {name: comparable_statistics(read_any(name)) for name in progress(names, "counting")}
    figures = published_figures() if published else ()
    record = {"traces": statistics, **({"published": [to_dict(figure) for figure in figures]} if published else {})}
    report(json, record, *comparison(statistics, figures, markdown=markdown))


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
    report(json, {"synthetic": routing.source, "routing": routing.to_dict()}, *_fit_page(shape, routing))
    note(f"synthetic trace: {output}; compare it with published figures: trilane trace stats {output} --published")


def _routing(model: str | None, trace_name: str | None) -> tuple[ModelShape, RoutingModel]:
    """The model whose layers and experts the trace has, and the routing's parameters."""
    from traces.models.catalogue import load_model
    from traces.synthesis.estimate import estimate_routing
    from traces.synthesis.named import nearest_routing

    if trace_name is None:
        assert model is not None
        shape = load_model(model_named(model))
        return shape, nearest_routing(shape)
    trace = read_any(trace_name)
    shape = trace.shape if model is None else load_model(model_named(model))
    return shape, nearest_routing(shape, estimate_routing(trace, trace_name, trace.shape.name, trace.checksum))


def _fit_page(shape: ModelShape, routing: RoutingModel) -> list[Part]:
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


def info(trace: TraceArgument, json: JsonOption = None) -> None:
    """Describe a trace: model, tokens, forecasts, and where it came from."""
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
    megatron (.jsonl), moe-cache-eval and parquet-layers (folders), rows (CSV or .jsonl, to convert others to). How to
    record them: docs/traces.md.
    """
    check_trace_target(output, inputs=[log])
    with working(f"reading {log}"):
        from traces.file import write_trace
        from traces.importers import import_trace

        trace = import_trace(log, log_format, model=model and model_named(model), prompt_tokens=prompt_tokens)
        write_trace(trace, output)
    facts = facts_of(trace)
    note(f"{trace_in_words(output, trace)}: {facts['sequences']:,} sequence{'s' * (facts['sequences'] != 1)} of "
         f"{facts['model']}, {facts['prefill_tokens']:,} prompt and {facts['decode_tokens']:,} decode tokens, "
         f"{'with' if facts['forecasts'] else 'no'} forecasts")
    if not facts["decode_tokens"]:
        note(f"all tokens are of prompts, so there is no time per generated token; {DECODE_HINT}")


_VERBS: dict[str, Verb] = {"info": info, "stats": stats, "synth": synth, "import": import_, "capture": capture}
for name, verb in _VERBS.items():
    app.command(name, help=help_of(verb))(verb)
