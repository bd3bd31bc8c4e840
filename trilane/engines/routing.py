"""The routing that answers a question: the named trace, one recorded from this model, or a synthetic one.

The bundled mini-deepseek has DeepSeek-V2-Lite's topology, and its routing is real, but not that of the large model: an
LRU cache of a quarter of its experts hits 40 %, there 48 %, and its gate@1 forecasts are right for 84 of 100 experts,
where 73 are published for the large one (DALI, Table 5). The large model therefore gets synthetic routing with its own
statistics and the published forecasts; ``--trace mini-deepseek`` selects the other. So does gpt-oss-20b, whose recorded
routing has neither forecasts nor prompts. The page says which was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from traces.file import bundled_trace
from traces.library import calibration_of, load_trace
from traces.models.catalogue import load_model
from traces.models.names import parted
from traces.synthesis.named import with_lengths
from traces.trace import Trace
from trilane.engines.question import PROMPT_ROWS, Question

USUAL_SHARE = 0.25  # of the experts, where a page is about no cache of another size
CALIBRATION = (16, 8, 8)  # sequences and their tokens: enough to tell which experts are popular, and quickly made


@dataclass(frozen=True)
class RoutingSource:
    """The routing of an answer; ``name`` and ``calibration`` are names for ``load_trace``."""

    name: str
    calibration: str | None
    about: str  # on the page
    trace: Trace = field(repr=False)


def statistics_text(question: Question, share: float | None = USUAL_SHARE) -> str:
    """The statistics of made-up routing in words; empty for recorded routing and for a trace that was named.

    ``share``: of the experts, for which the hit rates of other such statistics are given; None: without these, which
    take time.
    """
    shape = question.model_shape
    recorded = bundled_trace(parted(shape.name).model)
    if question.trace or (recorded and load_trace(recorded).forecasts):
        return ""
    from traces.synthesis.spread import basis_in_words, in_words

    return basis_in_words(shape) if share is None else in_words(shape, share)


def synthetic_names(
    model: str, lengths: tuple[int, int, int], forecasts: Iterable[str], calibrated: Iterable[str]
) -> tuple[str, str]:
    """The names of a model's synthetic routing and of its calibration, with these forecasts each.

    ``lengths``: sequences, and their tokens of prompt and answer.
    """
    name, _, layers = parted(load_model(model).name)  # of a folder, the file in it
    whole, cut = f"synthetic:{name}", "" if layers is None else f":{layers}"
    calibration = with_lengths(f"{calibration_of(whole)}", *CALIBRATION, calibrated)
    return f"{with_lengths(whole, *lengths, forecasts)}{cut}", f"{calibration}{cut}"


def routing_for(
    question: Question, forecasts: Sequence[str] = (), *, with_calibration: bool = False
) -> RoutingSource:
    """Return the routing that answers a question. Raises TraceError for a trace that does not exist.

    ``forecasts``: those of synthetic routing, such as ``gate@1``. ``with_calibration``: for ``load_trace``, make that
    of synthetic routing at the same time.
    """
    model, _, layers = parted(load_model(question.model).name)  # of a folder, the file in it
    cut = "" if layers is None else f":{layers}"
    bundled = bundled_trace(model)
    complete = bundled and load_trace(bundled).forecasts
    recorded = question.trace or (f"{bundled}{cut}" if complete else None)
    if recorded:
        trace = load_trace(recorded)
        synthetic = trace.provenance.get("synthetic")
        about = f"{recorded} ({f'synthetic, {synthetic}' if synthetic else 'recorded'})"
        return RoutingSource(recorded, question.calibration or calibration_of(recorded), about, trace)
    lengths = question.batch, max(PROMPT_ROWS // question.batch, 1), question.most_steps
    calibrated = forecasts if question.policies else ()  # no default candidate reads how good forecasts were
    counted, others = synthetic_names(question.model, lengths, forecasts, calibrated)
    calibration = question.calibration or others
    if with_calibration:
        with ThreadPoolExecutor(2) as threads:  # numpy draws numbers without the interpreter's lock
            [*threads.map(load_trace, (counted, calibration))]
    trace = load_trace(counted)
    about = f"synthetic, like {model}: {trace.provenance['synthetic']}"
    return RoutingSource(counted, calibration, about, trace)
