"""``--engine llama.cpp`` of ``measure``, ``profile`` and ``validate``: a real engine, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trilane.pages.output import check_folder, check_targets, heading, legend, note, show, table, working, write_json
from trilane.verbs.options import MOST_CORES, OptionError

if TYPE_CHECKING:
    from realrun.llama_cpp.bench_engine import BenchPoint, BenchSettings, OpenModel

EngineName = Literal["llama.cpp"]
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class EngineChoice:
    """Another engine than this project's executor."""

    engine: Annotated[
        EngineName | None,
        typer.Option(help="llama.cpp: measure that engine instead, on this machine; needs the optional extra llama."),
    ] = None


@dataclass(frozen=True)
class LlamaRun:
    """What ``measure --engine llama.cpp`` runs."""

    gguf: Annotated[str | None, typer.Option(metavar="FILE", help="llama.cpp: the model.")] = None
    n_cpu_moe: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            help="llama.cpp: everything on the GPU but the experts of the first N layers. Default: no GPU.",
        ),
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
        int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="llama.cpp: tokens of a piece of it (-ub).")
    ] = 512
    kv: Annotated[
        Literal["f16", "f32", "bf16", "q8_0", "q4_0"], typer.Option(help="llama.cpp: format of keys and values.")
    ] = "f16"
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="llama.cpp: how often the prompt is computed; tokens four "
                                                             "times as often.")
    ] = 5  # fmt: skip


@dataclass(frozen=True)
class LlamaProfile:
    """How ``profile --engine llama.cpp`` measures."""

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


def refuse_without_engine(options: LlamaRun | LlamaProfile) -> None:
    """Raises OptionError for options of an engine that was not chosen."""
    changed = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    if changed:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise OptionError(f"{given}: expected --engine llama.cpp with that; add it, or leave that out")


def measure_llama(run: LlamaRun, json: str | None) -> None:
    """Time the tokens of an answer and a prompt, and print both with their spread."""
    from realrun.llama_cpp.bench_engine import BenchPoint, BenchSettings, time_points

    if run.gguf is None:
        raise OptionError("--engine llama.cpp: expected a model; give --gguf FILE")
    check_targets(json, inputs=(run.gguf,))
    threads = run.threads or _cores()
    settings = BenchSettings(
        max(run.depth, run.prompt) + 64, run.ubatch, run.n_cpu_moe is not None, run.n_cpu_moe or 0, run.kv
    )
    points = [(BenchPoint(threads, run.depth, 1), 4 * run.repeats), (BenchPoint(threads, 0, run.prompt), run.repeats)]
    with working(f"loading {run.gguf}") as say, _open_llama()(Path(run.gguf), settings) as context:
        say(f"{run.repeats} prompts of {run.prompt} tokens, and {4 * run.repeats} tokens")
        times = time_points(context, points)
    lines = {_work(point): _Times.of(point, ns) for point, ns in times.items()}
    show(json, heading(f"{run.gguf} with llama.cpp, {_settings(threads, settings)}"),
         table(["", "tokens/s", "ms\nmedian", "ms\nquartiles", "+/-", "repeats"],
               [[work, *each.cells()] for work, each in lines.items()]),
         legend({"+/-": "half of the distance between the quartiles, over the median",
                 "decode": "one token behind those in the cache; random ids, so that there is no text"}))  # fmt: skip
    write_json({"gguf": run.gguf, "threads": threads, "settings": settings._asdict(),
                **{work: each.to_dict() for work, each in lines.items()}}, json)  # fmt: skip


@dataclass(frozen=True)
class _Times:
    tokens: int
    low_ms: float
    median_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, point: BenchPoint, times: Sequence[int]) -> _Times:
        from realrun.llama_cpp.bench_engine import quartiles

        low, middle, high = (ns / 1e6 for ns in quartiles(times))
        return cls(point.tokens, low, middle, high, len(times))

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.median_ms

    @property
    def spread(self) -> float:
        return (self.high_ms - self.low_ms) / 2 / self.median_ms

    def cells(self) -> list[str]:
        return [f"{self.tokens_per_s:.1f}", f"{self.median_ms:.2f}", f"{self.low_ms:.2f}-{self.high_ms:.2f}",
                f"{self.spread:.1%}", str(self.repeats)]  # fmt: skip

    def to_dict(self) -> dict[str, float]:
        return {"tokens_per_s": self.tokens_per_s, **vars(self), "spread": self.spread}


