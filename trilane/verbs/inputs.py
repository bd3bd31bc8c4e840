"""Inputs that a command line names: a scenario with single values changed, policies, traces."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trilane.common.quoting import quoted
from trilane.output.pages.output import note
from trilane.verbs.options import OptionError, model_named

if TYPE_CHECKING:
    from sim.runs.scenario import Scenario
    from traces.trace import Trace


_PARAMETER = "parameters."
DECODE_HINT = (
    "`trilane trace import LOG --prompt-tokens N` marks those after the first N of a text as decode, as does a column "
    "`phase` in plain rows"
)


def scenario_of(file: str | None, changes: Sequence[str] | None, policy: str | None = None) -> Scenario:
    """The scenario of ``file``, or the default one: ``policy`` is applied first, then ``changes`` (``--set``).

    The file's parameters are dropped, with a remark, if another policy runs: they were written for the file's policy.
    Raises ScenarioError, and OptionError where ``policy`` and ``changes`` name two policies.
    """
    from sim.runs.scenario import Scenario
    from trilane.study.policy_choice import policy_in

    scenario = Scenario.from_yaml(file) if file else Scenario()
    changed = changes_of(changes)
    single = {key.removeprefix(_PARAMETER): changed.pop(key) for key in [*changed] if key.startswith(_PARAMETER)}
    if isinstance(changed.get("policy"), str):
        changed["policy"] = policy_named(changed["policy"])
    if isinstance(changed.get("model"), str):
        changed["model"] = model_named(changed["model"])
    if policy is not None and changed.setdefault("policy", name := policy_named(policy)) != name:
        raise OptionError(f"expected one policy, got --policy {name} and --set policy={changed['policy']}")
    if isinstance(changed.get("policy"), str):
        changed["policy"], own = policy_in(changed["policy"], OptionError)
        if own:
            changed["parameters"] = {**own, **changed.get("parameters", {})}
    if changed.get("policy", scenario.policy) != scenario.policy and "parameters" not in changed:
        if scenario.parameters:
            note(f"the parameters in {file} are those of {scenario.policy}; {changed['policy']} runs without them")
        changed["parameters"] = {}
    if single:
        changed["parameters"] = {**changed.get("parameters", scenario.parameters), **single}
    return Scenario.from_dict({**scenario.to_dict(), **changed}, "--set") if changed else scenario


def scenario_for(file: str | None, changes: Sequence[str] | None, policies: Sequence[str] | None) -> Scenario:
    """The scenario that several policies play; parameters in ``changes`` are those of the only one.

    Raises what ``scenario_of`` raises, and OptionError for parameters where several policies run.
    """
    given = changes_of(changes)
    if (key := next((key for key in given if key == "parameters" or key.startswith(_PARAMETER)), None)) is None:
        return scenario_of(file, changes)
    if policies is not None and len(policies) == 1 and "{" not in policies[0]:
        return scenario_of(file, changes, policies[0])
    name = next(iter(given[key]), "NAME") if isinstance(given[key], Mapping) else key.removeprefix(_PARAMETER)
    raise OptionError(
        f"--set {key}: expected one policy in --policies, whose parameters these are; or write "
        f"'POLICY{{{name}: VALUE}}' there, or compare values with `trilane whatif --vary parameters.{name}=A,B`"
    )


def changes_of(changes: Sequence[str] | None) -> dict[str, Any]:
    """Keys and values of ``--set KEY=VALUE``, values in YAML. Raises ScenarioError."""
    from sim.runs.scenario import ScenarioError
    from trilane.common.yaml_files import parse_yaml

    values = {}
    for text in changes or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ScenarioError(f"--set: expected KEY=VALUE, got {quoted(text)}")
        values[key.strip()] = parse_yaml(value, f"--set {quoted(key)[1:-1]}", ScenarioError)
    return values


def note_kind(scenario: Scenario) -> None:
    """Say that times are those of a typical program, where the engine is a kind of programs."""
    from trilane.study.kinds import ends_of

    if ends_of(scenario) is not None:
        note(f"{scenario.engine} is a kind of programs: times are those of a typical one; compare shows the range")


def note_model(scenario: Scenario) -> None:
    """Say that times are those of another model's kernels, where the engine runs one model."""
    from sim.costs.engine import FittedEngine, load_engine
    from traces.models.names import parted

    engine = load_engine(scenario.engine)
    if isinstance(engine, FittedEngine) and engine.model not in (None, parted(scenario.model or "").model):
        note(
            f"{scenario.engine} runs {engine.model}: times of its layers, rows and drafts are those of that model's "
            f"kernels, whatever the model here"
        )


def inputs_of(file: str | None, scenario: Scenario) -> tuple[str | None, ...]:
    """The file of a scenario, those that it names, and the files of loaded policies: no result may be written there."""
    return (file, scenario.trace, scenario.calibration, scenario.hardware, scenario.model, *policy_files())


def policy_files() -> tuple[str, ...]:
    """The files from which policies have been loaded."""
    from policies.user_files import loaded_policies

    return tuple(loaded_policies().values())


def command_line() -> str:
    """The command that is running, for a shell."""
    return shlex.join(["trilane", *sys.argv[1:]])


# --- names ------------------------------------------------------------------------------------------------------------


def names_in(text: str, option: str = "--policies") -> list[str]:
    """The names in ``A,B``, each once. Raises OptionError."""
    names = [name.strip() for name in re.split(r",(?![^{]*\})", text) if name.strip()]  # no comma within braces
    if not names:
        raise OptionError(
            f"{option}: expected at least one name, or several with commas between them, got {quoted(text)}"
        )
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise OptionError(f"{option}: expected every name once, got {', '.join(repeated)} more often")
    return names


