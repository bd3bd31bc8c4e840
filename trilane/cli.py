"""The command line: its verbs, and what becomes of errors."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from trilane.common.errors import TrilaneError
from trilane.common.printable import printable
from trilane.verbs.ablate import ablate
from trilane.verbs.cache_curve import cache_curve
from trilane.verbs.catalogues import hardware, models, policies
from trilane.verbs.compare import compare
from trilane.verbs.fit import fit
from trilane.verbs.inputs import command_line
from trilane.verbs.measure import measure
from trilane.verbs.options import help_of
from trilane.verbs.plot import plot
from trilane.verbs.profile import profile
from trilane.verbs.simulate import simulate
from trilane.verbs.smoke import smoke
from trilane.verbs.sweep import sweep
from trilane.verbs.trace import app as trace
from trilane.verbs.validate import validate
from trilane.verbs.whatif import whatif

app = typer.Typer(
    name="trilane",
    help="Predict and explain the time per token of policies that offload Mixture-of-Experts models.",
    epilog="Start with [bold]trilane compare[/]. Times are simulated from a routing trace, for a machine known from "
    "data sheets or by [bold]profile[/]; [bold]measure[/] and [bold]validate[/] run the same policies for real.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (compare, simulate, whatif, fit, ablate, sweep, plot, cache_curve, smoke, profile, measure, validate,
             policies, models, hardware):  # fmt: skip
    app.command(verb.__name__.replace("_", "-"), help=help_of(verb))(verb)
app.add_typer(trace, name="trace")


def _version() -> str:
    from importlib.metadata import version

    return f"trilane {version('trilane')}"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(_version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line.

    Bad input ends with one sentence on standard error and exit status 2; any other error is a bug, and is raised after
    a line that asks for a report.
    """
    try:
        status = app(prog_name="trilane", standalone_mode=False)
        _flush()
        sys.exit(status or 0)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            print(_request(), file=sys.stderr)
            raise
        if sentence:
            print(f"trilane: {printable(sentence)}", file=sys.stderr)
        sys.exit(2)


def _flush() -> None:
    """Write the rest of standard output. Where its reader has closed it, exit with the status 1, as typer does."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it again at its end
        sys.exit(1 if error.errno == errno.EPIPE else f"trilane: standard output: {error.strerror}")


def _sentence(error: Exception) -> str | None:
    """Bad input in one sentence; "" if the parser has printed all of it; None if the error is a bug."""
    if hasattr(error, "format_message"):  # the parser's: an unknown verb or option, or no verb at all
        text = error.format_message()
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "trilane"
        return f"{text.rstrip('.')}; see `{verb} --help`" if text else ""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # raised by ``write``, without a file's name
        return str(error.strerror)
    if isinstance(error, TrilaneError):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _request() -> str:
    """The line before the traceback of a bug."""
    from policies.user_files import loaded_policies

    where = " or ".join(["Trilane", *dict.fromkeys(loaded_policies().values())])
    return f"trilane: a bug in {where}; please report it with {_version()}, the traceback, and {command_line()}"
