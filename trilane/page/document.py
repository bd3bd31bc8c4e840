"""The document of the page: its markup, script and style, and the colours that it shares with the pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trilane.output.figures.families import FAMILIES, IDLE, LANE_NAMES, STEP_PARTS
from trilane.output.figures.marks import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION

if TYPE_CHECKING:
    from trilane.page.records import Record

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = (  # in the order in which they need each other
    "elements", "source", "address", "charts", "questions", "machine", "model", "what_if", "policies",
    "timeline", "boards", "learn", "share", "app",
)
_COLOURS = {"blue": BLUE, "vermillion": VERMILLION, "green": GREEN, "orange": ORANGE, "sky": SKY, "purple": PURPLE,
            "grey": GREY, "idle": IDLE}
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src \'unsafe-inline\'; '
    'style-src \'unsafe-inline\'; img-src data:">'
)


@cache
def script() -> str:
    """The whole script: words and colours, then its parts."""
    words = {
        "families": [family._asdict() for family in FAMILIES], "lanes": LANE_NAMES,
        "stepParts": [part._asdict() for part in STEP_PARTS],
    }
    parts = [_ASSETS.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return "\n".join(['"use strict";', f"const WORDS = {json.dumps(words)};", *parts])


@cache
def style() -> str:
    """The style sheet, with the colours of the pictures as variables."""
    colours = "".join(f"--{name}:{colour};" for name, colour in _COLOURS.items())
    return f":root{{{colours}}}\n{_ASSETS.joinpath('page.css').read_text(encoding='utf-8')}"


@cache
def icon() -> str:
    return _ASSETS.joinpath("icon.svg").read_text(encoding="utf-8")


@cache
def token_drawing() -> str:
    """The way of a token through a layer, as in the README (``tools.draw_docs``)."""
    return _ASSETS.joinpath("token.svg").read_text(encoding="utf-8")


@cache
def _markup() -> str:
    return _ASSETS.joinpath("page.html").read_text(encoding="utf-8")


def document() -> str:
    """The page that asks a server."""
    head = '<link rel="stylesheet" href="page.css"><link rel="icon" href="icon.svg" type="image/svg+xml">'
    return _markup().replace("<!-- head -->", head).replace("<!-- end -->", '<script src="page.js"></script>')


def report(answers: Mapping[str, Sequence[Record]], address: str) -> str:
    """The page with answers in it, by the addresses that the script asks, and no server; ``address``: what it shows
    first."""
    known = json.dumps({"address": address, "answers": answers}, separators=(",", ":"), allow_nan=False)
    safe = known.replace("<", "\\u003c")  # no text ends the element
    data = f'<script type="application/json" id="answers">{safe}</script>'
    head = f"{_POLICY}<style>{style()}</style>"
    end = f"{data}<script>{script()}</script>"
    return _markup().replace("<!-- head -->", head).replace("<!-- end -->", end)
