"""Pictures of runs and studies, for programs of your own.

>>> from trilane import Scenario, compare
>>> from trilane.output.figures import plot_tpot_bars, save_figure
>>> save_figure(plot_tpot_bars(compare(Scenario()).rows()), "tpot.png")

Pictures of a run

- ``plot_gantt(run)``: one decode step, lane by lane; ``save_gantt(run, path)`` writes it; by default the
  ``median_decode_step(run.spans)``;
- ``write_perfetto(runs, path)``: a timeline of whole runs for https://ui.perfetto.dev;

of a study

- ``plot_tpot_bars(comparison.rows())``: time per token of each policy, split by what the GPU does;
- ``plot_ladder(ablation)``: what each part of a policy gains (``trilane.ablate``);
- ``plot_hit_rate_curve(points)``: hit rate of one expert cache against its size;
- ``plot_agreement(agreement)``: predicted against measured times (``trilane.validate``);
- ``plot_engine(rows)``: predicted against measured times of an engine (``trilane validate --engine``);
- ``plot_accuracy(scores)``: predicted against measured speeds of other people's machines (``trilane accuracy``);
- ``plot_requests(predictions)``: predicted against measured windows of Strata (``trilane accuracy --requests``);
- ``plot_papers(board)``: simulated against published figures (``trilane papers``);
- ``plot_leaderboard(standings)``: the best policies in every setting (``trilane leaderboard``), as a ``Picture``;
- ``plot_pays(gain_map)``: what an idea gains and where its break-even is (``trilane pays``), as a ``Picture``;
- ``plot_quality(found)``: time per token against what it costs in quality (``trilane quality``);
- ``plot_measured_timeline(pairing)``: one decode step, measured and predicted, lane by lane;

of a sweep, from ``means_of(results)``, with ``results`` of ``trilane.sweep`` or ``trilane.read_results``

- ``plot_tpot_lines(means, x)``: time per token along an axis, a line for each policy;
- ``plot_heat_map(means, x, y)``: the fastest policy over two axes;
- ``plot_speedup_bars(means, baseline)``: speed-up of each policy over one of them;
- ``plot_hit_lines(means)``: hit rate against cache size, a line for each policy.

Functions of the first two groups return a matplotlib ``Figure``, which ``save_figure`` writes; those of a sweep,
``plot_pays`` and ``plot_leaderboard`` return a ``Picture`` of a figure and the frame that it draws, which
``save_picture`` writes. What cannot be drawn raises ``PictureError``. Names are imported when they are first used, so
that ``import trilane.output.figures`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilane.common.lazy import lazy_names

if TYPE_CHECKING:  # the table of public names, read by ``lazy_names``
    from trilane.output.figures.bars import plot_ladder as plot_ladder
    from trilane.output.figures.bars import plot_tpot_bars as plot_tpot_bars
    from trilane.output.figures.figure_files import Picture as Picture
    from trilane.output.figures.figure_files import PictureError as PictureError
    from trilane.output.figures.figure_files import save_figure as save_figure
    from trilane.output.figures.figure_files import save_picture as save_picture
    from trilane.output.figures.leaderboard import plot_leaderboard as plot_leaderboard
    from trilane.output.figures.lines import plot_hit_lines as plot_hit_lines
    from trilane.output.figures.lines import plot_hit_rate_curve as plot_hit_rate_curve
    from trilane.output.figures.lines import plot_tpot_lines as plot_tpot_lines
    from trilane.output.figures.maps import plot_heat_map as plot_heat_map
    from trilane.output.figures.maps import plot_pays as plot_pays
    from trilane.output.figures.papers import plot_papers as plot_papers
    from trilane.output.figures.perfetto import write_perfetto as write_perfetto
    from trilane.output.figures.published import plot_accuracy as plot_accuracy
    from trilane.output.figures.quality import plot_quality as plot_quality
    from trilane.output.figures.scatter import plot_agreement as plot_agreement
    from trilane.output.figures.scatter import plot_engine as plot_engine
    from trilane.output.figures.speedup_bars import plot_speedup_bars as plot_speedup_bars
    from trilane.output.figures.strata import plot_requests as plot_requests
    from trilane.output.figures.sweep_means import means_of as means_of
    from trilane.output.figures.timelines import median_decode_step as median_decode_step
    from trilane.output.figures.timelines import plot_gantt as plot_gantt
    from trilane.output.figures.timelines import plot_measured_timeline as plot_measured_timeline
    from trilane.output.figures.timelines import save_gantt as save_gantt

__getattr__, __dir__, __all__ = lazy_names(__name__)
