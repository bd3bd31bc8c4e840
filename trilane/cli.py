"""The command line: verbs, and the one place where errors become a sentence and an exit status."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from trilane.verbs.ablate import ablate
from trilane.verbs.cache_curve import cache_curve
from trilane.verbs.catalogues import hardware, models, policies
from trilane.verbs.compare import compare
from trilane.verbs.fit import fit
from trilane.verbs.measure import measure
from trilane.verbs.plot import plot
from trilane.verbs.profile import profile
from trilane.verbs.simulate import simulate
from trilane.verbs.smoke import smoke
from trilane.verbs.sweep import sweep
from trilane.verbs.trace import app as trace
from trilane.verbs.validate import validate
from trilane.verbs.whatif import whatif

_OURS = ("trilane", "traces", "policies", "sim", "realrun")

app = typer.Typer(
    name="trilane",
    help="Which policy for offloading a Mixture-of-Experts model gives which time per token on which machine, and why.",
    epilog="Start with [bold]trilane compare[/]. Times are simulated from a routing trace, for a machine known from "
    "data sheets or by [bold]profile[/]; [bold]measure[/] and [bold]validate[/] run the same policies for real.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compare")(compare)
app.command("simulate")(simulate)
app.command("whatif")(whatif)
app.command("fit")(fit)
app.command("ablate")(ablate)
app.command("sweep")(sweep)
app.command("plot")(plot)
app.command("cache-curve")(cache_curve)
app.add_typer(trace, name="trace")
app.command("smoke")(smoke)
app.command("profile")(profile)
app.command("measure")(measure)
app.command("validate")(validate)
app.command("policies")(policies)
app.command("models")(models)
app.command("hardware")(hardware)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"trilane {version('trilane')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Bad input ends with one sentence on standard error and exit status 2."""
    try:
        sys.exit(app(prog_name="trilane", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        if sentence:
            print(f"trilane: {sentence}", file=sys.stderr)
        sys.exit(2)


def _sentence(error: Exception) -> str | None:
    """What to say of bad input, on one line; "" if all has been said, None if the error is the program's own fault."""
    if hasattr(error, "format_message"):  # the parser's: an unknown verb or option, or no verb at all
        text = error.format_message()
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "trilane"
        return f"{text.rstrip('.')}; see `{verb} --help`" if text else ""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if type(error).__module__.partition(".")[0] not in _OURS:
        return None
    return " ".join(str(error).split()) or type(error).__name__
