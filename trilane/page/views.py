"""The views of the page by name."""

from __future__ import annotations

from collections.abc import Mapping

from trilane.page.machine_views import machine, model, names
from trilane.page.view import View
from trilane.page.what_if_view import what_if

VIEWS: Mapping[str, View] = {
    "names": View(names), "machine": View(machine), "model": View(model), "what-if": View(what_if),
}
