"""``--engine llama.cpp`` of ``measure``, ``profile`` and ``validate``: a real engine on this machine.

Reports name the machine; in a plan, ``here`` stands for its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trilane.common.units import in_gb
from trilane.output.pages.output import (
    check_folder,
    check_targets,
    heading,
    note,
    report,
    show,
    table,
    working,
    write_json,
)
from trilane.verbs.inputs import whole_numbers
from trilane.verbs.options import MOST_CORES, OptionError

if TYPE_CHECKING:
    from realrun.llama_cpp.bench import BenchSettings, OpenModel


HERE = "here"  # in place of a machine's name in a plan
NAME_THE_PARTS = "name the parts: --set hardware=GPU+MEMORY+CPU (HARDWARE= of examples/gpu.sh)"
_MOST_TOKENS = 1 << 20
_MEASURED = ("kernels.", "gpu_kernels.", "split.")  # sections of an engine's file


EngineOption = Annotated[
    Literal["llama.cpp"] | None,
    typer.Option(help="llama.cpp: measure that engine instead, on this machine; needs the optional extra llama."),
]


@dataclass(frozen=True)
class LlamaRun:
    """The model and the tokens of ``measure --engine llama.cpp``."""

    gguf: Annotated[str | None, typer.Option(metavar="FILE", help="llama.cpp: the model.")] = None
    n_cpu_moe: Annotated[
        int | None,
        typer.Option(min=0, max=1000, metavar="N",
                     help="llama.cpp: everything on the GPU but the experts of the first N layers. Default: no GPU."),
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_CORES, metavar="N", help="llama.cpp: CPU threads. Default: all cores.")
    ] = None
    depth: Annotated[
        int, typer.Option(min=0, max=_MOST_TOKENS, metavar="N", help="llama.cpp: tokens in the cache while it decodes.")
    ] = 0
    prompt: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="llama.cpp: tokens of the prompt.")
    ] = 512
    ubatch: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="llama.cpp: prompt tokens computed at once (-ub).")
    ] = 512
    kv: Annotated[
        Literal["f16", "f32", "bf16", "q8_0", "q4_0"], typer.Option(help="llama.cpp: format of keys and values.")
    ] = "f16"
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="llama.cpp: how often the prompt is computed; tokens four "
                                                             "times as often.")
    ] = 5
    llama_bench: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM",
            help="llama.cpp: use this llama-bench instead of the optional extra. Default: if the extra is missing, "
                 "the one in LLAMA_BENCH or on the PATH.",
        ),
    ] = None


@dataclass(frozen=True)
class LlamaProfile:
    """The threads, blocks and rounds of ``profile --engine llama.cpp``."""

    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="llama.cpp: numbers of threads. Default: one, half of the cores, all of them."
        ),
    ] = None
    blocks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="llama.cpp: blocks of weights; q4_0 is always added. Default: q4_0,q4_k,q5_0,q6_k,q8_0,mxfp4.",
        ),
    ] = None
    rounds: Annotated[
        int, typer.Option(min=1, max=100, metavar="N", help="llama.cpp: how often all small models are timed.")
    ] = 2
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="llama.cpp: measure its kernels on the GPU, and experts that stay with the CPU next "
                                   "to it, in place of the CPU alone; needs a build for GPUs (LLAMA_LIBRARY)."),
    ] = False


@dataclass(frozen=True)
class LlamaValidation:
    """Earlier measurements that ``validate --engine llama.cpp`` compares with."""

    measured: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="llama.cpp: measure nothing; take the times of this rows.csv of an earlier "
                                          "report, and compare them with the predictions of this profile."),
    ] = None


def refuse_without_engine(options: LlamaRun | LlamaProfile | LlamaValidation) -> None:
    """Raise OptionError for options of an engine that was not chosen."""
    changed = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    if changed:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise OptionError(f"{given}: expected --engine llama.cpp with that; add it, or leave that out")


def measure_llama(run: LlamaRun, json: str | None) -> None:
    """Time the tokens of an answer and a prompt, and print both with their spread."""
    from trilane.output.pages.engine import engine_times_table, settings_line

    check_targets(json, inputs=(run.gguf,) if run.gguf else ())
    about, results = timed_llama(run)
    engine = "llama.cpp" if about["program"] is None else f"llama.cpp ({about['program']})"
    title = heading(f"{run.gguf} with {engine}, {settings_line(about['threads'], _settings(run))}")
    report(json, {**about, **results}, title, *engine_times_table(results))


def timed_llama(run: LlamaRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run, and its times by what was computed. Raises OptionError without a file."""
    from realrun.llama_cpp.bench import BenchPoint, program_times, time_points
    from trilane.output.pages.engine import times_of, work_words

    if run.gguf is None:
        raise OptionError("--engine llama.cpp: expected a model; give --gguf FILE")
    threads, settings = run.threads or core_count(), _settings(run)
    points = [(BenchPoint(threads, run.depth, 1), 4 * run.repeats), (BenchPoint(threads, 0, run.prompt), run.repeats)]
    program = run.llama_bench or _program()
    with working(f"{run.repeats} prompts of {run.prompt} tokens, and {4 * run.repeats} tokens"):
        if program is not None:
            times = program_times(program, Path(run.gguf), settings, points)
        else:
            with _open_llama()(Path(run.gguf), settings) as context:
                times = time_points(context, points)
    about = {"gguf": run.gguf, "program": program, "threads": threads, "settings": settings._asdict()}
    return about, {work_words(point): times_of(point, ns) for point, ns in times.items()}


