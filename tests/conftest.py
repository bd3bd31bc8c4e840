"""Settings of every test run."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from realrun.llama_cpp.abi import has_library
from tests.kit.browser import has_page
from tests.kit.depth import DEEP, left_out
from trilane.common.gc_paused import collect_seldom

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors on shared cores: more threads only wait for each other

# No example fails for the time that it took: the machine may be busy. In CI all runs draw the same ones.
settings.register_profile(
    "trilane", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow],
    max_examples=200 if DEEP else 30,
)
settings.load_profile("trilane")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("auto", "cuda", "fake"), default="auto",
        help="tests marked `device` run on a GPU. auto: where there is one; cuda: they fail where there is none; fake: "
             "never, the fake GPU of the other tests has to do.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left := left_out(items):
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
    marked = [item for item in items if item.get_closest_marker("device")]
    if marked and not _on_device(config.getoption("--device")):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        if item.get_closest_marker("page") and not has_page():
            item.add_marker(pytest.mark.skip(reason="needs the extra page, Playwright and Chromium: make test-page"))
        if item.get_closest_marker("llama") and not has_library():
            item.add_marker(pytest.mark.skip(reason="needs the package xllamacpp: make test-llama"))


def pytest_sessionstart() -> None:
    """Collection keeps nearly all that it makes: garbage is looked for once, at its end."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    collect_seldom()
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """What a module of tests has imported and keeps is frozen when it ends."""
    yield
    _freeze()


def _freeze() -> None:
    """A measured run collects garbage before it begins: not again among all that was imported, up to a second each."""
    gc.collect()
    gc.freeze()


def _on_device(asked: str) -> bool:
    if asked == "auto":
        import torch

        return torch.cuda.is_available()
    return asked == "cuda"
