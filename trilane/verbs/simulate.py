"""``trilane simulate``: one scenario under one policy, in every detail."""

from __future__ import annotations

from trilane.output.pages.output import JsonOption, check_targets, report, working
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
    from trilane.output.pages.run import record_of, run_page

    chosen = scenario_of(scenario, changes, policy)
    check_targets(files.spans, files.perfetto, json, picture=files.gantt, inputs=inputs_of(scenario, chosen))
    with working(f"simulating {chosen.policy}"):
        run = run_scenario(chosen)
    about = describe(chosen)
    report(json, record_of(run), *run_page(about, run.to_dict()))
    files.write(run, about)
