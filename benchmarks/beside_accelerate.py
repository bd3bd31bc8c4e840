"""Generation next to Hugging Face accelerate's: ``python -m benchmarks.beside_accelerate [--write | --out FOLDER]``.

One model, one prompt and one limit of GPU memory: through Hugging Face accelerate's offload, and through ours. With a
GPU both use it. Without one, a core plays the GPU and a paced memory copy is the link, for accelerate as well (see
``realrun.machine.host_lanes``). ``--write`` keeps the figures next to this file, ``--out`` in a folder, in
``accelerate.json`` and ``.md``: after every round, so that those of the rounds before remain if one fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

import torch
from transformers import AutoModelForCausalLM

from benchmarks import llama_bench
from benchmarks.contestants import Contestant, Size, Tokens, learn, prompts, with_accelerate, with_ours, write_model
from benchmarks.figures import Cell, Section, machine, markdown_of, print_section, write_json
from realrun.generation.hosted_model import HostedModel, load_model, look_at
from realrun.llama_cpp.bench import VARIABLE, bench_program
from realrun.machine.host_lanes import HostLanes
from realrun.machine.lanes import Machine
from realrun.machine.machines import LaneOptions, RealMachine, machine_for
from realrun.profiling.lab import Points
from realrun.profiling.profile import profile
from realrun.profiling.timing import QUICK
from realrun.smoke.generation_checks import output_of_library
from sim.machine.hardware import write_hardware
from sim.runs.scenario import Scenario
from traces.models.shape import ModelShape
from trilane.common.files import atomic_path
from trilane.study.validation.validate import alternating

HERE = Path(__file__).parent
POLICIES = ("on-demand", "fiddler", "dali")
PROMPT_TOKENS, GENERATED_TOKENS, RUNS, LEARN_FROM = 16, 16, 3, 8
COLUMNS = (
    "who", "TPOT, ms", "quartiles, ms", "times as fast as accelerate", "experts kept on the GPU", "hit rate",
    "MB over the link per token", "first token that differs from the unmodified model",
)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_accelerate", description=__doc__)
    parser.add_argument("--memory-gb", type=float, default=0.7, help="limit of GPU memory, GB")
    parser.add_argument("--link-gbps", type=float, default=4.0, help="pace of the link where there is no GPU, GB/s")
    parser.add_argument("--write", action="store_const", dest="out", const=HERE,
                        help="write accelerate.json and accelerate.md next to this file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write them to a folder")
    given = parser.parse_args()
    where = facts(given.link_gbps * 1e9)
    keep = partial(write, where, given.out) if given.out else lambda _: None
    with tempfile.TemporaryDirectory() as name:
        section = measure(Path(name), Size(), given.memory_gb, given.link_gbps * 1e9, keep)
    print_section(section)


def write(where: dict[str, Cell], folder: Path, section: Section) -> None:
    """Keep what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(where, [section], folder / "accelerate.json")
    text = markdown_of(where, [section], "Next to Hugging Face accelerate", "make bench-accelerate")
    with atomic_path(folder / "accelerate.md") as aside:
        aside.write_text(text, encoding="utf-8")


def facts(link_bytes_per_s: float) -> dict[str, Cell]:
    """Machine, versions and command."""
    host = f"none: one core, and a link paced to {link_bytes_per_s / 1e9:g} GB/s"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else host
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    command = " ".join(["python -m benchmarks.beside_accelerate", *sys.argv[1:]])
    return {**machine(), **packages, "GPU": gpu, "command": command}


