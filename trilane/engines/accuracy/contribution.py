"""A contribution of measured speeds: rows made of what a program printed, and what is still missing for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath, PureWindowsPath
from typing import Any, NamedTuple

from sim.machine.assembly import NO_GPU
from sim.machine.parts import is_unified, taken
from sim.machine.plausibility import HardwareError
from traces.models.catalogue import load_model, model_names
from traces.models.shape import ShapeError
from traces.models.spellings import spelled
from trilane.engines.accuracy.errors import Speeds, error_of, factor, measured
from trilane.engines.accuracy.measured_rows import COLUMNS, MeasuredRow, predict, read_rows
from trilane.engines.accuracy.outputs import ReadSpeed
from trilane.engines.accuracy.slow_machines import SlowCause, slow_causes_of_row
from trilane.engines.question import KV_BITS, Question, engine_of

SUSPECT = 3.0  # times too fast or too slow a prediction, from which on a row is doubted
_SAME = 0.01  # of a speed: two rows of one setting that are nearer are one measurement


@dataclass(frozen=True)
class Given:
    """Names and numbers of the person; None for what the text may say. ``cpu_layers``: N of --n-cpu-moe."""

    model: str | None = None
    weights: str | None = None
    gpu: str | None = None
    ram: str | None = None
    cpu: str | None = None
    cores: int | None = None
    channels: int | None = None
    pcie: str | None = None
    cpu_layers: int | None = None
    source: str = ""


class Lacking(NamedTuple):
    """Something that neither the text nor the person says; ``option``: that names it."""

    option: str
    why: str


@dataclass(frozen=True)
class Contribution:
    """Rows, or what is missing for them."""

    rows: tuple[MeasuredRow, ...]
    lacking: tuple[Lacking, ...]


def contribution(speeds: Sequence[ReadSpeed], given: Given) -> Contribution:
    """Make rows of speeds. Raises ShapeError, HardwareError, FitError for names that there are not."""
    first = speeds[0]
    model, weights = _model_of(first, given)
    parts: dict[str, Any] = {
        "gpu": given.gpu or _part("gpu", first.gpu) or (NO_GPU if first.back_end == "CPU" else None),
        "cpu": given.cpu or _part("cpu", first.cpu), "ram": given.ram,
    }
    split = given.cpu_layers if given.cpu_layers is not None else _named_layers(first)
    lacking = tuple(_lacking(model, parts, split))
    if lacking or model is None:
        return Contribution((), lacking)
    question = Question(
        model, weights=weights, **parts, cores=given.cores, channels=given.channels, pcie=given.pcie,
    )
    engine = engine_of(question, question.load_machine())
    shape = load_model(question.shape)
    layers = sum(block < (split or 0) for block in shape.expert_blocks)
    whole = parts["gpu"] == NO_GPU or first.gpu_layers == 0
    common: dict[str, Any] = {
        "model": model, "weights": question.shape.partition("@")[2], "machine": question.hardware,
        "engine": engine.name, "cpu_layers": shape.moe_layers if whole else layers,
        "quality": "A", "source": given.source or "own measurement",
    }
    return Contribution(tuple(_row(str(number), one, common) for number, one in enumerate(speeds, 1)), ())


def _model_of(first: ReadSpeed, given: Given) -> tuple[str | None, str | None]:
    """The catalogue's name of the model and its weights, by what was named or by the file's name."""
    text = given.model or (PurePath(PureWindowsPath(first.file).as_posix()).name if first.file else None)
    if text is None:
        return None, given.weights
    if text.lower() in model_names():
        return text.lower(), given.weights
    try:
        found = spelled(text, model_names()).name
    except ShapeError:
        if given.model:
            raise
        return None, given.weights
    return found.model, given.weights or found.weights


def _part(kind: Any, text: str | None) -> str | None:
    """The part that a program's words mean, if they mean one."""
    try:
        return taken(kind, text).name if text else None
    except HardwareError:
        return None


def _named_layers(first: ReadSpeed) -> int | None:
    """N of --n-cpu-moe as the text says it: none, where a setting that has its default is not printed."""
    if first.cpu_layers is None and (first.overridden or first.gpu_layers is None):
        return None
    return first.cpu_layers or (None if first.overridden else 0)


