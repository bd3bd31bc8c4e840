"""Tables of real parts that can be bought, and what each gives; on the pages of recommend, tune and fit."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.engines.replaceable import NoUpgrades
from trilane.engines.upgrades import WORTH_BUYING, TableUpgrade, Upgrade
from trilane.output.pages.output import Part, heading, number, percent, table

NO_UPGRADES = {
    "laptop": "what to buy: a laptop's GPU and CPU are soldered, only memory modules can be replaced in some",
    "one memory": "what to buy: GPU, CPU and memory are one part, none can be replaced",
    "preset": "what to buy: name the machine by its parts (--gpu, --ram, --cpu) to see which others it takes",
}
_RULE = (
    "speeds: with the settings that trilane tune finds; gain: by the time until the last token, or the one that its "
    "--for names. Cards of the same maker, modules of the same "
    f"kind and CPUs of the same socket; of each the smallest step that gains {WORTH_BUYING:.0%}; no gain: less than "
    "that. watts: the part's own, at most"
)


def upgrade_parts(upgrades: Sequence[Upgrade], none: NoUpgrades | None, generated: int) -> list[Part]:
    """Parts to buy for one model and so many tokens of an answer; ``none``: why no part can be replaced."""
    if none is not None:
        return ["", NO_UPGRADES[none]]
    if not upgrades:
        return ["", "what to buy: no part of the catalogue helps here"]
    rows = [
        [one.step.title, one.step.part, number(one.step.watts, 0), _rate(one, generated),
         number(one.tuned.ttft_ms / 1e3, 2), gain_text(one)]
        for one in upgrades
    ]
    columns = ("\nin place of the own", "\npart", "\nwatts", "tokens\n/s", "first\ntoken s", "\ngain")
    return ["", heading("what to buy"), table(columns, rows, (0, 1, 5)), "", _RULE]


def _rate(one: Upgrade, generated: int) -> str:
    return number(1000 / one.tuned.tpot_ms if generated > 1 else None)


def gain_text(one: Upgrade) -> str:
    """The gain in words."""
    if one.faster is None:
        return "runs"
    return percent(one.faster) if one.pays else "no gain"


def _median(faster: float | None) -> str:
    return percent(faster) if faster is None or faster > WORTH_BUYING else "none"


def table_upgrade_parts(upgrades: Sequence[TableUpgrade], none: NoUpgrades | None) -> list[Part]:
    """Parts to buy for all models, with those that run only then."""
    if none is not None:
        return ["", NO_UPGRADES[none]]
    rows = [
        [one.step.title, number(one.step.watts, 0), _median(one.faster), str(one.more_bits or "-"),
         ", ".join(f"{run.model} ({run.weights}) {number(1000 / run.tuned.tpot_ms)}" for run in one.runs) or "-"]
        for one in upgrades
    ]
    columns = ("\nin place of the own", "\nwatts", "median\ngain", "in more\nbits", "\nruns then, with tokens/s")
    about = (
        "median gain: by the time until the last token, of the models that ran before, in the same format; in more "
        "bits: models whose best format then has more"
    )
    return ["", heading("what to buy"), table(columns, rows, (0, 4), wrap=True), "", about]
