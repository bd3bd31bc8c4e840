"""Whole answers of the policies: where they come from, and what they refuse."""

from __future__ import annotations

import gc
import json
from functools import cache
from typing import Any

import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.file import FOLDER
from trilane.engines.memory import HOST_RESERVE_BYTES
from trilane.engines.question import FitError, Question
from trilane.fit.answer import PolicyAnswer
from trilane.fit.fit import fit
from trilane.fit.prepared_question import routing_of

MINI: dict[str, Any] = {"model": "deepseek-v2-lite", "trace": "mini-deepseek", "weights": "bf16", "gpu": "rtx-3060",
                        "ram": "ddr4-3200", "prompt_tokens": 64, "generated": 16,
                        "policies": ("fiddler", "on-demand")}


def policies(**asked: Any) -> PolicyAnswer:
    found = fit(Question(**asked)).policies
    assert found is not None
    return found


@cache
def mini(**more: Any) -> PolicyAnswer:
    return policies(**{**MINI, **more})


def test_an_eager_answer_to_a_short_prompt_is_that_of_simulate() -> None:
    """No prompt is repeated, no kernel shared, no step stands for others: what is left is the simulator."""
    asked = Question(**{**MINI, "prompt_tokens": 8, "generated": 16, "policy_engine": "pytorch"})
    found = fit(asked).policies
    assert found is not None
    for answer in (found.best, *found.runners_up):
        run = simulate(
            Scenario(
                model=asked.shape, hardware=asked.hardware, policy=answer.policy, prompt_tokens=8, generated_tokens=16
            )
        )
        assert answer.tpot_ms == pytest.approx(run.metrics.tpot_ms, rel=1e-12)
        assert answer.ttft_ms == pytest.approx(run.metrics.ttft_ms, rel=1e-12)
        assert answer.hit_rate == run.metrics.decode_resident_hit_rate


def test_the_best_has_the_last_token_first_and_llama_cpp_and_the_clairvoyant_run_stand_beside_it() -> None:
    found = mini(generated=256)
    names = [answer.policy for answer in (found.best, *found.runners_up)]
    assert sorted(names) == ["fiddler", "on-demand"]
    assert [answer.policy for answer in found.compared] == ["llama.cpp@impl"]
    ends = [answer.answer_ms for answer in (found.best, *found.runners_up)]
    assert ends == sorted(ends)
    assert found.best.answer_ms == found.best.ttft_ms + 255 * found.best.tpot_ms
    assert found.clairvoyant is not None
    assert found.clairvoyant.labels == ("clairvoyant",)


def test_the_gpus_memory_is_divided_without_a_rest() -> None:
    memory = mini().memory
    assert memory.fixed_bytes + memory.cache_bytes == memory.gpu_bytes
    assert memory.cached_experts == memory.cache_bytes * memory.experts // memory.routed_bytes


def test_an_answer_is_the_same_every_time_and_leaves_the_collector_on() -> None:
    assert policies(**MINI) == mini()
    assert gc.isenabled()


def test_the_number_of_processes_changes_nothing() -> None:
    assert fit(Question(**MINI), jobs=2).policies == mini()


def test_policies_may_come_in_a_list() -> None:
    assert Question(**{**MINI, "policies": ["fiddler", "on-demand"]}) == Question(**MINI)


def test_a_dict_of_it_is_json() -> None:
    found = json.loads(json.dumps(fit(Question(**MINI)).to_dict(), allow_nan=False))
    assert found["policies"]["best"]["tpot_ms"] == mini().best.tpot_ms
    assert found["engine"]["engine"] == "llama.cpp"


def test_a_policy_that_moves_experts_needs_all_of_them_in_the_hosts_memory() -> None:
    by_policy = {answer.policy: answer.host_bytes for answer in (mini().best, *mini().runners_up)}
    memory = mini().memory
    assert by_policy["on-demand"] == memory.routed_bytes
    assert by_policy["fiddler"] < memory.routed_bytes - memory.cache_bytes * 0.99


def test_little_host_memory_leaves_those_that_move_nothing() -> None:
    found = mini(ram_gb=28)
    assert found.best.policy == "fiddler"
    assert set(found.refused) == {"on-demand", "oracle"}
    missing = found.memory.routed_bytes + HOST_RESERVE_BYTES - 28 * 2**30
    assert found.refused["on-demand"].startswith(f"{missing / 1e9:.1f} GB")
    assert found.clairvoyant is None


