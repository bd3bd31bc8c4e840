"""Capture, generation and loading of every text family of the installed transformers, tried on tiny random models.

``python -m tests.realrun.generation.families`` tries all of them (minutes) and writes
``docs/notes/families.md``; with names of families it tries these alone and writes nothing. It fails where a result is
wrong, or where an error is not one of ours.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TypeAlias

import torch
import transformers

from realrun.errors import RefusedError
from realrun.experts.checkpoint import load_streamed
from realrun.generation.hosted_model import HostedModel, look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import ModelOutput, output_of_executor, output_of_library
from tests.kit.generating import CPU, PROMPTS, build_family, every_slot, families, flips, left_out, request
from traces.capture.capture import capture_loaded
from traces.capture.forecasts import calibrate, stream_if_any
from traces.capture.load import Loaded
from traces.capture.passes import HookedModel
from traces.capture.prompts import PromptFile, read_prompts
from traces.capture.record import RouterRecorder
from traces.capture.router_forecast import parse_forecasts
from traces.capture.settings import FORECASTS, CaptureError, CaptureSettings
from traces.capture.vectors import write_vectors
from traces.file import read_trace

PAGE = Path(__file__).parents[3] / "docs" / "notes" / "families.md"
FORECAST_KINDS = tuple(dict.fromkeys(key.kind for key in parse_forecasts(FORECASTS)))
REFUSALS = (CaptureError, RefusedError)
SETTINGS = CaptureSettings(prompt_tokens=8, generated_tokens=3, batch_size=2)
OTHER = ((9, 8, 7, 6, 5, 4, 30, 31), (50, 51, 52, 53, 9, 9, 1, 2))  # to calibrate on
POLICIES = ("on-demand", "naive-cpu", "llama.cpp")  # experts on the GPU, on the CPU, on both; without forecasts
STEPS = 3  # after the prompt
TOLERANCE = 1e-5  # of a logit in float32: law 11

Attempt: TypeAlias = Callable[[str, Path], str]  # (family, a folder of its own) -> what came of it


class WrongResultError(Exception):
    """A result that is not the unmodified model's."""


@dataclass(frozen=True)
class Row:
    """Results of every attempt with one family; ``why``: reasons of refusals, with the attempts that met them."""

    family: str
    cells: Mapping[str, str]
    why: Mapping[str, list[str]]

    @property
    def failed(self) -> bool:
        """Is anything wrong, or an error that is not ours?"""
        return any(cell in ("WRONG", "TRACEBACK") for cell in self.cells.values())


def captured(family: str, folder: Path) -> str:
    """The forecasts that the model can give."""
    loaded, path = build_family(family), folder / "trace.safetensors"
    capture_loaded(loaded, _prompts(folder, PROMPTS), path, SETTINGS, _prompts(folder, OTHER))
    made = {key.kind for key in read_trace(path).forecasts}
    return ", ".join(kind for kind in FORECAST_KINDS if kind in made) or "no forecasts"


def generated(family: str, _folder: Path) -> str:
    """By policies that need no preparation. A control: with other experts the unmodified model says something else."""
    model, whole = look_at(*taken_apart(build_family(family), CPU, plain)), build_family(family)
    expected = _expected(whole)
    for policy in POLICIES:
        _assert_exact(model, policy, expected)
    for layer in whole.layers:
        layer.down.data.copy_(layer.down.data.roll(1, 0))
    if flips(_expected(whole).logits, expected.logits).largest_difference <= 10 * TOLERANCE:
        raise WrongResultError("experts make no difference")
    return "exact"


def generated_by_dali(family: str, folder: Path) -> str:
    """With residual vectors of other prompts."""
    vectors = _vectors(build_family(family), folder)
    model, expected = look_at(*taken_apart(build_family(family), CPU, plain)), _expected(build_family(family))
    _assert_exact(model, "dali", expected, vectors=vectors)
    return "exact"


def loaded_from_checkpoint(family: str, folder: Path) -> str:
    """Expert by expert, from what the library saves; it must be what the library itself makes of it."""
    whole, saved = build_family(family), folder / "model"
    whole.model.save_pretrained(saved)
    model, layers, store = load_streamed(saved, torch.float32, CPU, plain)
    library = type(model).from_pretrained(saved)._apply(torch.clone)  # mapped from a file, it lies at odd addresses
    loaded = Loaded(family, "random", model, whole.tokenizer, layers, 32)
    _assert_exact(look_at(loaded, store), "on-demand", _expected(replace(whole, model=library)))
    return "exact"


