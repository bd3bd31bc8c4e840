"""``trilane policies``, ``models``, ``hardware``, ``engines``: everything that has a name, with its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from trilane.common.units import GB
from trilane.output.pages.output import (
    JsonOption,
    Part,
    check_targets,
    heading,
    named_as,
    note,
    pairs,
    report,
    table,
    working,
)
from trilane.verbs.inputs import policies_in, policy_files
from trilane.verbs.options import OWN_POLICY, OptionError, model_named

if TYPE_CHECKING:
    from policies.protocols import Needs
    from policies.registry import System
    from sim.costs.engine import InferenceEngine
    from sim.machine.hardware import Hardware
    from traces.models.shape import ModelShape
    from trilane.engines.accuracy.fitted_numbers import FittedNumber


_EXAMPLE = "qwen3-30b-a3b"  # the model of the table of weight formats


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help=f"One policy, with its parameters. {OWN_POLICY}.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Policies: what they do, what they need, their parameters and sources."""
    from policies.registry import SYSTEMS, system

    chosen = [system(policy) for policy in policies_in(name)] if name else list(SYSTEMS.values())
    check_targets(json, inputs=policy_files())
    page = [part for entry in chosen for part in _policy_page(entry)]
    if not name:
        columns = ["name", "GPU\nonly", "needs", "what it does"]
        page = [table(columns, map(_policy_row, chosen), 4, widest={"needs": 28, "what it does": 56}), _MARKS]
    report(json, {"policies": [_policy_facts(entry) for entry in chosen]}, *page)


_MARKS = """
NAME@impl  the system as its code was released; other names after an @ are other readings of it
GPU only   every expert runs on the GPU; the other policies use the CPU too
needs      of the trace: forecasts as KIND@LAYERS AHEAD, router scores, single tokens; calibration: other prompts
*, ~       clairvoyant; changes the routing

`trilane policies NAME` shows parameters and the source."""


def _policy_row(entry: System) -> list[str]:
    """A variant, such as ``fiddler@impl``, is indented below its system."""
    from trilane.output.figures.marks import marked

    indent = "  " if "@" in entry.name else ""
    gpu_only = "yes" if entry.needs.gpu_only else ""
    return [indent + marked(entry.name, entry.needs.kind), gpu_only, _needs(entry.needs) or "-", entry.summary]


def _policy_page(entry: System) -> list[Part]:
    system, at, _ = entry.name.partition("@")
    facts = [
        ("what it does", entry.summary),
        *([("variant of", system)] if at else []),
        ("source", entry.source),
        *([("runs", "every expert on the GPU")] if entry.needs.gpu_only else []),
        ("needs", _needs(entry.needs) or "nothing beyond the routing"),
        *([("changes", "the routing, and with it what the model computes")] if entry.needs.changes_routing else []),
    ]
    rows = [[name, repr(default), kind] for name, kind, default in entry.parameter_table()]
    columns = ["parameter", "default", "type"]
    parameters: list[Part] = ["", table(columns, rows, 3, widest={"type": 70})] if rows else []
    own_first = [kind.__doc__ for kind in entry.parameters.__mro__ if is_dataclass(kind) and kind.__doc__]
    return [heading(entry.name), pairs(facts), *parameters, *(f"\n{cleandoc(text)}" for text in own_first)]


def _policy_facts(entry: System) -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "source": entry.source,
        "forecasts": [f"{kind}@{lookahead}" for kind, lookahead in entry.needs.forecasts],
        "needs": _other_needs(entry.needs),
        "gpu_only": entry.needs.gpu_only,
        "changes_routing": entry.needs.changes_routing,
        "parameters": [{"name": n, "type": kind, "default": default} for n, kind, default in entry.parameter_table()],
    }


def _needs(needs: Needs) -> str:
    """The needs of a policy, in words."""
    ahead: dict[str, list[int]] = {}
    for kind, lookahead in needs.forecasts:
        ahead.setdefault(kind, []).append(lookahead)
    spans = {kind: sorted({min(steps), max(steps)}) for kind, steps in ahead.items()}
    return ", ".join([*(f"{kind}@{'-'.join(map(str, span))}" for kind, span in spans.items()), *_other_needs(needs)])


