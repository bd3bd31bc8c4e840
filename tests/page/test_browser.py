"""The page in a browser: every view by mouse and by keyboard, at two widths, light and dark, and for screen readers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import done
from tests.trilane.engines.accuracy.test_outputs import TESTS

pytestmark = pytest.mark.page

MACHINE = "gpu=rtx-3060&cpu=ryzen-5-5600&ram=ddr4-3200&ram_gb=32"
VIEWS = {
    "machine": f"machine?{MACHINE}",
    "model": f"model?{MACHINE}&model=qwen3-30b-a3b",
    "what-if": f"what-if?{MACHINE}&model=qwen3-30b-a3b",
    "policies": "policies?setting=small&policies=on-demand,fiddler,dali,oracle",
    "timeline": "timeline?setting=small&share=50&policies=on-demand,mixtral-offloading",
    "pays": "pays", "accuracy": "accuracy", "leaderboard": "leaderboard", "learn": "learn",
    "share": "share",
}
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
SHOTS = os.environ.get("TRILANE_SHOTS")  # a folder that keeps the screenshots
Opened = Callable[..., Any]


@pytest.mark.parametrize("size", ["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_its_window_and_has_no_serious_findings(
    view: str, scheme: str, size: str, opened: Opened, tmp_path: Path
) -> None:
    page = done(opened(VIEWS[view], size, scheme))
    page.wait_for_timeout(300)  # bars grow
    page.screenshot(path=Path(SHOTS or tmp_path) / f"{view}-{size}-{scheme}.png", full_page=True)
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.evaluate(AXE)
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    serious = [
        f"{one['id']}: {node['html'][:160]}" for one in found["violations"] if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
    assert serious == []


def test_a_serious_finding_would_be_found(opened: Opened) -> None:
    page = done(opened(VIEWS["machine"]))
    page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
    page.evaluate(AXE)
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    assert "button-name" in [one["id"] for one in found["violations"]]


def test_an_owner_finds_model_command_and_upgrade_by_mouse(opened: Opened) -> None:
    page = opened("machine")
    page.get_by_label("GPU", exact=True).fill("NVIDIA GeForce RTX 3060 12GB")
    page.get_by_label("CPU", exact=True).fill("Ryzen 5 5600")
    page.get_by_label("memory modules").fill("ddr4-3200")
    page.get_by_label("RAM (GiB)").fill("32")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("taken as rtx-3060 (12 GB)").wait_for()
    done(page)
    page.get_by_role("link", name="gpt-oss-20b").click()
    assert "llama-server -m gpt-oss-20b-mxfp4.gguf" in page.get_by_label("Command line", exact=True).inner_text()
    page.get_by_role("link", name="RTX 5060 Ti 16GB").first.click()
    page.get_by_text("RTX 5060 Ti 16GB, Ryzen 5 5600").wait_for()


def test_a_model_is_opened_and_its_words_are_read_by_keyboard(opened: Opened) -> None:
    page = done(opened(VIEWS["machine"]))
    first = page.locator("ol.bars a").first
    first.focus()
    name = first.inner_text()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=re.compile(f"^{re.escape(name)}, ")).wait_for()
    assert page.evaluate("() => document.activeElement.tagName") == "H1"
    page.locator("pre.command span").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".about-word").inner_text().startswith("-m ")


def test_a_point_of_a_curve_says_its_numbers_by_keyboard(opened: Opened) -> None:
    page = done(opened(VIEWS["model"]))
    page.locator(".chart circle").first.focus()
    page.keyboard.press("End")
    assert re.match(r"[\d,]+ tokens: [\d.]+ tokens/s", page.locator("#tip").inner_text())


def test_a_slider_changes_the_answer_the_address_and_survives_a_reload(opened: Opened) -> None:
    page = done(opened(VIEWS["what-if"]))
    speed = page.locator("#what-if-speed")
    before = speed.inner_text()
    page.get_by_label("GPU memory (GB)").focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    page.locator(".held[aria-busy=false]").wait_for()
    after = speed.inner_text()
    assert float(after) > float(before)
    assert "gpu_memory_gb=" in page.url
    page.reload()
    done(page)
    assert speed.inner_text() == after


def test_a_step_is_played_by_keyboard_and_says_why_the_gpu_waits(opened: Opened) -> None:
    page = done(opened(VIEWS["timeline"]))
    page.get_by_role("button", name="Next event").focus()
    for _ in range(4):
        page.keyboard.press("Enter")
    assert float(page.locator(".clock").inner_text().split()[0]) > 0
    page.get_by_role("button", name="Play").press("Enter")
    page.get_by_role("button", name="Pause").wait_for()
    idle = page.locator('rect[fill="var(--idle)"]').last
    idle.focus()
    assert re.match(r"the GPU waits [\d.]+ ms (in layer \d+ )?for ", page.locator("#tip").inner_text())


def test_a_step_is_saved_for_perfetto(opened: Opened, tmp_path: Path) -> None:
    page = done(opened(VIEWS["timeline"]))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save for ui.perfetto.dev").click()
    download.value.save_as(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


def test_a_policy_leads_to_its_step(opened: Opened) -> None:
    page = done(opened(VIEWS["policies"]))
    page.get_by_role("link", name="fiddler").click()
    page.get_by_role("heading", name=re.compile("^fiddler: ")).wait_for()


def test_points_are_filtered_and_explained_by_keyboard(opened: Opened) -> None:
    page = done(opened(VIEWS["accuracy"]))
    every = page.locator("circle").count()
    page.get_by_label("kind of machine").select_option("laptop")
    page.wait_for_timeout(1500)
    assert page.locator("circle").count() < every
    page.locator("circle").first.press("Enter")
    page.get_by_role("heading", name=re.compile("^Row ")).wait_for()


def test_a_column_of_the_leaderboard_sorts_it(opened: Opened) -> None:
    page = done(opened(VIEWS["leaderboard"]))
    assert page.locator("tbody tr").count() == 12
    page.get_by_role("button", name="policy", exact=True).click()
    page.get_by_role("button", name="policy", exact=True, pressed=True).wait_for()
    names = page.locator("tbody td:first-child").all_inner_texts()
    assert names == sorted(names)


def test_a_cell_says_its_reasons(opened: Opened) -> None:
    page = done(opened(VIEWS["pays"]))
    page.locator("td.here").first.hover()
    assert "tokens/s with llama-cache-lru" in page.locator("#tip").inner_text()


def test_a_question_can_be_tried(opened: Opened) -> None:
    page = done(opened(VIEWS["learn"]))
    page.get_by_role("link", name="Try it").nth(3).click()
    page.get_by_role("heading", name="What runs on my machine?").wait_for()


def test_back_leads_to_the_question_before(opened: Opened) -> None:
    page = done(opened(VIEWS["machine"]))
    page.get_by_role("button", name="fastest first").click()
    done(page)
    fastest = page.locator("ol.bars a").first.inner_text()
    page.go_back()
    page.get_by_role("button", name="largest first", pressed=True).wait_for()
    assert page.locator("ol.bars a").first.inner_text() != fastest


def test_a_refused_question_says_why_and_the_page_goes_on(opened: Opened) -> None:
    page = opened("machine?gpu=rtx-3061&ram=ddr4-3200")
    assert "there is no gpu 'rtx-3061'" in page.get_by_role("alert").inner_text()
    page.get_by_label("GPU", exact=True).fill("rtx-3060")
    page.get_by_role("button", name="Show").click()
    page.locator("ol.bars li").first.wait_for()


def test_a_report_opens_from_the_disk(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trilane.page.report import write_report

    monkeypatch.setattr("trilane.page.machine_views.shapes_of", lambda models: {"gpt-oss-20b": (), "kimi-k2": ()})
    query = {"gpu": "rtx-3060", "ram": "ddr4-3200", "ram_gb": "32", "use": "chat"}
    write_report(query, tmp_path / "r.html", None, 1, lambda done, of: None)
    page = opened("", base=(tmp_path / "r.html").as_uri())
    done(page)
    page.get_by_role("link", name="gpt-oss-20b").click()
    page.get_by_role("heading", name="Command line").wait_for()
    assert page.locator("svg circle").count() > 5
    assert "What if" not in page.locator("nav").inner_text()


def test_numbers_are_those_of_the_server(opened: Opened, address: str) -> None:
    page = done(opened(VIEWS["machine"]))
    lines = page.evaluate(
        "async (question) => (await fetch(`answers/${question}`)).text()", VIEWS["machine"]
    )
    rows = [record for record in map(json.loads, lines.splitlines()) if record["kind"] == "runs"]
    shown = page.locator("ol.bars li .value strong").all_inner_texts()
    assert sorted(shown) == sorted(row["speed"] for row in rows)


def test_speeds_are_compared_and_saved(opened: Opened, tmp_path: Path) -> None:
    page = done(opened("share"))
    page.get_by_label("Output of llama-bench").fill(json.dumps(TESTS))
    page.get_by_label("GPU", exact=True).fill("rtx-3060")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("kind and speed of the memory modules").wait_for()
    assert page.evaluate("() => document.activeElement.name") == "ram"
    page.keyboard.type("ddr4-3200")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Everything in the file").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save speeds.csv").click()
    download.value.save_as(tmp_path / "speeds.csv")
    assert len((tmp_path / "speeds.csv").read_text().splitlines()) == 3
