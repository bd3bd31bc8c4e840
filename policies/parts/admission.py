"""Admission: whether an expert that was computed without a slot is worth one, and the copy that fills it.

A cache that no layer waits for has this decision apart from that of the victim: a miss costs the CPU's time whether or
not its expert is copied, so that the copy has to pay by later hits.
"""

from __future__ import annotations

from collections import defaultdict

from policies.mechanism.views import ExpertId, LayerView

Key = tuple[int, int]  # layer, expert


class Admission:
    """Any miss is worth a copy (llama.cpp #27861); base of the others.

    Lifetime: created when a policy is composed, used for one run. In each layer ``observe`` comes first; ``admits`` is
    then asked for those of its experts that missed.
    """

    def observe(self, view: LayerView, missed: frozenset[int]) -> None:
        """A layer was routed; ``missed`` are its active experts that were in no slot."""

    def admits(self, incoming: ExpertId, victim: ExpertId | None) -> bool:
        """True if ``incoming`` is worth the slot of ``victim``; None: the slot is free."""
        return True


class SecondMiss(Admission):
    """The second miss within ``window`` steps is; a free slot takes any (everett6/moe-prefetch, patches/0007:
    ``LLAMA_MOE_ADMIT=window``, 8)."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._last: dict[Key, int] = {}  # step of the latest miss
        self._again: set[Key] = set()  # whose latest miss was the second within the window

    def observe(self, view: LayerView, missed: frozenset[int]) -> None:
        for expert in missed:
            key = (view.layer, expert)
            recent = view.step - self._last.get(key, -self.window) < self.window
            (self._again.add if recent else self._again.discard)(key)
            self._last[key] = view.step

    def admits(self, incoming: ExpertId, victim: ExpertId | None) -> bool:
        return victim is None or incoming in self._again


class Hotter(Admission):
    """An expert whose heat is above ``margin`` x the victim's + ``floor``; a free slot takes any.

    Heat counts the steps that used an expert, hit or miss, and is halved every ``half_life`` steps; None: never. The
    defaults are those of everett6/moe-prefetch, patches/0007 (``LLAMA_MOE_ADMIT=heat``).
    """

    def __init__(self, half_life: int | None = 64, margin: float = 1.25, floor: float = 1.0) -> None:
        self.half_life, self.margin, self.floor = half_life, margin, floor
        self._heat: defaultdict[Key, float] = defaultdict(float)
        self._period = 0  # half-lives that have passed

    def observe(self, view: LayerView, missed: frozenset[int]) -> None:
        if self.half_life is not None and view.step // self.half_life > self._period:
            past, self._period = self._period, view.step // self.half_life
            for key in self._heat:
                self._heat[key] /= 1 << min(self._period - past, 64)
        for expert in view.routing.active:
            self._heat[view.layer, expert] += 1

    def heat(self, key: ExpertId) -> float:
        return self._heat.get(key, 0.0)

    def admits(self, incoming: ExpertId, victim: ExpertId | None) -> bool:
        return victim is None or self.heat(incoming) > self.margin * self.heat(victim) + self.floor
