"""One golden page for each verb: what a small command prints.

``python -m tests.trilane.output.pages.golden`` renews them.

Run that after a change of wording or layout, and read the difference before it is committed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.kit.commands import write_route_csv
from trilane.cli import main
from trilane.output.pages.output import PIPE, WIDTH

FOLDER = Path(__file__).parent / "golden"
_SMALL = "--set trace=mini-moe --set model=null --set cached_share=0.25 --set prompt_tokens=4 --set generated_tokens=3"
COMMANDS = {  # by the name of the page
    "ablate": f"ablate dali {_SMALL} --draws 2 --jobs 1",
    "cache-curve": "cache-curve phone.csv --pool 2KB,4KB,8KB",
    "compare": f"compare --policies fiddler,dali,daop,best-exact,oracle {_SMALL} --draws 2 --jobs 1",
    "fit": "fit -m deepseek-v2-lite --gpu rtx-3050 --ram ddr4-3200 --prompt 64 --generated 8 --policies dali --jobs 1",
    "hardware": "hardware",
    "models": "models mixtral-8x7b --quantisations",
    "policies": "policies",
    "recommend": "recommend --for gpt-oss-20b --upgrade --gpu rtx-3060 --ram ddr4-3200 --cpu ryzen-5-5600 --ram-gb 32",
    "simulate": f"simulate --policy daop {_SMALL}",
    "trace-info": "trace info mini-moe",
    "tune": "tune deepseek-v2-lite --gpu rtx-3050 --ram ddr4-3200 --prompt 600 --threads 8 --kv f16 --explain",
    "whatif": f"whatif --vary batch=1,2,4 --policies on-demand,fiddler,daop {_SMALL} --jobs 1",
    "whatif-cells": f"whatif --vary batch=1,2 --vary pcie=4x16,5x16 --policies on-demand,daop {_SMALL} --jobs 1",
}


def page(name: str, width: int = PIPE) -> str:
    """Output of the command of a page, in an empty folder."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_route_csv(Path("phone.csv"))
        with (
            patch.dict(os.environ, {WIDTH: str(width)}),
            patch.object(sys, "argv", ["trilane", *shlex.split(COMMANDS[name])]),
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
        ):
            main()
    return printed.getvalue()


def file_of(name: str) -> Path:
    """The file of a page."""
    return FOLDER / f"{name}.txt"


if __name__ == "__main__":
    for each in COMMANDS:
        file_of(each).write_text(page(each), encoding="utf-8")
