"""``trilane fit``: what will this model do on that machine?"""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.pages.output import JsonOption, check_targets, show, working, write_json
from trilane.verbs.inputs import policies_in, policy_files
from trilane.verbs.options import OWN_POLICY, JobsOption, processes


def fit(
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME|FILE", help="Model; see [bold]trilane models[/]. Or a config.json, "
                                                                "or a GGUF file."),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU, such as rtx-4080; [bold]trilane hardware --parts[/] lists all parts."),
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="NAME", help="Memory of the CPU, such as ddr5-5600.")] = None,
    cpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="CPU, such as ryzen-9-7950x. Default: a generic one.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option(metavar="N", help="Cores that compute experts. Default: the CPU's.")
    ] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Memory channels. Default: the CPU's.")] = None,
    pcie: Annotated[str | None, typer.Option(metavar="4x16", help="PCIe slot. Default: the best of the parts.")] = None,
    ram_gb: Annotated[
        int | None,
        typer.Option("--ram-gb", metavar="N", help="Memory of the host, in GiB (2^30 bytes). Default: enough."),
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A preset or a profile, in place of gpu, ram and cpu.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format of weights, such as bf16, q8_0, q4_k_m. Default: q4_k_m, or as "
                                          "published if that has fewer than 16 bits."),
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of the prompt.")] = 4096,
    generated: Annotated[int, typer.Option(metavar="N", help="Tokens of the answer.")] = 256,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that run together.")] = 1,
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
        typer.Option(metavar="A,B", help=f"Policies to choose from. {OWN_POLICY}. llama.cpp and the clairvoyant run "
                                         "are always included. Default: some that keep the routing."),
    ] = None,
    policy_engine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Engine on which the policies are played, such as ideal or pytorch.")
    ] = "ideal",
    jobs: JobsOption = None,
    json: JsonOption = None,
) -> None:  # fmt: skip
    """Report whether a model runs on a machine, how, how fast, and what limits it."""
    from trilane.pages.fit import fit_page
    from trilane.study.fit.fit import fit as answer
    from trilane.study.fit.question import Question

    names = None if policies is None else tuple(policies_in(policies))
    check_targets(json, inputs=(trace, calibration, machine, *policy_files()))
    question = Question(
        model=model, gpu=gpu, ram=ram, cpu=cpu, cores=cores, channels=channels, pcie=pcie, machine=machine,
        ram_gb=ram_gb, policy_engine=policy_engine, weights=weights, context=context, generated=generated, batch=batch, trace=trace,
        calibration=calibration, policies=names,
    )  # fmt: skip
    with working("simulating the policies"):
        found = answer(question, processes(jobs))
    show(json, *fit_page(found))
    write_json(found.to_dict(), json)
