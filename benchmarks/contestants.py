"""Contestants of ``beside_accelerate``: accelerate and Trilane, timed by the same clock on the same lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from realrun.generation.generate import GenerateRequest, generate_hosted
from realrun.generation.hosted_model import HostedModel, computed_in_place, routed_through
from realrun.machine.host_lanes import HostLanes
from realrun.machine.lanes import Machine
from sim.runs.scenario import Scenario
from traces.capture.forecasts import calibrate
from traces.capture.layers import find_moe_layers
from traces.capture.passes import Batch, HookedModel
from traces.capture.passes import generate as library_passes
from traces.capture.prompts import read_prompts
from traces.capture.record import RouterRecorder
from traces.capture.settings import CaptureSettings
from traces.capture.vectors import write_vectors


@dataclass(frozen=True)
class Turn:
    """One generation: tokens, times of its decode steps, and what it had on the GPU and moved there."""

    tokens: Tokens
    steps_ms: tuple[float, ...]
    experts_on_gpu: int  # that the GPU's memory held from one use to the next
    hit_rate: float | None  # of the experts routed to in decode steps, those that were there
    link_bytes: float | None  # a token


@dataclass
class Contestant:
    """A program that generates; ``turns`` are those that count."""

    who: str
    generate: Callable[[], Turn]
    turns: list[Turn] = field(default_factory=list)

    @property
    def steps_ms(self) -> list[float]:
        """The decode steps of all turns."""
        return [ms for turn in self.turns for ms in turn.steps_ms]


class Clock:
    """Takes the likeliest token, and notes when the host knows it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._known_ns: list[int] = []

    def __call__(self, logits: Tensor, _sequences: Sequence[int], _step: int) -> Tensor:
        """The next token [1, 1] for logits [1, V]."""
        chosen = logits.argmax(-1, keepdim=True)
        self.tokens.append(int(chosen))
        self._known_ns.append(time.perf_counter_ns())
        return chosen

    @property
    def steps_ms(self) -> tuple[float, ...]:
        """From each token to the next; the first one is the prompt's."""
        return tuple((end - begin) / 1e6 for begin, end in zip(self._known_ns, self._known_ns[1:], strict=False))


def with_accelerate(
    folder: Path, scratch: Path, limit_bytes: int, prompt: Tokens, generated: int, lanes: Machine
) -> list[Contestant]:
    """Accelerate's offload, the one that all are compared with; without a GPU also as it is there, without any link."""
    if not isinstance(lanes, HostLanes):
        placed = split(folder, limit_bytes, 0, "cpu")
        model = load(folder, placed.places, scratch)
        return [Contestant("accelerate", partial(by_library, model, placed, prompt, generated, lanes))]
    placed = split(folder, limit_bytes, "cpu", "disk")
    linked, plain = (load(folder, placed.places, scratch / name) for name in ("linked", "plain"))
    send_over_link(linked, lanes)
    return [
        Contestant("accelerate", partial(by_library, linked, placed, prompt, generated, lanes)),
        Contestant(
            "accelerate to disk, no link",
            partial(by_library, plain, placed, prompt, generated, lanes, linked=False),
        ),
    ]


def by_library(
    model: Any, placed: Split, prompt: Tokens, generated: int, lanes: Machine, *, linked: bool = True
) -> Turn:
    """The library's own passes over a model that accelerate has put its hooks on."""
    clock = Clock()
    with torch.inference_mode(), lanes.hosting():
        for _ in library_passes(model, Batch((0,), torch.tensor([prompt])), generated, clock):  # type: ignore[arg-type]
            pass
    experts = placed.layers_on_gpu * model.config.num_experts
    share = placed.layers_on_gpu / placed.layers
    return Turn(tuple(clock.tokens), clock.steps_ms, experts, share, placed.moved_bytes if linked else None)


def with_ours(
    policies: Sequence[str], model: HostedModel, prompt: Tokens, generated: int, lanes: Machine, base: Scenario,
    learnt: Learnt,
) -> list[Contestant]:
    """Ours, once for every policy; ``base``: the memory, and what planners believe in."""
    scenarios = [base.with_(policy=policy, calibration=str(learnt.trace)) for policy in policies]
    return [
        Contestant(f"ours, {one.policy}", partial(by_ours, model, prompt, generated, lanes, one, learnt.vectors))
        for one in scenarios
    ]


