"""``trilane pays``: does an idea pay for this model on that machine?"""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.output.pages.output import JsonOption, check_targets, note, report, watching
from trilane.verbs.inputs import policy_files, policy_named
from trilane.verbs.options import OWN_POLICY, JobsOption, grouped, processes
from trilane.verbs.question_options import MachineParts, ModelOption, Workload


@grouped
def pays(
    idea: Annotated[
        str,
        typer.Argument(metavar="IDEA", help="cache: a cache of experts on the GPU; prefetch: copies of the next "
                                            "layer's experts; deferral: results of some experts that join the next "
                                            "layer; speculation: drafted tokens; link: a link of twice the bandwidth; "
                                            "memory: a GPU with a quarter more memory."),
    ],
    *,
    model: ModelOption,
    parts: MachineParts,
    workload: Workload,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Policy in place of the usual one: in place of a cache's, or on both sides; "
                                         f"llama.cpp@cache: llama.cpp's own cache. {OWN_POLICY}."),
    ] = None,
    x: Annotated[
        float | None,
        typer.Option("--x", metavar="X", help="The machine's value of the first of the two numbers, as sweeps take it: "
                                              "cached_share (cache, link), noisy_forecast_recall, deferred, "
                                              "draft_acceptance, gpu_memory_gb. Default: its own; drafts: 0.7."),
    ] = None,
    y: Annotated[
        float | None,
        typer.Option("--y", metavar="Y", help="The same of the second: pcie_gbps (cache, prefetch, link), dram_gbps "
                                              "(deferral, memory), draft_tokens. Default: its own; drafts: 3."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Recorded routing. Default: synthetic, like the model's.")
    ] = None,
    draws: Annotated[int, typer.Option(metavar="N", help="Draws (of other texts) over which each gain is a mean.")] = 3,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the map (.png, .svg or .pdf); a CSV with the same data goes next to "
                                          "it."),
    ] = None,
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:
    """Does an idea pay here, and where is the break-even?

    Simulates decoding with and without the idea while the two numbers that matter most are varied: whether it pays on
    the machine that was named, by how much, and from which values of these numbers on.
    """
    from trilane.output.pages.pays import pays_page
    from trilane.study.pays.gain_map import gain_map
    from trilane.study.pays.ideas import PaysQuestion

    named = None if policy is None else policy_named(policy)
    check_targets(json, picture=out, data=True, inputs=(trace, parts.machine, *policy_files()))
    asked = workload.question(model=model, **vars(parts), trace=trace)
    with watching("simulating") as watch:
        found = gain_map(PaysQuestion(idea, asked, draws, named, x, y), processes(jobs), watch)
    report(json, found.to_dict(), *pays_page(found))
    if out is not None:
        from trilane.output.figures import plot_pays, save_picture

        note(f"picture: {out}, and what it draws: {save_picture(plot_pays(found), out)}")
