"""``trilane simulate``: one scenario under one policy, in every detail."""

from __future__ import annotations

from trilane.pages.output import JsonOption, check_picture, check_targets, show, working, write_json
from trilane.pages.run import keep_run, record_of, run_page
from trilane.verbs.inputs import describe, inputs_of, scenario_of
from trilane.verbs.options import PolicyOption, RunFiles, ScenarioOption, SetOption, grouped


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

    check_picture(files.gantt)
    chosen = scenario_of(scenario, changes, policy)
    check_targets(*files.paths, json, inputs=inputs_of(scenario, chosen))
    with working(f"simulating {chosen.policy}"):
        run = run_scenario(chosen)
    about = describe(chosen)
    show(json, *run_page(about, run.to_dict()))
    write_json(record_of(run), json)
    with working("writing"):
        keep_run(run, about, *files.paths)