def by_ours(
    model: HostedModel, prompt: Tokens, generated: int, lanes: Machine, scenario: Scenario, vectors: Path
) -> Turn:
    """Ours, under the policy of ``scenario``."""
    clock = Clock()
    request = GenerateRequest(
        model="in memory", prompts=[prompt], scenario=scenario, generated_tokens=generated, vectors=vectors
    )
    run = generate_hosted(model, request, lanes, clock).run
    return Turn(
        tuple(clock.tokens), clock.steps_ms, run.memory["cache_slots"], run.metrics.decode_resident_hit_rate,
        run.metrics.pcie_bytes_per_token,
    )


# --- Hugging Face accelerate ------------------------------------------------------------------------------------------


Place = str | int
Arena = dict[tuple[str, torch.Size], Tensor]  # of the one layer that has come: a weight's name and shape


class Split(NamedTuple):
    """Place of each module; layers whose experts stay on the GPU, of all; and bytes that every pass copies."""

    places: Mapping[str, Place]
    layers_on_gpu: int
    layers: int
    moved_bytes: int


def split(folder: Path, limit_bytes: int, here: Place, away: Place) -> Split:
    """Put ``here`` all but experts, and the experts of as many layers as the limit holds.

    Room is kept for one more layer's experts, as accelerate's own ``infer_auto_device_map`` does: those that are away
    come here, all of a layer's at once. Raises ValueError for a limit that does not hold even that.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    experts = {layer.experts for layer in find_moe_layers(model)}
    sizes = {name: bytes_of(module) for name, module in model.named_modules() if module in experts}
    room = limit_bytes - (bytes_of(model) - sum(sizes.values())) - max(sizes.values())
    if room < 0:
        raise ValueError(f"accelerate: the limit of {limit_bytes:,} bytes is {-room:,} too small for this model")
    fit = min(room // max(sizes.values()), len(sizes))
    places: dict[str, Place] = {name: here for name, module in model.named_modules() if _own(module)}
    places |= dict.fromkeys(list(sizes)[fit:], away)
    return Split(places, fit, len(sizes), sum(list(sizes.values())[fit:]))


def load(folder: Path, places: Mapping[str, Place], offload_folder: Path) -> Any:
    """The model with accelerate's hooks on it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=dict(places), offload_folder=str(offload_folder), dtype=torch.bfloat16
    ).eval()


def bytes_of(module: nn.Module) -> int:
    """Bytes of all weights of a module."""
    return sum(value.numel() * value.element_size() for value in module.parameters())


def send_over_link(model: Any, machine: HostLanes) -> None:
    """From now on, what accelerate fetches is in the host's memory and comes over the link of ``machine``.

    Without a GPU, accelerate offloads to disk alone, and computes in place in the file that it maps: nothing moves.
    Its hooks stay as they are; only the mapping that they read weights from is another.
    """
    arrived: Arena = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            if getattr(part, "offload", False) and part.weights_map is not None and _own(module):
                names = [name for name, _ in module.named_parameters(recurse=False)]
                part.weights_map = _OverLink({name: part.weights_map[name] for name in names}, machine, arrived)


class _OverLink(Mapping[str, Tensor]):
    """Weights that are copied, at the link's pace, whenever they are looked up: to memory that all layers share."""

    def __init__(self, weights: Mapping[str, Tensor], machine: HostLanes, arrived: Arena) -> None:
        self._weights = {name: weight.clone() for name, weight in weights.items()}
        self._machine, self._arrived = machine, arrived

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        key = (name, weight.shape)
        if key not in self._arrived:
            self._arrived[key] = torch.zeros_like(weight)
        target = self._arrived[key]
        self._machine.paced_copy(_bytes(target), _bytes(weight))
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _bytes(weight: Tensor) -> Tensor:
    return weight.view(-1).view(torch.uint8)


def _own(module: nn.Module) -> bool:
    """True if a module has weights of its own, not only in its parts."""
    return any(True for _ in [*module.parameters(recurse=False), *module.buffers(recurse=False)])


# --- the model --------------------------------------------------------------------------------------------------------


SEED = 11
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """Sizes of a Qwen3-MoE. The default has 1.2 GB of experts in bfloat16, 6.3 MB each."""

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
    request = GenerateRequest(
        model="in memory", prompts=texts, scenario=Scenario(policy="naive-cpu"), generated_tokens=generated,
        cache_slots=0, trace=learnt.trace,
    )
    generate_hosted(model, request, machine)
    file, layers = folder / "prompts.txt", model.loaded.layers
    file.write_text("".join(" ".join(map(str, text)) + "\n" for text in texts))
    in_place = routed_through(layers, computed_in_place(layers, model.store))
    with torch.inference_mode(), RouterRecorder(layers) as recorder, in_place:
        run = HookedModel(model.loaded, CaptureSettings(generated_tokens=generated), recorder)
        write_vectors(calibrate(run, None, read_prompts(file)), learnt.vectors)
    return learnt
