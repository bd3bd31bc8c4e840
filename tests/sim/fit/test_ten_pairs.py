"""Ten machine-model pairs: their times lie where reasons put them, in an order that reasons give, within what the
machines' bandwidths allow.

Everything that is compared with is worked out here, from data sheets and the models' published widths. The policies are
two of the usual ones, a cache on the GPU and a CPU that helps it, to save time; llama.cpp and the clairvoyant run stand
beside them as always.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest

from sim.fit.fit import Fit, fit
from sim.fit.question import Question

POLICIES = ("mixtral-offloading@impl", "ktransformers")
SAME = 1.02  # two times no further apart than that count as equal
MOST = 5.0  # of the plain sum of bandwidth times: nothing else than reading weights may take four times as long as that


class Model(NamedTuple):
    """Weights that a token reads: of the routed experts, and of everything else but the embedding table."""

    expert_params: float
    other_params: float


class Weights(NamedTuple):
    """Bits per weight of experts and of everything else, at least."""

    experts: float
    others: float


QWEN = Model(48 * 8 * 3 * 2048 * 768, 48 * (18_874_368 + 2048 * 128) + 151_936 * 2048)
MIXTRAL = Model(32 * 2 * 3 * 4096 * 14_336, 32 * (41_943_040 + 4096 * 8) + 32_000 * 4096)
GPT_OSS = Model(24 * 4 * 3 * 2880 * 2880, 24 * (26_542_080 + 2880 * 32) + 201_088 * 2880)
Q4, Q8, BF16, MXFP4 = Weights(4.5, 4.5), Weights(8.5, 8.5), Weights(16, 16), Weights(4.25, 16)
DDR4, DDR5 = 51.2, 89.6  # GB/s, two channels of 3200 and 5600 MT/s


class Pair(NamedTuple):
    """A question; what its model and its machine are on paper; the TPOT that is expected, and why."""

    asked: dict[str, Any]
    model: Model
    weights: Weights
    gpu_gbps: float
    dram_gbps: float
    least_ms: float
    most_ms: float
    why: str


PAIRS = {
    "small card": Pair(
        {"model": "qwen3-30b-a3b", "gpu": "rtx-3060", "ram": "ddr4-3200"}, QWEN, Q4, 360, DDR4, 10, 30,
        "1.2 GB of experts a token, four in ten of them not on the card: a cache leaves a tenth of that to the link",
    ),
    "the usual question": Pair(
        {"model": "qwen3-30b-a3b", "gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 16}, QWEN, Q4, 717, DDR5, 6, 18,
        "eight in ten experts fit, and those that do not are seldom used",
    ),
    "all fits": Pair(
        {"model": "qwen3-30b-a3b", "gpu": "rtx-4090", "ram": "ddr5-5600"}, QWEN, Q4, 1008, DDR5, 3, 10,
        "24 GB hold the 18.5 GB of the model: 1.9 GB a token at 1 TB/s, and the start of a thousand kernels",
    ),
    "eight bits": Pair(
        {"model": "qwen3-30b-a3b", "weights": "q8_0", "gpu": "rtx-4080", "ram": "ddr5-5600", "cores": 16},
        QWEN, Q8, 717, DDR5, 10, 30, "twice the bytes, and only four in ten experts fit",
    ),
    "sixteen bits": Pair(
        {"model": "qwen3-30b-a3b", "weights": "bf16", "gpu": "rtx-4090", "ram": "ddr5-5600"}, QWEN, BF16, 1008, DDR5,
        15, 45, "3.6 GB of experts a token, a tenth of it over a link of 25 GB/s or through the CPU",
    ),
    "slower memory": Pair(
        {"model": "qwen3-30b-a3b", "weights": "bf16", "gpu": "rtx-4090", "ram": "ddr4-3200"}, QWEN, BF16, 1008, DDR4,
        15, 50, "as above; the link takes over what the CPU has become too slow for",
    ),
    "larger card, faster link": Pair(
        {"model": "qwen3-30b-a3b", "weights": "bf16", "gpu": "rtx-5090", "ram": "ddr5-5600"}, QWEN, BF16, 1792, DDR5,
        8, 25, "32 GB hold half of the experts, and PCIe 5 brings the others twice as fast",
    ),
    "slow slot": Pair(
        {"model": "qwen3-30b-a3b", "weights": "bf16", "gpu": "rtx-4090", "ram": "ddr5-5600", "pcie": "3x8"},
        QWEN, BF16, 1008, DDR5, 20, 80, "a quarter of the link: more is left to the CPU",
    ),
    "few large experts": Pair(
        {"model": "mixtral-8x7b", "gpu": "rtx-3090", "ram": "ddr4-3200"}, MIXTRAL, Q4, 936, DDR4, 20, 70,
        "6.8 GB of experts a token, of which a sixth is not on the card",
    ),
    "laptop-sized card": Pair(
        {"model": "gpt-oss-20b", "gpu": "rtx-4060", "ram": "ddr5-5600"}, GPT_OSS, MXFP4, 272, DDR5, 18, 50,
        "2.4 GB of other weights at 272 GB/s, 1.3 GB of experts, of which a third is on the card",
    ),
}  # fmt: skip

ORDER = (  # faster, slower, why
    ("the usual question", "small card", "a better card and better memory"),
    ("all fits", "the usual question", "a card that holds everything"),
    ("the usual question", "eight bits", "fewer bits"),
    ("all fits", "sixteen bits", "fewer bits on the same machine"),
    ("sixteen bits", "slower memory", "faster memory"),
    ("larger card, faster link", "sixteen bits", "a larger card on a faster link"),
    ("sixteen bits", "slow slot", "a faster slot"),
)


@cache
def answered(name: str) -> Fit:
    return fit(Question(**PAIRS[name].asked, policies=POLICIES))


@pytest.mark.parametrize("name", PAIRS)
def test_the_time_per_token_lies_where_it_is_expected(name: str) -> None:
    pair, found = PAIRS[name], answered(name)
    assert pair.least_ms <= found.best.tpot_ms <= pair.most_ms, pair.why


@pytest.mark.parametrize("name", PAIRS)
def test_no_answer_reads_faster_than_the_memories_can(name: str) -> None:
    """Other weights are read by the GPU, and each expert by the GPU or by the CPU, at best both at once."""
    pair, found = PAIRS[name], answered(name)
    others, experts = bytes_of(pair)
    least_s = others / (pair.gpu_gbps * 1e9) + experts / ((pair.gpu_gbps + pair.dram_gbps) * 1e9)
    for answer in (found.best, *found.runners_up, *([found.clairvoyant] if found.clairvoyant else [])):
        assert answer.tpot_ms / 1e3 >= least_s, answer.policy


@pytest.mark.parametrize("name", PAIRS)
def test_no_answer_is_far_above_the_plain_sum_of_bandwidth_times(name: str) -> None:
    """That of somebody who keeps any experts on the GPU and computes the others on the CPU, one after the other."""
    pair, found = PAIRS[name], answered(name)
    others, experts = bytes_of(pair)
    cached = found.memory.cached_experts / found.memory.experts
    sum_s = (others + cached * experts) / (pair.gpu_gbps * 1e9) + (1 - cached) * experts / (pair.dram_gbps * 1e9)
    assert found.best.tpot_ms / 1e3 <= MOST * sum_s


@pytest.mark.parametrize(("faster", "slower", "why"), ORDER)
def test_better_machines_and_fewer_bits_are_never_slower(faster: str, slower: str, why: str) -> None:
    one, other = answered(faster).best, answered(slower).best
    assert one.tpot_ms <= other.tpot_ms * SAME, why
    assert one.answer_ms <= other.answer_ms * SAME, why


@pytest.mark.parametrize("name", PAIRS)
def test_the_best_is_no_slower_than_llama_cpp_nor_faster_than_the_bound(name: str) -> None:
    found = answered(name)
    assert found.llama_cpp is not None
    assert found.bounds["lower_bound_tpot_ms"] <= found.best.tpot_ms
    assert found.best.answer_ms <= found.llama_cpp.ttft_ms + 255 * found.llama_cpp.tpot_ms


def bytes_of(pair: Pair) -> tuple[float, float]:
    """Of other weights and of experts, that a token reads."""
    return pair.model.other_params * pair.weights.others / 8, pair.model.expert_params * pair.weights.experts / 8
