"""``trilane quality``: effects of policies that change the routing on the text, with their times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.output.pages.output import JsonOption, check_targets, named_as, report, watching, working
from trilane.verbs import completion
from trilane.verbs.inputs import choices_in, inputs_of, scenario_of
from trilane.verbs.options import OWN_POLICY, OptionError, SetOption, grouped, model_named

if TYPE_CHECKING:
    from sim.runs.scenario import Scenario
    from trilane.study.quality.measure import QualitySetting


@dataclass(frozen=True)
class Passages:
    """The texts that are read."""

    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="FILE", help="A text (UTF-8) to cut passages from, which the model was not "
                                                    "trained on; repeatable. Needed with --model."),
    ] = None
    passages: Annotated[int, typer.Option(metavar="N", min=2, max=10_000, help="Passages of each text.")] = 4
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Of each passage, read at once as a prompt.")
    ] = 32
    given_tokens: Annotated[
        int, typer.Option(metavar="N", min=4, max=100_000, help="Of each passage, given one by one after the prompt.")
    ] = 64


@dataclass(frozen=True)
class Model:
    """The model, and what belongs to it."""

    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A folder, or the id of a Hugging Face model. Without one, the bundled "
                                           "measurements are shown."),
    ] = None
    sizes_of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take times from the sizes of this model of the catalogue, not from MODEL's: "
                                          "the experts of a small model are too small to be worth a copy."),
    ] = None
    vectors: Annotated[
        str | None, typer.Option(metavar="FILE", help="Vectors of a calibration, for forecasts that need them.")
    ] = None


_OF_TEXTS = {"passages": "--passages", "prompt_tokens": "--prompt-tokens", "given_tokens": "--given-tokens"}


@grouped
def quality(
    policies: Annotated[
        str | None,
        typer.Argument(metavar="[POLICIES]", autocompletion=completion.policies,
                       help=f"Policies with commas between them. {OWN_POLICY}. Parameters may follow: "
                            "'smoe{alpha: 0.1},smoe{alpha: 0.4}'. Default: all that change the routing."),
    ] = None,
    *,
    model: Model,
    texts: Passages,
    fronts: Annotated[
        bool, typer.Option("--fronts", help="Measure each policy at several values of the parameter that says how much "
                                            "it may change, too. Without --model: show all of these.")
    ] = False,
    changes: SetOption = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE.csv", callback=named_as(".csv"),
                     help="Write the table. Every text is kept in FILE.csv.journal as soon as it is measured: the same "
                          "command continues after an interruption."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw time per token against KL (.png, .svg or .pdf).")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Show what published measurements of large models say, how far mini "
                                               "models rank them alike, and the curve from moved routing weight to KL.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Measure what changing the routing costs in quality, with the time per token.

    The model reads the same texts under its own routing and under every policy, token by token. The policy is
    simulated at the same time, so that what it finds on the GPU, and what it changes, are those of the machine in the
    scenario. Half of the experts are cached, unless --set cached_share=S or gpu_memory_gb=N says otherwise.

    Small models tell which policy hurts more, not by how much a large one would be hurt: see docs/quality.md.
    """
    from trilane.output.pages.quality import overview_page, quality_page
    from trilane.study.quality.table import BUNDLED, HALF, read_table, write_table

    as_page = quality_page
    if model.model is None or published:
        _refuse_without_measuring(published, model, texts, policies, changes, output)
    if published:
        _show_published(fronts, plot, json)
        return
    if model.model is None:
        check_targets(json, picture=plot)
        found = [each for each in read_table(BUNDLED) if each.cached_share == HALF]
        about = "measured for Trilane on mini models, half of the experts cached"
        as_page = quality_page if fronts else overview_page
    else:
        found, about = _measured(model, texts, policies, fronts, changes, output, (json, plot))
    report(json, {"about": about, "rows": [each.to_dict() for each in found]}, *as_page(found, about))
    if output is not None:
        write_table(found, output)
    if plot is not None:
        from trilane.output.figures import plot_quality, save_figure
        from trilane.study.quality.published import published as bundled

        save_figure(plot_quality(found, bundled()), plot)


