"""The MoE layers of a Hugging Face model, one router and one experts module each, and the shape of the whole model.

The library has no common name, config field or base class for them (transformers 5.17 to 5.23), so layers are found by
parameter shapes: an experts module holds ``down_proj`` of all experts in one 3-D parameter; its sibling routes. Sizes
are read from parameters, counts that no parameter shows from the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from traces.capture.settings import CaptureError
from traces.models.shape import ModelShape

SHARED = ("shared_experts", "shared_expert", "shared_mlp", "mlp")  # mlp: next to the mixture in Gemma 4


@dataclass(frozen=True)
class MoeLayer:
    """One mixture of a loaded model."""

    path: str  # of the module that owns router and experts, such as model.layers.3.mlp
    block: nn.Module
    router: nn.Module
    experts: nn.Module

    @property
    def experts_count(self) -> int:
        """Routed experts, E."""
        return int(self.down.shape[0])

    @property
    def down(self) -> nn.Parameter:
        """The down projection of all experts: [E, H, I], or [E, I, H] where the module says ``is_transposed``."""
        down: nn.Parameter = self.experts.down_proj  # type: ignore[assignment]
        return down

    @property
    def width(self) -> int:
        """Intermediate width of one expert, I."""
        return int(self.down.shape[1 if getattr(self.experts, "is_transposed", False) else 2])

    @property
    def hidden(self) -> int:
        """Width of one expert's output, H."""
        return int(self.down.shape[2 if getattr(self.experts, "is_transposed", False) else 1])

    @property
    def matrices(self) -> int:
        """Weight matrices of one expert: 3 with a gate (two of them fused), 2 without."""
        return 3 if hasattr(self.experts, "gate_up_proj") else 2

    @property
    def expert_elements(self) -> int:
        """Weights of one expert, biases included."""
        return sum(p.numel() for p in self.experts.parameters()) // self.experts_count


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Every mixture of ``model``, in the order of its layers. Raises CaptureError if none is recognised."""
    modules = dict(model.named_modules())
    layers = [_layer(path, modules) for path, module in modules.items() if _holds_experts(path, module)]
    if not layers:
        raise CaptureError(
            f"{type(model).__name__}: expected modules that hold all experts of a layer in one 3-D `down_proj`, "
            "found none; this is not a mixture of experts, or one with another layout (DBRX, JetMoe)"
        )
    return layers


def _holds_experts(path: str, module: nn.Module) -> bool:
    """Excludes shared experts, which may have the same layout but are not routed to."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Parameter) and down.ndim == 3 and path.rpartition(".")[2] != "shared_experts"


def _layer(path: str, modules: dict[str, nn.Module]) -> MoeLayer:
    owner = path.rpartition(".")[0]
    children = dict(modules[owner].named_children())
    router = children.get("router", children.get("gate"))
    if router is None:
        raise CaptureError(
            f"{owner}: expected a child named `router` or `gate` next to the experts, found {sorted(children)}; "
            "this family routes in another way and is not supported"
        )
    held = {name: len(p) for name, p in modules[path].named_parameters(recurse=False) if p.ndim == 3}
    if len(set(held.values())) > 1:
        raise CaptureError(
            f"{path}: expected every matrix to be of the same experts, got {held}; a router that also chooses experts "
            "without weights, so that tokens have different numbers of experts (LongCat), is not supported"
        )
    return MoeLayer(owner, modules[owner], router, modules[path])


