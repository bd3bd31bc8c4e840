"""The page of model families: true of a handful of them, and complete for the installed library."""

from __future__ import annotations

import pytest
import torch
import transformers

from realrun.generation.generate import generate_hosted
from realrun.generation.hosted_model import look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from tests.kit.generating import CPU, build_family, families, left_out, request
from tests.realrun.generation import families as tool
from tests.realrun.generation.families import ATTEMPTS, PAGE, Row, line, tried
from traces.capture.record import LayerRecord, RouterRecorder, scoring_rule

# Routers that read tokens, several residual streams, rows of a checkpoint by turns, shared experts that look routed,
# experts without weights, no gate in an expert, a mixture that can be skipped.
HANDFUL = ("deepseek_v4", "hy_v4", "inkling2_text", "inkling_text", "longcat_flash", "nemotron_h", "zaya")


TEXT = PAGE.read_text(encoding="utf-8")
VERSION = TEXT.partition(" in transformers ")[2].split()[0]

of_the_page_s_version = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}"
)


def rows() -> dict[str, list[str]]:
    """The page's cells of every attempt, by family."""
    lines = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return {cells[0].removeprefix("| "): cells[1 : 1 + len(ATTEMPTS)] for cells in lines if cells[0] != "| family"}


def available(family: str) -> str:
    if family not in families():
        pytest.skip(f"the installed transformers has no {family}")
    return family


@of_the_page_s_version
@pytest.mark.parametrize("family", HANDFUL)
def test_a_family_does_what_its_row_says(family: str) -> None:
    assert list(tried(family).cells.values()) == rows()[family]


@of_the_page_s_version
def test_every_family_of_the_library_has_its_row_or_is_left_out_by_name() -> None:
    assert set(families()) == set(rows())
    assert all(name in TEXT for name in left_out())


def test_a_line_of_the_page_has_the_cells_and_which_attempts_were_refused_and_why() -> None:
    row = Row("new", {"capture": "gate", "generate": "refused", "`dali`": "refused"}, {"a | b": ["generate", "`dali`"]})
    assert line(row) == "| new | gate | refused | refused | generate, `dali`: a &#124; b |"


def test_no_row_is_wrong_and_dali_runs_on_more_than_45() -> None:
    assert not any(cell in ("WRONG", "TRACEBACK") for cells in rows().values() for cell in cells)
    assert sum(cells[list(ATTEMPTS).index("`dali`")] == "exact" for cells in rows().values()) > 45


def test_a_wrong_result_and_an_error_that_is_not_ours_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise IndexError("of the library's")

    monkeypatch.setattr(tool, "TOLERANCE", -1.0)
    monkeypatch.setattr(tool, "ATTEMPTS", {"generate": tool.generated, "capture": broken})
    row = tried("mixtral")
    assert row.cells == {"generate": "WRONG", "capture": "TRACEBACK"}
    assert row.failed
    assert not Row("mixtral", {"generate": "exact", "capture": "refused"}, {}).failed


def record_of(family: str) -> LayerRecord:
    loaded = build_family(available(family))
    with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
        loaded.model(input_ids=torch.arange(3, 67).view(2, 32))
        return recorder.take()[0]


def test_tokens_that_skip_a_mixture_leave_the_scores_of_its_experts_as_they_are() -> None:
    """Zaya's router has a class more than experts; a token that takes it goes to expert 0 with weight 0."""
    record = record_of("zaya")
    assert record.ids is not None
    assert record.weights is not None
    kept = record.weights[:, 0] > 0
    assert 0 < kept.sum() < len(kept)
    assert record.logits.shape[1] == 8
    assert (record.logits.sum(-1) < 1).all()
    torch.testing.assert_close(record.weights[kept], record.logits[kept].gather(1, record.ids[kept]))
    assert scoring_rule([record]) == ("identity", True)


def test_routers_that_choose_by_tokens_are_asked_with_those_of_the_pass(inline_lanes: HostLanes) -> None:
    """DeepSeek-V4 in its first layers: forecasts for the second are certain, in the prompt and after it."""
    model = look_at(*taken_apart(build_family(available("deepseek_v4")), CPU, plain))
    trace = generate_hosted(model, request("mix", 8), inline_lanes).trace
    forecast = trace.tensors()["forecast/gate@1/ids"][:, 0, : model.shape.top_k]
    assert set(trace.phase.tolist()) == {0, 1}
    assert [sorted(row) for row in forecast.tolist()] == [sorted(row) for row in trace.topk_ids[:, 1].tolist()]
