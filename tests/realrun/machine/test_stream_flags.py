"""Waiting for a flag: which function of the driver does it, if any."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from realrun.machine.stream_flags import VARIABLE, driver_wait_value


def driver(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A driver's library with these functions."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))


def test_the_function_of_today_s_drivers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace()
    driver(monkeypatch, cuStreamWaitValue32=SimpleNamespace(), cuStreamWaitValue32_v2=found)
    assert driver_wait_value() is found
    assert found.argtypes == [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]


def test_an_older_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, cuStreamWaitValue32=SimpleNamespace())
    assert driver_wait_value() is None


def test_no_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_wait_value() is None


def test_the_environment_can_do_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, cuStreamWaitValue32_v2=SimpleNamespace())
    monkeypatch.setenv(VARIABLE, "0")
    assert driver_wait_value() is None
