"""The nearest setting of a tool that people run: llama.cpp, which keeps the experts of whole layers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traces.models.shape import ModelShape
from trilane.study.fit.asked import Asked
from trilane.study.fit.candidates import LLAMA_CPP, RESIDENT
from trilane.study.fit.policy_result import Played


@dataclass(frozen=True)
class LlamaCppSetting:
    """Its arguments, and the times that the policy ``llama.cpp@impl`` has with them.

    The TTFT is that of a prompt in one piece, as with ``-ub`` of its length.
    """

    arguments: str
    cpu_layers: int  # N of --n-cpu-moe: layers, from the first on, whose experts the CPU computes
    layers: int  # of the model, dense ones included
    tpot_ms: float
    ttft_ms: float | None


def llama_cpp_setting(asked: Asked, played: Sequence[Played]) -> LlamaCppSetting | None:
    """From the plan of llama.cpp among the policies that were played; None if it cannot run."""
    llama = next((one for one in played if one.answer.policy in (LLAMA_CPP, RESIDENT)), None)
    if llama is None:
        return None
    shape, question, answer = asked.setting.shape, asked.question, llama.answer
    cpu_layers = cpu_layers_of(shape, [len(experts) for experts in llama.residents])
    arguments = ["-ngl 99", *([f"--n-cpu-moe {cpu_layers}"] if cpu_layers else [])]
    arguments.append(f"-c {question.batch * question.tokens}")
    arguments += [f"-np {question.batch}"] if question.batch > 1 else []
    return LlamaCppSetting(" ".join(arguments), cpu_layers, shape.layers, answer.tpot_ms, answer.ttft_ms)


def cpu_layers_of(shape: ModelShape, resident: list[int]) -> int:
    """N of ``--n-cpu-moe``, which counts dense layers too: those of these models come first."""
    on_cpu = sum(count < shape.experts for count in resident)
    return on_cpu + shape.dense_layers if on_cpu else 0
