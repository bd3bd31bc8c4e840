"""``trilane recommend``: which model?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from trilane.common.quoting import quoted
from trilane.common.schema import to_dict
from trilane.output.pages.output import JsonOption, Part, check_targets, report, working
from trilane.verbs.named_parts import machine_named, taken_record
from trilane.verbs.options import MachineParts, OptionError, UpgradeOption, grouped, model_named
from trilane.verbs.tune import parts_of, readers_part_of, strata_part

if TYPE_CHECKING:
    from trilane.engines.recommend import Recommendation, Use
    from trilane.engines.upgrades import TableUpgrade, Upgrade


@grouped
def recommend(
    *,
    parts: MachineParts,
    wanted: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="USE|MODEL",
                     help="chat (default; 1,024 prompt tokens, 256 of an answer, in a window of 16,384), code (8,192 + "
                          "1,024 in 32,768) or documents (16,384 + 512 in 32,768), all of them choices. Or a model: "
                          "its command line, and all of its formats. Give it twice for both."),
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="NAME", help="size: the largest model first; speed: most tokens/s; first: the "
                                               "soonest first token."),
    ] = "size",
    upgrade: UpgradeOption = False,
    json: JsonOption = None,
) -> None:
    """Show what every model of the catalogue does on this machine, or on one of named parts.

    Each model stands in its best format: as published, if that has fewer than 16 bits; else the most bits with which an
    answer takes at most a quarter longer than with the fewest, from four bits on; fewer than four only where those do
    not run, or take too long. Speeds are those of [bold]trilane tune[/] for the same lengths. Exit code 2: nothing
    runs.

    Without --gpu and --machine, parts that are not named are those of this machine.
    """
    from trilane.engines.recommend import SORTS
    from trilane.engines.recommend import recommend as answer
    from trilane.output.pages.recommend import recommend_page

    check_targets(json, inputs=(parts.machine,))
    if sort not in SORTS:
        raise OptionError(f"--sort: expected {', '.join(SORTS[:-1])} or {SORTS[-1]}, got {quoted(sort)}")
    parts, taken = machine_named(parts)
    use, model = use_and_model(wanted or [])
    with working("reading the catalogue") as say:
        answered = answer(
            use, None if model is None else [model],
            lambda done, of: say(f"trying settings: {done} of {of} models are done"), **parts_of(parts),
        )
        bought = _upgrades(answered, say) if upgrade else None
    page = recommend_page(answered, sort)
    record = {**answered.to_dict(), **taken_record(taken)}
    if bought is not None:
        page, record = [*page, *bought.page], {**record, "upgrades": [to_dict(one) for one in bought.upgrades]}
    models = [answered.asked.fit.model] if answered.formats else None
    report(json, record, *page, *_strata(answered), *readers_part_of(answered.asked.fit, models))
    if not answered.runs:
        raise typer.Exit(2)


def _strata(answered: Recommendation) -> list[Part]:
    """Lines on Strata, if its model is asked about, or all are."""
    from dataclasses import replace

    from trilane.engines.strata import MODEL

    asked = answered.asked.fit
    return strata_part(asked if answered.formats else replace(asked, model=MODEL, weights=None))


class _Bought(NamedTuple):
    upgrades: Sequence[Upgrade | TableUpgrade]
    page: list[Part]


def _upgrades(answered: Recommendation, say: Callable[[str], None]) -> _Bought:
    """Try other parts for the model that was asked for, or for all."""
    from trilane.engines.replaceable import no_upgrades
    from trilane.engines.upgrades import table_upgrades, upgrades
    from trilane.output.pages.upgrades import table_upgrade_parts, upgrade_parts

    question = answered.asked
    none = no_upgrades(question.fit)
    if answered.formats:
        say("trying other parts")
        of_model = upgrades(question)
        return _Bought(of_model, upgrade_parts(of_model, none, question.fit.generated))
    of_all = table_upgrades(answered, lambda done, of: say(f"trying other parts: {done} of {of} are done"))
    return _Bought(of_all, table_upgrade_parts(of_all, none))


def use_and_model(wanted: list[str]) -> tuple[Use, str | None]:
    """Read the values of --for. Raises OptionError for two of one kind."""
    from trilane.engines.recommend import USES

    uses = [word for word in wanted if word in USES]
    models = [_model(word) for word in wanted if word not in USES]
    if len(uses) > 1 or len(models) > 1:
        raise OptionError(f"--for: expected one of {', '.join(USES)}, and one model, got {', '.join(wanted)}")
    return cast("Use", uses[0]) if uses else "chat", models[0] if models else None


def _model(text: str) -> str:
    """A model's name as it is taken. Raises OptionError for what is neither a model nor a use."""
    from traces.models.shape import ShapeError
    from trilane.common.names import alternatives, hints
    from trilane.engines.recommend import USES

    try:
        return model_named(text)
    except ShapeError as error:
        meant = hints(text, USES) or [use for use in USES if text.lower().startswith(use[:3])]
        hint = f"did you mean {alternatives(meant)}? " if meant else ""
        raise OptionError(f"--for: expected {', '.join(USES)} or a model: {hint}{error}") from None