def _other_needs(needs: Needs) -> list[str]:
    flags = ("scores", "tokens", "calibration", "future", "uniform_sizes")
    words = [flag.replace("_", " ") for flag in flags if getattr(needs, flag)]
    words += ["narrow copies"] if needs.narrow_share is not None else []
    return words + ([f"batch <= {needs.max_batch}"] if needs.max_batch else [])


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]",
                       help="One model, with its sources; [bold]NAME:N[/]: its first N MoE layers; "
                            "[bold]NAME@q4_k_m[/]: the model in that format. Or a config.json, or a GGUF file."),
    ] = None,
    quantisations: Annotated[
        bool, typer.Option("--quantisations", help=f"Formats of weights, with the sizes of NAME or {_EXAMPLE}.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Models: the sizes on which time and memory depend."""
    from traces.models.catalogue import aliases, load_model, model_names

    check_targets(json)
    name = model_named(name) if name else None
    if quantisations:
        from trilane.output.pages.parts import quantisation_facts, quantisation_page

        shape = load_model(name or _EXAMPLE)
        facts = quantisation_facts(shape)
        report(json, {"model": shape.name, "quantisations": facts}, *quantisation_page(shape, facts))
        return
    others = {} if name else {other: alias.model for other, alias in aliases().items()}
    shapes = [load_model(model) for model in ([name] if name else model_names()) if model not in others]
    if name:
        facts_of_name = [*_with_sources(shapes[0].to_dict(), shapes[0].sources), *_router(shapes[0])]
        page: list[Part] = [heading(name), pairs(facts_of_name)]
    else:
        columns = ["name", "MoE layers", "experts", "top-k", "shared", "bits", "MB/expert", "experts GB", "rest GB"]
        same = heading("\nnames of models with the shape of another")
        page = [table(columns, map(_model_row, shapes)), same, pairs(sorted(others.items())), _OTHER_MODELS]
    report(json, {"models": [shape.to_dict() for shape in shapes], "aliases": others}, *page)


_OTHER_MODELS = """
GB = 10^9 bytes. `trilane models NAME` shows every number with its source.
Any other model: give the path of its config.json, or of its GGUF file, in place of NAME.
NAME@q4_k_m is a model in that format; `trilane models --quantisations` lists the formats."""


def _model_row(shape: ModelShape) -> list[str]:
    sizes = sorted({size / 1e6 for size in shape.expert_bytes_by_layer})
    size = f"{sizes[0]:.1f}" if len(sizes) == 1 else f"{sizes[0]:.1f}-{sizes[-1]:.1f}"
    return [
        shape.name, str(shape.moe_layers), str(shape.experts), str(shape.top_k), str(shape.shared_experts),
        f"{shape.weight_bits:g}", size, f"{shape.routed_bytes / GB:.1f}", f"{shape.non_expert_bytes / GB:.1f}",
    ]


def _with_sources(values: Mapping[str, Any], sources: Mapping[str, str]) -> list[tuple[str, str, str]]:
    rest = sources.get("*", "")
    absent: tuple[object, ...] = ([], (), None)
    shown = ((key, value) for key, value in values.items() if key not in ("name", "sources") and value not in absent)
    return [(key, str(value), sources.get(key, rest)) for key, value in shown]


def _router(shape: ModelShape) -> list[tuple[str, str, str]]:
    """How the router is balanced and scores, and whose statistics made-up routing has."""
    from traces.models.routers import router_of
    from traces.synthesis.spread import basis_in_words

    router = router_of(shape)
    known = [] if router is None else [
        (key, str(value), router.source)
        for key, value in (("balance", router.balance), ("scoring", router.scoring), ("expert_groups", router.groups))
    ]
    return [*known, ("routing", basis_in_words(shape), "docs/traces.md, Synthetic routing")]


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One machine, with its sources; made of parts: rtx-4080+ddr5-5600, "
                                              "2x-rtx-3090+ddr4-3200 (then with each of its GPUs)."),
    ] = None,
    parts: Annotated[bool, typer.Option("--parts", help="The parts that make up such names.")] = False,
    json: JsonOption = None,
) -> None:
    """Machines: every number with its source and its confidence. A disk below them is named by a scenario
    (--set disk=nvme-4x4), or stated by a file's section disk."""
    from sim.machine.cards import load_machine
    from sim.machine.hardware import hardware_names

    check_targets(json, inputs=[name])
    if parts:
        from sim.machine.parts import all_parts
        from trilane.output.pages.parts import part_facts, parts_page

        every_part = all_parts()
        report(json, {"parts": [part_facts(part) for part in every_part]}, *parts_page(every_part))
        return
    machines = load_machine(name).cards if name else [load_machine(machine) for machine in hardware_names()]
    columns = ["name", "GPU GB", "GPU GB/s", "CPU GB/s", "link GB/s", "what it is"]
    every = [table(columns, map(_machine_row, machines), wrap=True), _OTHER_MACHINES]
    further = [part for machine in machines[1:] for part in ("", *_numbers(machine))]
    page = [*_machine_page(machines[0]), *further] if name else every
    report(json, {"hardware": [_machine_facts(machine) for machine in machines]}, *page)


