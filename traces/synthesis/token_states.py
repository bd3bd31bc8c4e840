"""States of the tokens of a text: random, with a given autocorrelation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]


def token_states(
    streams: Sequence[np.random.Generator], autocorrelation: Sequence[float], tokens: int, width: int
) -> Singles:
    """[texts, tokens, width], one text a stream: ``width`` stationary processes of variance 1 whose correlation at
    lag i is ``autocorrelation[i - 1]``, and 0 beyond.

    Amplitudes follow from the autocorrelation, phases are drawn (surrogate data: J. Theiler et al., Testing for
    nonlinearity in time series, Physica D 58, 1992). So each text has the autocorrelation itself, not only on average:
    a short text is as typical as a long one. A sequence that is no autocorrelation (its spectrum is negative somewhere)
    is replaced by the nearest that is one.
    """
    power = _spectrum(tuple(autocorrelation), tokens)
    bins = len(power)
    phase = np.exp(2j * np.pi * np.stack([rng.random((bins, width)) for rng in streams]))
    phase[:, 0] = np.sign(phase[:, 0].real)
    if tokens % 2 == 0:
        phase[:, -1] = np.sign(phase[:, -1].real)
    return np.asarray(np.fft.irfft(np.sqrt(tokens * power)[:, None] * phase, tokens, axis=1), np.float32)


@lru_cache(maxsize=8)
def _spectrum(autocorrelation: tuple[float, ...], tokens: int) -> NDArray[np.float64]:
    """Power by frequency, of a circle of ``tokens``, mean 1 over both halves of the circle."""
    lag = np.minimum(np.arange(tokens), tokens - np.arange(tokens))
    correlation = np.concatenate([[1.0], autocorrelation, np.zeros(tokens)])[lag]
    power = np.maximum(np.fft.fft(correlation).real, 0)
    return np.asarray(power[: tokens // 2 + 1] / power.mean())
