"""``trilane smoke``: a line for every check, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import realrun.smoke.smoke
from realrun.smoke import Check
from tests.kit.commands import Trilane

SOUND = [Check("link: host to GPU", "ok", "24.9 GB/s"), Check("flags", "skipped", why="the host waits")]
BROKEN = Check("zero-copy", "failed", why="RuntimeError: it read something else")


@pytest.mark.parametrize(("more", "status"), [([], 0), ([BROKEN], 1)])
def test_every_check_is_a_line_and_a_failed_one_the_exit_status(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch, more: list[Check], status: int
) -> None:
    def smoke(made: Any) -> Iterator[Check]:
        yield from SOUND + more

    monkeypatch.setattr(realrun.smoke.smoke, "smoke", smoke)
    done = trilane("smoke", "--lanes", "host-lanes", "--json", "checks.json")
    lines = ["ok      link: host to GPU: 24.9 GB/s", "skipped flags: the host waits"]
    lines += [f"failed  zero-copy: {BROKEN.why}"] * len(more)
    assert done.out.splitlines() == [*lines, "", f"{2 + len(more)} checks, {len(more)} failed"]
    assert done.status == status
    assert trilane("smoke", "--json", "-").json["checks"] == [check._asdict() for check in SOUND + more]


def test_without_a_gpu_a_gpu_is_refused_with_a_sentence(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = trilane("smoke", "--lanes", "cuda")
    assert (done.status, done.out) == (2, "")
    assert "expected a GPU" in done.err
