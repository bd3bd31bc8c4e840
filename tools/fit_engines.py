"""Fit the engines' numbers to measured speeds, and score them on machines that they were not fitted to.

    python -m tools.fit_engines            scores: all rows, and one machine left out at a time
    python -m tools.fit_engines --write    and writes sim/costs/engines/*.yaml and held_out.csv
"""

from __future__ import annotations
