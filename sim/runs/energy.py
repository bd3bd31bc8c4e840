"""Energy: watts of GPU and CPU, busy and idle, and of the platform (docs/design.md, Metrics)."""

from __future__ import annotations

from sim.machine.devices import Power
from sim.runs.metrics import Metrics
from sim.runs.vocabulary import Device


def joules_per_token(metrics: Metrics, power: Power | None, batch: int) -> float | None:
    """Joules per generated token; None without decode steps or watts.

    A device draws its busy watts while its lane works and its idle watts otherwise; DRAM, link and board draw what the
    machine states as ``platform_w``, and are left out where it states nothing.
    """
    if power is None or metrics.tpot_ms is None:
        return None
    shares = [metrics.busy_share[device] or 0.0 for device in (Device.GPU, Device.CPU)]
    idle, busy = (power.gpu_idle_w, power.cpu_idle_w), (power.gpu_busy_w, power.cpu_busy_w)
    watts = power.platform_w or 0.0
    watts += sum(low + share * (high - low) for low, high, share in zip(idle, busy, shares, strict=True))
    return watts * metrics.tpot_ms / 1e3 / batch
