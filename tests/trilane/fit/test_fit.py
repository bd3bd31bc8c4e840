"""Whole answers of the policies: where they come from, and what they refuse."""

from __future__ import annotations

import gc
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.traces.models.gguf_files import Q4_K, Q6_K, grouped, mixture, model, write_gguf
from traces.file import FOLDER
from traces.models.catalogue import load_model
from trilane.engines.memory import HOST_RESERVE_BYTES, expert_room, least_need
from trilane.engines.question import FitError, Question
from trilane.engines.refusals import check_fits
from trilane.engines.shortage import NoRoomError
from trilane.engines.speed import EngineAnswer
from trilane.fit.answer import PolicyAnswer
from trilane.fit.fit import engine_part, fit
from trilane.fit.prepared_question import (
    DEFAULT_CANDIDATES,
    chosen_names,
    routing_of,
)
from trilane.output.pages.fit import fit_page
from trilane.output.pages.output import show

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


def test_without_names_no_policy_is_simulated_unless_no_engine_has_an_answer() -> None:
    unnamed = {name: value for name, value in MINI.items() if name not in ("policies", "trace")}
    assert fit(Question(**unnamed)).policies is None
    assert fit(Question(**unnamed, policy_engine="pytorch")).policies is not None
    assert fit(Question(**unnamed, trace="mini-deepseek")).policies is not None
    profile = str(Path(__file__).parents[3] / "docs/validation/host-lanes/profile.yaml")
    found = fit(Question("deepseek-v2-lite:2", trace="mini-deepseek:2", machine=profile, prompt_tokens=8, generated=2))
    assert (found.engine, found.policies is None) == (None, False)


def test_policies_on_a_profile_run_on_the_engine_that_was_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(Path(__file__).parents[3] / "docs/validation/host-lanes/profile.yaml")
    found = fit(Question("deepseek-v2-lite:2", trace="mini-deepseek:2", machine=profile, prompt_tokens=8, generated=2))
    assert found.to_dict()["policies"]["engine"] is None
    show(None, *fit_page(found))
    assert "the one that was profiled" in capsys.readouterr().out


def test_the_usual_policies_may_stand_beside_others() -> None:
    both = chosen_names(Question(**{**MINI, "policies": ("fiddler", "usual", "dali")}))
    assert both == ("fiddler", *DEFAULT_CANDIDATES)


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


DISK: dict[str, Any] = {"ram_gb": 16, "disk": "nvme-4x4"}
TWO: dict[str, Any] = {"gpu": "rtx-3060+rtx-3060-ti", "policies": ("fiddler", "on-demand", "daop")}


def engine_of(**more: Any) -> EngineAnswer:
    found = engine_part(Question(**{**MINI, **more})).engine
    assert found is not None
    return found


@pytest.mark.parametrize("more", [DISK, TWO, {**TWO, **DISK}])
def test_on_several_gpus_and_above_a_disk_an_answer_is_that_of_simulate(more: dict[str, Any]) -> None:
    found = mini(policy_engine="pytorch", **more)
    memory, on_disk = engine_of(**more).memory, "disk" in more
    room = memory.ram_bytes - sum(memory.host_parts.values()) + memory.host_parts["experts"] if on_disk else None
    above = {} if room is None else {"disk": "nvme-4x4", "host_expert_gb": room / 1e9}
    for answer in (found.best, *found.runners_up):
        run = simulate(Scenario(
            policy=answer.policy, model="deepseek-v2-lite@bf16", trace="mini-deepseek",
            calibration="mini-deepseek-calibration", hardware=Question(**{**MINI, **more}).hardware,
            prompt_tokens=64, generated_tokens=16, sampled_steps=56, **above,
        ))
        assert answer.tpot_ms == pytest.approx(run.metrics.tpot_ms, rel=1e-12)
        assert answer.disk_bytes_per_token == run.metrics.disk.get("disk_bytes_per_token")


def test_experts_without_room_on_the_host_stay_on_the_disk_as_those_of_the_engine_do() -> None:
    memory, found = engine_of(**DISK).memory, mini(**DISK)
    by_policy = {answer.policy: answer for answer in (found.best, *found.runners_up)}
    assert by_policy["on-demand"].host_bytes == memory.host_parts["experts"]
    assert by_policy["on-demand"].host_bytes + by_policy["on-demand"].disk_bytes == found.memory.routed_bytes
    assert all(answer.disk_bytes_per_token > 0 for answer in by_policy.values())
    assert 0 < by_policy["fiddler"].disk_bytes < by_policy["on-demand"].disk_bytes
    assert "disk" in {gain.part for gain in found.gains}
    assert "disk" not in {gain.part for gain in mini().gains}


