"""Cards that work together on every layer, in vLLM and KTransformers: what is divided, what is not, and their sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import load_fitted
from sim.machine.cards import load_machine
from traces.models.catalogue import load_model
from traces.models.shape import ExpertWork
from trilane.engines.accuracy.apart import PARALLEL
from trilane.engines.accuracy.measured_rows import predict, read_rows
from trilane.engines.parallel import ExpertFactors, divides_heads, expert_parallel, takes_cards
from trilane.engines.question import FitError, Question, check_engine, check_setting
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import DecodeTime, StaticSplit, decode_time
from trilane.engines.tensor_split import busiest_share
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune

HOST = "ddr4-3200"
VLLM = load_fitted("vllm")
QWEN = load_model("qwen3-30b-a3b@awq")


def decode(machine: str, model: str = "qwen3-30b-a3b@awq") -> DecodeTime:
    return decode_time(load_model(model), load_machine(machine), VLLM, StaticSplit(0), 1000)


def speed_of(question: Question) -> EngineSpeed:
    return EngineSpeed.asked(question, question.model_shape, question.load_machine())


def test_two_cards_read_half_each_and_wait_for_two_sums_a_layer() -> None:
    """A sum takes 39 us through the host's memory, and the bytes of a hidden state hardly more; of 48 layers 3.7 ms."""
    one, two = decode(f"rtx-3090+{HOST}"), decode(f"2x-rtx-3090+{HOST}")
    assert two.gpu_experts_ns == pytest.approx(one.gpu_experts_ns / 2, rel=1e-6)
    saved = two.total_ns - one.total_ns
    fixed = 48 * 0.060e6 * (6.6 / 2.848) ** 0.215
    divided = one.attention_ns - fixed + one.gpu_experts_ns
    assert saved < 96 * 39e3 - divided / 2 + 0.1e6
    assert two.attention_ns == pytest.approx(fixed + (one.attention_ns - fixed) / 2, rel=0.01)
    assert 96 * 39e3 < two.others_ns < 96 * 43e3 + one.others_ns


def test_linked_cards_add_their_results_sooner() -> None:
    apart, linked = decode(f"2x-rtx-3090+{HOST}"), decode(f"2x-rtx-3090+{HOST}+nvlink")
    assert linked.others_ns < apart.others_ns - 96 * 15e3
    assert (linked.attention_ns, linked.gpu_experts_ns) == (apart.attention_ns, apart.gpu_experts_ns)


def test_the_slowest_card_decides() -> None:
    both, slow = decode(f"rtx-5090+rtx-3090+{HOST}"), decode(f"2x-rtx-3090+{HOST}")
    assert both.attention_ns == pytest.approx(slow.attention_ns, rel=0.01)
    assert both.gpu_experts_ns == pytest.approx(slow.gpu_experts_ns, rel=0.01)


def test_cards_have_whole_experts_where_their_width_is_not_divided() -> None:
    """768 weights are six groups of 128: three on each of two cards, none and a half on each of four."""
    assert [expert_parallel(QWEN, cards) for cards in (2, 3, 4)] == [False, False, True]
    assert not expert_parallel(load_model("qwen3-30b-a3b"), 4)  # in 16 bits any width is
    assert not expert_parallel(load_model("gpt-oss-120b"), 2)  # 2,880 in blocks of 32, which are filled up
    work = ExpertWork.of(QWEN, 1)
    four = ExpertFactors.of(QWEN, load_machine(f"4x-rtx-3090+{HOST}"), VLLM, work)
    assert four.gpu == pytest.approx(busiest_share(128, 8, 4))
    assert four.gpu > 1 / 4
    assert ExpertFactors.of(QWEN, load_machine(f"rtx-3090+{HOST}"), VLLM, work) == (1.0, 1.0)


