"""The answers of ``trilane tune``, ``accuracy``, ``leaderboard`` and ``pays`` in Python; ``recommend`` and ``fit`` have
homes of their own. Each returns the record that its verb prints, which ``to_dict`` makes JSON-ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trilane.engines.accuracy.scores import Scores, bundled_scores, scores_of
from trilane.engines.question import Question
from trilane.engines.tune.settings import Goal, TuneQuestion
from trilane.engines.tune.tune import Tuning
from trilane.engines.tune.tune import tune as tune_question
from trilane.study.leaderboard.standings import Standing, read_entries, standings, with_played
from trilane.study.pays.gain_map import GainMap, gain_map
from trilane.study.pays.ideas import PaysQuestion


def tune(model: str, goal: Goal = "both", **asked: Any) -> Tuning:
    """Find the best command line for a model: ``tune("gpt-oss-20b", gpu="rtx-3060", ram="ddr4-3200").best.command``.

    ``asked``: fields of ``Question``: parts of the machine, weights, lengths, engine. ``goal``: the time that settings
    are compared by, "decode", "prompt" or "both". Raises FitError for what cannot run, HardwareError, ShapeError.
    """
    return tune_question(TuneQuestion(Question(model, **asked), goal))


def accuracy(rows: str | Path | None = None) -> Scores:
    """Score predicted speeds against measured ones: the bundled rows, or those of a CSV file. Raises RowsError."""
    return bundled_scores() if rows is None else scores_of(str(rows))


def leaderboard(policies: Sequence[str] = (), jobs: int = 1) -> list[Standing]:
    """Rank all policies over machines and batches, best first; those of ``policies`` without an entry are simulated.

    Raises LeaderboardError, ChoiceError.
    """
    return standings(with_played(read_entries(), policies, jobs, lambda progress: None))


def pays(idea: str, model: str, draws: int = 3, jobs: int = 1, **asked: Any) -> GainMap:
    """Simulate decoding with and without an idea, such as "cache" or "prefetch", on a machine and around it.

    ``asked``: fields of ``Question``: parts of the machine, weights, lengths, trace. ``draws``: of other texts, over
    which each gain is a mean. Raises PaysError, FitError.
    """
    return gain_map(PaysQuestion(idea, Question(model, **asked), draws), jobs)