def whole_numbers(text: str, option: str, least: int = 1, most: int = 10**6) -> tuple[int, ...]:
    """The whole numbers in ``N,M``, ascending, each once. Raises OptionError."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < least or numbers[-1] > most:
        raise OptionError(
            f"{option}: expected whole numbers from {least} to {most:,} with commas between them, got {quoted(text)}"
        )
    return numbers


def choices_in(text: str) -> list[str]:
    """The policies in ``A,FILE.py:NAME``, any of them with parameters: ``A{window: 8}``. Raises as ``policies_in``."""
    return [choice for word in names_in(text) for choice in _registered(word)]


def policies_in(text: str) -> list[str]:
    """The names in ``A,FILE.py:NAME``; policies of files are registered. Raises OptionError, ChoiceError."""
    if "{" in text:
        raise OptionError(
            f"--policies: expected names without parameters, got {quoted(text)}; trilane compare and whatif take "
            f"policies with parameters"
        )
    return names_in(",".join(name for word in names_in(text) for name in _registered(word)))


def policy_named(text: str) -> str:
    """``text``, or the name of the one policy in ``FILE.py`` or ``FILE.py:NAME``; parameters in braces stay behind it.

    Raises OptionError, ChoiceError.
    """
    names = _registered(text)
    if len(names) > 1:
        raise OptionError(f"{text}: expected one policy, found {', '.join(names)}; name one as {text}:NAME")
    return names[0]


def _registered(text: str) -> Sequence[str]:
    from policies.user_files import load_policies, names_file

    word, brace, parameters = text.partition("{")
    names = load_policies(word) if names_file(word := word.strip()) else (word,)
    return [f"{name}{brace}{parameters}" for name in names]


# --- traces -----------------------------------------------------------------------------------------------------------


def read_any(name: str) -> Trace:
    """A trace by its bundled name, its file, or the file of a format that can be imported."""
    from traces.importers import import_trace, importable
    from traces.library import load_trace

    return import_trace(name) if importable(name) else load_trace(name)


def trace_in_words(name: str, trace: Trace) -> str:
    """A trace's name, marked as synthetic where the name does not say so, and where its weights are unknown."""
    kept = trace.provenance
    marks = ["synthetic"] if kept.get("synthetic") and not name.startswith("synthetic:") else []
    marks += ["synthetic prompts"] if kept.get("synthetic_prompts") else []
    marks += ["weights unknown"] if str(kept.get("weights")).startswith("unknown") else []
    return f"{name} ({', '.join(marks)})" if marks else name


def describe(scenario: Scenario) -> str:
    """A scenario in one line."""
    from traces.forecasts import NoisyForecasts
    from traces.library import load_trace
    from trilane.output.figures.words import memory_words

    trace = load_trace(scenario.trace)
    scenario = scenario.with_header(trace.provenance)
    memory = memory_words(scenario.cached_share, scenario.gpu_memory_gb)
    routing = f"routing of {trace_in_words(scenario.trace, trace)}"
    lengths = _lengths(scenario, trace)
    where = f"{_model(scenario, trace)} on {scenario.hardware}, engine {scenario.engine}"
    cards = [f"{scenario.gpus} GPUs"] if (scenario.gpus or 1) > 1 else []
    cards += ["each layer's experts divided among GPUs"] if scenario.split_mode == "expert" else []
    about = ", ".join([where, *cards, memory, lengths, routing, *_shortened(scenario)])
    if scenario.noisy_forecast_recall is None:
        return about
    return f"{about}; where it lacks forecasts, {NoisyForecasts(scenario.noisy_forecast_recall)}"


def _shortened(scenario: Scenario) -> list[str]:
    """Steps and tokens that stand for others, and drafts."""
    from sim.runs.sampling import tokens_a_step

    texts = []
    if scenario.sampled_steps is not None:
        texts.append(f"at most {scenario.sampled_steps} decode steps simulated")
    if scenario.sampled_prompt_tokens is not None:
        texts.append(f"prompts from the routing of at most {scenario.sampled_prompt_tokens} tokens")
    if (mean := tokens_a_step(scenario)) is not None:
        texts.append(f"drafts of {scenario.draft_tokens} tokens (mtp; {mean:.2f} tokens a step expected)")
    return texts


def _model(scenario: Scenario, trace: Trace) -> str:
    """The model with its format, or bits of a weight: ``qwen3-30b-a3b@q4_k_m``, ``qwen3-30b-a3b in 16 bits``."""
    from traces.models.catalogue import load_model

    shape = load_model(scenario.model) if scenario.model else trace.shape
    name = scenario.model or shape.name
    return name if "@" in name else f"{name} in {shape.weight_bits:g} bits"


def _lengths(scenario: Scenario, trace: Trace) -> str:
    """The batch with its prompts and answers, such as ``batch 1, 64+32 tokens``."""
    from sim.runs.sampling import steps_of

    steps, repeats, generated = steps_of(scenario, trace)
    tokens: Counter[int] = Counter()  # of each sequence's prompt
    for step in steps:
        if step.phase == "prefill":
            tokens.update(dict(zip(step.sequences, step.tokens, strict=True)))
    shortest, longest = (scenario.prompt_tokens or repeats * end(tokens.values(), default=0) for end in (min, max))
    length = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    return f"batch {scenario.batch}, {length}+{generated:,} tokens"
