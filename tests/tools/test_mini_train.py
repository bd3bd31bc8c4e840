"""The mini trainer: data, schedule, router losses, evaluation, resuming, export."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer  # noqa: E402

from tools.mini_bundle import cut_passages, cut_prompts  # noqa: E402
from tools.mini_data import CorpusError, load_corpus, train_tokenizer  # noqa: E402
from tools.mini_train import (  # noqa: E402
    RouterTap,
    Trainer,
    TrainingSettings,
    _balance,
    _router_losses,
    build_model,
    deepseek_config,
    learning_rate,
    moe_config,
    train,
)

VOCAB = 320
TOY = TrainingSettings("mini-moe", steps=3, batch=2, length=16, vocab=VOCAB, eval_windows=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number, domain in enumerate(("letters", "digits")):
        random = np.random.default_rng(number)
        words = ["alpha", "beta", "gamma", "delta"] if domain == "letters" else ["12", "345", "6", "789"]
        for split, lines in (("train", 400), ("eval", 200)):
            text = "\n".join(" ".join(random.choice(words, 8)) for _ in range(lines))
            (folder / f"{domain}.{split}.txt").write_text(text + "\n")
    return folder


def test_the_mini_deepseek_has_the_routing_topology_of_deepseek_v2_lite() -> None:
    config = deepseek_config()
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (27, 1)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (64, 6, 2)
    assert (config.topk_method, config.norm_topk_prob, config.routed_scaling_factor) == ("greedy", False, 1.0)


def test_the_mini_moe_fits_in_12_megabytes() -> None:
    model = build_model("mini-moe", seed=0)
    assert (moe_config().num_experts, moe_config().num_experts_per_tok, moe_config().num_hidden_layers) == (16, 2, 8)
    assert sum(p.numel() for p in model.parameters()) * 2 < 11.5e6


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(KeyError, match=r"no mini model 'big'; known: \['mini-deepseek', 'mini-deepseek-8', 'mini-moe'"):
        build_model("big", seed=0)


def test_tokens_come_back_as_the_text_that_they_were(corpus: Path) -> None:
    tokenizer = train_tokenizer(corpus, VOCAB)
    text = "alpha 345  ünïcode\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    loaded = load_corpus(corpus, tokenizer)
    assert loaded.domains == ("digits", "letters")
    for tokens, domain in zip(loaded.held_out, loaded.domains, strict=True):
        assert loaded.token_bytes[tokens].sum() == (corpus / f"{domain}.eval.txt").stat().st_size


def test_batches_depend_on_seed_and_step_alone(corpus: Path) -> None:
    loaded = load_corpus(corpus, train_tokenizer(corpus, VOCAB))
    assert torch.equal(loaded.batch(1, 5, 4, 16), loaded.batch(1, 5, 4, 16))
    assert not torch.equal(loaded.batch(1, 5, 4, 16), loaded.batch(1, 6, 4, 16))
    assert math.isclose(np.exp(-loaded.unigram_nats()).sum(), 1.0)


def test_a_folder_without_pairs_and_a_short_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="found none"):
        train_tokenizer(tmp_path, VOCAB)
    (tmp_path / "a.train.txt").write_text("too short")
    (tmp_path / "a.eval.txt").write_text("too short")
    with pytest.raises(CorpusError, match="at least 512 tokens"):
        load_corpus(tmp_path, train_tokenizer(tmp_path, VOCAB))


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    rates = [learning_rate(TOY, progress / 1000) for progress in range(1001)]
    assert max(rates) == pytest.approx(TOY.peak_lr)
    assert rates.index(max(rates)) == 20
    assert rates[-1] == pytest.approx(TOY.final_lr * TOY.peak_lr)
    assert all(a >= b for a, b in pairwise(rates[20:]))


def test_the_balance_loss_is_one_when_experts_share_evenly_and_grows_when_they_do_not() -> None:
    even, _ = _router_losses(torch.zeros(8, 4), torch.arange(8).view(8, 1) % 4)
    logits = torch.zeros(8, 4)
    logits[:, 0] = 9.0
    uneven, _ = _router_losses(logits, torch.zeros(8, 1, dtype=torch.int64))
    assert even.item() == pytest.approx(1.0)
    assert uneven.item() == pytest.approx(4.0, abs=0.01)


def test_balance_reports_share_dead_experts_and_domain_distance() -> None:
    counts = torch.tensor([[[4.0, 4, 0, 0]], [[0.0, 0, 8, 0]]]).double()  # 2 domains, 1 layer, 4 experts
    report = _balance(counts)
    assert report == {"max_over_mean": [2.0], "dead_fraction": [0.25], "domain_distance": [0.5]}


@pytest.mark.parametrize("model", ["mini-moe", "mini-deepseek"])
def test_router_taps_find_every_router_of_both_families(model: str) -> None:
    built = build_model(model, seed=0, vocab=32, layers=3)
    tap = RouterTap(built)
    built(input_ids=torch.arange(12).view(2, 6))
    top_k, layers = (2, 3) if model == "mini-moe" else (6, 2)
    assert tap.layers == layers
    assert tap.counts().sum(1).tolist() == [12 * top_k] * layers


def small_trainer(corpus: Path, folder: Path, settings: TrainingSettings) -> Trainer:
    """Three tiny layers instead of the whole model."""
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(corpus, VOCAB).save(str(path))
    model = build_model(settings.model, settings.seed, vocab=VOCAB, layers=3)
    text = load_corpus(corpus, Tokenizer.from_file(str(path)))
    return Trainer(settings, text, folder, model, iter(range(10**6)).__next__)


def weights(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return state


@pytest.mark.parametrize("model", ["mini-moe", "mini-deepseek"])
def test_a_resumed_run_ends_byte_identical_to_an_unbroken_one(corpus: Path, tmp_path: Path, model: str) -> None:
    settings = replace(TOY, model=model, steps=4)
    small_trainer(corpus, tmp_path / "whole", settings).run()
    broken = small_trainer(corpus, tmp_path / "broken", settings)
    for _ in range(2):
        broken._train_step()
        broken.step += 1
    broken._checkpoint()
    small_trainer(corpus, tmp_path / "broken", settings).run()
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    one, two = (tmp_path / run / "model" / "model.safetensors" for run in ("whole", "broken"))
    assert one.read_bytes() == two.read_bytes()


def test_training_learns_logs_and_exports_what_the_library_loads(corpus: Path, tmp_path: Path) -> None:
    done = train(replace(TOY, steps=30, peak_lr=0.01), corpus, tmp_path / "run", clock=iter(range(10**6)).__next__)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    held_out = log[-1]["held_out"]
    for domain in held_out["loss"].values():
        assert domain["nats_per_token"] < domain["unigram_nats_per_token"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert loaded.dtype == torch.bfloat16
    first = next(done.model.parameters())
    assert torch.equal(next(loaded.parameters()), first.to(torch.bfloat16))


def test_the_clock_ends_a_run_that_has_minutes(corpus: Path, tmp_path: Path) -> None:
    settings = replace(TOY, steps=None, minutes=0.1, checkpoint_minutes=0.05)
    trainer = small_trainer(corpus, tmp_path / "run", settings)  # a step takes one second of the fake clock
    trainer.run()
    assert trainer.step == 5  # the evaluation of the one checkpoint before the end takes a second too
    assert trainer.progress >= 1.0


def test_passages_do_not_overlap_and_are_long_enough() -> None:
    text = "\n".join(f"line {n} of some text" for n in range(400))
    split = {"input_ids": []}

    def tokenizer(piece: str) -> dict[str, list[str]]:
        return {**split, "input_ids": piece.split()}

    passages = cut_passages(text, 4, 8, tokenizer, np.random.default_rng(0))
    starts = sorted(text.index(p) for p in passages)
    assert len(passages) == 4
    assert all(b - a >= 64 for a, b in pairwise(starts))
    with pytest.raises(CorpusError, match="found"):
        cut_passages(text[:100], 4, 8, tokenizer, np.random.default_rng(0))


def test_calibration_prompts_come_from_the_last_tenth_of_the_training_text(tmp_path: Path) -> None:
    for split in ("train", "eval"):
        (tmp_path / f"a.{split}.txt").write_text("".join(f"line {number:04}\n" for number in range(10_000)))
    for split, first in (("train", 9000), ("eval", 0)):
        cut = cut_prompts(tmp_path, split, 3, lambda text: {"input_ids": list(text)}, 1, tmp_path / "p.jsonl")
        assert min(int(number) for p in cut.prompts for number in re.findall(r"\d{4}", p.text)) >= first
        assert len(cut.prompts) == 3
