"""``python -m tests.trilane.study.accuracy.renew``: regime_errors.csv, after held_out.csv has changed."""

from __future__ import annotations

from trilane.study.accuracy.regime_errors import regime_errors, write_regime_errors
from trilane.study.accuracy.scores import bundled_scores

if __name__ == "__main__":
    scores = bundled_scores()
    write_regime_errors(list(regime_errors(scores.rows, scores.first)))
