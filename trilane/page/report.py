"""The report: the page in one file, with the answers that it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from trilane.common.files import atomic_path
from trilane.page.document import report
from trilane.page.questions import PageError
from trilane.page.records import Record
from trilane.page.view import records
from trilane.page.views import VIEWS
from trilane.study.pool import WorkerPool

Watch = Callable[[int, int], None]


def write_report(query: Mapping[str, str], path: str | Path, model: str | None, jobs: int, watch: Watch) -> int:
    """Write the answers for one machine into a file, and return its size in bytes. ``model``: that alone is opened,
    None: each that runs. ``watch`` is called with the number of models that are done, and of all. Raises PageError for
    a machine that cannot be answered for."""
    all_models = machine_records(query)
    answers = {address_of("machine", query): all_models}
    models = [record["model"] for record in all_models if record["kind"] == "runs"] if model is None else [model]
    queries = [{**query, "model": model} for model in models]
    with WorkerPool(jobs, _nothing) as pool:
        futures = [pool.submit(_records, "model", each) for each in queries]
        for done, _ in enumerate(pool.as_completed(futures), 1):
            watch(done, len(futures))
    answers |= {address_of("model", each): future.result() for each, future in zip(queries, futures, strict=True)}
    first = address_of("machine", query) if model is None else address_of("model", queries[0])
    text = report(answers, f"#/{first}").encode()
    with atomic_path(path) as aside:
        aside.write_bytes(text)
    return len(text)


def machine_records(query: Mapping[str, str]) -> Sequence[Record]:
    """All models on the machine. Raises PageError where that is refused."""
    found = list(records(VIEWS["machine"], query))
    if found[0]["kind"] == "refused":
        raise PageError(found[0]["text"])
    return found


def address_of(view: str, query: Mapping[str, str]) -> str:
    """The question as the page's script writes it."""
    return f"{view}?{urlencode(sorted(query.items()))}"


def _nothing() -> None:
    """No state."""


def _records(state: None, view: str, query: Mapping[str, str]) -> list[Record]:
    return list(records(VIEWS[view], query))