def _settings(run: LlamaRun) -> BenchSettings:
    from realrun.llama_cpp.bench import BenchSettings

    return BenchSettings(
        max(run.depth, run.prompt) + 64, run.ubatch, run.n_cpu_moe is not None, run.n_cpu_moe or 0, run.kv
    )


def profile_llama(choice: LlamaProfile, out: str, json: str | None) -> None:
    """Measure llama.cpp's kernels on small models of random weights, and write an engine."""
    from realrun.llama_cpp.benchmark_models import BLOCKS, bench_models, files_bytes, gpu_models, measure_samples
    from realrun.llama_cpp.kernel_numbers import KernelNumbers, write_engine
    from realrun.llama_cpp.random_gguf import block_format
    from realrun.llama_cpp.split_numbers import gpu_numbers

    blocks = tuple(dict.fromkeys((BLOCKS[0], *choice.blocks.split(",")))) if choice.blocks else BLOCKS
    for block in blocks:
        block_format(block)  # an unknown one is refused now
    check_targets(out, json)
    threads = _threads(choice.threads)
    opened, where = _open_llama(), gpu_machine() if choice.gpu else cpu_machine()
    models = tuple(gpu_models(blocks, threads) if choice.gpu else bench_models(blocks, threads))
    parent = Path(out).absolute().parent
    _check_room(files_bytes(models), parent)
    with TemporaryDirectory(dir=parent, prefix=".kernels-") as folder, working("measuring") as say:
        samples = measure_samples(opened, Path(folder), models, choice.rounds, say)
    times = {name: [[*point, ns] for point, ns in of_model.items()] for name, of_model in samples.items()}
    write_json({"samples": times}, json)  # before anything is made of them
    about = f"llama.cpp's kernels on {where}, measured {datetime.now(UTC):%Y-%m-%d}"
    of_gpu = gpu_numbers(samples, blocks, threads, about) if choice.gpu else None
    engine = write_engine(of_gpu or KernelNumbers(samples, blocks, threads, about).kernels(), about, Path(out))
    facts = {key: number.value for key, number in engine.flat().items() if key.startswith(_MEASURED)}
    show(json, heading(about), table(["number", "value"], [[key, str(value)] for key, value in facts.items()], 2))
    if unsure := [key for key, number in engine.flat().items() if key in facts and number.confidence == "low"]:
        note(f"{', '.join(unsure)}: bounded, since the times are within noise; measure again, without other programs")
    machines = f"machines with {where}" if choice.gpu else "machines without a GPU"
    note(f"an engine for {machines}: --set engine={out}, fit --engine {out}")


def _check_room(size_bytes: int, folder: Path) -> None:
    """Say what is written. Raises OptionError without room for it."""
    free_bytes = disk_usage(folder).free
    if free_bytes < size_bytes:
        raise OptionError(
            f"{folder}: expected room for {in_gb(size_bytes)} GB of models of random weights, {in_gb(free_bytes)} GB "
            f"are free; name a file on another disk with --out, or fewer formats with --blocks"
        )
    note(f"{in_gb(size_bytes)} GB of models of random weights are written to {folder}, and removed at the end")


