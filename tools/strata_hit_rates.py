"""Write the hit rates of Strata's cache, from synthetic routing: ``python -m tools.strata_hit_rates`` (two minutes)."""

from __future__ import annotations

from trilane.common.csv_files import write_csv
from trilane.engines.strata.cache import RATES, SwapTierRates, simulated

if __name__ == "__main__":
    write_csv([SwapTierRates._fields, *simulated()], RATES)
