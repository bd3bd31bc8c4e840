"""A mixture of experts with random weights to offload, and what policies learn of it beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.generation.hosted_model import HostedModel, computed_in_place, routed_through
from realrun.machine.lanes import Machine
from sim.runs.scenario import Scenario
from traces.capture.forecasts import calibrate
from traces.capture.passes import HookedModel
from traces.capture.prompts import read_prompts
from traces.capture.record import RouterRecorder
from traces.capture.settings import CaptureSettings
from traces.capture.vectors import write_vectors

SEED = 11
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """Of a Qwen3-MoE. The default has 1.2 GB of experts in bfloat16, 6.3 MB each."""

    hidden: int = 1024
    layers: int = 6
    experts: int = 32
    top_k: int = 4
    width: int = 1024
    vocab: int = 4096


@dataclass(frozen=True)
class Learnt:
    """Files that policies are calibrated with: a trace, and residual vectors."""

    trace: Path
    vectors: Path


def write_model(size: Size, folder: Path) -> None:
    """A checkpoint with a tokenizer for text that is token numbers.

    Embeddings are large, so that the next token depends on the last one: else the likeliest is the same for ever, and
    so are the experts.
    """
    config = transformers.Qwen3MoeConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=size.hidden // 8, num_experts=size.experts, num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width, intermediate_size=size.width, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    torch.manual_seed(SEED)
    model = transformers.Qwen3MoeForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(number): number for number in range(size.vocab)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def prompts(size: Size, count: int, tokens: int) -> list[Tokens]:
    """Random prompts; the first ones are the same, however many are asked for."""
    drawn = np.random.default_rng(SEED).integers(3, size.vocab, (count, tokens))
    return [tuple(row) for row in drawn.tolist()]


def learn(model: HostedModel, texts: list[Tokens], generated: int, machine: Machine, folder: Path) -> Learnt:
    """Calibrate on prompts of their own: what was routed where, and how the gates' input changes by layer."""
    learnt = Learnt(folder / "calibration.safetensors", folder / "vectors.safetensors")
    asked = GenerateRequest(
        model="in memory", prompts=texts, scenario=Scenario(policy="naive-cpu"), generated_tokens=generated,
        cache_slots=0, trace=learnt.trace,
    )
    generate_hosted(model, asked, machine)
    file, layers = folder / "prompts.txt", model.loaded.layers
    file.write_text("".join(" ".join(map(str, text)) + "\n" for text in texts))
    in_place = routed_through(layers, computed_in_place(layers, model.store))
    with torch.inference_mode(), RouterRecorder(layers) as recorder, in_place:
        run = HookedModel(model.loaded, CaptureSettings(generated_tokens=generated), recorder)
        write_vectors(calibrate(run, None, read_prompts(file)), learnt.vectors)
    return learnt
