"""Write the hit rates of Strata's cache, from synthetic routing: ``python -m tools.strata_hit_rates`` (two minutes)."""

from __future__ import annotations

from trilane.common.csv_files import write_csv
from trilane.engines.strata.cache import RATES, HitRates, simulated

if __name__ == "__main__":
    write_csv([HitRates._fields, *simulated()], RATES)
