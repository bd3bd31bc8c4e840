"""Logits of synthetic routers, layer by layer.

A router's logit for an expert is a preference of the text plus a response to the token's state:

    logit = sqrt(p) preference + sqrt(1 - p) (sqrt(1 - n) state . direction + sqrt(n) noise)

where p is the layer's preference_share and n the noise_share. Every expert of every layer has its own direction, like
the rows of a router's matrix. The state belongs to the token and changes little between layers, so that similar tokens
choose similar experts in all layers; this makes a later layer predictable from an earlier one. Preferences belong
partly to the model (the same for all texts) and partly to the text; those of a prompt differ a little from those of its
answer. Each logit is approximately a standard normal variate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from traces.synthesis.routing_model import RoutingModel

Singles = NDArray[np.float32]
_MODEL, _TEXT = 1, 2  # kinds of random streams
_MAGNITUDE = np.int32(0x7FFFFFFF)


@dataclass(frozen=True)
class Texts:
    """Texts by their own seeds, so that a text does not depend on the others that are made with it."""

    seeds: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    generated_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return len(self.seeds) * (self.prompt_tokens + self.generated_tokens)


def layer_logits(fit: RoutingModel, texts: Texts, model_seed: int = 0) -> Iterator[Singles]:
    """Logits [tokens, experts] of all texts, one after the other, layer by layer; prompt first."""
    streams = [np.random.default_rng((_TEXT, *seed)) for seed in texts.seeds]
    quantiles = skewed_scores(fit.experts, fit.preference_tail).astype(np.float32)
    states = _fresh_states(fit, texts, streams)
    for layer, share in enumerate(fit.preference_share):
        model = np.random.default_rng((_MODEL, model_seed, layer))
        if layer:
            fresh = _fresh_states(fit, texts, streams) if fit.layer_drift else states
            states = _mixed(states, fresh, fit.layer_drift)
        directions = _directions(model, fit)
        model_preferences = model.standard_normal(fit.experts, dtype=np.float32)
        changing = _mixed(states @ directions, _noise(fit, texts, streams), fit.noise_share)
        preferences = _text_preferences(streams, model_preferences, fit, quantiles)
        yield _logits(fit, texts, share, preferences, changing)


def _mixed(one: Singles, other: Singles, share: float) -> Singles:
    """A standard normal variate made of two independent ones, ``share`` of its variance that of the second."""
    return np.float32(np.sqrt(1 - share)) * one + np.float32(np.sqrt(share)) * other


def _fresh_states(fit: RoutingModel, texts: Texts, streams: list[np.random.Generator]) -> Singles:
    """States [tokens, width]; a prompt and its answer are two texts."""
    lengths = (texts.prompt_tokens, texts.generated_tokens)
    parts = [token_states(streams, fit.autocorrelation, length, fit.state_width) for length in lengths]
    return np.concatenate(parts, axis=1).reshape(texts.tokens, fit.state_width)


def _directions(rng: np.random.Generator, fit: RoutingModel) -> Singles:
    """Directions [width, experts], of length 1."""
    directions = rng.standard_normal((fit.state_width, fit.experts), dtype=np.float32)
    return np.asarray(directions / np.linalg.norm(directions, axis=0))


def _noise(fit: RoutingModel, texts: Texts, streams: list[np.random.Generator]) -> Singles:
    """Noise [tokens, experts]."""
    length = texts.prompt_tokens + texts.generated_tokens
    return np.concatenate([rng.standard_normal((length, fit.experts), dtype=np.float32) for rng in streams])


def _text_preferences(
    streams: list[np.random.Generator], model_preferences: Singles, fit: RoutingModel, quantiles: Singles
) -> Singles:
    """Preferences [texts, 2, experts] of the prompt and of the answer.

    Drawn values are replaced by quantiles of the same rank, so that the preferences of every layer and text are equally
    strong.
    """
    drawn = np.stack([rng.standard_normal((2, fit.experts), dtype=np.float32) for rng in streams])
    answer, other = drawn[:, 0], drawn[:, 1]
    prompt = _mixed(other, answer, fit.prompt_likeness**2)
    raw = _mixed(np.stack([prompt, answer], axis=1), model_preferences, fit.model_share)
    ranked = np.empty_like(raw)
    np.put_along_axis(ranked, raw.argsort(axis=-1), quantiles[None, None], axis=-1)
    return ranked


def _logits(fit: RoutingModel, texts: Texts, share: float, preferences: Singles, changing: Singles) -> Singles:
    """The sum of preferences [texts, 2, experts] and the part that changes with the token."""
    logits = changing.reshape(len(texts.seeds), -1, changing.shape[1])
    prompt, answer = np.s_[:, : texts.prompt_tokens], np.s_[:, texts.prompt_tokens :]
    for phase, (part, of) in enumerate(((prompt, share * fit.prompt_preference_share), (answer, share))):
        logits[part] = _mixed(logits[part], preferences[:, phase, None], min(of, 1.0))
    return logits.reshape(changing.shape)


def token_states(
    streams: Sequence[np.random.Generator], autocorrelation: Sequence[float], tokens: int, width: int
) -> Singles:
    """States [texts, tokens, width], one text a stream: ``width`` stationary processes of variance 1, whose correlation
    at lag i is ``autocorrelation[i - 1]``, and 0 beyond.

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


def skewed_scores(count: int, tail: float) -> NDArray[np.float64]:
    """``count`` quantiles, ascending, of mean 0 and variance 1: of a normal variate if ``tail`` is 0; above 0 the lower
    end is longer, below 0 the upper (J. W. Tukey's g distribution, mirrored).

    In single precision, and as far as stored fits go, they are those of ``scipy.special.ndtri``, which takes 0.2 s to
    import (but where they are 0: then both are within 1e-15 of it).
    """
    normal = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
    scores = -np.expm1(-tail * normal) / tail if tail else normal
    return np.asarray((scores - scores.mean()) / max(float(scores.std()), np.finfo(float).tiny))


def sortable(values: Singles) -> NDArray[np.int32]:
    """Keys [rows, columns] that sort as ``values`` do; their low bits hold the column.

    The bits of a float sort as an integer once those of negative numbers are inverted, so that one vectorised sort
    gives order and column together.
    """
    bits = values.view(np.int32)
    keys: NDArray[np.int32] = bits >> 31  # changed in place from here on: half the time of an array for each operation
    keys &= _MAGNITUDE
    keys ^= bits
    keys &= ~_columns_mask(values)
    keys |= np.arange(values.shape[1], dtype=np.int32)
    return keys


def coarse(values: Singles) -> Singles:
    """``values`` with the low bits that a key has no room for left out: equal where their keys differ in the column
    alone."""
    return np.asarray((values.view(np.int32) & ~_columns_mask(values)).view(np.float32))


def best(values: Singles, count: int) -> NDArray[np.int16]:
    """Columns [rows, count] of the largest values, descending."""
    keys = np.sort(sortable(values), axis=1)[:, : -count - 1 : -1]
    return np.asarray(keys & _columns_mask(values), np.int16)


def _columns_mask(values: Singles) -> np.int32:
    return np.int32((1 << (values.shape[1] - 1).bit_length()) - 1)
