"""A processor for tests: how its logical cores lie on physical ones, which may be used, and which thread is where."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from realrun.machine import cores

SMT = [(core, core + 8) for core in range(8)]  # eight physical cores, sixteen logical ones


class FakeCores:
    """``physical``: logical cores of each; ``usable``: those that the process may use (None: all).

    Without ``told`` the system says nothing of physical cores. Threads can be bound to all cores; ``bound`` has their
    cores by their names.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, folder: Path, physical: Iterable[Collection[int]],
        usable: Collection[int] | None = None, told: bool = True,
    ) -> None:
        groups = [set(core) for core in physical]
        self.all = set().union(*groups)
        self.usable = set(self.all if usable is None else usable)
        self.bound: dict[str, set[int]] = {}
        self._of: dict[int, set[int]] = {}
        for group in groups if told else ():
            for core in group:
                listed = folder / f"cpu{core}" / "topology" / "thread_siblings_list"
                listed.parent.mkdir(parents=True)
                listed.write_text(_listed(group))
        patch.setattr(cores, "TOPOLOGY", folder)
        patch.setattr(cores, "CPU_QUOTA", folder / "cpu.max")
        patch.setattr(os, "sched_getaffinity", self._get, raising=False)
        patch.setattr(os, "sched_setaffinity", self._set, raising=False)

    def here(self) -> set[int]:
        """Cores on which the calling thread may run."""
        return self._get(0)

    def _get(self, thread: int) -> set[int]:
        return set(self._of.get(thread or threading.get_native_id(), self.usable))

    def _set(self, thread: int, allowed: Collection[int]) -> None:
        assert set(allowed) <= self.all
        assert allowed
        self._of[thread] = self.bound[threading.current_thread().name] = set(allowed)


def _listed(group: set[int]) -> str:
    """As Linux writes it: neighbours as a range."""
    least, most = min(group), max(group)
    is_range = len(group) > 1 and most - least + 1 == len(group)
    return f"{least}-{most}\n" if is_range else ",".join(map(str, sorted(group))) + "\n"