def _lacking(model: str | None, parts: dict[str, str | None], split: int | None) -> Iterable[Lacking]:
    if model is None:
        yield Lacking("--model", "the model's name, as trilane models lists it, or as its file is called")
    if parts["gpu"] is None:
        yield Lacking("--gpu", "the GPU, as nvidia-smi prints it, or none")
    unified = parts["gpu"] is not None and is_unified(parts["gpu"])
    if parts["ram"] is None and not unified:
        yield Lacking("--ram", "kind and speed of the memory modules, such as ddr5-5600: sudo dmidecode -t memory "
                               "(Configured Memory Speed), or Task Manager, Performance, Memory")
    if parts["cpu"] is None and not unified:
        yield Lacking("--cpu", "the processor, as /proc/cpuinfo or Windows prints it")
    if split is None and parts["gpu"] not in (None, NO_GPU):
        yield Lacking("--n-cpu-moe", "layers whose experts are on the CPU; 0 if all are on the GPU")


def _row(name: str, one: ReadSpeed, common: dict[str, Any]) -> MeasuredRow:
    speed: dict[str, Any] = (
        {"decode_tokens_per_s": one.tokens_per_s, "generated_tokens": one.tokens, "depth_tokens": one.depth}
        if one.decode else
        {"prompt_tokens_per_s": one.tokens_per_s, "prompt_tokens": one.tokens, "prompt_depth_tokens": one.depth,
         "piece_tokens": one.piece_tokens}
    )
    setting = ", ".join(filter(None, (
        f"-ngl {one.gpu_layers}" if one.gpu_layers is not None else "", f"build {one.build}" if one.build else "",
    )))
    return MeasuredRow(
        id=name, **common, **speed, threads=one.threads, kv_bits=KV_BITS.get(one.kv or ""),  # type: ignore[call-overload]
        date=one.date or "", setting=setting,
    )


def cells(rows: Sequence[MeasuredRow]) -> list[list[str]]:
    """Rows as the lines of a CSV file that ``read_rows`` takes, its head first: everything that is shared."""
    words = {True: "yes", False: "no", None: ""}
    lines = [[getattr(row, name) for name in COLUMNS] for row in rows]
    return [[*COLUMNS], *([str(words.get(value, value) if isinstance(value, bool | None) else value) for value in line]
                          for line in lines)]


# --- checks -----------------------------------------------------------------------------------------------------------


class RowCheck(NamedTuple):
    """A row with its prediction, and what speaks against it; ``duplicate``: the id of a bundled row that is the same.

    ``causes``: of a machine that is slower than its parts.
    """

    row: MeasuredRow
    predicted: Speeds
    error: float | None
    duplicate: str | None
    suspect: bool
    causes: tuple[SlowCause, ...]

    @property
    def well(self) -> bool:
        """True if nothing speaks against it."""
        return self.duplicate is None and not self.suspect and not self.causes


def check_rows(rows: Iterable[MeasuredRow], known: Sequence[MeasuredRow] | None = None) -> list[RowCheck]:
    """Compare rows with predictions and with the bundled ones. Raises what ``predict`` raises."""
    bundled = [row for row in (read_rows() if known is None else known) if not row.left_out]
    return [_checked(row, bundled) for row in rows]


def _checked(row: MeasuredRow, bundled: Sequence[MeasuredRow]) -> RowCheck:
    found = predict(row)
    predicted = Speeds(found.decode_tokens_per_s, found.prompt_tokens_per_s)
    known = measured(row)
    errors = [error_of(row, {row.id: predicted}, quantity) for quantity in ("decode", "prompts")]
    error = next((one for one in errors if one is not None), None)
    duplicate = next((other.id for other in bundled if _is_same(row, other)), None)
    suspect = error is not None and factor(error) > SUSPECT
    causes = tuple(slow_causes_of_row(row)) if any(known) else ()
    return RowCheck(row, predicted, error, duplicate, suspect, causes)


def _is_same(row: MeasuredRow, other: MeasuredRow) -> bool:
    """True for the same setting and, within a hundredth, the same speed."""
    own, theirs = measured(row), measured(other)
    speeds = [(one, another) for one, another in zip(own, theirs, strict=True) if one is not None]
    near = all(another is not None and abs(one / another - 1) < _SAME for one, another in speeds)
    plain = (replace(each, id="-", date="", source="", setting="", assumed="", quality="", left_out="", fault="",
                     decode_tokens_per_s=None, prompt_tokens_per_s=None, generated_tokens=64, threads=None,
                     prompt_tokens=None, piece_tokens=None, prompt_depth_tokens=0, kv_bits=None, copies=None)
             for each in (row, other))
    first, second = plain
    return near and bool(speeds) and first == second
