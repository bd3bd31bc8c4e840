"""The page of ``trilane leaderboard``: standings over all settings, and the speeds on each machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from policies.protocols import PolicyKind
from trilane.output.figures.marks import marked, meanings
from trilane.output.figures.quality_words import nats
from trilane.output.pages.output import Part, heading, legend, number, percent, table
from trilane.study.leaderboard.standings import TIE, BoardSetting, Entry, Standing, all_settings, leaderboard_settings
from trilane.study.quality.curve import measured_nats

MEANINGS = {
    "score": "speed over that of the fastest policy of the setting that keeps the routing: geometric mean",
    "lowest": "the same in the setting that suits the policy least",
    "best in": f"settings in which no policy that keeps the routing is more than {percent(TIE)} faster",
    "KL": "of policies that change the routing: nats a token on mini models, half of the experts cached; least-largest "
    "(docs/quality.md)",
    "runs in": "settings; the others refuse it (batches that it does not take, forecasts that the routing lacks)",
}


def leaderboard_page(found: Sequence[Standing], own: Collection[str] = ()) -> list[Part]:
    """All policies, the best first; ``own`` are marked."""
    settings, lines, running = leaderboard_settings(), [], [one for one in found if one.relative]
    for place, one in enumerate(running, 1):
        name = f"{marked(one.policy, PolicyKind(one.kind)) if one.kind else one.policy}{' <' * (one.policy in own)}"
        shares = [percent(one.score), percent(one.lowest)]
        lines.append([str(place), name, *shares, str(one.best_in), str(len(one.relative)), cost_of(one)])
    batches = " and ".join(map(str, settings.batches))
    about = f"{len(settings.machines)} machines x {len(settings.families)} families of routing x batch {batches}"
    idle = len(found) - len(running)
    whole = f"{len(running)} policies{f' (and {idle} that cannot run)' * (idle > 0)}"
    marks = meanings({PolicyKind(one.kind) for one in found if one.kind})
    return [
        heading(f"{whole} in {len(all_settings())} settings: {about}, {settings.draws} draws each"),
        table(["", "policy", "score", "lowest", "best in", "runs in", "KL"], lines, text_columns=2),
        legend({**MEANINGS, **marks, **({"<": "yours"} if own else {})}),
        *(f"{one.policy} runs in no setting: {_reason(one)}" for one in found if not one.relative),
        *(f"\n{_standing(one, running)}" for one in running if one.policy in own),
    ]


def cost_of(one: Standing) -> str:
    """The measured divergence of a policy that changes the routing, over the mini models."""
    if not one.kind or PolicyKind(one.kind) is not PolicyKind.CHANGES:
        return ""
    found = measured_nats(one.policy)
    return "-" if found is None else "-".join(dict.fromkeys(map(nats, found)))


def _standing(mine: Standing, running: Sequence[Standing]) -> str:
    """The standing of one's own policy: its rank, the settings in which it is best, and the one that suits it least."""
    rank = 1 + running.index(mine)
    best = [_named(setting) for setting, share in mine.relative.items() if share >= 1 - TIE]
    where = f": {', '.join(best)}" if best else ""
    worst = min(mine.relative, key=lambda setting: mine.relative[setting])
    return (
        f"{mine.policy} is {rank} of {len(running)}; none that keeps the routing is more than {percent(TIE)} faster in "
        f"{len(best)} of {len(mine.relative)} settings{where}; it is worst in {_named(worst)}, with "
        f"{percent(mine.lowest)} of the speed of the fastest"
    )


def _named(setting: BoardSetting) -> str:
    return f"{leaderboard_settings().machines[setting.machine].about} {setting.family} batch {setting.batch}"


def _reason(one: Standing) -> str:
    """Why a policy is refused: the first reason."""
    return next((entry.reason for entry in one.entries.values() if entry.reason), "it has no entry")


def machine_pages(found: Sequence[Standing]) -> Iterator[Part]:
    """For each machine: tokens a second of all sequences, the lowest and highest draw in brackets."""
    settings = leaderboard_settings()
    for machine, (about, hardware) in settings.machines.items():
        columns = [BoardSetting(machine, family, batch) for family in settings.families for batch in settings.batches]
        models = ", ".join(settings.families[family][machine] for family in settings.families)
        header = [f"{column.family}\nbatch {column.batch}" for column in columns]
        lines = [[one.policy, *(_speeds(one.entries.get(column)) for column in columns)] for one in found]
        yield ""
        yield heading(f"{about}: {hardware}; {models}; tokens/s")
        yield table(["policy", *header], lines)


def _speeds(entry: Entry | None) -> str:
    if entry is None or entry.tokens_per_s is None:
        return "-"
    return f"{number(entry.tokens_per_s)} [{number(entry.lowest)}-{number(entry.highest)}]"