ATTEMPTS: dict[str, Attempt] = {
    "capture": captured, "generate": generated, "`dali`": generated_by_dali, "load": loaded_from_checkpoint,
}


def tried(family: str) -> Row:
    """All attempts with one family."""
    gc.freeze()  # every run collects garbage before it begins: not all that the libraries have made
    cells: dict[str, str] = {}
    why: dict[str, list[str]] = {}
    for title, attempt in ATTEMPTS.items():
        with tempfile.TemporaryDirectory() as folder:
            cells[title], reason = _outcome(attempt, family, Path(folder))
        if reason:
            why.setdefault(reason, []).append(title)
    return Row(family, cells, why)


def _outcome(attempt: Attempt, family: str, folder: Path) -> tuple[str, str]:
    """The cell, and the reason where it is not a success."""
    try:
        return attempt(family, folder), ""
    except REFUSALS as error:
        return "refused", str(error).replace(f"{folder}/", "")
    except WrongResultError as error:
        return "WRONG", str(error)
    except Exception as error:  # whatever it is, it is a fault
        traceback.print_exc()
        return "TRACEBACK", f"{type(error).__name__}: {error}"


def _expected(loaded: Loaded) -> ModelOutput:
    return output_of_library(loaded.model, torch.tensor(PROMPTS), STEPS)


def _assert_exact(model: HostedModel, policy: str, expected: ModelOutput, vectors: Path | None = None) -> None:
    """Law 11: the same greedy tokens, logits within 1e-5."""
    lanes = HostLanes(inline=True)
    try:
        asked = request(policy, every_slot(model) // 4, generated=STEPS, vectors=vectors)
        said = output_of_executor(model, asked, lanes)
    finally:
        lanes.close()
    difference = flips(said.logits, expected.logits).largest_difference
    if said.tokens.tolist() != expected.tokens.tolist() or not difference <= TOLERANCE:
        raise WrongResultError(f"{policy}: logits differ by {difference:.1e}")


def _vectors(loaded: Loaded, folder: Path) -> Path:
    with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
        run = HookedModel(loaded, SETTINGS, recorder)
        stream, _ = stream_if_any(run, run.probe(list(OTHER[0])), "quasi_hidden@1")
        if stream is None:
            return write_vectors(calibrate(run, None, _prompts(folder, OTHER)), folder / "vectors.safetensors")
        with stream:
            return write_vectors(calibrate(run, stream, _prompts(folder, OTHER)), folder / "vectors.safetensors")


def _prompts(folder: Path, tokens: tuple[tuple[int, ...], ...]) -> PromptFile:
    path = folder / f"{tokens[0][0]}.txt"
    path.write_text("".join(" ".join(map(str, line)) + "\n" for line in tokens))
    return read_prompts(path)


def page(rows: Sequence[Row], today: date) -> str:
    """The table, and what is not in it."""
    exact = {title: sum(row.cells[title] == "exact" for row in rows) for title in ATTEMPTS}
    return f"""# Model families

Text families with a mixture of experts in transformers {transformers.__version__}
(torch {torch.__version__}, {today}).
Written by `python -m tests.realrun.generation.families`, which tries tiny random models in float32.
Of {len(rows)} families {exact["generate"]} generate exactly, {exact["`dali`"]} also with `dali`,
and {exact["load"]} load from a checkpoint one expert at a time.

- *capture*: the forecasts that `trilane trace capture` can record of {", ".join(FORECAST_KINDS)}.
- *generate*: with a quarter of the experts cached ({", ".join(POLICIES)}), the greedy tokens
  are the unmodified model's, and its logits are met within {TOLERANCE:.0e}.
- *`dali`*: the same under `dali`, with residual vectors calibrated on other prompts.
- *load*: the same from a checkpoint that the library saved, against what the library loads from it.

| family | {" | ".join(ATTEMPTS)} | refused, and why |
|{"---|" * (len(ATTEMPTS) + 2)}
{chr(10).join(map(line, rows))}

Left out, as the library has no text model of them alone (parts of multimodal models, encoder-decoders, models
that do not generate text): {", ".join(left_out())}.
A multimodal config that holds one of the families counts as that family.
"""


def line(row: Row) -> str:
    """The line of a family in the table."""
    why = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in row.why.items())
    return f"| {' | '.join((row.family, *row.cells.values()))} | {why.replace('|', '&#124;')} |"


def main(names: list[str]) -> int:
    """The exit status."""
    rows = []
    for family in names or families():
        rows.append(tried(family))
        print(line(rows[-1]), flush=True)
    if not names:
        PAGE.write_text(page(rows, date.today()), encoding="utf-8")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
