"""A server of the page and a browser, shared by all tests; what the browser asks for and complains of is kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.browser import chromium
from tests.kit.commands import ROOT

SIZES = {"wide": (1280, 900), "phone": (390, 800)}
WAIT_MS = 120_000  # of a busy machine
Page = Any  # of Playwright, which is not installed with the other test tools


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Address of the page, with its token."""
    words = [sys.executable, "-m", "trilane", "explore", "--no-browser"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().partition("#")[0]
        server.terminate()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, address: str, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """A function that opens an address of the page. At the end no tab has asked another machine, or complained."""
    complaints: list[str] = []
    contexts = []

    def open_page(where: str, size: str = "wide", scheme: str = "light", base: str = address) -> Page:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((base, "data:")) else complaints.append(
            f"asked {request.url}"
        ))
        page.goto(f"{base}#/{where}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def done(page: Page) -> Page:
    """The page, once it has said that its answer is complete."""
    page.wait_for_selector("#said:not(:empty)", state="attached")
    return page
