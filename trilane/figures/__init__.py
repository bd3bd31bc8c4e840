"""Pictures of runs and studies, for programs of your own.

>>> from trilane import Scenario, compare
>>> from trilane.figures import plot_tpot_bars, save_figure
>>> save_figure(plot_tpot_bars(compare(Scenario()).rows()), "tpot.png")

Of a run

- ``plot_gantt(run)``: one decode step, lane by lane; ``save_gantt(run, path)`` writes it;
- ``write_perfetto(runs, path)``: a timeline of whole runs for https://ui.perfetto.dev;

of a study

- ``plot_tpot_bars(comparison.rows())``: time per token of each policy, split by what the GPU does;
- ``plot_ladder(ablation)``: what each part of a policy gains (``trilane.ablate``);
- ``plot_hit_rate_curve(points)``: hit rate of one expert cache against its size;
- ``plot_agreement(agreement)``: predicted against measured times (``trilane.validate``);
- ``plot_measured_timeline(pairing)``: one decode step, measured and predicted, lane by lane;

of a sweep, from ``means_of(results)``, with ``results`` of ``trilane.sweep`` or ``trilane.read_results``

- ``plot_tpot_lines(means, x)``: time per token along an axis, a line for each policy;
- ``plot_heat_map(means, x, y)``: the fastest policy over two axes;
- ``plot_speedup_bars(means, baseline)``: speed-up of each policy over one of them;
- ``plot_hit_lines(means)``: hit rate against cache size, a line for each policy.

Functions of the first two groups return a matplotlib ``Figure``, which ``save_figure`` writes; those of a sweep return
a ``Picture`` of a figure and the frame that it draws, which ``save_picture`` writes. What cannot be drawn raises
``PictureError``. Names are imported when they are first used, so that ``import trilane.figures`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trilane.figures.agreement_scatter import plot_agreement as plot_agreement
    from trilane.figures.figure_files import Picture as Picture
    from trilane.figures.figure_files import PictureError as PictureError
    from trilane.figures.figure_files import save_figure as save_figure
    from trilane.figures.figure_files import save_picture as save_picture
    from trilane.figures.gantt import plot_gantt as plot_gantt
    from trilane.figures.gantt import save_gantt as save_gantt
    from trilane.figures.heat_map import plot_heat_map as plot_heat_map
    from trilane.figures.hit_lines import plot_hit_lines as plot_hit_lines
    from trilane.figures.hit_rate_curve import plot_hit_rate_curve as plot_hit_rate_curve
    from trilane.figures.ladder import plot_ladder as plot_ladder
    from trilane.figures.measured_timeline import plot_measured_timeline as plot_measured_timeline
    from trilane.figures.perfetto import write_perfetto as write_perfetto
    from trilane.figures.speedup_bars import plot_speedup_bars as plot_speedup_bars
    from trilane.figures.sweep_means import means_of as means_of
    from trilane.figures.tpot_bars import plot_tpot_bars as plot_tpot_bars
    from trilane.figures.tpot_lines import plot_tpot_lines as plot_tpot_lines

_MODULES = {
    "Picture": "figure_files",
    "PictureError": "figure_files",
    "means_of": "sweep_means",
    "plot_agreement": "agreement_scatter",
    "plot_gantt": "gantt",
    "plot_heat_map": "heat_map",
    "plot_hit_lines": "hit_lines",
    "plot_hit_rate_curve": "hit_rate_curve",
    "plot_ladder": "ladder",
    "plot_measured_timeline": "measured_timeline",
    "plot_speedup_bars": "speedup_bars",
    "plot_tpot_bars": "tpot_bars",
    "plot_tpot_lines": "tpot_lines",
    "save_figure": "figure_files",
    "save_gantt": "gantt",
    "save_picture": "figure_files",
    "write_perfetto": "perfetto",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trilane.figures' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"trilane.figures.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
