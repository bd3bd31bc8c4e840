"""The command line: its verbs, and what becomes of errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from trilane.common.errors import TrilaneError
from trilane.common.files import errors_name
from trilane.common.quoting import printable, shortened
from trilane.output.pages.output import STANDARD_OUTPUT
from trilane.verbs.inputs import command_line
from trilane.verbs.options import AllCards, help_of

_BAD_INPUT, _NOT_WRITTEN = 2, 74  # exit statuses; the second is EX_IOERR of sysexits.h
_INTERRUPTED, _CLOSED = 128 + 2, 128 + 13  # as if SIGINT and SIGPIPE had ended it
_OF_TORCH = ("torch", "transformers", "tokenizers")  # packages of the extra torch
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # faults of a disk, not of the input

_GROUPS = {  # of --help, in its order: verbs with their modules
    "Look at answers in the browser": {"explore": "explore", "report": "explore"},
    "Choose a model, a machine and settings": {
        "recommend": "recommend", "tune": "tune", "fit": "questions", "pays": "questions",
    },
    "Compare policies": {
        "compare": "scenario", "simulate": "scenario", "whatif": "sweeps", "ablate": "scenario", "sweep": "sweeps",
        "plot": "sweeps", "cache-curve": "cache_curve", "leaderboard": "boards", "papers": "boards",
    },
    "Measure on this machine": {
        "smoke": "smoke", "profile": "profile", "measure": "measure", "validate": "validate", "share": "share",
        "quality": "quality",
    },
    "Look up": {
        "accuracy": "boards", "policies": "catalogues", "models": "catalogues", "hardware": "catalogues",
        "engines": "catalogues", "trace": "trace",
    },
}
_VERBS = {verb: (module, group) for group, verbs in _GROUPS.items() for verb, module in verbs.items()}


def _version() -> str:
    from importlib.metadata import version

    return f"trilane {version('trilane')}"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(_version())
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def app_of(names: Iterable[str] = _VERBS) -> typer.Typer:
    """Return the command line with some of its verbs."""
    app = typer.Typer(
        name="trilane",
        help="Predict and explain the time per token of policies that offload Mixture-of-Experts models.",
        epilog="Start with [bold]trilane tune[/] for a command line, or [bold]trilane compare[/] for policies: their "
        "times are simulated from a routing trace, for a machine known from data sheets or by [bold]profile[/]; "
        "[bold]measure[/] and [bold]validate[/] run the same policies for real.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names:
        file, group = _VERBS[name]
        module = import_module(f"trilane.verbs.{file}")
        if name == "trace":
            app.add_typer(module.app, name=name, rich_help_panel=group)
        else:
            verb = getattr(module, name.replace("-", "_"))
            app.command(name, help=help_of(verb), cls=AllCards, rich_help_panel=group)(verb)
    return app


@cache
def command(verb: str | None = None) -> Any:
    """Return the command of one verb, which alone is imported, or of all of them; made once, which takes 30 ms."""
    return get_command(app_of(_VERBS if verb is None else [verb]))


def main() -> None:
    """Run the command line.

    Bad input ends with one sentence on standard error and the exit status 2, a result that the disk does not take with
    74, Ctrl-C with 130, and a reader that closes standard output, as in ``trilane policies | head -1``, with 141 and
    without a message. Any other error is a bug, and is raised after a line that asks for a report.
    """
    _check_streams()
    try:
        status = command(_named_verb())(prog_name="trilane", standalone_mode=False) or 0
        with errors_name(STANDARD_OUTPUT):
            sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        status = _INTERRUPTED
    except SystemExit as end:  # of typer or rich, where the reader has closed standard output
        status = _CLOSED if isinstance(end.__context__, BrokenPipeError) else end.code
    except Exception as error:
        status = _status(error)
        if status is None:
            print(_request(), file=sys.stderr)
            raise
    _drop_unwritten()
    sys.exit(status)


def _named_verb() -> str | None:
    """The verb of the command line, if there is such a one."""
    return sys.argv[1] if sys.argv[1:] and sys.argv[1] in _VERBS else None


def _check_streams() -> None:
    """Exit if standard output is closed, since a file that is opened later would get its number."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - until the end
    if sys.stdout is None:
        print("trilane: standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
        sys.exit(_NOT_WRITTEN)


def _drop_unwritten() -> None:
    """Drop what standard output does not take: the interpreter would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status(error: Exception) -> int | None:
    """The exit status, after a sentence on standard error; None if the error is a bug."""
    if isinstance(error, BrokenPipeError) and error.filename == str(STANDARD_OUTPUT):
        return _CLOSED
    sentence = _sentence(error)
    if sentence:
        lines = printable(sentence).split("\n") if getattr(error, "in_lines", False) else [printable(sentence)]
        message = "\n".join(" ".join(line.split()) for line in lines)
        print(f"trilane: {shortened(message)}", file=sys.stderr)
    if sentence is None:
        return None
    return _NOT_WRITTEN if isinstance(error, OSError) and error.errno in _DISK else _BAD_INPUT


def _sentence(error: Exception) -> str | None:
    """Bad input in one sentence; "" if the parser has printed all of it; None if the error is a bug."""
    from policies.user_errors import told
    from policies.user_files import loaded_policies

    if hasattr(error, "format_message"):  # the parser's: an unknown verb or option, or no verb at all
        text = error.format_message()
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else " ".join(filter(None, ["trilane", _named_verb()]))
        return f"{text.rstrip('.')}; see `{verb} --help`" if text else ""
    if isinstance(error, OSError) and (error.filename or error.errno in _DISK):
        limit = " (the limit on the size of files; see `ulimit -f`)" if error.errno == errno.EFBIG else ""
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part) + limit
    if isinstance(error, ModuleNotFoundError) and error.name in _OF_TORCH:
        return (
            f"{_named_verb()} needs {error.name}; in the folder of Trilane: `pip install '.[torch]'` (without a GPU, "
            f"add --extra-index-url https://download.pytorch.org/whl/cpu)"
        )
    if isinstance(error, TrilaneError):
        return str(error) or type(error).__name__
    return told(error, loaded_policies().values())


def _request() -> str:
    """The line before the traceback of a bug."""
    return f"trilane: a bug in Trilane; please report it with {_version()}, the traceback, and {command_line()}"
