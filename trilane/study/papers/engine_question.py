"""Questions that the formulas of an engine answer (``trilane.engines``), as ``trilane fit`` asks them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

from trilane.common.computer import System
from trilane.common.hints import Count, Name, at_least
from trilane.common.schema import to_dict
from trilane.engines.accuracy.errors import errors_of, read_predictions
from trilane.engines.accuracy.measured_rows import read_rows
from trilane.engines.question import KvFormat, Question
from trilane.engines.speed import engine_answer

EngineQuantity: TypeAlias = Literal["decode_tokens_per_s", "prompt_tokens_per_s", "first_token_s"]


@dataclass(frozen=True, kw_only=True)
class EngineQuestion:
    """A question to an engine that people run. All but ``ask`` are options of ``trilane fit``, by their names.

    Tokens a second are those of all sequences of the batch together.
    """

    ask: EngineQuantity
    engine: Name
    model: Name
    weights: Name | None = None
    gpu: Name | None = None
    ram: Name | None = None
    cpu: Name | None = None
    cores: Count | None = None
    channels: Count | None = None
    sockets: Count | None = None
    pcie: Name | None = None
    ram_gb: Count | None = None
    machine: Name | None = None
    os: System | None = None
    prompt: Count = 4096
    generated: Count = 256
    batch: Count = 1
    threads: Count | None = None
    kv: KvFormat | None = None
    n_cpu_moe: Annotated[int, at_least(0)] | None = None
    ubatch: Count | None = None

    @property
    def key(self) -> str:
        """The question of `trilane fit` as text, the same for all that is asked of one answer."""
        return json.dumps({"fit": self._options})

    @property
    def method(self) -> str:
        """The engine."""
        return self.engine

    @property
    def baselines(self) -> tuple[str, ...]:
        """None: only methods that are simulated are compared."""
        return ()

    @property
    def command(self) -> str:
        """The command line that asks the same."""
        options = (f"--{name.replace('_', '-')} {value}" for name, value in self._options.items())
        return " ".join(["trilane fit", *options])

    @property
    def facts(self) -> dict[str, Any]:
        """The fields in which two questions may differ, by name."""
        return to_dict(self)

    @property
    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in to_dict(self, nulls=False).items() if name != "ask"}

    @property
    def question(self) -> Question:
        """That of ``trilane fit``. Raises FitError."""
        options = vars(self).copy()
        del options["ask"]
        return Question(system=options.pop("os"), prompt_tokens=options.pop("prompt"), **options)

    @property
    def band(self) -> str:
        """The fact that has the band of such speeds."""
        return "speed_band" if self.ask == "decode_tokens_per_s" else "prompt_band"

    def answered(self) -> dict[str, float]:
        """Each ``EngineQuantity``, and two bands: four fifths of such decode speeds, and of all prompt speeds, are
        between predicted / (1 + band) and predicted * (1 + band).

        Raises FitError for what cannot run, and errors of unknown names."""
        question = self.question
        answer = engine_answer(question, question.model_shape, question.load_machine())
        prompt_tokens = self.batch * self.prompt
        return {
            "decode_tokens_per_s": 1e3 * self.batch / answer.tpot_ms,
            "prompt_tokens_per_s": 1e3 * prompt_tokens / answer.ttft_ms,
            "first_token_s": answer.ttft_ms / 1e3,
            "prompt_band": _prompt_band(),
            **({"speed_band": answer.error.band} if answer.error else {}),
        }


@cache
def _prompt_band() -> float:
    """The band of all prompt speeds that were measured, predicted without the row's machine."""
    scored = [row for row in read_rows() if row.scored]
    errors = errors_of(scored, read_predictions(), "prompts")
    assert errors is not None
    return errors.band
