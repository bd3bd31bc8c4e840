"""The page of a measured profile, of ``trilane hardware FILE``: where, when and what was measured, and the results."""

from __future__ import annotations

from collections.abc import Mapping

from sim.machine.interpolation import Measured, Table
from sim.machine.profile import MeasuredModel, MeasuredRate, Profile
from trilane.output.pages.output import Part, heading, pairs, table

_COLUMNS = (
    "model", "GPU expert\n1 token, us", "CPU expert\n1 token, us", "one expert's\ncopy, us", "launch to\nGPU start, us",
    "launched to\nGPU end, us", "workloads\nmeasured",
)
_RATES = {
    "CPU expert,\nduring a copy": "cpu_permille", "copy, during\na CPU expert": "copy_permille",
    "GPU expert,\nduring a copy": "gpu_permille", "GPU expert, during\na CPU expert": "gpu_with_cpu_permille",
    "CPU expert, during\na GPU expert": "cpu_with_gpu_permille",
}


def profile_page(profile: Profile) -> list[Part]:
    """Facts of the machine, achieved rates and measured models, to be shown next to the machine's numbers."""
    rates: list[Part] = [heading("rates achieved, which simulations do not use"), pairs(_lines(profile.rates)), ""]
    return [
        heading("a measured profile: times come from its tables, the rates above are used by the null model alone"),
        pairs(_lines(profile.machine)), "",
        *(rates if profile.rates else []),
        heading("measured models: median (quartiles)"),
        table(_COLUMNS, [_model_row(name, model) for name, model in profile.models.items()]), "",
        heading("speed while both work, in percent of the speed alone: median (quartiles)"),
        table(("model", *_RATES), [
            [name, *(_rate(getattr(model, rate)) for rate in _RATES.values())] for name, model in profile.models.items()
        ]),
    ]


def decisions_note(profile: Profile) -> str:
    """Sentence with the policies whose decision costs were measured on this machine."""
    measured = dict.fromkeys((*profile.plan, *profile.foresee))
    return f"Measured on this machine, and not scaled: {', '.join(measured) or 'none'}."


def _lines(values: Mapping[str, str | float]) -> list[tuple[str, str]]:
    return [(key, value if isinstance(value, str) else f"{value:,g}") for key, value in values.items()]


def _model_row(name: str, model: MeasuredModel) -> list[str]:
    most = max(model.expert_gpu.at[-1], model.expert_cpu.at[-1])
    return [
        name, _first(model.expert_gpu), _first(model.expert_cpu), _time(model.copy),
        _time(model.launch_lead), _time(model.launch_tail), f"{model.expert_gpu.at[0]}-{most}",
    ]


def _first(times: Table) -> str:
    return _microseconds(times.ns[0], times.low[0], times.high[0])


def _microseconds(ns: int, low: int, high: int) -> str:
    return f"{ns / 1e3:,.1f} ({low / 1e3:,.1f}-{high / 1e3:,.1f})"


def _time(measured: Measured | None) -> str:
    """Median and quartiles in microseconds; "-" if the profile is of an earlier version, without them."""
    return "-" if measured is None else _microseconds(measured.ns, measured.low, measured.high)


def _rate(rate: MeasuredRate | None) -> str:
    """Median and quartiles in percent; "-" as in ``_time``."""
    if rate is None:
        return "-"
    return f"{rate.permille / 10:.0f}% ({rate.low / 10:.0f}-{rate.high / 10:.0f})"