def config_value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of ``names`` that ``config`` has and that is not None. (Some configs raise on attributes that differ
    by layer, and not AttributeError.)
    """
    for name in names:
        try:
            value = getattr(config, name)
        except Exception:  # of a class that differs between versions of the library
            continue
        if value is not None:
            return value
    return default


def shape_of(model: nn.Module, layers: list[MoeLayer], name: str, top_k: int, bits: int) -> ModelShape:
    """Describe ``model``, whose weights take ``bits`` each at rest; ``top_k`` is what its experts were called with.

    Raises CaptureError where the layers differ in their number of experts, which a trace cannot hold.
    """
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = {layer.experts_count for layer in layers}
    if len(counts) > 1:
        raise CaptureError(f"{name}: expected the same number of experts in every layer, got {sorted(counts)}")
    decoder, dense = _decoder_layers(model, layers)
    first = layers[0]
    hidden = int(config_value(config, "hidden_size", "d_model"))
    heads = int(config_value(config, "num_attention_heads", default=1))
    return ModelShape(
        name=name, moe_layers=len(layers), dense_layers=len(dense), experts=first.experts_count, top_k=top_k,
        hidden=hidden, expert_width=first.width, shared_experts=_shared_experts(config, decoder[0]),
        shared_width=_width_of(decoder[0], SHARED),
        dense_width=_width_of(dense[0], ("mlp", "feed_forward", "mixer")) if dense else 0, heads=heads,
        kv_heads=int(config_value(config, "num_key_value_heads", default=heads)),
        head_dim=_head_dim(config, hidden, heads), kv_width=_kv_width(config, hidden, heads),
        attention_params=_attention_params(decoder[0]), vocab=int(config_value(config, "vocab_size", default=0)),
        tied_embeddings=bool(config_value(config, "tie_word_embeddings", default=False)),
        norm_topk=bool(config_value(config, "norm_topk_prob", default=True)), matrices_per_expert=first.matrices,
        weight_bits=float(bits), dense_bits=float(bits), expert_bytes=_expert_bytes(layers, hidden, bits),
        sources={"*": f"read from the loaded {type(model).__name__}"},
    )


def stack_of(model: nn.Module, layers: Sequence[MoeLayer]) -> tuple[str | None, list[int]]:
    """The path of the module that lists the decoder layers, None if there is none, and the places of ``layers`` in
    it."""
    paths = [layer.path.split(".") for layer in layers]
    at = max((i for i, part in enumerate(paths[0]) if part.isdigit()), default=None)
    if at is None:
        return None, []
    stack = ".".join(paths[0][:at])
    names = [name for name, _ in model.get_submodule(stack).named_children()]
    return stack, [names.index(path[at]) for path in paths]


def _decoder_layers(model: nn.Module, layers: list[MoeLayer]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The decoder layers with a mixture, and those without."""
    path, places = stack_of(model, layers)
    if path is None:
        return [layers[0].block], []
    decoders = list(model.get_submodule(path).children())
    return [decoders[i] for i in sorted({*places})], [d for i, d in enumerate(decoders) if i not in places]


def _expert_bytes(layers: list[MoeLayer], hidden: int, bits: int) -> tuple[int, ...]:
    """Bytes per layer where they differ from "matrices x hidden x width" (biases, latent widths); else empty."""
    plain = layers[0].matrices * hidden * layers[0].width
    sizes = [layer.expert_elements for layer in layers]
    return () if set(sizes) == {plain} else tuple(size * bits // 8 for size in sizes)


def _shared_experts(config: Any, layer: nn.Module) -> int:
    if not _width_of(layer, SHARED):
        return 0
    return int(config_value(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=1))


def _width_of(layer: nn.Module, names: tuple[str, ...]) -> int:
    """Intermediate width of the first feed-forward module of one of ``names`` in ``layer``; 0 without."""
    for path, module in layer.named_modules():
        if path.rpartition(".")[2] in names:
            for part in ("down_proj", "output_linear", "w2"):
                linear = getattr(module, part, None)
                if isinstance(linear, nn.Linear):
                    return linear.in_features
    return 0


def _attention_params(layer: nn.Module) -> int:
    """Weights of the attention (or whatever mixes tokens) of one decoder layer."""
    mixers = [m for n, m in layer.named_children() if "attn" in n or "attention" in type(m).__name__.lower()]
    return sum(p.numel() for m in mixers for p in m.parameters() if p.ndim > 1)


def _head_dim(config: Any, hidden: int, heads: int) -> int:
    nope, rope = config_value(config, "qk_nope_head_dim"), config_value(config, "qk_rope_head_dim")
    if nope is not None and rope is not None:
        return int(nope) + int(rope)
    return int(config_value(config, "head_dim", default=hidden // heads))


def _kv_width(config: Any, hidden: int, heads: int) -> int:
    """KV-cache elements a token and layer; latent attention (MLA) keeps one compressed vector and one rotary key."""
    latent, rope = config_value(config, "kv_lora_rank"), config_value(config, "qk_rope_head_dim")
    if latent is not None and rope is not None:
        return int(latent) + int(rope)
    kv_heads = int(config_value(config, "num_key_value_heads", default=heads))
    return 2 * kv_heads * _head_dim(config, hidden, heads)
