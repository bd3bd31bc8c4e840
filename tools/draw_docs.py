"""The two drawings of the documentation: a token's way through one layer, and the packages with their imports.

``python -m tools.draw_docs`` writes them into ``docs/``, and the first into the page, too. The same sources give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from trilane.output.figures.figure_files import default_settings
from trilane.output.figures.marks import BLUE, GREEN, INK, ORANGE

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS.parent / "trilane" / "page" / "assets"
_GPU, _HOST, _LINK, _PAPER = "#E3EEF7", "#E3F3ED", "#FBF0DA", "#FFFFFF"  # paler than the colours of the lanes
Point = tuple[float, float]


@dataclass(frozen=True)
class Room:
    """A package as it is drawn: its floor (0: the ground), the centre and the width of its box, and what it is."""

    floor: int
    x: float
    width: float
    about: str
    also: tuple[str, ...] = ()  # modules outside the package that count as its own


ROOMS: Mapping[str, Room] = {
    "trilane.verbs": Room(11, 5.0, 4.6, "the command line", ("trilane.cli",)),
    "trilane.page": Room(10, 5.0, 4.6, "the page in the browser, and the report"),
    "trilane.output": Room(9, 5.0, 4.6, "pages and figures: every sentence and picture"),
    "trilane.fit": Room(8, 5.0, 4.6, "an engine and the best policy, side by side"),
    "trilane.study": Room(7, 5.0, 4.6, "many simulated runs: compare, sweep, pays, papers"),
    "trilane.testing": Room(7, 8.8, 2.2, "the laws, as tests"),
    "trilane.engines": Room(6, 2.1, 3.8, "engines in use, in closed form"),
    "realrun": Room(5, 4.9, 1.8, "the executor"),
    "sim.timeline": Room(5, 7.9, 3.6, "the simulator, with sim.simulate", ("sim.simulate",)),
    "sim.runs": Room(4, 6.5, 4.6, "what a run is: scenario, spans, metrics, bounds"),
    "realrun.machine": Room(4, 1.8, 3.0, "this machine: cores, memory, lanes", ("realrun.errors",)),
    "sim.costs": Room(3, 5.4, 4.2, "what work costs; engines as data"),
    "sim.machine": Room(2, 2.9, 3.6, "what a machine is, by parts or measured"),
    "traces": Room(1, 2.9, 3.6, "what a model routed; models"),
    "policies": Room(1, 7.8, 4.0, "what to do about it, and the mechanism"),
    "trilane.common": Room(0, 5.0, 9.6, "the ground floor, under everything: errors, schema, files, names"),
}
GROUND = "trilane.common"


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports from, read from the sources."""
    import grimp  # comes with import-linter

    graph = grimp.build_graph("trilane", "traces", "policies", "sim", "realrun", cache_dir=None)
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module in graph.modules:
        if home := room_of(module):
            targets = map(room_of, graph.find_modules_directly_imported_by(module))
            found[home].update(name for name in targets if name and name != home)
    return found


def room_of(module: str) -> str | None:
    """The room of a module; None for the public names, ``trilane`` and ``trilane.parts``, which are in none."""
    homes = [(home, name) for name, room in ROOMS.items() for home in (name, *room.also)
             if module == home or module.startswith(f"{home}.")]
    return max(homes, key=lambda home: len(home[0]))[1] if homes else None


