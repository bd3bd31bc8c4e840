"""``trilane share``: one's own speeds as a small file for others, with a preview; nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.machine.assembly import NO_GPU
from trilane.output.pages.output import JsonOption, check_targets, named_as, note, report
from trilane.verbs import completion
from trilane.verbs.options import OptionError

if TYPE_CHECKING:
    from trilane.engines.accuracy.contribution import Given
    from trilane.engines.accuracy.outputs import ReadSpeed


class LackingError(OptionError):
    """Facts that neither the output nor the options say, a line for each."""

    in_lines = True


def share(
    output: Annotated[
        str,
        typer.Argument(metavar="FILE", help="Output of llama-bench (best with -o json), a server's timings or log, or "
                                            "the --json of [bold]trilane measure --engine llama.cpp[/]; or a GGUF "
                                            "file, which is measured first."),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="F.csv", callback=named_as(".csv"), help="Write the rows to share."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.models, help="Model, if the output has none."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="NAME", autocompletion=completion.formats, help="Format of weights.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", autocompletion=completion.gpus, help="GPU, or none.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.memories, help="Memory modules, such as ddr5-5600."),
    ] = None,
    cpu: Annotated[str | None, typer.Option(metavar="NAME", autocompletion=completion.cpus, help="CPU.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, metavar="N", help="Cores. Default: the CPU's.")] = None,
    channels: Annotated[int | None, typer.Option(min=1, metavar="N", help="Memory channels. Default: the CPU's.")] = (
        None
    ),
    pcie: Annotated[str | None, typer.Option(metavar="4x16", help="PCIe slot. Default: the best of the parts.")] = None,
    n_cpu_moe: Annotated[
        int | None, typer.Option("--n-cpu-moe", min=0, metavar="N", help="Layers whose experts are on the CPU.")
    ] = None,
    source: Annotated[str, typer.Option(metavar="TEXT", help="A link, if the speeds are published.")] = "",
    json_out: JsonOption = None,
) -> None:
    """Compare measured speeds with the predictions, and write them as a file that others can use.

    Parts and settings that the output names are read from it; what is missing is asked for. Everything in the file is
    shown, and nothing is sent.
    """
    from trilane.common.csv_files import write_csv
    from trilane.engines.accuracy.contribution import Given, cells, check_rows, contribution
    from trilane.output.pages.share import lacking_text, share_page

    check_targets(json_out, out, inputs=(output,))
    given = Given(model, weights, gpu, ram, cpu, cores, channels, pcie, n_cpu_moe, source)
    made = contribution(_speeds(output, given), given)
    if made.lacking:
        raise LackingError(lacking_text(made.lacking))
    checks = check_rows(made.rows)
    lines = cells(made.rows)
    record = {"rows": [dict(zip(lines[0], line, strict=True)) for line in lines[1:]],
              "errors": {check.row.id: check.error for check in checks}}
    report(json_out, record, *share_page(checks))
    if out is not None:
        write_csv(lines, out)
        note(f"{out}: {len(made.rows)} rows")


def _speeds(output: str, given: Given) -> list[ReadSpeed]:
    """The speeds in an output, or those of a model that is measured now, once all that it will not say was named.

    Raises LackingError, OptionError, OutputTextError, and what ``timed_llama`` raises.
    """
    from trilane.common.computer import cpu_name
    from trilane.engines.accuracy.contribution import contribution
    from trilane.engines.accuracy.outputs import ReadSpeed, read_output, speeds_in
    from trilane.engines.tune.cards_found import cards_found
    from trilane.output.pages.share import lacking_text
    from trilane.verbs.llama_cpp import LlamaRun, timed_llama

    if not output.lower().endswith(".gguf"):
        return read_output(output)
    if not Path(output).is_file():
        raise OptionError(f"{output}: expected a GGUF file or a program's output, found no such file")
    on_cpu, card = given.gpu == NO_GPU, next(iter(cards_found()), None)
    here: dict[str, Any] = {"cpu": cpu_name(), "gpu": card and card.name, "gpu_layers": 0 if on_cpu else 99}
    if lacking := contribution([ReadSpeed(True, 1, 1.0, file=output, **here)], given).lacking:
        raise LackingError(lacking_text(lacking))
    about, results = timed_llama(LlamaRun(output, n_cpu_moe=None if on_cpu else given.cpu_layers or 0))
    return [one._replace(**here) for one in speeds_in(json.dumps({**about, **results}), output)]
