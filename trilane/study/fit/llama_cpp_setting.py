"""The nearest setting of llama.cpp, which keeps the experts of whole layers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traces.models.shape import ModelShape
from trilane.study.fit.candidates import LLAMA_CPP, RESIDENT
from trilane.study.fit.policy_result import PlayedPolicy
from trilane.study.fit.question import Question


@dataclass(frozen=True)
class LlamaCppSetting:
    """The arguments of llama.cpp, and the times of the policy ``llama.cpp@impl`` with them.

    The TTFT is that of a prompt in one piece, as with ``-ub`` of its length.
    """

    arguments: str
    cpu_layers: int  # N of --n-cpu-moe: layers, from the first on, whose experts the CPU computes
    layers: int  # of the model, dense ones included
    tpot_ms: float
    ttft_ms: float | None


def llama_cpp_setting(question: Question, shape: ModelShape, played: Sequence[PlayedPolicy]) -> LlamaCppSetting | None:
    """From the placement of llama.cpp among the policies that were played; None if it cannot run."""
    llama = next((one for one in played if one.result.policy in (LLAMA_CPP, RESIDENT)), None)
    if llama is None:
        return None
    result = llama.result
    cpu_layers = cpu_layers_of(shape, [len(experts) for experts in llama.residents])
    arguments = ["-ngl 99", *([f"--n-cpu-moe {cpu_layers}"] if cpu_layers else [])]
    arguments.append(f"-c {question.batch * question.tokens}")
    arguments += [f"-np {question.batch}"] if question.batch > 1 else []
    return LlamaCppSetting(" ".join(arguments), cpu_layers, shape.layers, result.tpot_ms, result.ttft_ms)


def cpu_layers_of(shape: ModelShape, resident: list[int]) -> int:
    """N of ``--n-cpu-moe``, which counts dense layers too: those of these models come first."""
    on_cpu = sum(count < shape.experts for count in resident)
    return on_cpu + shape.dense_layers if on_cpu else 0
