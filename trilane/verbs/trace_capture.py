"""``trilane trace capture``: record what a real model routes, with PyTorch or llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from typing import Annotated, Any

import typer

from traces.capture.settings import FORECASTS, CaptureError
from trilane.common.files import OutputError
from trilane.output.pages.output import check_targets, note, working
from trilane.verbs.options import processes

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
    """``traces.capture.capture.capture``, with fewer torch threads. Raises OutputError if torch is not installed."""
    try:
        from realrun.machine.thread_lane import limit_torch_threads
        from traces.capture.capture import capture as run
    except ModuleNotFoundError as error:
        raise OutputError(
            f"capture needs {error.name}; in the folder of Trilane: "
            "`.venv/bin/pip install -c constraints.txt -e '.[torch]'` "
            "(without a GPU, add --extra-index-url https://download.pytorch.org/whl/cpu)"
        ) from None
    limit_torch_threads()
    return run