def validate_llama(
    choice: LlamaValidation, plan: str, profile: str, out: str | None, json: str | None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Measure the scenarios of a plan one model after the other, or take what was measured earlier, and compare with an
    engine's predictions. ``changes``: other values of the plan's keys.
    """
    from sim.costs.engine import load_fitted
    from trilane.output.pages.engine import engine_page, write_engine_report
    from trilane.study.validation.engine_validation import EnginePlan, measure_plan, predicted_anew, read_rows

    if changes.get("hardware") == HERE:
        changes = {**changes, "hardware": machine_found()}
    chosen, engine = EnginePlan.from_yaml(Path(plan), changes), load_fitted(profile)
    check_folder(out)
    check_targets(json, inputs=(plan, profile, choice.measured))
    where = gpu_machine() if chosen.cpu_parts and choice.measured is None else cpu_machine()
    if choice.measured is not None:
        where = f"Measured earlier ({choice.measured})"
        rows = [predicted_anew(row, chosen.machine(), engine) for row in read_rows(Path(choice.measured))]
    else:
        opened = _open_llama()
        if out:
            Path(out).mkdir(parents=True, exist_ok=True)  # models are as large as memory: next to the report
        with TemporaryDirectory(dir=out or None, prefix=".models-") as folder, working("validating") as say:
            rows = measure_plan(chosen, engine, opened, Path(folder), say, note)
    report(json, {"rows": [{**vars(row), "error": row.error} for row in rows]}, *engine_page(rows, profile))
    if out:
        write_engine_report(rows, Path(out), engine, f"{where}, {datetime.now(UTC):%Y-%m-%d}")
        note(f"report, table and picture are in {out}/")


def _open_llama() -> OpenModel:
    """The engine. Raises RefusedError if the package is not installed."""
    from realrun.llama_cpp.abi import llama_library
    from realrun.llama_cpp.bench import open_llama

    llama_library()
    return open_llama


def _program() -> str | None:
    """The program llama-bench, if the package is not installed; None if it is, or without the program."""
    from realrun.llama_cpp.abi import has_library
    from realrun.llama_cpp.bench import bench_program

    return None if has_library() else bench_program()


def _threads(given: str | None) -> tuple[int, ...]:
    if given is None:
        cores = core_count()
        return tuple(sorted({1, max(cores // 2, 1), cores}))
    return whole_numbers(given, "--threads", most=MOST_CORES)


def machine_found() -> str:
    """The name of a machine with the parts of this one; assumptions are printed.

    Raises OptionError for parts that are not in the catalogue.
    """
    from sim.machine.assembly import assembled_name
    from sim.machine.hardware import load_hardware
    from sim.machine.plausibility import HardwareError
    from trilane.engines.tune.machine_found import UnknownCardError, found_machine
    from trilane.output.pages.caveats import assumption_text

    try:
        own = found_machine()
        name = assembled_name(own.gpu, own.ram, own.cpu, cores=own.cores, pcie=own.pcie, ram_gib=own.ram_gb)
        load_hardware(name)
    except UnknownCardError as error:
        raise OptionError(f"hardware={HERE}: {error.why}; {NAME_THE_PARTS}") from None
    except HardwareError as error:
        raise OptionError(f"hardware={HERE}: {error}; {NAME_THE_PARTS}") from None
    for assumption in own.assumed:
        text, _, _ = assumption_text(assumption).partition(";")  # what follows are options of tune
        note(f"assumed: {text}")
    if own.assumed:
        note(NAME_THE_PARTS)
    return name


def gpu_machine() -> str:
    """Names of the first GPU that llama.cpp can use, and of the CPU. Raises RefusedError if there is no GPU."""
    from realrun.llama_cpp.abi import gpu_name

    return f"{gpu_name()}, {cpu_machine()}"


def cpu_machine() -> str:
    """The CPU's name and the number of its cores."""
    from realrun.machine.facts import cpu_facts

    facts = cpu_facts()
    return f"{facts['cpu']}, {facts['cores']} cores"


def core_count() -> int:
    """The number of physical cores."""
    from realrun.machine.cores import physical_cores

    return len(physical_cores())
