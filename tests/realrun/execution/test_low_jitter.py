"""Python around a run: as the run wants it, and then as it was."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from realrun.machine.thread_lane import SWITCH_INTERVAL_S, low_jitter


def state() -> tuple[float, bool, bool]:
    return round(sys.getswitchinterval(), 6), gc.isenabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("collects", [True, False])
def test_python_is_left_as_it_was(collects: bool) -> None:
    if not collects:
        gc.disable()
    before = state()
    try:
        with low_jitter():
            assert state() == (SWITCH_INTERVAL_S, False, True)
        assert state() == before
    finally:
        gc.enable()


def test_also_after_an_error() -> None:
    before = state()
    with pytest.raises(ValueError, match="boom"), low_jitter():
        raise ValueError("boom")
    assert state() == before
