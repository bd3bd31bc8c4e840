"""The same model under llama.cpp's own ``llama-bench``, where that is installed: as many layers' experts on the GPU as
fit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import median, quantiles

import torch
from transformers import AutoModelForCausalLM

from benchmarks.accelerate_offload import split
from benchmarks.figures import Cell
from benchmarks.gguf_file import write_gguf
from realrun.llama_cpp.bench import samples_ns


def row_of(
    program: str, checkpoint: Path, scratch: Path, limit_bytes: int, prompt_tokens: int, generated: int, runs: int,
    reference_ms: float,
) -> list[Cell]:
    """A row of the table of ``beside_accelerate``. Raises RuntimeError, with what it printed, where it fails."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    file = scratch / "model.gguf"
    write_gguf(model, file)
    there, gpu = split(checkpoint, limit_bytes, "cpu", "disk"), torch.cuda.is_available()
    here = min(there.layers_here + 1, there.layers) if gpu else 0  # + 1: here no layer comes and goes
    command = [program, "-m", str(file), "-o", "json", "-r", str(runs), "-p", str(prompt_tokens), "-n", str(generated)]
    if gpu:
        command += ["-ngl", "99", "-ncmoe", str(there.layers - here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    low, tpot, high = _quartiles([ns / generated / 1e6 for ns in samples_ns(done.stdout, program, 0, generated)])
    who = f"llama-bench, experts of {there.layers - here} layers on the CPU" if gpu else "llama-bench, all on the CPU"
    kept, share = here * model.config.num_experts, here / there.layers
    return [who, tpot, f"{low:.1f}-{high:.1f}", reference_ms / tpot, kept, share, 0.0, "no text"]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high
