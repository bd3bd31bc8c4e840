"""Strict YAML, of plain values, within limits."""

from __future__ import annotations

import os
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.yaml_files import MOST_BYTES, MOST_DEPTH, YamlError, parse_yaml, read_yaml

ROOT = Path(__file__).parents[3]
YAML_FILES = sorted(
    path.relative_to(ROOT)
    for room in ("traces", "sim", "trilane", "examples")
    for path in (ROOT / room).rglob("*.yaml")
)


def test_yaml_gives_plain_values(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("a: [1, x]\nb: {c: null, 2: 1.5, yes: '7'}\n")
    assert read_yaml(tmp_path / "f.yaml") == {"a": [1, "x"], "b": {"c": None, 2: 1.5, True: "7"}}


@pytest.mark.parametrize("text", ["2026-11-22", "2026-99-99", "2026-11-22 10:00:00", "=", "<<"])
def test_dates_and_other_marks_are_text(text: str) -> None:
    assert parse_yaml(f"{text}: {text}", "here") == {text: text}


@pytest.mark.parametrize("text", ["", "# nothing", "---", "null"])
def test_an_empty_text_is_null(text: str) -> None:
    assert parse_yaml(text, "here") is None


@pytest.mark.parametrize(("text", "problem"), [
    ("a: 1\nb: 2\na: 3\n", "in line 3: duplicate key 'a'"),
    ("x: {a: 1, a: 2}", "duplicate key 'a'"),
    ("a:\n  [1", "in line 3: did not find expected ',' or ']'"),
    ("{[1, 2]: 3}", "a list or mapping as a key"),
    ("? {a: 1}\n: 2", "a list or mapping as a key"),
    ("--- 1\n--- 2", "in line 2: a second document"),
    ("a: &x [1]\nb: *x", "in line 1: the anchor or alias 'x'"),
    ("!!bool x", "the tag '!!bool'"),
    ("!!map [1]", "the tag '!!map'"),
    ("!!timestamp 2026-99-99", "the tag '!!timestamp'"),
    ("a: !!python/object:os.system x", "the tag '!!python/object:os.system'"),
    ("{!!str a: 1}", "the tag '!!str'"),
    ("0b_", "'0b_' is no number"),
    ("1" * 5000, "a number of 5,000 characters"),
    (":".join(["59"] * 5000), "a number of 14,999 characters"),
    (str(2**63), "the whole number '9223372036854775808' is beyond 64 bits"),
    ("a: \0", "control characters are not allowed"),
    ('"\\ud800"', "invalid Unicode character"),
    ("\ud800", "expected YAML in UTF-8"),
    (b"\xff\xfe\x00\xd8", "expected YAML in UTF-8"),
])
def test_what_is_no_plain_value_is_refused_in_one_sentence(text: str | bytes, problem: str) -> None:
    with pytest.raises(YamlError) as raised:
        parse_yaml(text, "gpu.yaml")
    message = str(raised.value)
    assert message.startswith("gpu.yaml: ")
    assert problem in message
    assert "\n" not in message


def test_the_largest_whole_numbers_are_read() -> None:
    assert parse_yaml(f"[{2**63 - 1}, {-(2**63)}]", "here") == [2**63 - 1, -(2**63)]


def test_text_in_quotes_may_look_like_a_number() -> None:
    assert parse_yaml(f"'{'1' * 5000}'", "here") == "1" * 5000


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[{a: "])
def test_depth_is_limited(opening: str) -> None:
    with pytest.raises(YamlError, match=f"more than {MOST_DEPTH} deep"):
        parse_yaml(opening * 50_000, "deep")
    assert parse_yaml("[" * MOST_DEPTH + "]" * MOST_DEPTH, "deep") is not None


def test_size_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("é" * MOST_BYTES, encoding="utf-8")  # cut in the middle of a letter
    with pytest.raises(YamlError, match=r"long\.yaml: expected at most 524,288 bytes"):
        read_yaml(path)


def test_an_endless_file_is_read_to_the_limit() -> None:
    if Path("/dev/zero").exists():
        with pytest.raises(YamlError, match="at most"):
            read_yaml("/dev/zero")


def test_nested_aliases_are_refused_before_they_are_built() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    tracemalloc.start()
    with suppress(YamlError):
        repr(parse_yaml("\n".join(lines), "bomb"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


@given(st.text("[]{}:,-?&*!|>'\"%@`#ab01._~<= \n\t\\x\x85\u2028", max_size=40))
def test_every_text_is_read_or_refused(text: str) -> None:
    with suppress(YamlError):
        repr(parse_yaml(text, "here"))


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_PLAIN)
def test_what_is_written_plainly_is_read_back(value: object) -> None:
    text = yaml.safe_dump(value)
    if "&" not in text and "!!" not in text:  # PyYAML may write lists that occur twice as aliases
        assert parse_yaml(text, "here") == value


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"none\.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", YAML_FILES, ids=str)
def test_bundled_files_are_read_as_pyyaml_reads_them(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    # repr tells 1 from 1.0 and from True, and keeps the order of keys
    assert repr(read_yaml(ROOT / path)) == repr(yaml.load(text, yaml.SafeLoader))


def test_a_pipe_is_refused_since_its_writer_may_never_come(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(YamlError, match=r"pipe: expected a file, this is a pipe"):
        read_yaml(tmp_path / "pipe")
