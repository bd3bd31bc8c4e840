"""Fits that come with the package: of the bundled traces, and of two published ones that are not bundled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from traces.synthesis.routing_fit import RoutingFit

FITS = Path(__file__).with_name("fits.yaml")


@cache
def stored_fits() -> Mapping[str, RoutingFit]:
    """By the name of the trace, in the order of the file: ``python -m traces.synthesis.refit`` wrote it."""
    entries = yaml.safe_load(FITS.read_text(encoding="utf-8"))
    return {name: RoutingFit.from_dict({"name": name, **entry}) for name, entry in entries.items()}