def _show_published(fronts: bool, plot: str | None, json: str | None) -> None:
    from trilane.output.pages.quality_published import published_page
    from trilane.study.quality.curve import bundled_curve
    from trilane.study.quality.published import published
    from trilane.study.quality.table import BUNDLED, read_table
    from trilane.study.quality.trends import trends

    if fronts or plot:
        raise OptionError(f"--published: expected no {'--fronts' if fronts else '--plot'}, which are for measurements")
    check_targets(json)
    measured, curve = read_table(BUNDLED), bundled_curve()
    record = {
        "trends": [trend.to_dict() for trend in trends(measured)], "curve": asdict(curve),
        "values": [asdict(value) for value in published()],
    }
    report(json, record, *published_page(measured, curve))


def _refuse_without_measuring(
    published: bool, model: Model, texts: Passages, policies: str | None, changes: list[str] | None, output: str | None
) -> None:
    """Raise OptionError for what only a measurement uses."""
    numbers = {option: getattr(texts, field) for field, option in _OF_TEXTS.items()}
    usual = {option: getattr(Passages(), field) for field, option in _OF_TEXTS.items()}
    given = {"POLICIES": policies, "--text": texts.text, "--output": output, "--set": changes,
             "--sizes-of": model.sizes_of, "--vectors": model.vectors,
             **{option: number for option, number in numbers.items() if number != usual[option]}}
    if published and model.model is not None:
        raise OptionError("--published: expected no --model, which is for measurements of your own")
    if unused := next((option for option, value in given.items() if value), None):
        raise OptionError(
            f"{unused}: expected --model MODEL, and --text FILE for it to read, to measure policies; without them "
            f"{'published' if published else 'the bundled'} measurements are shown"
        )


def _measured(
    model: Model, texts: Passages, policies: str | None, fronts: bool, changes: list[str] | None, output: str | None,
    targets: tuple[str | None, str | None],
) -> tuple[list[Any], str]:
    from trilane.study.quality.fronts import changing, with_fronts
    from trilane.study.quality.measure import measure
    from trilane.study.quality.summary import summaries

    scenario = _scenario(changes)
    names = changing() if policies is None else choices_in(policies)
    names = with_fronts(names) if fronts else names
    files = (*(texts.text or ()), *inputs_of(None, scenario), model.model, model.vectors)
    check_targets(output, targets[0], picture=targets[1], inputs=files)
    setting = _setting(model, texts, scenario)
    with watching("measuring") as watch:
        rows = measure(setting, names, None if output is None else Path(output), watch)
    sizes = f", with times of the sizes of {setting.sizes_of}" if setting.sizes_of else ""
    return summaries(rows), f"{model.model} on {scenario.hardware}{sizes}"


def _scenario(changes: list[str] | None) -> Scenario:
    """The scenario, of which policy, trace, model and lengths do not count."""
    from trilane.study.quality.table import HALF

    chosen = scenario_of(None, changes)
    without = chosen.cached_share is None and chosen.gpu_memory_gb is None
    return chosen.with_(cached_share=HALF) if without else chosen


def _setting(model: Model, texts: Passages, scenario: Scenario) -> QualitySetting:
    from realrun.quality.models import model_on_cpu
    from trilane.study.quality.measure import QualitySetting
    from trilane.study.quality.texts import passages

    if not texts.text:
        raise OptionError("--model: expected a text for it to read; give --text FILE, once or more often")
    with working(f"loading {model.model}"):
        hosted = model_on_cpu(str(model.model))
        cut = passages(texts.text, hosted.loaded.tokenizer, texts.passages, texts.prompt_tokens, texts.given_tokens)
    sizes = None if model.sizes_of is None else model_named(model.sizes_of)
    return QualitySetting(hosted, cut, scenario, sizes, model.vectors)