def upward(found: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that do not go down: to a higher floor, or to another room of the same."""
    return sorted((one, other) for one, others in found.items() for other in others
                  if ROOMS[other].floor >= ROOMS[one].floor)


def arrows(found: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that are drawn: downward ones that do not follow from others, without those of the ground floor."""
    wrong = upward(found)
    down = {one: {other for other in others if (one, other) not in wrong} for one, others in found.items()}
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(down).static_order():
        below[name] = down[name].union(*(below[other] for other in down[name]))
    drawn = [(one, other) for one, others in down.items() for other in others
             if other != GROUND and not any(other in below[third] for third in others)]
    return sorted(drawn)


# --- drawing ----------------------------------------------------------------------------------------------------------


def page(width: float, height: float) -> Axes:
    """Axes of that many inches, without frame; one unit is an inch."""
    figure = Figure(figsize=(width, height))
    axes: Axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(axes: Axes, centre: Point, size: Point, colour: str, edge: str = INK) -> None:
    """A box with round corners."""
    (x, y), (width, height) = centre, size
    shape = FancyBboxPatch((x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.07",
                           facecolor=colour, edgecolor=edge, linewidth=1)
    axes.add_patch(shape)


def text(axes: Axes, place: Point, words: str, size: float = 10, **style: str) -> None:
    """Words around a place, unless ``style`` aligns them otherwise."""
    settings: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, **style}
    axes.text(*place, words, size=size, **settings)


def arrow(axes: Axes, start: Point, end: Point, colour: str = INK, width: float = 1.3) -> None:
    """An arrow from one point to another."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, linewidth=width,
                                   shrinkA=0, shrinkB=0))


def svg(axes: Axes) -> bytes:
    """The drawing as a file."""
    drawn = BytesIO()
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


# --- one token's way --------------------------------------------------------------------------------------------------

_EXPERTS, _HELD, _COPIED, _ON_CPU = 8, 2, 5, 7  # of the layer that is drawn
_COLUMN = 5.9  # inches from the left edge to the experts on the GPU


def draw_token() -> Axes:
    """One token in one layer: which experts the router chooses, and the three ways in which they are computed."""
    axes = page(10, 4.9)
    for y, height, colour in ((3.64, 2.32, _GPU), (2.1, 0.76, _LINK), (0.9, 1.64, _HOST)):
        box(axes, (5, y), (9.8, height), colour, edge=colour)
    for y, words, colour in ((4.6, "GPU", BLUE), (2.1, "PCIe link", ORANGE), (1.5, "Host", GREEN)):
        text(axes, (0.25, y), words, 13, color=colour, weight="bold", ha="left")
    _draw_gpu(axes)
    _draw_host(axes)
    _draw_link(axes)
    return axes


def _draw_gpu(axes: Axes) -> None:
    text(axes, (0.55, 3.6), "token", 11)
    for x, words in ((1.75, "attention"), (3.45, "router\nchooses 3\nof 8 experts"), (8.2, "combine")):
        box(axes, (x, 3.6), (1.15 if x != 3.45 else 1.35, 0.9), _PAPER)
        text(axes, (x, 3.6), words, 10)
    for start, end in (((0.85, 3.6), (1.17, 3.6)), ((2.33, 3.6), (2.77, 3.6)), ((8.78, 3.6), (9.12, 3.6))):
        arrow(axes, start, end)
    text(axes, (9.5, 3.6), "next\nlayer", 11)
    for y, number, words in ((4.15, _HELD, "held in GPU memory: a hit"), (3.12, _COPIED, "copied, then computed")):
        _draw_expert(axes, (_COLUMN, y), number, BLUE)
        text(axes, (_COLUMN, y + 0.36), words, 9.5)
        arrow(axes, (4.13, 3.6 + (y - 3.6) / 3), (_COLUMN - 0.26, y), BLUE)
        arrow(axes, (_COLUMN + 0.26, y), (7.62, 3.6 + (y - 3.6) / 3), BLUE)


def _draw_host(axes: Axes) -> None:
    text(axes, (0.25, 0.6), "host memory:\nall experts of the layer", 10, ha="left")
    for number in range(_EXPERTS):
        colour = {_COPIED: ORANGE, _ON_CPU: GREEN}.get(number, _PAPER)
        _draw_expert(axes, (_memory(number), 0.6), number, colour)
    box(axes, (8.6, 0.7), (1.9, 0.86), _PAPER, GREEN)
    text(axes, (8.6, 0.7), "CPU computes\nexpert 7 in place", 10)
    arrow(axes, (_memory(_ON_CPU) + 0.26, 0.6), (7.64, 0.6), GREEN)


def _memory(number: int) -> float:
    """Place of an expert in host memory, in inches: the copied one below its slot on the GPU."""
    return _COLUMN + 0.52 * (number - _COPIED)


def _draw_expert(axes: Axes, centre: Point, number: int, colour: str) -> None:
    box(axes, centre, (0.46, 0.46), colour)
    text(axes, centre, str(number), 11, color=INK if colour == _PAPER else "white", weight="bold")


def _draw_link(axes: Axes) -> None:
    arrow(axes, (_COLUMN, 0.86), (_COLUMN, 2.86), ORANGE, 3)
    text(axes, (_COLUMN - 0.12, 2.1), "weights of expert 5: slow", 10, color="#8A5A00", ha="right")
    for xs, ys in (((3.45, 3.45, _COLUMN - 0.1), (3.14, 1.4, 1.4)), ((_COLUMN + 0.1, 8.2), (1.4, 1.4))):
        axes.plot(xs, ys, color=GREEN, linewidth=1.3)  # apart where the copy crosses
    arrow(axes, (8.2, 1.4), (8.2, 1.14), GREEN)
    arrow(axes, (8.6, 1.14), (8.6, 3.13), GREEN)
    text(axes, (3.35, 2.1), "activation", 10, color="#00684C", ha="right")
    text(axes, (8.7, 2.1), "result", 10, color="#00684C", ha="left")


# --- packages ---------------------------------------------------------------------------------------------------------

_FLOOR, _BOX = 0.74, 0.5  # inches from floor to floor, and of a box
_LEGEND = ((_LINK, "formulas"), (_GPU, "simulator"), (_HOST, "routing and decisions"))


def draw_packages() -> Axes:
    """The rooms, floor by floor, and an arrow for each import that does not follow from others."""
    axes = page(10, 0.24 + _FLOOR * max(room.floor for room in ROOMS.values()) + _BOX)
    for name, room in ROOMS.items():
        box(axes, (room.x, _middle(room)), (room.width, _BOX), _colour(name))
        text(axes, (room.x, _middle(room) + 0.1), name, 10.5, weight="bold")
        text(axes, (room.x, _middle(room) - 0.11), room.about, 8.5)
    for row, (colour, about) in enumerate(_LEGEND):
        box(axes, (0.42, _middle(ROOMS["trilane.verbs"]) - 0.32 * row), (0.28, 0.2), colour)
        text(axes, (0.68, _middle(ROOMS["trilane.verbs"]) - 0.32 * row), about, 9, ha="left")
    for one, other in arrows(imports()):
        upper, lower = ROOMS[one], ROOMS[other]
        start, end = _ends(upper, lower)
        arrow(axes, (start, _middle(upper) - _BOX / 2), (end, _middle(lower) + _BOX / 2))
    return axes


def _middle(room: Room) -> float:
    return 0.12 + _BOX / 2 + _FLOOR * room.floor


def _ends(upper: Room, lower: Room) -> tuple[float, float]:
    """Ends of an arrow, in inches: straight down where the boxes overlap."""
    left = max(room.x - room.width / 2 for room in (upper, lower)) + 0.25
    right = min(room.x + room.width / 2 for room in (upper, lower)) - 0.25
    middle = min(max(lower.x, left), right)
    return (middle, middle) if left <= right else (left, right) if upper.x > lower.x else (right, left)


def _colour(name: str) -> str:
    if name == GROUND:
        return "#EEEEEE"
    if name == "trilane.engines":
        return _LINK
    return {"sim": _GPU, "policies": _HOST, "traces": _HOST}.get(name.partition(".")[0], _PAPER)


DRAWINGS: Mapping[str, Callable[[], Axes]] = {"token.svg": draw_token, "packages.svg": draw_packages}


@default_settings
def drawing(name: str) -> bytes:
    """The bytes of a file of ``DRAWINGS``."""
    return svg(DRAWINGS[name]())


if __name__ == "__main__":
    for name in DRAWINGS:
        (DOCS / name).write_bytes(drawing(name))
    (PAGE / "token.svg").write_bytes(drawing("token.svg"))
