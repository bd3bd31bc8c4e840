"""``trilane smoke``: checks of this computer's GPU, or of its host lanes, in a minute."""

from __future__ import annotations

from typing import Annotated

import typer

from realrun.machine import LaneKind
from trilane.output.pages.output import JsonOption, check_targets, note, report, show

FAILED = 1  # exit status


def smoke(
    lanes: Annotated[
        LaneKind,
        typer.Option(help="cuda: a GPU. host-lanes: threads and memory copies. auto: a GPU if there is one."),
    ] = "auto",
    json: JsonOption = None,
) -> None:
    """Check in about a minute that this computer can run what the other commands measure.

    Checks streams, events, waiting for the CPU, memory that both devices read, page-locking, and both directions of the
    link; then a small bundled model under every policy, in float32: a policy that keeps the routing must give the
    tokens of the unmodified model on the CPU, and its logits within 1e-5 of the largest. Prints one line per check:
    ok, failed or skipped; what was checked; a figure, or the reason.

    The exit status is 1 if a check failed, and 2 if the lanes that were asked for do not exist here.
    """
    from realrun.machine.machines import has_gpu, machine_for
    from realrun.smoke.smoke import smoke as run

    check_targets(json)
    done = []
    if lanes == "auto" and not has_gpu():
        note("torch finds no CUDA GPU: checking host lanes instead")
    for check in run(lambda inline: machine_for(lanes, inline=inline)):
        show(json, f"{check.outcome:<8}{check.name}: {check.why or check.figure}")
        done.append(check)
    failed = sum(check.outcome == "failed" for check in done)
    record = {"checks": [check._asdict() for check in done], "failed": failed}
    report(json, record, f"\n{len(done)} checks, {failed} failed")
    if failed:
        raise typer.Exit(FAILED)
