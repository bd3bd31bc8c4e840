"""Measured speeds that are nearest to a prediction: the same model, then its architecture, on the same GPU first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from sim.machine.hardware import Hardware
from traces.models.catalogue import architecture_of
from traces.models.names import parted
from traces.models.shape import ModelShape
from trilane.engines.accuracy.errors import (
    Regime,
    Speeds,
    architecture_of_row,
    measured,
    read_predictions,
    regime_of_row,
)
from trilane.engines.accuracy.measured_rows import MeasuredRow, machine_of, read_rows

MOST_NEAR = 12


class MeasuredPoint(NamedTuple):
    """A measured row and its speeds, measured and as predicted without the row's machine (held out)."""

    row: MeasuredRow
    regime: Regime
    gpu: str
    architecture: str
    measured: Speeds
    predicted: Speeds


@cache
def measured_points() -> tuple[MeasuredPoint, ...]:
    """Every bundled row that was predicted, in the order of its file."""
    predictions = read_predictions()
    return tuple(
        MeasuredPoint(
            row, regime_of_row(row), machine_of(row.machine).gpu.name, architecture_of_row(row), measured(row),
            predictions[row.id],
        )
        for row in read_rows() if row.id in predictions
    )


def near(shape: ModelShape, hardware: Hardware, regime: Regime) -> Sequence[MeasuredPoint]:
    """Decode speeds of the model or its architecture, at most ``MOST_NEAR``: the same model, GPU and regime first."""
    own, architecture, gpu = parted(shape.name).model, architecture_of(shape), hardware.gpu.name
    like = [
        point for point in measured_points()
        if point.measured.decode and point.predicted.decode and point.row.scored and point.architecture == architecture
    ]
    ranked = sorted(like, key=lambda point: (point.row.model != own, point.gpu != gpu, point.regime != regime))
    return ranked[:MOST_NEAR]
