"""Ask llama.cpp anew for ``llama_plans.csv``: python -m tests.trilane.engines.renew_llama_plans (needs xllamacpp)."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

from tests.kit.loadable_ggufs import FAMILIES, TWICE_AS_DEEP, write_loadable
from tests.trilane.engines.test_memory import FEW, MACHINES, PLANS, planned

if __name__ == "__main__":
    with PLANS.open("w", encoding="utf-8", newline="") as plans, tempfile.TemporaryDirectory() as folder:
        table = csv.writer(plans, lineterminator="\n")
        table.writerow(["family", "gpu", "cpu_layers", *FEW[0], "cache_mib", "compute_mib"])
        for family in (*FAMILIES, *TWICE_AS_DEEP):
            file = write_loadable(family, Path(folder) / "m.gguf")
            for gpu, cpu_layers in MACHINES:
                for asked, said in zip(FEW, planned(file, gpu, cpu_layers, FEW), strict=True):
                    sizes = (f"{sum(said['cache']):.2f}", f"{said['compute'][0]:.2f}")
                    table.writerow([family, int(gpu), cpu_layers, *asked.values(), *sizes])
