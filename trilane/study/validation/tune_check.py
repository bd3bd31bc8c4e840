"""Settings run on this machine by the real engine: measured times and memory next to those that were predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from realrun.errors import RefusedError
from realrun.llama_cpp.bench import RunSettings, TimedRun, timed_run
from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from traces.models.names import parted
from trilane.common.quoting import quoted
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.measured_rows import NS
from trilane.engines.accuracy.slow_machines import SlowCause, slow_causes
from trilane.engines.question import FitError, engine_of
from trilane.engines.speed import EngineSpeed
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import Tuning
from trilane.engines.tune.tuned import Tuned, Workbench

MOST_TOKENS = 32  # of an answer that are timed
_RUN_HERE = ("llama", "llama-2025")  # dialects of the program that is run
RunEngine = Callable[[Path, RunSettings], TimedRun]


@dataclass(frozen=True)
class Checked:
    """A setting, and what was measured with it. ``memory``: predicted and reported bytes, by kind.

    ``refused``: why the engine did not run it; nothing is measured then.
    """

    name: str
    tuned: Tuned
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    memory: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    refused: str | None = None

    @property
    def decode_error(self) -> float | None:
        """Predicted over measured tokens a second, minus 1."""
        return None if self.tpot_ms is None else self.tpot_ms / self.tuned.tpot_ms - 1

    @property
    def prompt_error(self) -> float | None:
        """Predicted over measured prompt tokens a second, minus 1."""
        return None if self.ttft_ms is None else self.ttft_ms / self.tuned.ttft_ms - 1


def check(tuning: Tuning, run: RunEngine = timed_run) -> Iterator[Checked]:
    """The best settings, and the engine's own, one after the other. ``run``: the engine.

    Raises FitError as ``file_to_run``. A setting that the engine refuses has its reason, and the others still run.
    """
    path = file_to_run(tuning.question)
    named = [(f"best but {place}" if place else "best", tuned) for place, tuned in enumerate(tuning.leading)]
    if tuning.usual is not None and tuning.usual.tuned not in tuning.leading:
        named.append(("engine's own", tuning.usual.tuned))
    for name, tuned in named:
        try:
            timed = run(path, _settings(tuning, tuned))
        except RefusedError as error:
            yield Checked(name, tuned, refused=str(error))
        else:
            yield Checked(name, tuned, timed.tpot_ms, timed.ttft_ms, _memory(tuned, timed))


def slow_causes_of(tuning: Tuning, checked: Checked) -> list[SlowCause]:
    """Causes of the speeds that a setting had here; none for one that was refused, or whose cache of experts makes its
    speed depend on the text."""
    tuned, question = checked.tuned, tuning.question
    if not checked.tpot_ms or not checked.ttft_ms or tuned.cache_mib is not None:
        return []
    asked = replace(
        question.fit, kv=tuned.kv, ubatch=tuned.piece_tokens, threads=tuned.threads,
        n_cpu_moe=None if tuned.cpu_only else tuned.n_cpu_moe,
    )
    shape, machine = question.shape_with(tuned.kv), question.hardware
    bench = Workbench(question, machine, engine_of(question.fit, machine))

    def predicted(hardware: Hardware, engine: FittedEngine) -> Speeds:
        speed = EngineSpeed(asked, shape, hardware, engine)
        return Speeds(NS / speed.decode.total_ns, asked.prompt_tokens * NS / speed.prompt.total_ns)

    known = Speeds(1000 / checked.tpot_ms, 1000 * asked.prompt_tokens / checked.ttft_ms)
    return slow_causes(predicted, known, bench.host if tuned.cpu_only else machine, bench.reading(tuned.pinned))


def file_to_run(question: TuneQuestion) -> Path:
    """The model's file. Raises FitError for a question that this machine cannot be asked: no GGUF file, an engine other
    than llama.cpp or one measured with it, several sequences."""
    asked, engine = question.fit, engine_of(question.fit, question.hardware)
    path = Path(parted(asked.model).model)
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise FitError(f"tune: --check runs the model: expected a GGUF file, got {quoted(asked.model)}")
    if engine.dialect not in _RUN_HERE or asked.batch > 1:
        raise FitError(f"tune: --check runs one sequence in llama.cpp, got {asked.batch} in {quoted(engine.name)}")
    return path


def _settings(tuning: Tuning, tuned: Tuned) -> RunSettings:
    asked = tuning.question.fit
    return RunSettings(
        threads=tuned.threads,
        piece_tokens=tuned.piece_tokens,
        kv=tuned.kv,
        window_tokens=asked.tokens,
        prompt_tokens=asked.prompt_tokens,
        generated_tokens=min(asked.generated, MOST_TOKENS),
        gpu=not tuned.cpu_only,
        cpu_expert_layers=tuned.n_cpu_moe,
        expert_cache_mib=tuned.cache_mib or 0,
        mapped=not tuned.pinned,
    )


def _memory(tuned: Tuned, timed: TimedRun) -> dict[str, tuple[int, int]]:
    """Memory of GPU and host together in bytes, predicted and reported, by the engine's kinds of buffers."""
    own = tuned.memory
    predicted = {
        "model": own.every_token_bytes + own.experts_bytes + own.host_bytes + own.host_table_bytes,
        "KV": own.kv_bytes, "compute": own.compute_bytes + own.host_compute_bytes,
    }
    return {kind: (size, timed.reported[kind]) for kind, size in predicted.items() if kind in timed.reported}
