"""``trilane fit`` and ``pays``: what a model does on a machine, and whether an idea pays there."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from trilane.common.gc_paused import gc_paused, leave_garbage
from trilane.common.quoting import quoted
from trilane.output.pages.output import JsonOption, check_targets, note, report, show, watching, working, write_json
from trilane.verbs import completion
from trilane.verbs.inputs import policies_in, policy_files, policy_named
from trilane.verbs.named_parts import machine_named, model_checks, taken_record
from trilane.verbs.options import (
    OWN_POLICY,
    JobsOption,
    MachineParts,
    ModelArgument,
    OptionError,
    UpgradeOption,
    Workload,
    grouped,
    processes,
)
from trilane.verbs.tune import strata_part, upgraded


@grouped
def fit(
    *,
    name: ModelArgument,
    parts: MachineParts,
    workload: Workload,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", autocompletion=completion.engines,
                     help="Engine, such as ik_llama.cpp. Default: llama.cpp; for AMD and Intel cards "
                          "llama.cpp-vulkan."),
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
    ts: Annotated[
        str | None,
        typer.Option("--ts", metavar="N,N", help="Layers on each of several GPUs, the quickest first, with the output "
                                                 "layer. Default: chosen."),
    ] = None,
    sm: Annotated[
        str | None,
        typer.Option("--sm", metavar="MODE", help="How several GPUs divide the model: layer, row, tensor or graph. "
                                                  "Default: layer, which is the engines' own."),
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
        typer.Option(metavar="A,B", autocompletion=completion.policies,
                     help="Policies to simulate and choose from; usual: some that keep the routing. "
                          f"{OWN_POLICY}. Where experts are offloaded, llama.cpp and the clairvoyant run are added; "
                          "elsewhere only llama.cpp is simulated. Default: none; the usual ones where a trace or their "
                          "engine is named."),
    ] = None,
    policy_engine: Annotated[
        str, typer.Option(
            metavar="NAME|FILE", help="Engine on which policies are simulated, such as graphs or pytorch."
        )
    ] = "graphs",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what each part of the machine would gain if it were 25% better, "
                                             "with the engine and with the best policy.")
    ] = False,
    upgrade: UpgradeOption = False,
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:
    """Report whether a model runs on a machine, how, how fast, and what limits it."""
    from trilane.fit.fit import engine_part, with_policies
    from trilane.output.pages.fit_engine import explained_part, first_part, last_part

    model, names = name.text, None if policies is None else tuple(policies_in(policies))
    check_targets(json, inputs=(trace, calibration, parts.machine, *policy_files()))
    parts, taken = machine_named(parts, *model_checks(model, workload.weights, engine))
    question = workload.question(
        model=model, **vars(parts), trace=trace, calibration=calibration, policies=names,
        policy_engine=policy_engine, engine=engine, threads=threads, kv=kv, n_cpu_moe=n_cpu_moe, ubatch=ubatch,
        ts=_counts(ts), sm=sm,
    )
    with gc_paused():
        found = engine_part(question)
        show(json, *first_part(found), *(explained_part(found) if explain else ()))
        with working("simulating the policies"):
            found = with_policies(found, processes(jobs), better_parts=explain or json is not None)
        leave_garbage()
    from trilane.output.pages.caveats import fit_record

    record = {**fit_record(found), **taken_record(taken)}
    if found.policies is None:
        page = last_part(found)
    else:
        from trilane.output.pages.fit import policies_part  # here: it imports much, and the processes begin before that

        page = policies_part(found, found.policies, explain)
    show(json, *page, *strata_part(question))
    if upgrade:
        from trilane.engines.tune.settings import KV_FORMATS, TuneQuestion

        formats = KV_FORMATS if question.kv is None else (question.kv,)
        record["upgrades"] = upgraded(TuneQuestion(question, kv=formats), json)
    write_json(record, json)


def _counts(text: str | None) -> tuple[int, ...] | None:
    """Numbers of layers. Raises OptionError."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})+", text):
        raise OptionError(f"--ts: expected a number of layers for each GPU, such as 25,24, got {quoted(text)}")
    return tuple(map(int, text.split(",")))


# --- pays -------------------------------------------------------------------------------------------------------------

@grouped
def pays(
    idea: Annotated[
        str,
        typer.Argument(metavar="IDEA", help="cache: a cache of experts on the GPU; prefetch: copies of the next "
                                            "layer's experts; deferral: results of some experts that join the next "
                                            "layer; speculation: drafted tokens; link: a link of twice the bandwidth; "
                                            "memory: a GPU with a quarter more memory; Strata: pcie-share, a share of "
                                            "misses over the link; workers, twice the threads; window, drafts."),
    ],
    *,
    name: ModelArgument,
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
                                              "draft_acceptance, gpu_memory_gb, pcie_share, threads (workers). "
                                              "Default: its own; drafts: 0.7."),
    ] = None,
    y: Annotated[
        float | None,
        typer.Option("--y", metavar="Y", help="The same of the second: pcie_gbps (cache, prefetch, link, pcie-share), "
                                              "dram_gbps (deferral, memory, workers), draft_tokens. Default: its own; "
                                              "drafts: 3."),
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

    Maps are of one GPU, with all experts in the memory of GPU and host: several cards and --disk are refused here;
    trilane compare simulates both.
    """
    from sim.machine.hardware import load_hardware
    from trilane.output.pages.pays import pays_page
    from trilane.study.pays.gain_map import gain_map
    from trilane.study.pays.ideas import PaysQuestion

    model, named = name.text, None if policy is None else policy_named(policy)
    check_targets(json, picture=out, data=True, inputs=(trace, parts.machine, *policy_files()))
    parts, taken = machine_named(parts, *model_checks(model, workload.weights))
    asked = workload.question(model=model, **vars(parts), trace=trace)
    load_hardware(asked.hardware)  # raises HardwareError for several GPUs, of which there are no maps
    with watching("simulating") as watch:
        found = gain_map(PaysQuestion(idea, asked, draws, named, x, y), processes(jobs), watch)
    report(json, {**found.to_dict(), **taken_record(taken)}, *pays_page(found))
    if out is not None:
        from trilane.output.figures import plot_pays, save_picture

        note(f"picture: {out}, and what it draws: {save_picture(plot_pays(found), out)}")
