"""The search for the best setting, by Optuna: all settings where they are few, else a seeded sample of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from trilane.study.fit.question import FitError
from trilane.study.tune.settings import Setting, SettingSpace

if TYPE_CHECKING:
    import optuna

ALL_OF = 300  # settings up to which all of them are tried
TRIALS = 160  # of more
_SEED = 0
Cost: TypeAlias = Callable[[Setting], float]


def search(choices: SettingSpace, cost: Cost) -> tuple[dict[Setting, float], dict[Setting, str]]:
    """The cost of each setting that was tried, and why others cannot run; the same in every call.

    ``cost`` raises FitError for a setting that cannot run. Where not all settings are tried, those without a cache of
    experts are, with the engine's own number of threads.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found: dict[Setting, float] = {}
    refused: dict[Setting, str] = {}

    def objective(trial: optuna.Trial) -> float:
        setting = Setting(**{name: trial.suggest_categorical(name, each) for name, each in choices.grid.items()})
        if setting in refused:
            raise optuna.TrialPruned
        try:
            if setting not in found:
                found[setting] = cost(setting)
        except FitError as error:
            refused[setting] = str(error)
            raise optuna.TrialPruned from None
        return found[setting]

    whole = choices.count <= ALL_OF
    study = optuna.create_study(sampler=_sampler(choices.grid, whole))
    if not whole:
        for setting in choices.without_cache():
            study.enqueue_trial(setting._asdict())
    study.optimize(objective, n_trials=choices.count if whole else TRIALS)
    return found, refused


def _sampler(grid: Mapping[str, object], whole: bool) -> optuna.samplers.BaseSampler:
    import optuna

    if whole:
        return optuna.samplers.GridSampler(dict(grid), seed=_SEED)  # type: ignore[arg-type]  # any values, as documented
    return optuna.samplers.TPESampler(seed=_SEED, multivariate=False)
