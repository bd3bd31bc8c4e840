"""The trace file: what is written is read back, and nothing that breaks the format is."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.kit.processes import small_disk
from tests.kit.toys import declare_empty, toy_trace
from traces.file import TraceError, TraceWriter, file_metadata, read_trace, write_trace
from traces.layout import ForecastKey
from traces.trace import Trace, trace_checksum
from trilane.testing.worlds import toy_shape, traces

Tensors = dict[str, NDArray[Any]]
GATE = ForecastKey("gate", 1)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def sample() -> Trace:
    """3 prompt and 2 decode tokens, 2 layers, 6 experts, top-2, scores and a forecast with m = 4."""
    rng = np.random.default_rng(0)
    scores = rng.dirichlet(np.ones(6), (5, 2)).astype(np.float16)
    order = np.argsort(-scores, axis=-1, kind="stable")
    forecast = order[..., :4].astype(np.int16)
    forecast[:, 1:] = -1
    tensors: Tensors = {
        "sequence": np.zeros(5, np.int32),
        "position": np.arange(5, dtype=np.int32),
        "phase": np.array([0, 0, 0, 1, 1], np.uint8),
        "topk_ids": order[..., :2].astype(np.int16),
        "topk_weights": np.take_along_axis(scores, order[..., :2], axis=-1),
        "scores": scores,
        GATE.ids_name: forecast,
        GATE.scores_name: np.tile(np.array([0.4, 0.3, 0.2, 0.1], np.float16), (5, 2, 1)),
    }
    return Trace.from_tensors(toy_shape(2, 6, 2), tensors, {"model": "sample", "seed": 0})


def write_unchecked(path: Path, tensors: Tensors, **metadata: str) -> None:
    """A file as another program might write it: the checksum fits, the content need not."""
    trace = sample()
    checksum = trace_checksum("test", trace.shape, tensors, trace.provenance)
    save_file(tensors, path, metadata={**file_metadata(trace), "checksum": checksum, **metadata})


def plain_tensors() -> Tensors:
    return {name: array.copy() for name, array in sample().tensors().items()}


def assert_equal(left: Trace, right: Trace) -> None:
    assert (left.shape, left.checksum, dict(left.provenance)) == (right.shape, right.checksum, dict(right.provenance))
    assert left.tensors().keys() == right.tensors().keys()
    for name, array in left.tensors().items():
        np.testing.assert_array_equal(array, right.tensors()[name])


@given(traces())
@same_folder
def test_what_is_written_is_read_back(tmp_path: Path, trace: Trace) -> None:
    write_trace(trace, tmp_path / "t.safetensors")
    assert_equal(trace, read_trace(tmp_path / "t.safetensors"))


@given(traces())
@same_folder
def test_a_streamed_trace_has_the_bytes_of_one_written_at_once(tmp_path: Path, trace: Trace) -> None:
    write_trace(trace, tmp_path / "whole.safetensors")
    with TraceWriter(
        tmp_path / "streamed.safetensors",
        trace.shape,
        dict(trace.provenance),
        scores=trace.scores is not None,
        forecasts={key: (f.ids.shape[2], f.scores is not None) for key, f in trace.forecasts.items()},
    ) as writer:
        for row in range(len(trace)):
            writer.append({name: array[row : row + 1] for name, array in trace.tensors().items()})
    assert (tmp_path / "streamed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_any_safetensors_reader_reads_the_file(tmp_path: Path) -> None:
    write_trace(sample(), tmp_path / "t.safetensors")
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == sample().tensors().keys()
    np.testing.assert_array_equal(found["topk_ids"], sample().topk_ids)


def test_arrays_are_mapped_and_read_only(tmp_path: Path) -> None:
    write_trace(sample(), tmp_path / "t.safetensors")
    trace = read_trace(tmp_path / "t.safetensors")
    for array in trace.tensors().values():
        assert not array.flags.owndata
        assert not array.flags.writeable
        assert array.flags.aligned


def test_a_forecast_key_prints_as_kind_at_lookahead() -> None:
    assert str(GATE) == "gate@1"
    assert list(sample().forecasts) == [GATE]


def test_the_checksum_covers_shape_provenance_and_content() -> None:
    trace = sample()
    other_shape = Trace.from_tensors(toy_shape(2, 6, 2, vocab=9), trace.tensors(), trace.provenance)
    other_source = Trace.from_tensors(trace.shape, trace.tensors(), {"model": "other"})
    tensors = plain_tensors()
    tensors["position"] += 1
    other_content = Trace.from_tensors(trace.shape, tensors, trace.provenance)
    assert len({t.checksum for t in (trace, other_shape, other_source, other_content)}) == 4


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t.safetensors"
    write_trace(sample(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TraceError, match=r"t\.safetensors: expected a complete \.safetensors file"):
        read_trace(path)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_trace(sample(), path)
    content = path.read_bytes()
    for at in range(8, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(TraceError):
            read_trace(path)


def test_a_flipped_byte_of_content_fails_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_trace(sample(), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.safetensors: expected content with checksum sha256:.*damaged"):
        read_trace(path)


def test_a_missing_file_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="found no file there"):
        read_trace(tmp_path / "absent.safetensors")
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(TraceError, match="not a routing trace"):
        read_trace(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("metadata", "message"), [
    ({"schema": "2"}, "expected schema version 1, got '2'"),
    ({"shape": "{"}, "expected metadata shape"),
    ({"shape": json.dumps({"name": "x"})}, "model shape: missing keys"),
    ({"shape": json.dumps({**toy_shape(2, 6, 2).to_dict(), "colour": 1})}, "there is no key .*colour"),
    ({"shape": json.dumps(toy_shape(3, 6, 2).to_dict())}, r"topk_ids must be int16 \[tokens, 3, 2\]"),
])
def test_wrong_metadata_is_refused(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    write_unchecked(tmp_path / "t.safetensors", plain_tensors(), **metadata)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.safetensors")


VALUES: list[tuple[str, Any, Any, str]] = [
    ("scores", (3, 1, 2), np.nan, r"scores row 3 layer 1: expected probabilities in \[0, 1\], got nan"),
    ("scores", (0, 0, 0), 1.5, r"scores row 0 layer 0: expected probabilities in \[0, 1\], got 1.5"),
    ("scores", (0, 0, 0), -0.5, r"scores row 0 layer 0"),
    ("topk_ids", (2, 1, 0), 6, r"topk_ids row 2 layer 1: expected expert ids in 0\.\.5, got 6"),
    ("topk_ids", (2, 1, 0), -1, r"topk_ids row 2 layer 1: expected expert ids in 0\.\.5, got -1"),
    ("topk_ids", (4, 0), [3, 3], r"topk_ids row 4 layer 0: expected distinct expert ids for one token, got \[3, 3\]"),
    ("topk_weights", (1, 1, 1), np.inf, "topk_weights row 1 layer 1: expected finite weights >= 0, got inf"),
    ("topk_weights", (1, 1), [0.1, 0.2], "topk_weights row 1 layer 1: expected weights in descending order"),
    ("phase", 3, 2, r"phase row 3: expected 0 \(prefill\) or 1 \(decode\), got 2"),
    ("phase", 1, 1, "phase row 2: expected no prefill after decode within sequence 0"),
    ("position", 3, 2, "position row 3: expected an increase within sequence 0, got 2 after 2"),
    ("position", 0, -1, "position row 0: expected numbers >= 0, got -1"),
    (GATE.ids_name, (1, 1, 0), 0, "forecast/gate@1/ids row 1 layer 1: expected .* and -1|-1 from there"),
    (GATE.ids_name, (1, 0, 0), -1, "forecast/gate@1/ids row 1 layer 0"),
    (GATE.ids_name, (1, 0), [1, 2, 3, 1], "forecast/gate@1/ids row 1 layer 0: expected distinct"),
    (GATE.scores_name, (1, 0, 0), np.nan, "forecast/gate@1/scores row 1 layer 0: expected finite scores"),
    (GATE.scores_name, (1, 0, 0), 0.05, "forecast/gate@1/scores row 1 layer 0: expected scores in descending order"),
]


@pytest.mark.parametrize(("name", "at", "value", "message"), VALUES)
def test_a_value_that_breaks_a_rule_is_refused(tmp_path: Path, name: str, at: Any, value: Any, message: str) -> None:
    tensors = plain_tensors()
    tensors[name][at] = value
    write_unchecked(tmp_path / "t.safetensors", tensors)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.safetensors")


@pytest.mark.parametrize(("changes", "message"), [
    ({"topk_weights": None}, r"missing \['topk_weights'\]"),
    ({"extra": np.zeros(5, np.int16)}, r"unknown \['extra'\]"),
    ({"forecast/Gate@0/ids": np.zeros((5, 2, 4), np.int16)}, "unknown"),
    ({GATE.ids_name: None}, "forecast gate@1 needs forecast/gate@1/ids"),
    ({GATE.ids_name: np.zeros((5, 2, 3), np.int16)}, "must record m = 4 to 6 experts per token"),
    ({"topk_ids": sample().topk_ids.astype(np.int32)}, "topk_ids must be int16 .* got int32"),
    ({"phase": np.zeros(4, np.uint8)}, r"phase must be uint8 \[tokens\] with 5 tokens, got uint8 \[4\]"),
    ({"scores": sample().tensors()["scores"].astype(np.float64)}, "'scores' must be of type"),
])
def test_a_wrong_set_of_tensors_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tensors = {**plain_tensors(), **changes}
    write_unchecked(tmp_path / "t.safetensors", {name: array for name, array in tensors.items() if array is not None})
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.safetensors")


@pytest.mark.parametrize(("name", "shape"), [
    ("forecast/x@1/ids", [0, 2**40, 2**40]),
    ("forecast/x@1/ids", [0] * 70),
    (f"forecast/x@{'1' * 5000}/ids", [0]),
    ("x" * 10**5, [0]),
    ("\x1b[31m", [0]),
])
def test_a_header_that_declares_what_no_array_has_is_refused(tmp_path: Path, name: str, shape: list[int]) -> None:
    write_trace(sample(), tmp_path / "t.safetensors")
    declare_empty(tmp_path / "t.safetensors", name, "I16", shape)
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "t.safetensors")
    assert len(str(caught.value)) < 1000


def test_a_file_name_that_is_not_utf_8_is_refused() -> None:
    """It is in the provenance of an imported log."""
    with pytest.raises(TraceError, match="metadata must be JSON"):
        Trace.from_tensors(sample().shape, plain_tensors(), {"file": "\udcff.csv"})


def writer(path: Path) -> TraceWriter:
    return TraceWriter(path, sample().shape, {}, scores=True, forecasts={("gate", 1): (4, True)})


def test_an_error_inside_the_block_leaves_nothing(tmp_path: Path) -> None:
    def capture_that_fails() -> None:
        with writer(tmp_path / "t.safetensors") as open_writer:
            open_writer.append(plain_tensors())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_that_fails()
    assert list(tmp_path.iterdir()) == []


def test_a_bad_row_is_refused_when_it_is_appended(tmp_path: Path) -> None:
    bad = plain_tensors()
    bad["topk_ids"][1, 0] = 9
    with writer(tmp_path / "t.safetensors") as open_writer:
        open_writer.append(plain_tensors())
        with pytest.raises(TraceError, match=r"t\.safetensors: topk_ids row 6 layer 0"):
            open_writer.append(bad)
    assert len(read_trace(tmp_path / "t.safetensors")) == 5


def test_rows_out_of_order_leave_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_trace(sample(), path)
    before = path.read_bytes()
    twice = {name: np.concatenate([array, array]) for name, array in plain_tensors().items()}
    with pytest.raises(TraceError, match="position row 5: expected an increase"), writer(path) as open_writer:
        open_writer.append(twice)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one token"), writer(tmp_path / "t.safetensors"):
        pass
    with pytest.raises(TraceError, match="at least one token"):
        Trace.from_tensors(sample().shape, {name: array[:0] for name, array in plain_tensors().items()}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_writer_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not open"):
        writer(tmp_path / "t.safetensors").append(plain_tensors())
    with pytest.raises(TraceError, match="metadata must be JSON"):
        TraceWriter(tmp_path / "t", sample().shape, {"at": object()}, scores=False, forecasts={})
    with pytest.raises(TraceError, match="must record m = 4 to 6"):
        TraceWriter(tmp_path / "t", sample().shape, {}, scores=False, forecasts={("gate", 1): (3, False)})
    with pytest.raises(TraceError, match=r"lookahead >= 1\), got gate@0"):
        TraceWriter(tmp_path / "t", sample().shape, {}, scores=False, forecasts={("gate", 0): (4, False)})
    with pytest.raises(TraceError, match="does not exist; create it first"):
        write_trace(sample(), tmp_path / "no" / "t.safetensors")


def test_sequences_may_be_interleaved() -> None:
    tensors = dict(toy_trace([[[0]], [[1]], [[0]], [[1]]]).tensors())
    tensors["sequence"] = np.array([0, 1, 0, 1], np.int32)
    tensors["position"] = np.array([4, 0, 5, 1], np.int32)
    assert len(Trace.from_tensors(toy_shape(1, 2, 1), tensors, {})) == 4


@pytest.mark.parametrize("value", [2**64 - 1, functools.reduce(lambda inner, _: [inner], range(40), 0)])
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, value: object) -> None:
    trace = toy_trace([[[0], [1]]])
    with pytest.raises(TraceError, match=r"not plain JSON"):
        write_trace(Trace.from_tensors(trace.shape, trace.tensors(), {"id": value}), tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.traces.test_file import large, stream

def kill(event, given):
    if event == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

with stream(Path(sys.argv[1])) as writer:
    writer.append(large().tensors())
    sys.addaudithook(kill)
    sys.audit("appended")
"""


def large() -> Trace:
    return toy_trace([[[token % 8]] for token in range(20_000)])


def stream(path: Path) -> TraceWriter:
    return TraceWriter(path, toy_shape(1, 8, 1), {}, scores=False, forecasts={})


def killed_at(event: str, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), event], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_capture_leaves_nothing(tmp_path: Path) -> None:
    killed_at("appended", tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_by_one_that_was_killed_at_its_end_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    killed_at("os.rename", path)
    assert not path.exists()
    write_trace(large(), path)
    assert list(tmp_path.iterdir()) == [path]
    assert len(read_trace(path)) == 20_000


@pytest.mark.parametrize("streamed", [True, False])
def test_a_trace_that_does_not_fit_on_the_disk_is_named(tmp_path: Path, streamed: bool) -> None:
    path = tmp_path / "t.safetensors"
    with small_disk(), pytest.raises(OSError, match="File too large") as raised:
        write_streamed(path) if streamed else write_trace(large(), path)
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def write_streamed(path: Path) -> None:
    with stream(path) as writer:
        writer.append(large().tensors())
