"""Which engine answers a question, and whether it runs on the card and reads the weights."""

from __future__ import annotations

from typing import TypeGuard

from sim.costs.engine import FittedEngine, InferenceEngine, engine_names, load_engine
from sim.machine.hardware import Hardware
from sim.machine.parts import Vendor
from traces.models.names import parted
from traces.models.quantisation import quantisation_files
from traces.models.shape import ModelShape
from trilane.engines.question import FitError, Question

USUAL_ENGINE = "llama.cpp"
_OF_VENDOR = {"amd": "llama.cpp-vulkan", "intel": "llama.cpp-vulkan", "apple": "llama.cpp-metal"}
_UNSTATED: Vendor = "nvidia"  # of cards that state no vendor
_THREADS_A_CORE = 2
_TITLES: dict[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}


def engine_of(question: Question, hardware: Hardware) -> FittedEngine:
    """The engine that was asked for, or the usual one of the card. Raises FitError for one that was not fitted."""
    engine = load_engine(question.engine or _OF_VENDOR.get(hardware.gpu.vendor or "", USUAL_ENGINE))
    if not serves_users(engine):
        raise FitError(
            f"engine {engine.name!r} serves policies, which are played on it: use `trilane fit --policy-engine "
            f"{engine.name}`; --engine takes one whose speeds were fitted, such as {USUAL_ENGINE}"
        )
    return engine


def check_setting(question: Question, engine: FittedEngine, hardware: Hardware) -> None:
    """Raises FitError for an engine and for settings that such a machine has no use for."""
    if hardware.one_memory and question.n_cpu_moe:
        raise FitError(f"n_cpu_moe {question.n_cpu_moe}: all of {hardware.name} is in one memory; leave it out")
    if hardware.cpu_only and engine.needs_gpu:
        raise FitError(f"{engine.name}: expected a machine with a GPU, got {hardware.name}; choose {USUAL_ENGINE}")
    if question.threads is not None and question.threads > _THREADS_A_CORE * hardware.cpu.cores:
        raise FitError(
            f"threads {question.threads}: expected at most {_THREADS_A_CORE * hardware.cpu.cores}, "
            f"{_THREADS_A_CORE} on each of the {hardware.cpu.cores} cores"
        )


def check_engine(engine: InferenceEngine, shape: ModelShape, hardware: Hardware) -> None:
    """Raises FitError for a card that the engine does not run on, and for weights that it does not read."""
    vendor, weights = hardware.gpu.vendor or _UNSTATED, parted(shape.name).weights
    if not hardware.cpu_only and not engine.runs_on(vendor):
        others = [name for name, other in fitted_engines().items() if other.runs_on(vendor)]
        raise FitError(f"{engine.name} does not run on {_TITLES[vendor]}'s GPUs; use {' or '.join(others)}")
    if weights is not None and not reads(engine, weights):
        others = [name for name, other in fitted_engines().items() if other.runs_on(vendor) and reads(other, weights)]
        use = f"; {' or '.join(others)} does" if others else "; choose other weights (trilane models --quantisations)"
        raise FitError(f"{engine.name} does not read weights in {weights}{use}")


def reads(engine: InferenceEngine, weights: str) -> bool:
    """Whether an engine reads a format."""
    return engine.reads is None or bool({*engine.reads} & {*quantisation_files(weights)})


def fitted_engines() -> dict[str, FittedEngine]:
    """Engines of today that people run, by name."""
    engines = {name: load_engine(name) for name in engine_names()}
    return {name: one for name, one in engines.items() if serves_users(one) and one.superseded_by is None}


def serves_users(engine: InferenceEngine) -> TypeGuard[FittedEngine]:
    """Whether it splits a model once and for all, with times that were fitted: no policy decides while it runs, and
    not every layer has a part on the CPU."""
    return isinstance(engine, FittedEngine) and not engine.decides and not engine.cpu_in_turn