def test_the_memory_of_each_card_is_its_part() -> None:
    question = Question("qwen3-30b-a3b", gpu="2x-rtx-3090", ram=HOST, engine="vllm")
    two, one = speed_of(question), speed_of(replace(question, gpu="rtx-3090"))
    memory, alone = two.splitter.memory(two.split), one.splitter.memory(one.split)
    assert [card.experts_bytes for card in memory.cards] == [-(-alone.experts_bytes // 2)] * 2
    assert sum(card.kv_bytes for card in memory.cards) == alone.kv_bytes
    assert memory.reserve_bytes == 2 * alone.reserve_bytes


def test_latents_are_kept_and_read_by_every_card() -> None:
    """GLM-4.7-Flash: tokens that follow lengthen a step of two cards by as much as one of one."""
    question = Question("glm-4.7-flash", gpu="2x-rtx-3090", ram=HOST, engine="vllm")
    two, one = speed_of(question), speed_of(replace(question, gpu="rtx-3090"))
    kept = one.splitter.memory(one.split).kv_bytes
    assert [card.kv_bytes for card in two.splitter.memory(two.split).cards] == [kept, kept]
    shape, split = question.model_shape, StaticSplit(0)
    longer = [decode_time(shape, load_machine(f"{gpu}+{HOST}"), VLLM, split, 30_000).attention_ns
              - decode_time(shape, load_machine(f"{gpu}+{HOST}"), VLLM, split, 1_000).attention_ns
              for gpu in ("rtx-3090", "2x-rtx-3090")]
    assert longer[0] > 0
    assert longer[1] == pytest.approx(longer[0], rel=0.03)


def test_a_model_that_one_card_has_no_room_for_runs_on_four() -> None:
    question = Question("glm-4.5-air", gpu="4x-rtx-3090", ram=HOST, engine="vllm")
    four = speed_of(question)
    assert four.split.cpu_layers == 0
    assert speed_of(replace(question, gpu="rtx-3090")).split.cpu_layers > 0


def test_the_lines_to_paste_name_the_cards() -> None:
    two = " ".join(speed_of(Question("qwen3-30b-a3b", gpu="2x-rtx-3090", ram=HOST, engine="vllm")).words)
    assert two.startswith("vllm serve qwen3-30b-a3b-awq --tensor-parallel-size 2 --max-model-len 4352 ")
    four = " ".join(speed_of(Question("qwen3-30b-a3b", gpu="4x-rtx-3090", ram=HOST, engine="vllm")).words)
    assert " --tensor-parallel-size 4 --enable-expert-parallel " in four
    kt = Question("qwen3-235b-a22b", gpu="2x-rtx-5090", ram="ddr5-5600", engine="ktransformers")
    speed = speed_of(kt)
    assert f"--kt-num-gpu-experts {speed.split.gpu_experts} --tensor-parallel-size 2 " in " ".join(speed.words)


def test_two_cards_of_ktransformers_hold_more_experts_and_copy_the_others_sooner() -> None:
    kt = Question("qwen3-235b-a22b", gpu="rtx-5090", ram="ddr5-6000-ecc", cpu="epyc-9355", engine="ktransformers")
    one, two = speed_of(kt), speed_of(replace(kt, gpu="2x-rtx-5090"))
    assert two.split.gpu_experts > one.split.gpu_experts
    assert two.decode.cpu_experts_ns < one.decode.cpu_experts_ns
    assert two.prompt.copies_ns < one.prompt.copies_ns


def test_tune_answers() -> None:
    tuned = tune(TuneQuestion(Question("qwen3-30b-a3b", gpu="2x-rtx-3090", ram=HOST, engine="vllm", generated=64)))
    assert "--tensor-parallel-size 2" in tuned.best.command
    assert tuned.best.host_layers == 0


def test_ts_is_refused() -> None:
    question = Question("qwen3-30b-a3b", gpu="2x-rtx-3090", ram=HOST, engine="vllm", ts=(25, 24))
    with pytest.raises(FitError, match="ts, sm: vllm divides every layer over all GPUs alike"):
        check_setting(question, VLLM, question.load_machine())
    assert takes_cards(VLLM)
    assert takes_cards(load_fitted("ktransformers"))
    assert not takes_cards(load_fitted("llama.cpp"))


@pytest.mark.parametrize(("model", "cards", "even"), [
    ("qwen3-30b-a3b", 3, False), ("qwen3-30b-a3b", 4, True), ("qwen3-30b-a3b", 8, True),  # 32 heads, 4 of keys
    ("glm-4.5-air", 3, False), ("glm-4.5-air", 4, True),  # 96 heads, 8 of keys
    ("deepseek-v3", 3, False), ("deepseek-v3", 4, True),  # 128 heads, of one latent
    ("qwen3-next-80b-a3b", 4, True),
])
def test_heads_are_divided_evenly_or_refused(model: str, cards: int, even: bool) -> None:
    assert divides_heads(load_model(model), cards) == even
    machine = load_machine(f"{cards}x-rtx-3090+{HOST}")
    if even:
        check_engine(VLLM, load_model(model), machine)
        return
    with pytest.raises(FitError, match=f"expected GPUs that all have as many of the heads of {model}, got 3; use 2 of"):
        check_engine(VLLM, load_model(model), machine)


def test_every_row_is_asked() -> None:
    """With links between the cards those of 2026 are predicted within a half (docs/notes/vllm.md)."""
    rows = read_rows(PARALLEL)
    errors = {row.id: (predict(row).decode_tokens_per_s or 0) / (row.decode_tokens_per_s or 1) - 1 for row in rows}
    assert len(errors) == 11
    linked = [row.id for row in rows if row.machine.endswith(("nvlink", "p2p")) and row.date >= "2026"]
    assert len(linked) == 5
    assert all(abs(errors[name]) < 0.5 for name in linked)
