"""Bundles a finished training run: an evaluated and a calibration trace, vectors, the training record.

``python -m tools.mini_bundle --model mini-moe --corpus FOLDER --run DIR --vectors FILE -o traces/bundled``. Evaluated
sequences are prompts cut from held-out text. The calibration trace continues prompts cut from the last tenth of the
training text, which ``tools.train_estimator``, that made the vectors, does not read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tools.mini_data import CorpusError, domains_of
from traces.capture.capture import FORECASTS, CaptureSettings, capture_loaded
from traces.capture.load import load
from traces.capture.prompts import PromptFile, read_prompts
from traces.capture.vectors import read_vectors, write_vectors

EVALUATED_PER_DOMAIN, CALIBRATION_PER_DOMAIN = 4, 2
CALIBRATION_TAIL = 0.9  # calibration prompts are cut behind this share of the training text
SETTINGS = CaptureSettings(
    prompt_tokens=64, generated_tokens=64, batch_size=20, seed=17, forecasts=(*FORECASTS, "estimator@1")
)
CALIBRATION_SETTINGS = replace(SETTINGS, scores=False, forecasts=("quasi_hidden@1", "estimator@1"))
COMMITTED = ("mini-moe",)  # checkpoints small enough to keep in the repository


def cut_prompts(corpus: Path, split: str, per_domain: int, tokenizer: Any, seed: int, output: Path) -> PromptFile:
    """Write and read back a prompt file: ``per_domain`` passages of every ``<domain>.<split>.txt``."""
    lines = []
    for number, domain in enumerate(domains_of(corpus)):
        text = (corpus / f"{domain}.{split}.txt").read_text(encoding="utf-8")
        text = text[int(CALIBRATION_TAIL * len(text)) :] if split == "train" else text
        random = np.random.default_rng((seed, number))
        for passage in cut_passages(text, per_domain, SETTINGS.prompt_tokens, tokenizer, random):
            lines.append(json.dumps({"text": passage, "domain": domain}))
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_prompts(output)


def cut_passages(text: str, count: int, tokens: int, tokenizer: Any, random: np.random.Generator) -> list[str]:
    """``count`` passages of at least ``tokens`` tokens from starts of unindented lines, at random and without overlap.

    Raises CorpusError if the text has too few.
    """
    starts = [match.start() for match in re.finditer(r"^ ?\S", text, re.MULTILINE)]
    chosen: list[int] = []
    reach = 8 * tokens  # characters: more than enough for the tokens
    for at in random.permutation(len(starts)):
        start = starts[int(at)]
        apart = all(abs(start - other) >= reach for other in chosen)
        if apart and len(tokenizer(text[start : start + reach])["input_ids"]) >= tokens:
            chosen.append(start)
        if len(chosen) == count:
            return [text[s : s + reach] for s in chosen]
    raise CorpusError(f"expected {count} passages of {tokens} tokens, found {len(chosen)}; give more text")


def bundle(
    name: Annotated[str, typer.Option("--model")], corpus: Annotated[Path, typer.Option()],
    run: Annotated[Path, typer.Option()], vectors: Annotated[Path, typer.Option()],
    output: Annotated[Path, typer.Option("-o", "--output")],
) -> None:
    """Capture both traces of a trained model into ``output``; put vectors, training record (and checkpoint) there."""
    loaded = load(run / "model", dtype="float32", name=name)
    held_out = cut_prompts(
        corpus, "eval", EVALUATED_PER_DOMAIN, loaded.tokenizer, SETTINGS.seed, run / "held-out-prompts.jsonl"
    )
    other = cut_prompts(
        corpus, "train", CALIBRATION_PER_DOMAIN, loaded.tokenizer, SETTINGS.seed, run / "training-text-prompts.jsonl"
    )
    known = _copy_vectors(name, vectors, output)
    capture_loaded(loaded, held_out, output / f"{name}.safetensors", SETTINGS, vectors=known)
    capture_loaded(loaded, other, output / f"{name}-calibration.safetensors", CALIBRATION_SETTINGS, vectors=known)
    _record(run, output / "training" / name)
    if name in COMMITTED:
        shutil.rmtree(output / name, ignore_errors=True)
        shutil.copytree(run / "model", output / name, copy_function=shutil.copyfile)


def _copy_vectors(name: str, vectors: Path, output: Path) -> Path:
    """Write vectors under the model's name, which the folder that it was trained in does not tell."""
    known = read_vectors(vectors)
    named = replace(known, provenance={**known.provenance, "model": name})
    return write_vectors(named, output / f"{name}-vectors.safetensors")


def _record(run: Path, stem: Path) -> None:
    """Settings, the last evaluation and the log of a training run up to its checkpoint, written next to the traces."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    log = (run / "log.jsonl").read_text().splitlines()
    while "held_out" not in json.loads(log[-1]):
        log.pop()  # steps after the checkpoint that was captured
    last = json.loads(log[-1])
    record = {
        "settings": json.loads((run / "settings.json").read_text()),
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": round(last["tokens"] / last["seconds"], 1),
        "held_out": last["held_out"],
        "machine": f"{os.cpu_count()}-core {platform.machine()} CPU, no GPU; one thread at the lowest priority",
        "date": date.today().isoformat(),
        "sequences": "The traced sequences are prompts cut from held-out text, continued by the model.",
        "calibration": "Vectors come from training text, the calibration trace from another part of it.",
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".jsonl").write_text("\n".join(log) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(bundle)
