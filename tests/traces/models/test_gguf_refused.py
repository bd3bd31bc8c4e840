"""GGUF files that are refused, each in a sentence that names the file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.depth import examples
from tests.traces.models.gguf_files import (
    Q4_K,
    feed_forward,
    gguf_bytes,
    grouped,
    model,
    qwen3moe,
    weights_bytes,
    write_gguf,
    write_whole,
)
from traces.models.catalogue import load_model
from traces.models.gguf_reader import read_gguf_part
from traces.models.shape import ShapeError

GOOD = gguf_bytes(*qwen3moe(2))
GOOD_WEIGHTS = weights_bytes(qwen3moe(2)[1])
HUGE = (2**63).to_bytes(8, "little")


def refused(content: bytes, folder: Path, weights: int = 0) -> str:
    file = write_whole(folder / "model.gguf", content, weights)
    with pytest.raises(ShapeError) as caught:
        load_model(str(file))
    assert str(caught.value).startswith(str(file))
    return str(caught.value).removeprefix(f"{file}: ")


@pytest.mark.parametrize(("content", "words"), [
    (b"", "expected a GGUF file, this is empty"),
    (b"GGML" + GOOD[4:], "this is not a GGUF file: it begins with 'GGML', expected 'GGUF'"),
    (b"no", "this is not a GGUF file: it begins with 'no', expected 'GGUF'"),
    (b"\x00\xff", r"this is not a GGUF file: it begins with '\x00"),
    (b"GGUF" + (1).to_bytes(4, "little") + GOOD[8:], "expected a GGUF file of version 2 or 3"),
    (b"GGUF" + (3).to_bytes(4, "big") + GOOD[8:], "expected a GGUF file of version 2 or 3"),
    (GOOD[:7], "the file ends within its header"),
    (GOOD[:100], "the file ends within its header"),
    (GOOD[:-1], "the file ends within its header"),
    (GOOD[:8] + HUGE + GOOD[16:], "expected at most 200,000 tensors"),
    (GOOD[:16] + HUGE + GOOD[24:], "expected at most 10,000 keys"),
    (GOOD[:24] + HUGE + GOOD[32:], "expected a key of at most 1,048,576 bytes"),
    (gguf_bytes({}, [("a", (1,), 99)]), "tensor 'a' has type 99, whose size is not known"),
    (gguf_bytes({}, [("a", (0, 5), 0)]), "tensor 'a': expected 1 to 35,184,372,088,832 elements"),
    (gguf_bytes({}, [("a", (2**40, 2**40), 0)]), "tensor 'a': expected 1 to 35,184,372,088,832 elements"),
    (gguf_bytes({}, [("a", (1,) * 5, 0)]), "tensor 'a': expected 1 to 4 dimensions, got 5"),
    (gguf_bytes({}, [("a", (100,), Q4_K)]), "tensor 'a': expected rows of whole blocks of 256 weights, as Q4_K"),
    (gguf_bytes({}, [("a", (8,), 0)]), "the file ends at byte 57, within its weights, which take 96; copy or down"),
    (gguf_bytes({}, []), "expected a family with experts that is read, one of those in gguf_families.yaml, this"),
    (gguf_bytes({"general.alignment": 24}, []), "general.alignment: expected a power of two up to 1,048,576, got"),
    (gguf_bytes({"a": 1, "b": 2}, []).replace(b"b", b"a"), "expected every key once, 'a' is there twice"),
])
def test_what_is_no_gguf_file_is_refused_in_a_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    assert refused(content, tmp_path).startswith(words)


@pytest.mark.parametrize(("changed", "words"), [
    ({"expert_count": 0}, "expected a model with experts, this one, 'qwen3moe', has none"),
    ({"block_count": None}, "expected a whole number from 0 at the key 'qwen3moe.block_count', got 'None'"),
    ({"block_count": 3}, "expected attention in layer 2, or before its experts; there is none"),
    ({"block_count": 4_000_000_000}, "expected a whole number from 0 at the key 'qwen3moe.block_count'"),
    ({"block_count": 5000}, "block_count: expected 1 to 1000 layers, got 5,000"),
    ({"block_count": "48"}, "expected a whole number from 0 at the key 'qwen3moe.block_count', got '48'"),
    ({"embedding_length": 0}, "expected a whole number from 1 at the key 'qwen3moe.embedding_length', got 0"),
    ({"attention.head_count": "32"}, "expected a whole number from 0 at the key 'qwen3moe.attention.head_count'"),
    ({"attention.head_count": [32]}, "expected a whole number from 0 at the key 'qwen3moe.attention.head_count'"),
])
def test_metadata_that_is_missing_or_wrong_is_named(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(2)
    wrong = {f"qwen3moe.{key}": each for key, each in changed.items()}
    content = gguf_bytes({**metadata, **wrong}, tensors)
    assert refused(content, tmp_path, weights_bytes(tensors)).startswith(words)


def test_lists_that_are_kept_have_a_limit_in_all(tmp_path: Path) -> None:
    """64 lists of 4,096 numbers are 2^18. Longer lists, and texts, are passed over and do not count."""
    passed = {"long": [7] * 4097, "texts": ["a"] * 9}
    lists = {f"list {number}": [number] * 4096 for number in range(64)}
    most = write_gguf(tmp_path / "most.gguf", {**passed, **lists, "last": 5}, [])
    assert read_gguf_part(most).metadata == {**{key: tuple(each) for key, each in lists.items()}, "last": 5}
    more = write_gguf(tmp_path / "more.gguf", {**passed, **lists, "last": [True]}, [])
    with pytest.raises(ShapeError, match=r"more.gguf: expected at most 262,144 numbers in lists of up to 4,096, got"):
        read_gguf_part(more)


def test_tensors_that_are_there_twice_or_overlap_are_refused(tmp_path: Path) -> None:
    two = [("one", (32,), 0), ("two", (32,), 0)]
    twice = gguf_bytes({}, two).replace(b"two", b"one")
    assert refused(twice, tmp_path, 256) == "expected every tensor once, 'one' is there 2 times"
    overlapping = gguf_bytes({}, two)[:-8] + (64).to_bytes(8, "little")
    words = refused(overlapping, tmp_path, 256)
    assert words == "tensor 'two': expected it at a multiple of 32 from 128 on, after the tensor before, got 64"


def test_a_family_that_is_not_read_is_named(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(1)
    content = gguf_bytes({**metadata, "general.architecture": "arctic"}, tensors)
    words = refused(content, tmp_path, weights_bytes(tensors))
    assert words.endswith("this is of the architecture 'arctic'; give its config.json instead")


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    layer = grouped(512, 8, 2, 64) + feed_forward(512, 1024)
    metadata, tensors = model("llama", {"embedding_length": 512, "attention.head_count": 8}, 99, [layer])
    content = gguf_bytes(metadata, tensors)
    words = refused(content, tmp_path, weights_bytes(tensors))
    assert words == "expected a model with experts, this one, 'llama', has none"


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_gives_a_shape_or_a_shape_error(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes replaced, bits of counts and lengths among them, and the file cut."""
    content = bytearray(GOOD)
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = data.draw(st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    file = write_whole(tmp_path / "model.gguf", bytes(content[:cut]), GOOD_WEIGHTS)
    with suppress(ShapeError):
        load_model(str(file))


def test_parts_that_say_otherwise_than_their_names_are_refused(tmp_path: Path) -> None:
    metadata, tensors = qwen3moe(2)
    for number, some in ((1, tensors[:9]), (2, tensors[9:])):
        its = {**(metadata if number == 1 else {}), "split.no": number - 1, "split.count": 3}
        write_gguf(tmp_path / f"m-0000{number}-of-00002.gguf", its, some)
    with pytest.raises(ShapeError, match=r"m-00001-of-00002.gguf: expected part 1 of 2, as the name says, its keys"):
        load_model(str(tmp_path / "m-00002-of-00002.gguf"))
    alone = write_gguf(tmp_path / "alone.gguf", {**metadata, "split.no": 0, "split.count": 2}, tensors)
    with pytest.raises(ShapeError, match=r"expected part 1 of 1, .* of 2; name the parts NAME-00001-of-0000N.gguf"):
        load_model(str(alone))
    few = write_gguf(tmp_path / "few.gguf", {**metadata, "split.tensors.count": 99}, tensors)
    with pytest.raises(ShapeError, match=r"expected 99 tensors, as split.tensors.count says, got"):
        load_model(str(few))
