"""The sketch of what was read: it finds what was read, in any order and any windows, and stays small."""

from __future__ import annotations

import random

import numpy as np
import pytest

from traces.capture.prompts import KEPT, PASSAGE, hashes, read_sketch, sketch, smallest


def words(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(count))


def passages(text: str) -> set[str]:
    plain = "".join(text.split())
    return {plain[at : at + PASSAGE] for at in range(max(len(plain) - PASSAGE, 0) + 1)} - {""}


@pytest.mark.parametrize("text", ["", " \n ", "a", "short", "x" * PASSAGE, "x" * (PASSAGE + 1), words(90)])
def test_there_is_one_hash_for_every_passage(text: str) -> None:
    assert len(np.unique(hashes(text))) == len(passages(text))


def test_white_space_does_not_count_and_every_character_does() -> None:
    assert hashes("a b\n c").tolist() == hashes("abc").tolist()
    one, other = words(40), words(40).replace("a", "z", 1)
    assert len(np.intersect1d(hashes(one), hashes(other))) < len(hashes(one))
    assert hashes("ab").tolist() != hashes("ba").tolist()


def test_it_depends_on_the_text_alone() -> None:
    texts = [words(50, seed) for seed in range(4)]
    expected = sketch(texts).hashes
    assert sketch(reversed(texts)).hashes.tolist() == expected.tolist()
    halves = [half for text in texts for half in (text[: len(text) // 2 + 2 * PASSAGE], text[len(text) // 2 - 9 :])]
    assert set(expected.tolist()) <= set(sketch(halves).hashes.tolist())


def test_all_passages_are_kept_while_they_are_few() -> None:
    text = words(200)
    assert sketch([text]).shared([text]) == (len(passages(text)), len(passages(text)))
    assert sketch([text]).shared([words(200, 1)])[0] == 0


def test_of_many_passages_the_smallest_hashes_are_kept_and_asked_for() -> None:
    text, other = words(4000), words(4000, 1)
    kept = sketch([text])
    assert kept.hashes.tolist() == smallest([text], None)[:KEPT].tolist()
    found, asked = kept.shared([text[3000:9000]])
    assert found == asked
    assert 0 < asked < len(passages(text[3000:9000]))
    found, asked = kept.shared([text[3000:6000], other[:3000]])
    assert 0.3 * asked < found < 0.7 * asked
    assert kept.shared([other])[0] == 0
    assert kept.shared([]) == (0, 0)


def test_batches_of_hashes_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [words(300, seed) for seed in range(6)]
    whole = sketch(texts).hashes.tolist()
    monkeypatch.setattr("traces.capture.prompts._BATCH", 1)
    assert sketch(texts).hashes.tolist() == whole


@pytest.mark.parametrize("count", [0, 1, 4000])
def test_what_is_written_is_read_again_and_is_small(count: int) -> None:
    made = sketch([words(count)])
    again = read_sketch(made.write())
    assert again.hashes.tolist() == made.hashes.tolist()
    assert len(made.write()) <= 28_000


@pytest.mark.parametrize("written", ["no", "AAAA", "?" * 8])
def test_anything_else_is_refused(written: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_sketch(written)


@pytest.mark.parametrize("passage", ["a", "routed", "x" * PASSAGE, "mosaïque 🧩"])
def test_a_hash_is_the_same_in_every_version_and_on_every_machine(passage: str) -> None:
    """A polynomial of the characters and splitmix64's finaliser, in whole numbers; the first 40 bits."""
    value, modulus = 0, 2**64
    for character in passage.replace(" ", ""):
        value = (value * 0x9E3779B97F4A7C15 + ord(character)) % modulus
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % modulus
    value = (value ^ value >> 27) * 0x94D049BB133111EB % modulus
    assert hashes(passage).tolist() == [(value ^ value >> 31) >> 24]