_OTHER_MACHINES = """
GB = 10^9 bytes; GB/s are achieved, not nominal.
`trilane hardware NAME` shows every number with its source.
Other machines by their parts: rtx-4080+ddr5-5600; `trilane hardware --parts` lists the parts."""


def _machine_row(machine: Hardware) -> list[str]:
    return [
        machine.name, f"{machine.gpu.memory_bytes / GB:.1f}", f"{machine.gpu.read_bytes_per_s / GB:.0f}",
        f"{machine.cpu.read_bytes_per_s / GB:.1f}", f"{machine.link.expert_bytes_per_s / GB:.1f}", machine.about,
    ]


def _machine_page(machine: Hardware) -> list[Part]:
    from trilane.output.pages.profile import decisions_note, profile_page

    decisions = [[cost.pop("policy"), *(f"{ns:,.0f}" for ns in cost.values())] for cost in _plan_costs(machine)]
    headers = ("\npolicy", "plan\nns", "and per\nactive expert", "forecast\nns", "and per\nactive expert", "cache\nns",
               "and per\nactive expert")
    scale = f"{machine.host.plan_factor:g} (host.plan_factor)"
    notes: list[Part] = [heading("notes"), *(f"- {text}" for text in machine.notes), ""] if machine.notes else []
    return [
        *_numbers(machine), "",
        *notes,
        *([*profile_page(machine.measured_profile()), ""] if machine.measured else []),
        heading("cost of a policy's decisions on the host, per layer"), table(headers, decisions), "",
        f"From sim/machine/plan_costs.yaml, which names the sources, times {scale}.",
        *([decisions_note(machine.measured_profile())] if machine.measured else []),
    ]


def _numbers(machine: Hardware) -> list[Part]:
    columns = ("key", "value", "confidence", "source")
    rows = [[str(fact[column]) for column in columns] for fact in _machine_facts(machine)["numbers"]]
    return [heading(f"{machine.name}: {machine.about}"), table(columns, rows, text_columns=4, wrap=True)]


def _plan_costs(machine: Hardware) -> list[dict[str, Any]]:
    """The time that the host takes for each policy's two decisions in a layer, and for its cache."""
    from policies.registry import policy_names
    from sim.machine.plan_costs import Decision

    costs, rows = machine.decisions, []
    for policy in dict.fromkeys((*costs.plan, *costs.foresee, *policy_names())):
        decisions = {decision: costs.of(decision, policy) for decision in get_args(Decision)}
        times = {f"{name}_{key}": ns for name, cost in decisions.items() for key, ns in cost._asdict().items()}
        rows.append({"policy": policy, **times})
    return rows


def _machine_facts(machine: Hardware) -> dict[str, Any]:
    numbers = [{"key": key, **number._asdict()} for key, number in machine.numbers().items()]
    facts = {"name": machine.name, "about": machine.about, "numbers": numbers, "plan_costs": _plan_costs(machine)}
    facts |= {"notes": list(machine.notes)} if machine.notes else {}
    return facts | ({"measured": machine.document()["measured"]} if machine.measured else {})


# --- engines ----------------------------------------------------------------------------------------------------------

_NOTE = """
fitted   its times of layers and shares of rates are fitted to speeds that other people measured (`trilane accuracy`)
counted  its kernels are counted, with times of the machine; engines of papers add the overheads of their programs
kind     its numbers have a spread over programs; times of your own program set them: --calibrate (--template)

`trilane engines NAME` shows every number with its source, and how many machines' rows hold one that was fitted; a file
like those in sim/costs/engines is an engine, too. tune alone knows colibri and ds4 (docs/tune.md)."""


