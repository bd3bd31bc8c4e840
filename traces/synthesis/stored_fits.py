"""Fits that come with the package: of the bundled traces, and of two published ones that are not bundled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from traces.synthesis.routing_model import RoutingFit
from traces.yaml_data import read_yaml

FITS = Path(__file__).with_name("fits.yaml")


@cache
def stored_fits() -> Mapping[str, RoutingFit]:
    """By the name of the trace, in the order of the file: ``python -m tools.refit_routing`` wrote it."""
    return {name: RoutingFit.from_dict({"name": name, **entry}) for name, entry in read_yaml(FITS).items()}