def measure(
    folder: Path, size: Size, memory_gb: float, link_bytes_per_s: float, keep: Callable[[Section], None]
) -> Section:
    """Measure all once to warm up, then ``RUNS`` times in alternating order; ``keep`` gets the figures after each."""
    say = partial(print, file=sys.stderr, flush=True)
    checkpoint = folder / "model"
    say("writing a model")
    write_model(size, checkpoint)
    prompt, *others = prompts(size, 1 + LEARN_FROM, PROMPT_TOKENS)
    truth = said_in_memory(checkpoint, prompt, GENERATED_TOKENS)
    options = LaneOptions() if torch.cuda.is_available() else LaneOptions(link_bytes_per_s=link_bytes_per_s)
    lanes = machine_for("auto", options, inline=True)
    try:
        model = hosted(checkpoint, lanes)
        learnt = learn(model, others, GENERATED_TOKENS, lanes, folder)
        say("profiling the machine, for the planners")
        hardware = profiled(model, options, folder)
        scenario = Scenario(hardware=str(hardware), gpu_memory_gb=memory_gb)
        contestants = [
            *with_accelerate(checkpoint, folder, round(memory_gb * 1e9), prompt, GENERATED_TOKENS, lanes),
            *with_ours(POLICIES, model, prompt, GENERATED_TOKENS, lanes, scenario, learnt),
        ]
        say("measuring")
        notes = [*about(model.shape, memory_gb, lanes), said(truth), *link_beside_copies(model, lanes)]
        for number in compete(contestants, RUNS):
            section = Section("One sequence, decode steps", COLUMNS, rows(contestants, truth), notes=notes)
            say(f"round {number} of {RUNS}")
            keep(section)
    finally:
        lanes.close()
    section = with_llama_bench(section, checkpoint, folder, round(memory_gb * 1e9))
    keep(section)
    return section


def with_llama_bench(section: Section, checkpoint: Path, scratch: Path, limit_bytes: int) -> Section:
    """Add a row for llama-bench, or a note that it is not installed."""
    program = bench_program()
    if program is None:
        why = f"llama-bench is not installed: neither {VARIABLE} nor the path names one"
        return replace(section, notes=[*section.notes, why])
    reference_ms = float(section.rows[0][1])  # type: ignore[arg-type]
    row = llama_bench.row_of(
        program, checkpoint, scratch, limit_bytes, PROMPT_TOKENS, GENERATED_TOKENS, RUNS, reference_ms
    )
    why = "llama-bench: the mean step of each repetition, after no prompt; it draws tokens instead of saying any"
    return replace(section, rows=[*section.rows, row], notes=[*section.notes, why])


def hosted(checkpoint: Path, lanes: Machine) -> HostedModel:
    """The model hosted by Trilane, ready for all policies."""
    allocate = lambda size: lanes.host_tensor((size,), torch.uint8)  # noqa: E731
    return look_at(*load_model(checkpoint, "bfloat16", lanes.device, allocate))


def said_in_memory(checkpoint: Path, prompt: Tokens, generated: int) -> Tokens:
    """Tokens of the unmodified model, all of it in the host's memory, at addresses aligned as ours."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()._apply(torch.clone)
    said = output_of_library(model, torch.tensor([prompt]), generated, "grouped_mm")
    return tuple(said.tokens[0].tolist())


def profiled(model: HostedModel, options: LaneOptions, folder: Path) -> Path:
    """Measure what planners plan with: microbenchmarks of the same lanes, and of this model's sizes."""
    lanes: RealMachine = machine_for("auto", options)
    try:
        points = Points(batches=(1,), contexts=(PROMPT_TOKENS, 2 * PROMPT_TOKENS), prompts=(PROMPT_TOKENS,))
        found = profile(lanes, [model.shape], points, POLICIES, name="here", effort=QUICK)
    finally:
        lanes.close()
    write_hardware(found.hardware, folder / "here.yaml")
    return folder / "here.yaml"


def compete(contestants: Sequence[Contestant], runs: int) -> Iterator[int]:
    """One round to warm up, then ``runs`` that count, each of which is yielded when it has ended."""
    for number, order in enumerate(alternating(len(contestants), runs + 1)):
        for place in order:
            turn = contestants[place].generate()
            if number:
                contestants[place].turns.append(turn)
        if number:
            yield number


def rows(contestants: Sequence[Contestant], truth: Tokens) -> list[list[Cell]]:
    """Rows of the table; times are compared with the first contestant's median."""
    reference = median(contestants[0].steps_ms)
    return [_row(contestant, reference, truth) for contestant in contestants]


