"""docs/comparing.md names the policies that play only a short prompt."""

from __future__ import annotations

import re

from policies.registry import policy_names, system
from tests.kit.commands import ROOT

PAGE = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")


def test_the_policies_that_read_every_token_are_those_of_the_page() -> None:
    found = re.search(r"Policies that read every token \((.*?)\)", PAGE, re.DOTALL)
    assert found is not None
    reads_tokens = {name.partition("@")[0] for name in policy_names() if system(name).needs.tokens}
    assert set(re.findall(r"`(.+?)`", found[1])) == reads_tokens