def test_with_room_for_all_experts_a_disk_changes_nothing() -> None:
    assert mini(ram_gb=64, disk="nvme-4x4") == mini(ram_gb=64)


def test_two_gpus_are_refused_to_policies_that_do_not_see_them() -> None:
    found = mini(**TWO)
    assert found.refused["daop"].startswith("several GPUs are not simulated with daop")
    assert found.memory.gpu_bytes == (12 + 8) * 2**30
    assert "kernel launches" not in {gain.part for gain in found.gains}


def test_gpus_with_room_for_all_experts_leave_policies_nothing_to_decide() -> None:
    found = fit(Question(**{**MINI, "gpu": "2x-rtx-3090"}))
    assert found.policies is None
    assert found.policies_refused == "the GPUs have room for every expert, so that policies have nothing to decide"


def test_a_host_without_room_for_a_layer_above_the_disk_is_refused() -> None:
    shape = load_model("deepseek-v2-lite@bf16")
    lacking = Question(**{**MINI, **DISK, "ram_gb": 5})
    room = expert_room(shape, lacking.load_machine(), lacking)
    short = least_need(shape, lacking.load_machine(), lacking).shortages(shape, lacking.load_machine(), lacking)
    assert [(one.memory, one.missing_bytes) for one in short] == [("host", shape.least_host_bytes - room)]
    with pytest.raises(NoRoomError, match="GB are missing"):
        check_fits(shape, lacking.load_machine(), lacking)


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
    named = routing_of(Question("deepseek-v2-lite:2", machine="rtx3090-ddr4", policies=("dali",)))
    assert named.calibration == "synthetic:deepseek-v2-lite-calibration/16x8+8/residual@1:2"  # DALI asks how good it is
    tiny = "synthetic:deepseek-v2-lite/1x8+4/none:2"
    own = routing_of(Question("deepseek-v2-lite:2", machine="rtx3090-ddr4", trace=tiny))
    assert own.about.startswith(f"{tiny} (synthetic, fitted to deepseek-v2-lite")
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


# --- Whole answers for models that are given as a file ----------------------------------------------------------------


SMALL = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 24,
    "num_experts_per_tok": 3, "moe_intermediate_size": 256, "vocab_size": 1000,
}


@pytest.mark.parametrize("given", ["", "config.json", "config.json@q8_0:2"])
def test_a_configuration_is_answered_for_as_the_catalogue_is(given: str, tmp_path: Path) -> None:
    """A folder, a file, and a file with weights and a cut; the q4_k_m of the first two is what most people run."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    question = Question(
        f"{tmp_path}/{given}".rstrip("/"),
        gpu="rtx-3060",
        ram="ddr4-3200",
        prompt_tokens=64,
        policies=("fiddler", "on-demand"),
    )
    found = fit(question)
    assert found.model == f"{tmp_path}/{given if '@' in given else 'config.json@q4_k_m'}"
    assert found.policies is not None
    assert found.policies.memory.experts == (2 if ":2" in given else 4) * 24
    assert found.policies.best.tpot_ms > 0
    assert f"synthetic, like {tmp_path}/config.json" in found.policies.routing
    assert found.engine is not None
    assert f" -m {tmp_path.name}-" in found.engine.command


def test_a_gguf_file_is_answered_for_with_its_own_weights(tmp_path: Path) -> None:
    """Layers of unequal size, as llama.cpp's mixtures have them."""
    keys = {"expert_count": 24, "expert_used_count": 3, "embedding_length": 512, "attention.head_count": 8}
    layers = [grouped(512, 8, 2, 64) + mixture(512, 256, 24)] * 4
    metadata, tensors = model("qwen3moe", keys, 1000, layers, experts=Q4_K)
    mixed = [(name, shape, Q6_K if name == "blk.1.ffn_down_exps.weight" else kind) for name, shape, kind in tensors]
    file = write_gguf(tmp_path / "mine.gguf", metadata, mixed)
    policies = ("on-demand", "fiddler")
    found = fit(Question(str(file), gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, policies=policies))
    assert found.model == str(file)
    assert found.policies is not None
    assert found.policies.memory.routed_bytes == 24 * 512 * 256 * (11 * 144 + 210) // 256
    assert found.policies.best.tpot_ms > 0
    assert found.engine is not None
    assert f" -m {file} " in found.engine.command
