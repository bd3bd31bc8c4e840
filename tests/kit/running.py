"""Running commands in an empty folder, for the tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SHORT = ("--set", "prompt_tokens=4", "--set", "generated_tokens=3")


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Trilane = Callable[..., Result]


def write_route_csv(path: Path, size: int = 1000) -> None:
    """A route_trace v1 file: 2 layers, 4 experts, top-1; a prompt of 2 tokens and 3 decode steps. Experts take ``size``
    bytes in the first layer, twice that in the second.
    """
    head = ["# route_trace v1", "# model=tiny arch=none n_layer=2 n_expert=4 n_expert_used=1",
            f"# layer=0 expert_bytes={size} dense_bytes=10", f"# layer=1 expert_bytes={2 * size} dense_bytes=10",
            "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    experts = [(0, 1), (2, 3), (0, 1), (0, 3), (2, 1)]
    rows = [
        f"0,{int(step > 1)},{step},{layer},0,{expert},1.0,0,{size * (layer + 1)}"
        for step, pair in enumerate(experts)
        for layer, expert in enumerate(pair)
    ]
    path.write_text("\n".join([*head, *rows, ""]))
