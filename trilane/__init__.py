"""Trilane: time per token of policies that offload Mixture-of-Experts models, simulated and measured.

>>> from trilane import Scenario, simulate
>>> run = simulate(Scenario(policy="fiddler", hardware="rtx4090-ddr5"))
>>> run.metrics.tpot_ms, run.spans  # numbers, and a pandas frame of what every lane did

- One run: ``Scenario``, ``simulate``, ``Run``; ``measure`` runs the same scenario on this machine.
- Engines that people run: ``recommend``, ``tune``, ``fit``, ``accuracy``.
- Many runs: ``compare``, ``ablate``, ``sweep``, ``pays``, ``leaderboard``, ``validate``.
- A policy of your own: ``Policy``, ``Composition``, ``register``, the parts in ``trilane.parts``, and the laws that
  every policy must obey in ``trilane.testing``.
- Inputs: traces, models and hardware by name or file. Outputs: ``trilane.output.figures``, ``write_perfetto``.

Names are imported when they are first used, so that ``import trilane`` is fast. ``measure`` and ``validate`` need torch
and ``trilane.testing`` needs pytest and hypothesis; ``from trilane import *`` leaves them out where these are not
installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilane.common.lazy import lazy_names

if TYPE_CHECKING:  # the table of public names, read by ``lazy_names``
    from policies.mechanism.views import PolicyError as PolicyError
    from policies.protocols import Composition as Composition
    from policies.protocols import Needs as Needs
    from policies.registry import policy_names as policy_names
    from policies.registry import system as system
    from policies.system import BuildContext as BuildContext
    from policies.system import Policy as Policy
    from policies.system import System as System
    from policies.system import register as register
    from policies.user_files import load_policies as load_policies
    from realrun.replay.replay import measure as measure
    from sim.machine.hardware import Hardware as Hardware
    from sim.machine.hardware import hardware_names as hardware_names
    from sim.machine.hardware import load_hardware as load_hardware
    from sim.runs.run import Run as Run
    from sim.runs.scenario import Scenario as Scenario
    from sim.simulate import simulate as simulate
    from traces.file import read_trace as read_trace
    from traces.file import trace_names as trace_names
    from traces.file import write_trace as write_trace
    from traces.importers import import_trace as import_trace
    from traces.importers.route_trace_v1 import import_route_trace as import_route_trace
    from traces.library import load_trace as load_trace
    from traces.models.catalogue import load_model as load_model
    from traces.models.catalogue import model_names as model_names
    from traces.models.shape import ModelShape as ModelShape
    from traces.statistics import trace_statistics as trace_statistics
    from traces.trace import Trace as Trace
    from trilane import parts as parts
    from trilane import testing as testing
    from trilane.answers import accuracy as accuracy
    from trilane.answers import leaderboard as leaderboard
    from trilane.answers import pays as pays
    from trilane.answers import tune as tune
    from trilane.common.errors import TrilaneError as TrilaneError
    from trilane.engines.question import Question as Question
    from trilane.engines.recommend import recommend as recommend
    from trilane.fit.fit import Fit as Fit
    from trilane.fit.fit import fit as fit
    from trilane.output import figures as figures
    from trilane.output.figures.perfetto import write_perfetto as write_perfetto
    from trilane.output.figures.timelines import save_gantt as save_gantt
    from trilane.study.ablate import ablate as ablate
    from trilane.study.compare import compare as compare
    from trilane.study.draws import summary as summary
    from trilane.study.sweep.axes import vary as vary
    from trilane.study.sweep.grid import Grid as Grid
    from trilane.study.sweep.sweep import sweep as sweep
    from trilane.study.sweep.table import read_results as read_results
    from trilane.study.validation.validate import validate as validate

__getattr__, __dir__, __all__ = lazy_names(
    __name__, needs={"measure": ["torch"], "validate": ["torch"], "testing": ["pytest", "hypothesis"]}
)
