"""Which routing answers a question: the trace that was named, one recorded from this very model, or one made up.

The bundled mini-deepseek has DeepSeek-V2-Lite's topology, and its routing is real, but not that model's: its gate@1
forecasts are right for 84 of 100 experts, where 73 are published for the large one (DALI, Table 5), so that what
prefetches would look better than it is. So the large model gets routing that is made up, like the mini's but with the
published forecasts; ``--trace mini-deepseek`` asks for the other. Either way the page says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.bundled_traces import bundled_trace
from traces.library import calibration_of, load_trace
from traces.synthesis.named import with_lengths
from traces.trace import Trace
from trilane.study.fit.answer_steps import most_steps
from trilane.study.fit.candidates import forecasts_read
from trilane.study.fit.long_prompt import PROMPT_ROWS
from trilane.study.fit.question import Question, parted

CALIBRATION = (16, 8, 8)  # sequences and their tokens: enough to know who is popular, and quickly made


@dataclass(frozen=True)
class Routing:
    """The routing of an answer; ``name`` and ``calibration`` as ``load_trace`` knows them."""

    name: str
    calibration: str | None
    told: str  # on the page
    trace: Trace = field(repr=False)


def routing_for(question: Question) -> Routing:
    """Raises TraceError for a trace that is not there."""
    model, cut = parted(question.model)
    bundled = bundled_trace(model)
    recorded = question.trace or (bundled and f"{bundled}{cut}")
    if recorded:
        trace = load_trace(recorded)
        made_up = trace.provenance.get("synthetic")
        told = f"{recorded} ({f'synthetic, {made_up}' if made_up else 'recorded'})"
        return Routing(recorded, question.calibration or calibration_of(recorded), told, trace)
    name = f"synthetic:{model}"
    read = forecasts_read(question)
    prompt = max(PROMPT_ROWS // question.batch, 1)
    counted = f"{with_lengths(name, question.batch, prompt, most_steps(question.batch), read)}{cut}"
    trace = load_trace(counted)
    told = f"synthetic, like {model}: {trace.provenance['synthetic']}"
    counted_before = read if question.policies else ()  # of the usual candidates none asks how good forecasts were
    calibration = f"{with_lengths(f'{calibration_of(name)}', *CALIBRATION, counted_before)}{cut}"
    return Routing(counted, question.calibration or calibration, told, trace)
