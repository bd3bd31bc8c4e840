"""``python -m tests.trilane.engines.accuracy.renew``: regime_errors.csv, after held_out.csv has changed."""

from __future__ import annotations

from trilane.common.csv_files import write_csv
from trilane.engines.accuracy.errors import REGIME_ERRORS, RegimeAccuracy, regime_errors
from trilane.engines.accuracy.scores import bundled_scores

if __name__ == "__main__":
    scores = bundled_scores()
    write_csv([RegimeAccuracy._fields, *regime_errors(scores.rows, scores.first)], REGIME_ERRORS)
