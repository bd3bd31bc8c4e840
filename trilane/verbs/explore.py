"""``trilane explore`` and ``report``: answers to look at, in the browser or in one file."""

from __future__ import annotations

import secrets
import webbrowser
from importlib.util import find_spec
from typing import Annotated

import typer

from trilane.common.errors import TrilaneError
from trilane.common.files import ending_of
from trilane.output.pages.output import note, number, working, writable
from trilane.verbs.named_parts import machine_named
from trilane.verbs.options import JobsOption, MachineParts, OptionError, grouped, processes
from trilane.verbs.recommend import use_and_model
from trilane.verbs.tune import parts_of

_LOCAL = ("127.0.0.1", "localhost")


class MissingExtraError(TrilaneError):
    """The packages of the extra ``page`` are not installed."""


def explore(
    view: Annotated[
        str, typer.Argument(metavar="[VIEW]", help="What to open first, such as what-if, policies, accuracy, learn.")
    ] = "machine",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port. Default: a free one.")] = 0,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen at. Any other than 127.0.0.1 lets other computers ask, "
                                             "too: who has the address of the page uses this machine's processor."),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open a page in the browser: what runs on a machine, what if it were another, and how policies compare.

    The page is served by this command alone, until Ctrl-C: nothing leaves this computer. Needs the extra
    [bold]page[/].
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtraError(
            "explore: expected the packages of the extra page; install them with `pip install '.[page]'` in Trilane's "
            "folder, or write one file with `trilane report`"
        )
    from trilane.page.server import application, listening, serve

    token, local = secrets.token_urlsafe(18), host in _LOCAL
    with listening(host, port) as at:
        shown = "127.0.0.1" if local else host
        address = f"http://{shown}:{at.getsockname()[1]}/{token}/#/{view}"
        if not local:
            note(f"--host {host}: other computers can ask, too. Whoever has the address can use this machine's "
                 f"processor; the page reads and writes no files. The address is sent unencrypted.")
        print(address, flush=True)
        note("Ctrl-C ends it")
        if browser:
            webbrowser.open(address)
        serve(application(token, frozenset(_LOCAL) if local else None), at)


@grouped
def report(
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE.html", help="The file to write.")] = "trilane.html",
    *,
    parts: MachineParts,
    wanted: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="USE|MODEL", help="chat (default), code or documents; see [bold]trilane "
                                                        "recommend[/]. Or a model, which alone is opened. Give it "
                                                        "twice for both."),
    ] = None,
    jobs: JobsOption = None,
) -> None:
    """Write what every model does on a machine as one HTML file, which needs no server and no network.

    The numbers are those of [bold]trilane recommend[/] and [bold]tune[/]: bars of all models, and of each its command
    line, memory, curves, parts to buy and measured speeds. Without --gpu, parts that are not named are those of this
    machine.
    """
    from trilane.page.report import write_report

    ending_of(out, ".html")
    target = writable(out)
    if parts.machine is not None:
        raise OptionError("--machine: expected parts (--gpu, --ram, --cpu), which the page can show")
    use, model = use_and_model(wanted or [])
    parts, _ = machine_named(parts)
    named = {name: str(value) for name, value in parts_of(parts).items() if value is not None}
    query = {"os" if name == "system" else name: value for name, value in named.items()}
    with working("working out all models") as say:
        size = write_report(
            {**query, "use": use}, target, model, processes(jobs),
            lambda done, of: say(f"{done} of {of} models are done"),
        )
    note(f"{target}: {number(size / 1e6)} MB")