def engines(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help="One engine, with the sources of its numbers.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="ROWS.csv",
                     help="Set numbers of NAME, a kind of programs such as eager, from one to three measured or "
                          "published speeds in this file, and predict its other rows."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE.yaml", callback=named_as(".yaml", ".yml"),
                     help="With --calibrate: write the engine, for --set engine=FILE.yaml."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="ROWS.csv", callback=named_as(".csv"), help="Write an example of such rows."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Engines: the software that runs a model, as numbers that say how fast a machine is with it."""
    from sim.costs.engine import FittedEngine, engine_names, load_engine

    if out is not None and calibrate is None:
        raise OptionError(f"--out {out}: expected --calibrate with it, whose engine it writes")
    check_targets(json, out, template, inputs=(name, calibrate))
    if template is not None:
        _write_template(template)
    elif calibrate is not None:
        _calibrate(name, calibrate, out, json)
    if template is not None or calibrate is not None:
        return
    chosen = [load_engine(one) for one in ([name] if name else engine_names())]
    rows = [[one.name, _kind(one), one.about] for one in chosen]
    page = _page(chosen[0]) if name else [table(["name", "numbers", "what it is"], rows, 3), _NOTE]
    report(json, {"engines": [_facts(one, fitted=isinstance(one, FittedEngine)) for one in chosen]}, *page)


def _kind(engine: InferenceEngine) -> str:
    from sim.costs.engine import CountedEngine

    return "fitted" if not isinstance(engine, CountedEngine) else "kind" if engine.spread else "counted"


def _write_template(path: str) -> None:
    from trilane.study.calibration_rows import write_template

    write_template(path)
    note(f"{path}: an example; put your own rows there, then: trilane engines eager --calibrate {path}")


def _calibrate(name: str | None, rows_file: str, out: str | None, json: str | None) -> None:
    from sim.costs.engine import engine_names
    from trilane.common.names import unknown
    from trilane.output.pages.calibration import calibration_page
    from trilane.study.calibration_rows import calibrate_rows, read_speed_rows, write_engine

    if name is None:
        raise OptionError("--calibrate: expected a kind of programs: trilane engines eager --calibrate ROWS.csv")
    if name not in engine_names():
        raise OptionError(f"--calibrate: {unknown('engine', name, engine_names())}")
    rows = read_speed_rows(rows_file, name)
    with working(f"{len(rows)} rows on {name}"):
        found = calibrate_rows(rows, name)
    report(json, found.to_dict(), *calibration_page(found))
    if out is not None:
        write_engine(found, out, rows_file)
        note(f"engine: {out}; use it with --set engine={out}")


def _page(engine: InferenceEngine) -> list[Part]:
    held, spread = _held(engine), getattr(engine, "spread", {})
    columns = ("number", "value", *["range"] * bool(spread), *["held by"] * bool(held), "confidence", "source")
    numbers = [
        [key, f"{n.value:g}" if isinstance(n.value, int | float) else str(n.value),
         *["{:g}..{:g}".format(*spread[key]) if key in spread else ""] * bool(spread),
         *[_holders(held.get(key))] * bool(held), n.confidence, n.source]
        for key, n in engine.flat().items()
    ]
    numbers_table = table(columns, numbers, len(columns), widest={"source": 90})
    facts = [("what it is", engine.about), *([("set by", ", ".join(engine.set_by))] if engine.set_by else [])]
    facts += [("fitted to", fit)] if (fit := getattr(engine, "fit", None)) else []
    facts += [(f"times set, {place}.", f"{one.number}: {one.why}")
              for place, one in enumerate(getattr(engine, "calibrated", ()), 1)]
    return [heading(engine.name), pairs(facts), "", *([numbers_table] if numbers else [])]


def _held(engine: InferenceEngine) -> Mapping[str, FittedNumber]:
    """How much rows say of the numbers of a fitted engine, by key."""
    from trilane.engines.accuracy.fitted_numbers import fitted_numbers

    return fitted_numbers() if getattr(engine, "fit", None) else {}


def _holders(number: FittedNumber | None) -> str:
    """Words for the machines whose rows hold a number; none for one that is not fitted."""
    if number is None:
        return ""
    return f"{number.machines} machine{'s' * (number.machines > 1)}" if number.machines else "no row"


def _facts(engine: InferenceEngine, *, fitted: bool) -> dict[str, Any]:
    held = {key: {"held": number._asdict()} for key, number in _held(engine).items()}
    numbers = {key: {**number._asdict(), **held.get(key, {})} for key, number in engine.flat().items()}
    facts = {"name": engine.name, "about": engine.about, "fitted": fitted, "set_by": list(engine.set_by)}
    facts |= {"fitted_to": fit} if (fit := getattr(engine, "fit", None)) else {}
    if spread := getattr(engine, "spread", {}):
        facts["spread"] = {key: ends._asdict() for key, ends in spread.items()}
    return {**facts, "numbers": numbers}
