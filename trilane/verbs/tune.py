"""``trilane tune``: which command line?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from trilane.common.quoting import quoted
from trilane.output.pages.output import JsonOption, Part, check_targets, note, report, show, working, write_json
from trilane.verbs import completion
from trilane.verbs.inputs import names_in
from trilane.verbs.named_parts import READERS, machine_named, model_checks, taken_record
from trilane.verbs.options import (
    MachineParts,
    ModelArgument,
    OptionError,
    UpgradeOption,
    grouped,
    model_named,
    weights_named,
)

if TYPE_CHECKING:
    from trilane.engines.question import KvFormat, Question
    from trilane.engines.tune.settings import TuneQuestion

OWN_ENGINE = "TRILANE_ENGINE"  # of the environment: an engine's file that was measured on this machine
KV = "f16,q8_0"  # formats of the KV cache
Answer: TypeAlias = tuple[dict[str, Any], list[Part]]  # for JSON, and its page


@grouped
def tune(
    *,
    name: ModelArgument,
    parts: MachineParts,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.formats,
                     help="Format of weights, such as q8_0, q4_k_m. Default: q4_k_m, or as published if that has fewer "
                          "than 16 bits; a file has its own."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Size of the KV cache in tokens (-c). Default: prompt and answer."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a prompt.")] = 4096,
    generated: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 256,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that run together.")] = 1,
    goal: Annotated[
        str,
        typer.Option("--for", metavar="NAME", help="What to make fast: decode (a token), prompt (the first token), "
                                                   "both (the whole answer)."),
    ] = "both",
    kv: Annotated[str, typer.Option(metavar="A,B", help="Formats of the KV cache to choose from.")] = KV,
    keep_free_gb: Annotated[
        float,
        typer.Option(metavar="X", help="GPU memory (without a GPU: host memory) to leave to other programs, in GB "
                                       "(10^9 bytes)."),
    ] = 0.0,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads. Default: chosen.")] = None,
    ubatch: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a prompt computed at once (-ub). Default: chosen.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", autocompletion=completion.engines,
                     help="Engine, such as ik_llama.cpp, strata or colibri, or an engine file of trilane profile "
                          "--engine llama.cpp. Default: on this machine without a GPU the file that "
                          f"{OWN_ENGINE} in the environment names; else llama.cpp, for AMD and Intel cards "
                          "llama.cpp-vulkan."),
    ] = None,
    draft_acceptance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Probability that a draft is accepted if the one before it was, for models "
                                           "whose own layers predict further tokens (--spec-type draft-mtp). Default: "
                                           "a published range."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what takes the time of one token, and what each part of the machine "
                                             "would gain if it were 25% better.")
    ] = False,
    upgrade: UpgradeOption = False,
    checked: Annotated[
        bool,
        typer.Option("--check", help="Run the best three settings, and the engine's default, on this machine. MODEL is "
                                     "a GGUF file; needs the extra [bold]llama[/]."),
    ] = False,
    accept_kl: Annotated[
        float | None,
        typer.Option("--accept-kl", min=0.0, metavar="X", help="Also try files of other formats whose published "
                                                               "divergence is at most X nats a token, such as 0.01: "
                                                               "they say something else. Never by default.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Find the best command line of llama.cpp for a model on this machine, or on one of named parts.

    Without --gpu and --machine, parts that are not named are those of this machine: GPU, CPU, cores, PCIe slot and size
    of the memory. With --cpu, cores and memory modules are those of that CPU.
    """
    from trilane.common.schema import to_dict
    from trilane.engines.question import Question
    from trilane.engines.tune.settings import GOALS, TuneQuestion
    from trilane.engines.tune.tune import completed, started
    from trilane.output.pages.caveats import tune_record
    from trilane.output.pages.tune import check_page, explained_page, facts_part, line_part

    model = name.text
    check_targets(json, inputs=(model, parts.machine))
    if goal not in GOALS:
        raise OptionError(f"--for: expected {', '.join(GOALS[:-1])} or {GOALS[-1]}, got {quoted(goal)}")
    parts, taken = machine_named(parts, *model_checks(model, weights, None if engine in READERS else engine))
    formats = tuple(cast("KvFormat", name) for name in names_in(kv, "--kv"))
    machine = parts_of(parts)
    question = Question(
        model=model_named(model), **machine, weights=weights_named(weights), prompt_tokens=prompt, generated=generated,
        batch=batch, window=context, engine=engine or _own_engine(parts, machine["gpu"]), threads=threads,
        ubatch=ubatch,
    )
    others = {
        "--for": goal != "both", "--kv": kv != KV, "--keep-free-gb": keep_free_gb > 0, "--ubatch": ubatch is not None,
        "--draft-acceptance": draft_acceptance is not None, "--explain": explain, "--upgrade": upgrade,
        "--check": checked, "--accept-kl": accept_kl is not None,
    }
    if (own := _of_readers(question, others) or _of_windows(question, others)) is not None:
        answer, page = own
        report(json, {**answer, **taken_record(taken)}, *page)
        return
    tune_question = TuneQuestion(question, goal, formats, keep_free_gb, draft_acceptance)
    if checked:
        from trilane.output.pages.slow_machine import slow_part
        from trilane.study.validation.tune_check import check, file_to_run, slow_causes_of

        file_to_run(tune_question)
    with working("comparing settings"):
        start = started(tune_question)
    show(json, *line_part(start))
    with working("comparing with other engines"):
        tuning = completed(start)
    show(json, *facts_part(tuning), *(explained_page(tuning) if explain else ()))
    show(json, *strata_part(question), *readers_part_of(question, [question.model]))
    record = {**tune_record(tuning), **taken_record(taken)}
    if accept_kl is not None:
        record["accepted"] = accepted_formats(tune_question, accept_kl, json)
    if upgrade:
        record["upgrades"] = upgraded(tune_question, json)
    if checked:
        with working("running llama.cpp"):
            measured = list(check(tuning))
        causes = slow_causes_of(tuning, measured[0])
        show(json, *check_page(measured), *slow_part(causes))
        record |= {"checked": [to_dict(one) for one in measured], "slow_causes": [one._asdict() for one in causes]}
    write_json(record, json)


