"""``trilane simulate``, ``compare`` and ``ablate``: a scenario under one policy, several, or parts of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.output.pages.output import (
    JsonOption,
    check_folder,
    check_targets,
    heading,
    note,
    progress,
    report,
    watching,
    working,
)
from trilane.study import DRAWS
from trilane.verbs import completion
from trilane.verbs.inputs import (
    DECODE_HINT,
    choices_in,
    describe,
    inputs_of,
    note_kind,
    note_model,
    scenario_for,
    scenario_of,
)
from trilane.verbs.options import (
    OWN_POLICY,
    DrawsOption,
    JobsOption,
    PolicyOption,
    RunFiles,
    ScenarioOption,
    SetOption,
    grouped,
    processes,
)

if TYPE_CHECKING:
    from sim.runs.run import Run
    from trilane.study.compare import Comparison


@grouped
def simulate(
    scenario: ScenarioOption = None,
    policy: PolicyOption = None,
    changes: SetOption = None,
    *,
    files: RunFiles,
    json: JsonOption = None,
) -> None:
    """Simulate one policy and report where the time goes."""
    from sim.simulate import simulate as run_scenario
    from trilane.output.pages.run import record_of, run_page

    chosen = scenario_of(scenario, changes, policy)
    check_targets(files.spans, files.perfetto, json, picture=files.gantt, inputs=inputs_of(scenario, chosen))
    with working(f"simulating {chosen.policy}"):
        run = run_scenario(chosen)
    note_kind(chosen)
    note_model(chosen)
    about = describe(chosen)
    report(json, record_of(run), *run_page(about, run.to_dict()))
    files.write(run, about)


# --- compare ----------------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
TIMELINE_STEPS = 6  # of each policy, so that the combined timeline stays small


def compare(
    scenario: ScenarioOption = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B", autocompletion=completion.policies,
                     help=f"Policies. {OWN_POLICY}. Parameters may follow: 'dali{{window: 8}},dali'. Default: all that "
                          "the scenario can run."),
    ] = None,
    changes: SetOption = None,
    draws: DrawsOption = DRAWS,
    jobs: JobsOption = None,
    json: JsonOption = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Also write tpot.png, gantt-POLICY.png, and timeline.json.gz for Perfetto."),
    ] = None,
) -> None:
    """Rank offloading policies by time per token.

    Every policy gets the same routing, machine and memory. The fastest on average comes first.
    """
    from trilane.output.figures.words import tuned
    from trilane.output.pages.columns import COMPARED, tabulate
    from trilane.study.compare import compare as run_all

    check_folder(out)
    names = None if policies is None else choices_in(policies)
    chosen = scenario_for(scenario, changes, names)
    check_targets(json, inputs=inputs_of(scenario, chosen))
    with watching("simulating") as watch:
        found = run_all(chosen, names, draws=draws, jobs=processes(jobs), watch=watch)
    note_model(chosen)
    about = describe(chosen)
    for name, reason in found.refused.items():
        note(f"left out {name}: {reason}")
    rows = found.rows()
    played = {sequence for runs in found.draws.values() for run in runs for sequence in run["sequences"]}
    remark = tuned(list(found.draws), found.scenario.trace, played)
    remarks = [f"\n{text}" for text in (_sampled(found), _speculative(found), _prompts_alone(found), remark) if text]
    shared = {key: value for key, value in found.scenario.to_dict().items() if key not in ("policy", "parameters")}
    record = {"scenario": shared, "policies": list(found.draws), "runs": rows, "refused": found.refused}
    report(json, record, heading(about), *tabulate(COMPARED, rows), *remarks)
    if out:
        _draw(found.runs, rows, Path(out), about, remark)


def _sampled(found: Comparison) -> str:
    """A remark where few decode steps stand for the answer."""
    from trilane.output.figures.words import sampled

    scenario = found.scenario
    if scenario.sampled_steps is None:
        return ""
    return sampled(found.runs[0].metrics.decode_steps, scenario.generated_tokens or 0, scenario.batch)


def _prompts_alone(found: Comparison) -> str:
    """A remark where the trace has no decode tokens to time."""
    from traces.layout import DECODE
    from traces.library import load_trace

    if found.runs[0].metrics.decode_steps or (load_trace(found.scenario.trace).phase == DECODE).any():
        return ""
    return f"no TPOT: all tokens of {found.scenario.trace} are of prompts; {DECODE_HINT}"


def _speculative(found: Comparison) -> str:
    """A remark where steps make more than one token."""
    from sim.runs.vocabulary import Label

    run = found.runs[0]
    if Label.SPECULATIVE not in run.labels:
        return ""
    metrics = run.metrics
    whose = "other tokens, drawn at random" if run.scenario.rejected_drafts == "drawn" else "the recorded tokens"
    return (
        f"times are of accepted tokens: in the first draw {metrics.decode_steps} steps of "
        f"{metrics.tokens_per_step:.2f} tokens; rejected drafts are computed with the experts of {whose}"
    )


def _draw(runs: Sequence[Run], rows: Sequence[Row], folder: Path, about: str, remark: str) -> None:
    """A bar chart, a Gantt chart of each run, and one timeline of all runs."""
    from trilane.output.figures import plot_tpot_bars, save_figure, save_gantt, write_perfetto

    folder.mkdir(parents=True, exist_ok=True)
    save_figure(plot_tpot_bars(rows, about, remark), folder / "tpot.png")
    for run in progress(runs, "drawing"):
        save_gantt(run, folder / f"gantt-{_in_file_names(run.policy)}.png", about=about)
    write_perfetto(runs, folder / "timeline.json.gz", TIMELINE_STEPS)
    note(f"pictures and a timeline for https://ui.perfetto.dev are in {folder}/")


def _in_file_names(policy: str) -> str:
    """A policy in the name of a file, which no system refuses: ``dali-window-8`` for ``dali{window: 8}``."""
    return re.sub(r"[^\w.@-]+", "-", policy).strip("-")


# --- ablate -----------------------------------------------------------------------------------------------------------

def ablate(
    policy: Annotated[
        str, typer.Argument(metavar="NAME", help=f"Policy; see [bold]trilane policies[/]. {OWN_POLICY}.")
    ],
    scenario: ScenarioOption = None,
    changes: SetOption = None,
    draws: DrawsOption = DRAWS,
    jobs: JobsOption = None,
    json: JsonOption = None,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the ladder.")] = None,
) -> None:
    """Switch a policy's parts on one after the other, and off one by one.

    Placement off: no expert is on the GPU at the start.

    Assigner off: every expert is computed where its weights are (copied, if the policy computes on the GPU alone).

    Cache off: the experts that are on the GPU at the start stay there, and no others are kept; prefetches into the
    cache go to staging slots.

    Prefetcher and router off: no prefetches, and the experts that the model's own router chose.
    """
    from trilane.output.pages.columns import ABLATED, tabulate
    from trilane.study.ablate import ablate as switch_parts

    chosen = scenario_of(scenario, changes, policy)
    check_targets(json, picture=png, inputs=inputs_of(scenario, chosen))
    with watching("simulating") as watch:
        found = switch_parts(chosen, draws=draws, jobs=processes(jobs), watch=watch)
    empty_line: list[dict[str, str]] = [{}] if found.all_but_one else []
    rows = [*found.ladder, *empty_line, *found.all_but_one]
    about = describe(chosen)
    report(json, found._asdict(), heading(f"{chosen.policy}: {about}"), *tabulate(ABLATED, rows))
    for row in rows:
        if row.get("refused"):
            note(f"{row['label']}: {row['refused']}")
    if png:
        from trilane.output.figures import plot_ladder, save_figure

        save_figure(plot_ladder(found, about), png)
        note(f"picture: {png}")
