"""Made-up routing: valid, said to be made up, as skewed and persistent as asked, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from sim.scenario import Scenario
from sim.simulate import simulate
from traces.model_shape import ModelShape
from traces.synthetic import Synthesis, synthetic_trace
from traces.trace import Trace
from traces.trace_file import write_trace
from traces.trace_layout import TraceError

SHAPE = ModelShape("made-up", moe_layers=3, dense_layers=0, experts=16, top_k=2, hidden=8, expert_width=4)


def reuse(trace: Trace) -> float:
    """How many of a token's experts the next token of its sequence uses again."""
    by_sequence = np.asarray(trace.topk_ids, np.int64).reshape(4, -1, 3, 2)
    shared = by_sequence[:, 1:, :, :, None] == by_sequence[:, :-1, :, None, :]
    return float(shared.any(-1).mean())


def most_used(trace: Trace) -> float:
    """The share of the most used quarter of experts, mean over layers."""
    counts = [np.sort(np.bincount(np.asarray(trace.topk_ids[:, layer]).ravel(), minlength=16)) for layer in range(3)]
    return float(np.mean([count[-4:].sum() / count.sum() for count in counts]))


def test_it_is_a_valid_trace_of_the_shape_and_the_same_for_the_same_seed() -> None:
    one, two, other = (synthetic_trace(SHAPE, Synthesis(seed=seed)) for seed in (1, 1, 2))
    assert one.topk_ids.shape == (4 * 128, 3, 2)
    assert one.checksum == two.checksum != other.checksum


def test_persistence_and_skew_do_what_they_say() -> None:
    drifting, jumping = (synthetic_trace(SHAPE, Synthesis(persistence=value)) for value in (0.95, 0.0))
    skewed, even = (synthetic_trace(SHAPE, Synthesis(skew=value)) for value in (2.0, 0.0))
    assert reuse(drifting) > reuse(jumping) + 0.2
    assert most_used(skewed) > most_used(even) + 0.2


def test_runs_on_it_say_that_it_is_synthetic(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "made-up.safetensors"
    write_trace(synthetic_trace(SHAPE, Synthesis(sequences=1, prompt_tokens=3, generated_tokens=2)), path)
    run = simulate(Scenario(trace=str(path), model=None, policy="on-demand", cached_share=0.5))
    assert "synthetic trace" in run.labels


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"persistence": 1.5}, {"generated_tokens": 0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="expected counts >= 1"):
        synthetic_trace(SHAPE, Synthesis(**wrong))  # type: ignore[arg-type]