def profile_llama(choice: LlamaProfile, out: str, json: str | None) -> None:
    """Measure llama.cpp's kernels on small models of random weights, and write an engine."""
    from realrun.llama_cpp.benchmark_models import BLOCKS
    from realrun.llama_cpp.kernel_engine import write_engine
    from realrun.llama_cpp.kernel_numbers import KernelNumbers
    from realrun.llama_cpp.kernel_profile import measure_samples
    from realrun.llama_cpp.random_blocks import block_format

    blocks = tuple(dict.fromkeys((BLOCKS[0], *choice.blocks.split(",")))) if choice.blocks else BLOCKS
    for block in blocks:
        block_format(block)  # an unknown one is refused now
    check_targets(out, json)
    threads = _threads(choice.threads)
    opened = _open_llama()
    with TemporaryDirectory(dir=Path(out).absolute().parent, prefix=".kernels-") as folder, working("measuring") as say:
        samples = measure_samples(opened, Path(folder), blocks, threads, choice.rounds, say)
    times = {name: [[*point, ns] for point, ns in each.items()] for name, each in samples.items()}
    write_json({"samples": times}, json)  # before anything is made of them
    about = f"llama.cpp's kernels on {_machine()}, measured {datetime.now(UTC):%Y-%m-%d}"
    engine = write_engine(KernelNumbers(samples, blocks, threads, about).kernels(), about, Path(out))
    facts = {key: number.value for key, number in engine.flat().items() if key.startswith("kernels.")}
    show(json, heading(about), table(["number", "value"], [[key, str(value)] for key, value in facts.items()], 2))
    if unsure := [key for key, number in engine.flat().items() if key in facts and number.confidence == "low"]:
        note(f"{', '.join(unsure)}: bounded, since the times are within noise; measure again, without other programs")
    note(f"an engine for machines without a GPU: --set engine={out}, fit --engine {out}")


def validate_llama(plan: str, profile: str, out: str | None, json: str | None) -> None:
    """Measure the scenarios of a plan one model after the other, and compare them with an engine's predictions."""
    from sim.costs.engine import load_engine
    from trilane.pages.engine_validation import MEANINGS, engine_table, summary_lines, write_engine_report
    from trilane.study.validation.engine_plan import EnginePlan
    from trilane.study.validation.engine_rows import EngineSummary
    from trilane.study.validation.engine_validation import measure_plan

    chosen, engine = EnginePlan.from_yaml(Path(plan)), load_engine(profile)
    check_folder(out)
    check_targets(json, inputs=(plan, profile))
    opened = _open_llama()
    with TemporaryDirectory(dir=out or None, prefix=".models-") as folder, working("validating") as say:
        rows = measure_plan(chosen, engine, opened, Path(folder), say)
    summary = EngineSummary.of(rows)
    show(json, heading(f"{len(rows)} scenarios, predicted by {profile}"), table(*engine_table(rows)), legend(MEANINGS),
         "", *summary_lines(summary))  # fmt: skip
    write_json({"rows": [{**vars(row), "error": row.error} for row in rows]}, json)
    if out:
        write_engine_report(rows, Path(out), engine, f"{_machine()}, {datetime.now(UTC):%Y-%m-%d}")
        note(f"report, table and picture are in {out}/")


def _open_llama() -> OpenModel:
    """llama.cpp. Raises RefusedError where the package is not installed."""
    from realrun.llama_cpp.library import llama_library
    from realrun.llama_cpp.llama_bench_context import open_llama

    llama_library()
    return open_llama


def _threads(given: str | None) -> tuple[int, ...]:
    if given is None:
        cores = _cores()
        return tuple(sorted({1, max(cores // 2, 1), cores}))
    numbers = [int(each) if each.isascii() and each.isdigit() else 0 for each in given.split(",")]
    if not all(1 <= number <= MOST_CORES for number in numbers):
        raise OptionError(f"--threads: expected whole numbers from 1 to {MOST_CORES}, such as 1,2,4; got {given!r}")
    return tuple(sorted(set(numbers)))


def _cores() -> int:
    from realrun.machine.cores import physical_cores

    return len(physical_cores())


def _machine() -> str:
    from realrun.machine.facts import cpu_facts

    facts = cpu_facts()
    return f"{facts['cpu']}, {facts['cores']} cores"


def _work(point: BenchPoint) -> str:
    return f"prompt of {point.tokens:,}" if point.tokens > 1 else f"decode at {point.depth:,} tokens"


def _settings(threads: int, settings: BenchSettings) -> str:
    where = f"experts of {settings.cpu_layers} layers on the CPU" if settings.gpu else "all on the CPU"
    many = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{where}, {many}, pieces of {settings.piece_tokens}, keys and values in {settings.kv}"