def test_less_host_memory_is_refused() -> None:
    with pytest.raises(FitError, match="GB are missing"):
        mini(ram_gb=16)


def test_where_everything_fits_nothing_is_decided() -> None:
    found = mini(gpu="rtx-4090", weights="q4_k_m")
    assert found.memory.all_fits
    assert (found.best.policy, found.best.hit_rate, found.runners_up, found.clairvoyant) == ("llama.cpp", 1.0, (), None)
    assert found.best.tpot_ms < mini(gpu="rtx-4090", weights="q4_k_m", policy_engine="pytorch").best.tpot_ms


def test_policies_that_change_the_routing_stand_apart() -> None:
    found = mini(policies=("fiddler", "daop"))
    assert [answer.policy for answer in found.changing] == ["daop"]
    assert found.changing[0].ttft_ms > 0
    repeated = mini(policies=("fiddler", "daop"), prompt_tokens=128)
    assert repeated.changing[0].ttft_ms is None
    assert found.best.policy == "fiddler"


def test_what_was_not_asked_for_is_not_recommended() -> None:
    """llama.cpp would be faster here."""
    found = mini(policies=("on-demand",))
    assert (found.best.policy, found.runners_up) == ("on-demand", ())
    assert found.compared[0].policy == "llama.cpp@impl"
    assert found.compared[0].answer_ms < found.best.answer_ms
    with pytest.raises(FitError, match="none of the policies that keep the routing can run"):
        mini(policies=("daop",))
    assert mini(policies=("on-demand", "llama.cpp@impl")).best.policy == "llama.cpp@impl"


def test_a_trace_of_ones_own_can_be_calibrated_on_another() -> None:
    """A file has none beside it, and then fiddler knows nobody who is popular."""
    own = str(FOLDER / "mini-deepseek.safetensors")
    with pytest.raises(FitError, match="'fiddler' needs calibration"):
        mini(trace=own, policies=("fiddler",))
    given = mini(trace=own, policies=("fiddler",), calibration="mini-deepseek-calibration")
    assert given.best == mini(policies=("fiddler",)).best


def test_a_host_that_no_desktop_can_be_is_told() -> None:
    """All experts of a large model in its own weights, and nobody said how much memory there is."""
    more: dict[str, Any] = {"model": "qwen3-235b-a22b:64", "gpu": "rtx-5090", "ram": "ddr5-5600", "generated": 2,
                            "prompt_tokens": 64, "policies": ("ktransformers",), "weights": "bf16"}
    room = policies(**more).caveats.room
    assert room is not None
    assert room[1:] == (2, "DDR5-5600", 2, 256)
    assert policies(**more, ram_gb=512).caveats.room is None
    assert policies(**{**more, "weights": "q4_k_m"}).caveats.room is None


def test_what_is_named_is_routed_as_recorded_and_a_large_model_by_what_is_made_up() -> None:
    assert mini().routing == "mini-deepseek (recorded)"
    made_up = routing_of(Question("deepseek-v2-lite", machine="rtx3090-ddr4", batch=2))
    assert made_up.name == "synthetic:deepseek-v2-lite/2x128+32/quasi_hidden@1,residual@1"
    assert made_up.about.startswith("synthetic, like ")
    assert made_up.calibration == "synthetic:deepseek-v2-lite-calibration/16x8+8/none"
    cut = routing_of(Question("deepseek-v2-lite@q8_0:2", machine="rtx3090-ddr4"))
    assert cut.trace.shape.moe_layers == 2
    assert routing_of(Question("mini-moe", machine="rtx3090-ddr4")).about == "mini-moe (recorded)"


def test_runners_up_within_the_spread_of_the_steps_are_equal_to_the_best() -> None:
    found = mini(policies=("ktransformers", "best-exact", "on-demand"))
    assert 0 < found.best.spread_ms < found.best.tpot_ms / 4
    later = {one.policy: one.answer_ms - found.best.answer_ms for one in found.runners_up}
    assert all(later[name] < found.best.tpot_ms * 15 / 4 for name in found.equal)
    assert "on-demand" not in found.equal


def test_a_smaller_cache_of_keys_and_values_leaves_policies_more_room() -> None:
    whole, half = (mini(prompt_tokens=8192, kv=kv).memory for kv in ("f16", "q8_0"))
    assert half.kv_bytes == pytest.approx(whole.kv_bytes * 8.5 / 16, rel=1e-6)
    assert half.cache_bytes > whole.cache_bytes
    assert mini(prompt_tokens=8192).memory == whole
