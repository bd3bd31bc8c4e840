"""``trilane fit``: what will this model do on that machine?"""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.common.gc_paused import gc_paused, leave_garbage
from trilane.output.pages.output import JsonOption, check_targets, report, working
from trilane.verbs.inputs import policies_in, policy_files
from trilane.verbs.options import OWN_POLICY, JobsOption, grouped, processes
from trilane.verbs.question_options import MachineParts, ModelOption, Workload


@grouped
def fit(
    model: ModelOption,
    *,
    parts: MachineParts,
    workload: Workload,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Engine, such as ik_llama.cpp. Default: llama.cpp; for AMD "
                                               "and Intel cards llama.cpp-vulkan."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of the engine. Default: one per core.")
    ] = None,
    kv: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of the KV cache: f16, q8_0, q4_0. Default: f16.")
    ] = None,
    n_cpu_moe: Annotated[
        int | None,
        typer.Option("--n-cpu-moe", metavar="N", help="Layers whose experts the engine keeps on the CPU. Default: as "
                                                      "few as the memory allows."),
    ] = None,
    ubatch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompt tokens that are computed at once. Default: that of the engine."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Recorded routing. Default: that of this model, or synthetic."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Trace of other prompts, for policies that need calibration. "
                                               "Default: the one that belongs to the trace, if there is one."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=f"Policies to choose from. {OWN_POLICY}. Where experts are offloaded, "
                                         "llama.cpp and the clairvoyant run are added; elsewhere only llama.cpp is "
                                         "simulated. Default: some that keep the routing."),
    ] = None,
    policy_engine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Engine on which policies are simulated, such as ideal or pytorch.")
    ] = "ideal",
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:
    """Report whether a model runs on a machine, how, how fast, and what limits it."""
    from trilane.fit.fit import fit as answer

    names = None if policies is None else tuple(policies_in(policies))
    check_targets(json, inputs=(trace, calibration, parts.machine, *policy_files()))
    question = workload.question(
        model=model, **vars(parts), trace=trace, calibration=calibration, policies=names,
        policy_engine=policy_engine, engine=engine, threads=threads, kv=kv, n_cpu_moe=n_cpu_moe, ubatch=ubatch,
    )
    with working("simulating the policies"), gc_paused():
        answered = answer(question, processes(jobs))
        leave_garbage()
    from trilane.output.pages.caveats import fit_record
    from trilane.output.pages.fit import (
        fit_page,  # here: it imports much, and the processes of an answer begin before that
    )

    report(json, fit_record(answered), *fit_page(answered))
