"""Without the collector: it is off meanwhile and then as it was, and spans do not wait for it; what it never sees."""

from __future__ import annotations

import gc

import pytest

from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import spans_of
from trilane.common import gc_paused as gc_paused_module
from trilane.common.gc_paused import collect_seldom, gc_paused, leave_garbage


def _fails() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_collector_is_then_as_it_was(collects: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError):
            _fails()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_nobody_but_the_caller_keeps_the_spans_of_a_run() -> None:
    prepared = prepare(Scenario(prompt_tokens=2, generated_tokens=1))
    with gc_paused():
        rows = spans_of(prepared)
        assert not [holder for holder in gc.get_referrers(rows) if isinstance(holder, dict | list)]


@pytest.mark.parametrize("ends", [True, False])
def test_garbage_is_left_only_by_a_process_that_ends_with_its_command(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_paused_module, "_ending", [])
    collect_seldom(ends_soon=ends)
    young: list[list[int]] = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    leave_garbage()
    assert (gc.get_freeze_count() >= before + len(young)) == ends