def accepted_formats(question: TuneQuestion, most_nats: float, json: str | None) -> list[Any]:
    """Try formats whose published divergence is accepted, print what each gives, and return the records."""
    from trilane.output.pages.quality_formats import bargains_part
    from trilane.study.quality.formats import bargains

    with working("trying other formats"):
        found = bargains(question, most_nats)
    show(json, *bargains_part(found, most_nats))
    return [{"weights": one.weights, "kl": one.value.value, "source": one.value.source, "command": one.tuned.command,
             "tokens_per_s": one.tuned.tokens_per_s, "ttft_ms": one.tuned.ttft_ms} for one in found]


def strata_part(question: Question) -> list[Part]:
    """Lines on Strata for the page of another engine."""
    from traces.models.names import parted
    from trilane.engines.strata import MODEL

    if parted(question.model).model != MODEL:
        return []  # without loading what answers
    from trilane.engines.strata.tune import strata_next_to
    from trilane.output.pages.strata_tune import next_to_part

    return next_to_part(strata_next_to(question, question.load_machine()))


def readers_part_of(question: Question, models: Sequence[str] | None) -> list[Part]:
    """Lines on programs that read experts by themselves, for the page of another engine; of models, None: of any."""
    if question.disk is None:
        return []  # without loading what answers
    from trilane.engines.streamed.tune import tunings_next_to
    from trilane.output.pages.streamed_tune import readers_part

    return readers_part(tunings_next_to(question, models))


def _of_readers(question: Question, others: Mapping[str, bool]) -> Answer | None:
    """The answer for a program that reads experts by itself; None for an engine."""
    if question.engine not in READERS:
        return None
    from trilane.engines.streamed.tune import streamed_tuning
    from trilane.output.pages.streamed_tune import streamed_tune_page

    _check_none(question.engine, others)
    found = streamed_tuning(question.engine, question)
    return found.to_dict(), streamed_tune_page(found)


def _of_windows(question: Question, others: Mapping[str, bool]) -> Answer | None:
    """The answer for an engine whose steps are windows; None for another one."""
    if question.engine is None:
        return None
    from trilane.engines.strata.cards_tune import cards_tuning
    from trilane.engines.strata.tune import strata_tuning, window_engine
    from trilane.output.pages.strata_cards import strata_cards_page
    from trilane.output.pages.strata_tune import strata_tune_page

    engine = window_engine(question.engine)
    if engine is None:
        return None
    _check_none(question.engine, others)
    hardware = question.load_machine()
    if hardware.further:
        split = cards_tuning(question, engine, hardware)
        return split.to_dict(), strata_cards_page(split)
    found = strata_tuning(question, engine, hardware)
    return found.to_dict(), strata_tune_page(found)


def _check_none(engine: str, others: Mapping[str, bool]) -> None:
    """Raise OptionError for options that are given, but not known for such an engine."""
    if given := [name for name, is_given in others.items() if is_given]:
        raise OptionError(f"--engine {engine}: expected none of {', '.join(others)}, got {' and '.join(given)}")


def upgraded(question: TuneQuestion, json: str | None) -> list[Any]:
    """Try other parts of the machine, print what each gives, and return the records."""
    from trilane.common.schema import to_dict
    from trilane.engines.replaceable import no_upgrades
    from trilane.engines.upgrades import upgrades
    from trilane.output.pages.upgrades import upgrade_parts

    with working("trying other parts"):
        found = upgrades(question)
    show(json, *upgrade_parts(found, no_upgrades(question.fit), question.fit.generated))
    return [to_dict(one) for one in found]


def _own_engine(parts: MachineParts, gpu: str | None) -> str | None:
    """The engine's file that was measured on the machine at hand, where that is meant, and has no GPU."""
    from sim.machine.assembly import NO_GPU

    path = os.environ.get(OWN_ENGINE)
    if not path or parts.gpu is not None or parts.machine is not None or gpu != NO_GPU:
        return None
    note(f"engine: {path} ({OWN_ENGINE})")
    return path


def parts_of(parts: MachineParts) -> dict[str, Any]:
    """The parts that were named; where no GPU was, those of the machine at hand, with a remark on what was assumed."""
    from trilane.engines.tune.machine_found import found_machine
    from trilane.output.pages.caveats import assumption_text

    if parts.gpu is not None or parts.machine is not None:
        return vars(parts)
    named = {name: value for name, value in vars(parts).items() if value is not None}
    machine = found_machine(parts.cpu).without(*named)
    for assumption in machine.assumed:
        note(f"assumed {assumption_text(assumption)}")
    return machine.parts(**named)
