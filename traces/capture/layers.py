"""The MoE layers of a Hugging Face model: one router and one experts module each, found by their contents.

The library has no common name, config field or base class for them (transformers 5.17 to 5.23), so layers are found by
parameter shapes: an experts module holds ``down_proj`` of all experts in one 3-D parameter; its sibling routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from traces.capture.settings import CaptureError


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