def _row(contestant: Contestant, reference_ms: float, truth: Tokens) -> list[Cell]:
    low, tpot, high = quantiles(contestant.steps_ms, n=4, method="inclusive")
    last = contestant.turns[-1]
    moved = None if last.link_bytes is None else last.link_bytes / 1e6
    strays = [first_stray(turn.tokens, truth) for turn in contestant.turns]
    stray = min((place for place in strays if place), default=None)
    said = f"{stray} of {len(truth)}" if stray else "none"
    times = [tpot, f"{low:.1f}-{high:.1f}", reference_ms / tpot]
    return [contestant.who, *times, last.experts_on_gpu, last.hit_rate, moved, said]


def said(tokens: Tokens) -> str:
    """Note for the reader: a model that repeats its tokens repeats its routing."""
    return f"of the {len(tokens)} generated tokens, {len(set(tokens))} are different"


def first_stray(tokens: Tokens, truth: Tokens) -> int | None:
    """Number of the first token that differs, counted from 1."""
    differ = [number for number, pair in enumerate(zip(tokens, truth, strict=True), 1) if pair[0] != pair[1]]
    return differ[0] if differ else None




# --- notes ------------------------------------------------------------------------------------------------------------


def about(shape: ModelShape, memory_gb: float, lanes: Machine) -> list[str]:
    """Notes on the runs and their rules."""
    notes = [
        f"model: Qwen3-MoE with random weights in bfloat16, {shape.moe_layers} layers of {shape.experts} experts, "
        f"{shape.top_k} per token, {shape.expert_bytes_by_layer[0] / 1e6:.1f} MB each, "
        f"{shape.routed_bytes / 1e9:.2f} GB in all; a trained model's routing has more regularities for caches to use",
        "TPOT: median of all decode steps of all runs, after one warm-up run; the programs take turns in alternating "
        "order; greedy decoding, one sequence",
        f"{memory_gb:g} GB of GPU memory hold all weights except experts. In addition, accelerate holds all experts of "
        "as many layers as leave room for the experts of one more layer, which are copied and dropped; Trilane (ours)"
        " holds the KV cache, staging slots and as many experts as fit",
        "accelerate copies the weights of a called module as a whole, which means all experts of a layer, and then "
        "drops them",
        "Trilane's planners use microbenchmarks of this machine, and are calibrated on other prompts",
    ]
    return notes + (_on_host_lanes(lanes) if isinstance(lanes, HostLanes) else [])


def _on_host_lanes(lanes: HostLanes) -> list[str]:
    return [
        "no GPU: one core, with one thread of torch, stands in for it, for accelerate and for Trilane; Trilane also "
        "uses the machine's other core for experts and copies, like the CPU next to a GPU",
        f"the link is a memory copy, limited to {lanes.settings.link_bytes_per_s / 1e9:g} GB/s, for both. Without "
        "a GPU accelerate offloads to disk only, and its weights are mapped from the page cache; here they are in "
        "ordinary memory, as with a GPU, and its hooks copy them over the link at each access",
        "the row without a link is accelerate's disk offload without changes: experts are computed in the mapped file "
        "itself, so nothing is copied, only the routed experts are read, and the limit has no effect. It is the cost "
        "of this model when the core can read all of it directly, and not a case of offloading",
    ]


def link_beside_copies(model: HostedModel, lanes: Machine) -> list[str]:
    """The rate of plain copies of experts, one after another, to new places, next to the pace of the link."""
    if not isinstance(lanes, HostLanes):
        return []
    targets = [torch.zeros_like(model.store.buffer(0, expert)) for expert in range(model.shape.experts)]
    times_ns = []
    for layer in range(model.shape.moe_layers):
        for expert, target in enumerate(targets):
            begin = time.perf_counter_ns()
            target.copy_(model.store.buffer(layer, expert))
            times_ns.append(time.perf_counter_ns() - begin)
    rate = targets[0].numel() / median(times_ns)
    return [
        f"copied without a limit, experts move at {rate:.1f} GB/s here. The link is slower, as real links are: "
        "a core that computes an expert as fast as it reads it has to wait for one that is copied, as a GPU has to"
    ]


if __name__ == "__main__":
    main()
