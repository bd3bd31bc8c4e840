"""docs/comparing.md names the policies that play only a short prompt, and has the lead of best-exact."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from policies.registry import policy_names, system
from tests.kit.commands import ROOT

PAGE = " ".join((ROOT / "docs" / "comparing.md").read_text(encoding="utf-8").split())  # without its line ends


def test_the_policies_that_read_every_token_are_those_of_the_page() -> None:
    found = re.search(r"Policies that read every token \((.*?)\)", PAGE, re.DOTALL)
    assert found is not None
    reads_tokens = [name for name in policy_names() if system(name).needs.tokens]
    bases = {name: name.partition("@")[0] for name in reads_tokens}  # which stand for their variants if they read, too
    named = {base if base in reads_tokens else name for name, base in bases.items()}
    assert set(re.findall(r"`(.+?)`", found[1])) == named


def test_the_lead_of_best_exact_is_that_of_the_held_out_scenarios() -> None:
    runs = pd.read_csv(ROOT / "notebooks/data/held_out.csv")
    tpot = runs.pivot_table(index=["trace", "hardware", "cached_share", "batch"], columns="policy", values="tpot_ms")
    published = [name for name in tpot if name in policy_names() and name not in ("best-exact", "mix", "oracle")]
    exact = [name for name in published if not system(name).needs.changes_routing]
    longer = np.exp(np.log(tpot[exact].div(tpot["best-exact"], axis=0)).mean()).min() - 1
    assert f"the best published policy that keeps the routing takes {100 * longer:.0f} % longer on average" in PAGE
