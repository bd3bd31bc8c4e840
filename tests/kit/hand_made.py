"""A run written by hand, small enough to check with a pencil: two steps, one layer, experts of 100 bytes.

Expert 0 is resident. The prefill (2 tokens) runs it, loads expert 2 through staging and leaves expert 1 to the CPU,
whose result queues on h2d. Expert 3 is prefetched while the step ends; the decode step runs 0 and 3. Then 1 is swapped
in for 0, which outlasts the run's last step.
"""

from __future__ import annotations

from sim.runs.spans import Span

BUDGET_BYTES = 200
ROUTINGS = {(0, 0): {0: 2, 1: 1, 2: 1}, (1, 0): {0: 1, 3: 1}}

_TABLE = """
# lane kind       ready start end step layer target expert tokens bytes
h2d   place           0     0   0   -1     0     -1      0      0   100
host  launch          0     0   2    0     0     -1     -1      0     0
gpu   attention       2     2  10    0     0     -1     -1      2     0
gpu   gate            2    10  12    0     0     -1     -1      2     0
gpu   shared          2    12  14    0     0     -1     -1      2     0
d2h   routing        12    12  13    0     0     -1     -1      2     4
host  wait           13    13  15    0     0     -1     -1      0     0
host  plan           15    15  17    0     0     -1     -1      2     0
host  launch         17    17  18    0     0     -1      0      0     0
host  launch         17    18  19    0     0     -1      2      0     0
host  launch         17    19  20    0     0     -1     -1      0     0
gpu   expert         18    18  24    0     0     -1      0      2   100
d2h   activations    17    17  19    0     0     -1     -1      2     8
cpu   expert         19    19  36    0     0     -1      1      1   100
h2d   demand         17    17  30    0     0     -1      2      0   100
gpu   expert         30    30  33    0     0     -1      2      1   100
h2d   release        33    33  33    0     0     -1      2      0   100
h2d   result         36    36  38    0     0     -1     -1      2     8
gpu   combine        38    38  40    0     0     -1     -1      2     0
h2d   prefetch       37    38  58    0     0     -1      3      0   100
host  launch         20    20  22    0    -1     -1     -1      0     0
gpu   attention      22    40  44    0    -1     -1     -1      2     0
d2h   routing        44    44  45    0    -1     -1     -1      2     8
host  wait           45    45  47    0    -1     -1     -1      0     0

host  launch         47    47  49    1     0     -1     -1      0     0
gpu   attention      49    49  57    1     0     -1     -1      1     0
gpu   gate           49    57  59    1     0     -1     -1      1     0
gpu   shared         49    59  61    1     0     -1     -1      1     0
d2h   routing        59    59  60    1     0     -1     -1      1     2
host  wait           60    60  62    1     0     -1     -1      0     0
host  plan           62    62  64    1     0     -1     -1      1     0
host  launch         64    64  65    1     0     -1      0      0     0
host  launch         64    65  66    1     0     -1      3      0     0
host  launch         64    66  67    1     0     -1     -1      0     0
gpu   expert         65    65  71    1     0     -1      0      1   100
gpu   expert         66    71  74    1     0     -1      3      1   100
h2d   release        74    74  74    1     0     -1      3      0   100
gpu   combine        67    74  76    1     0     -1     -1      1     0
h2d   evict          76    76  76    1     0     -1      0      0   100
h2d   swap           76    76  89    1     0     -1      1      0   100
host  launch         67    67  69    1    -1     -1     -1      0     0
gpu   attention      69    76  80    1    -1     -1     -1      1     0
d2h   routing        80    80  81    1    -1     -1     -1      1     4
host  wait           81    81  83    1    -1     -1     -1      0     0
"""


def spans_of(table: str) -> list[Span]:
    """Read a table of spans; steps up to 0 are prefill."""
    spans = []
    for line in table.splitlines():
        if not line or line.startswith("#"):
            continue
        lane, kind, *numbers = line.split()
        ready, start, end, step, *rest = map(int, numbers)
        spans.append(Span(lane, ready, start, end, kind, "decode" if step > 0 else "prefill", step, *rest))
    return spans


def hand_made() -> list[Span]:
    """The run above."""
    return spans_of(_TABLE)


def change(spans: list[Span], lane: str, kind: str, /, *, nth: int = 0, **fields: object) -> list[Span]:
    """A copy in which the nth span of a kind on a lane has other fields."""
    place = [i for i, s in enumerate(spans) if (s.lane, s.kind) == (lane, kind)][nth]
    return [s._replace(**fields) if i == place else s for i, s in enumerate(spans)]  # type: ignore[arg-type]


def without(spans: list[Span], lane: str, kind: str, /, *, nth: int = 0) -> list[Span]:
    """A copy without the nth span of a kind on a lane."""
    place = [i for i, s in enumerate(spans) if (s.lane, s.kind) == (lane, kind)][nth]
    return spans[:place] + spans[place + 1 :]
