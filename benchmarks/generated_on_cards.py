"""Generation on two GPUs of host lanes, predicted and measured: ``python -m benchmarks.generated_on_cards``.

A profile of the host lanes is made first, from microbenchmarks alone, for the shape of the bundled mini-moe. Under
every policy the model then generates; its tokens must be those of the unmodified model, and its experts, demand copies
and hand-overs those of a simulation on the trace that it leaves. Where they are, TPOT is compared. The profile's
attention is that of replays: what the library's own code takes beyond it is part of the error. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.cards_prediction import resident_hits
from benchmarks.predicted_replays import error_of, print_median
from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.generation.hosted_model import HostedModel, load_model, look_at
from realrun.machine.lanes import Machine
from realrun.machine.machines import machine_for
from realrun.profiling.lab import Points
from realrun.profiling.profile import profile
from realrun.profiling.timing import QUICK
from realrun.replay.replay import machine_on
from realrun.smoke.generation_checks import output_of_library
from sim.machine.hardware import Hardware, load_hardware, write_hardware
from sim.runs.prepare import prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.capture.load import load
from traces.file import FOLDER

MODEL, CALIBRATION = FOLDER / "mini-moe", "mini-moe-calibration"
POLICIES = ("on-demand", "naive-cpu", "fiddler")  # they copy nothing ahead: no count depends on time
PROMPT, GENERATED, SHARE = (5, 17, 33, 60, 9, 41, 77, 12), 24, 0.25
COUNTED = ("expert", "demand", "hand_over")


class Difference(NamedTuple):
    """Generated runs of a policy and their simulation, and what of them differs: "" if tokens and counts agree."""

    runs: list[Run]
    predicted: Run
    what: str


def compared(
    model: HostedModel, scenario: Scenario, tokens: Sequence[int], machine: Machine, rounds: int = 1
) -> Difference:
    """Generate so often, and simulate on the trace. ``tokens``: of the unmodified model."""
    request = GenerateRequest(MODEL, [list(PROMPT)], scenario, generated_tokens=len(tokens) - 1)
    made = [generate_hosted(model, request, machine) for _ in range(rounds)]
    predicted = play(prepare(made[0].run.scenario, made[0].trace))
    runs, said = [one.run for one in made], [one.tokens[0] for one in made]
    wrong = next((f"expected the tokens {list(tokens)}, got {list(own)}" for own in said if own != tuple(tokens)), "")
    return Difference(runs, predicted, wrong or next(filter(None, (difference(run, predicted) for run in runs)), ""))


def difference(generated: Run, simulated: Run) -> str:
    """The first count that differs; "" if all agree."""
    ours, theirs = counts(generated.spans), counts(simulated.spans)
    apart = [(*key, ours.get(key, 0), theirs.get(key, 0)) for key in sorted({*ours, *theirs})
             if ours.get(key) != theirs.get(key)]
    return f"lane, kind, step, layer, generated, simulated: {apart[0]}" if apart else ""


def counts(spans: Any) -> dict[Any, int]:
    """Spans of experts, demand copies and hand-overs by lane, kind, step and layer."""
    kept = spans[spans.kind.isin(COUNTED)].groupby(["lane", "kind", "step", "layer"], observed=True)
    return {key: int(count) for key, count in kept.size().items()}


def hosted(machine: Machine) -> HostedModel:
    """The bundled model in float32."""
    return look_at(*load_model(
        MODEL, "float32", machine.device, lambda size: machine.host_tensor((size,), torch.uint8)
    ))


def true_tokens(generated_tokens: int) -> list[int]:
    """The tokens of the unmodified model."""
    unmodified = load(MODEL, "float32").model._apply(torch.clone)  # weights mapped from the file are not aligned
    said: list[int] = output_of_library(unmodified, torch.tensor([PROMPT]), generated_tokens).tokens[0].tolist()
    return said


def profiled(model: HostedModel, generated_tokens: int) -> Hardware:
    """Host lanes, measured for the model's shape."""
    points = Points((1,), (len(PROMPT) + 1, len(PROMPT) + generated_tokens), (len(PROMPT),))
    with closing(machine_for("host-lanes")) as machine:
        return profile(machine, [model.shape], points, POLICIES, name="here", effort=QUICK).hardware


def main() -> None:
    """Profile, generate, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs; 1 for a comparison")
    parser.add_argument("--rounds", type=int, default=3, help="generations under each policy")
    asked = parser.parse_args()
    tokens = true_tokens(GENERATED)
    with TemporaryDirectory() as folder, closing(machine_for("host-lanes", inline=True)) as lanes:
        model, path = hosted(lanes), Path(folder) / "here.yaml"
        write_hardware(profiled(model, GENERATED), path)
        base = Scenario(hardware=str(path), calibration=CALIBRATION, cached_share=SHARE, gpus=asked.gpus)
        with closing(machine_on(load_hardware(str(path)), inline=True)) as machine:
            found = [compared(model, base.with_(policy=name), tokens, machine, asked.rounds) for name in POLICIES]
    for name, one in zip(POLICIES, found, strict=True):
        if one.what:
            raise SystemExit(f"{name}: {one.what}")
    print_median([error_of(one.predicted, one.runs, resident_hits) for one in found])


if __name__ == "__main__":
    main()
