"""The schema reader: dataclasses from plain values, by their type hints, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.errors import TrilaneError
from trilane.common.hints import ASCENDING, NOT_EMPTY, Count, Share, above, at_least, between, in_words
from trilane.common.schema import SchemaError, check, from_dict, to_dict

T = TypeVar("T")


class Keeps(Enum):
    YES = "keeps"
    NO = "changes"


class Sourced(NamedTuple, Generic[T]):
    value: T
    source: str
    confidence: Literal["high", "low"] = "high"


@dataclass(frozen=True)
class Gpu:
    memory_bytes: Sourced[int]
    rate: Annotated[float, above(0)] = 1.0


class MachineError(TrilaneError):
    pass


@dataclass(frozen=True)
class Machine:
    gpu: Gpu
    batch: Count | None = None
    recalls: tuple[Share, ...] = ()
    at: Annotated[tuple[int, ...], NOT_EMPTY, ASCENDING] = (1, 2)
    slot: tuple[int, str] = (4, "x16")
    spares: Mapping[str, Gpu] = field(default_factory=dict)
    by_generation: Mapping[int, float] = field(default_factory=dict)
    routing: Keeps = Keeps.YES
    fact: str | int | float = ""
    on: bool = True
    optional: Mapping[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        check(self, MachineError)
        if self.batch == 13:
            raise MachineError("batch: 13 is refused by a rule of its own")


PLAIN: Mapping[str, Any] = {"gpu": {"memory_bytes": {"value": 24, "source": "data sheet"}}}


def with_(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes}


def fault(values: object, hint: Any = Machine) -> str:
    with pytest.raises(SchemaError) as raised:
        from_dict(hint, values)
    return str(raised.value)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_defaults_fill_what_is_left_out() -> None:
    assert from_dict(Machine, PLAIN) == Machine(Gpu(Sourced(24, "data sheet", "high")))


@pytest.mark.parametrize(("hint", "plain", "found"), [
    (float, 3, 3.0),
    (float, "25e9", 25e9),  # YAML 1.1 reads this as text
    (int, "24e9", 24_000_000_000),
    (int, 4.0, 4),
    (tuple[int, ...], [1, 2], (1, 2)),
    (list[int], (1, 2), [1, 2]),
    (Sequence[int], [1], (1,)),
    (tuple[int, str], [1, "a"], (1, "a")),
    (Mapping[int, float], {3: 1}, {3: 1.0}),
    (Keeps, "changes", Keeps.NO),
    (str | int | float, 3, 3),
    (str | int | float, 3.0, 3.0),  # a value that fits as it stands is not converted
    (str | float, "25e9", "25e9"),
    (Sourced[int] | None, None, None),
    (float | tuple[float, ...], [1, 2], (1.0, 2.0)),
    (Any, {"as": ["it", "is"]}, {"as": ["it", "is"]}),
])
def test_plain_values_become_what_the_hint_says(hint: Any, plain: object, found: object) -> None:
    assert repr(from_dict(hint, plain)) == repr(found)


def test_an_instance_in_the_place_of_its_mapping_is_kept() -> None:
    gpu = Gpu(Sourced(1, "s"))
    assert from_dict(Machine, {"gpu": gpu}).gpu is gpu


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_unknown_key_names_the_closest_and_all_valid_ones() -> None:
    assert fault(with_(bach=1)).startswith(
        "there is no key 'bach'; did you mean 'batch'? Choose from gpu, batch, recalls"
    )


def test_missing_keys_are_named() -> None:
    assert fault({}) == "missing key: gpu"
    assert fault(with_(spares={"old": {"memory_bytes": {}}})) == (
        "spares.old.memory_bytes: missing keys: value, source"
    )


@pytest.mark.parametrize(("changes", "message"), [
    ({"batch": 0}, "batch: expected a whole number >= 1 or null, got 0"),
    ({"batch": True}, "batch: expected a whole number >= 1 or null, got True"),
    ({"batch": 1.5}, "batch: expected a whole number >= 1 or null, got 1.5"),
    ({"batch": "4"}, "batch: expected a whole number >= 1 or null, got '4'"),
    ({"recalls": [0.5, 2]}, "recalls[1]: expected a number from 0 to 1, got 2"),
    ({"recalls": 0.5}, "recalls: expected a list (each a number from 0 to 1), got 0.5"),
    ({"recalls": "05"}, "recalls: expected a list (each a number from 0 to 1), got '05'"),
    ({"at": []}, "at: expected a list (each a whole number) that is not empty and in ascending order, got []"),
    ({"at": [2, 1]}, "at: expected a list (each a whole number) that is not empty and in ascending order, got [2"),
    ({"slot": [4]}, "slot: expected a list of 2, got [4]"),
    ({"spares": {"a": {**PLAIN["gpu"], "rate": 0}}}, "spares.a.rate: expected a number above 0, got 0"),
    ({"spares": {1: PLAIN["gpu"]}}, "spares.1: expected text, got 1"),
    ({"spares": [1]}, "spares: expected a mapping (`key: value`), got [1]"),
    ({"routing": "keep"}, "routing: expected 'keeps' or 'changes', got 'keep'"),
    ({"optional": {"a": ["x"]}}, "optional.a[0]: expected a whole number, got 'x'"),
    ({"fact": [1]}, "fact: expected text or a whole number or a number, got [1]"),
    ({"on": 1}, "on: expected true or false, got 1"),
    ({"gpu": None}, "gpu: expected a mapping with the keys memory_bytes, rate, got null"),
    ({"gpu": {"memory_bytes": 1}},
     "gpu.memory_bytes: expected a mapping with the keys value, source, confidence, got 1"),
    ({"gpu": {"memory_bytes": {"value": 1.5, "source": "s"}}},
     "gpu.memory_bytes.value: expected a whole number, got 1.5"),
    ({"by_generation": {3: float("nan")}}, "by_generation.3: expected a number, got nan"),
    ({"by_generation": {3: float("inf")}}, "by_generation.3: expected a number, got inf"),
    ({"by_generation": {3: 10**400}}, "by_generation.3: expected a number, got a whole number of 1,329 bits"),
    ({"batch": 10**400}, "batch: expected a whole number >= 1 or null, got a whole number of 1,329 bits"),
])
def test_a_fault_is_told_with_its_path_what_was_expected_and_what_came(
    changes: Mapping[str, Any], message: str
) -> None:
    assert fault(with_(**changes)).startswith(message)


def test_long_values_are_cut() -> None:
    assert len(fault(with_(fact=["x" * 1000]))) < 150


def test_the_message_begins_with_where_and_is_of_the_callers_class() -> None:
    with pytest.raises(MachineError, match=r"^file x\.yaml: batch: expected"):
        from_dict(Machine, with_(batch=0), "file x.yaml", MachineError)


def test_a_rule_of_several_fields_is_told_with_the_path() -> None:
    message = fault({"new": with_(batch=13)}, Mapping[str, Machine])
    assert message == "new: batch: 13 is refused by a rule of its own"


def test_faults_of_the_program_are_not_bad_input() -> None:
    """Only a TrilaneError of ``__post_init__`` is an answer to the user."""

    @dataclass
    class Broken:
        def __post_init__(self) -> None:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        from_dict(Broken, {})


# --- instances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "path"), [
    ({"batch": 2.0}, "batch"), ({"recalls": [0.5]}, "recalls"), ({"recalls": (0.5, 2)}, r"recalls\[1\]"),
    ({"gpu": PLAIN["gpu"]}, "gpu"), ({"routing": "keeps"}, "routing"), ({"by_generation": {3: "1e9"}}, "by_g"),
])
def test_check_converts_nothing(changes: Mapping[str, Any], path: str) -> None:
    with pytest.raises(MachineError, match=f"^{path}.*: expected"):
        Machine(**{"gpu": Gpu(Sourced(1, "s")), **changes})


def test_check_takes_a_whole_number_for_a_float() -> None:
    Machine(Gpu(Sourced(1, "s")), recalls=(0, 1))


# --- there and back ---------------------------------------------------------------------------------------------------


def test_to_dict_may_leave_out_nulls() -> None:
    machine = from_dict(Machine, PLAIN)
    assert to_dict(machine)["batch"] is None
    assert "batch" not in to_dict(machine, nulls=False)
    assert from_dict(Machine, to_dict(machine, nulls=False)) == machine


LEAVES: Mapping[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
    Keeps: st.sampled_from(Keeps),
    Literal["a", 1]: st.sampled_from(["a", 1]),
    Annotated[int, at_least(1)]: st.integers(1, 9),
    Annotated[float, between(0, 1)]: st.floats(0, 1),
    Sourced[int]: st.builds(Sourced, st.integers(-9, 9), st.text("xyz"), st.sampled_from(["high", "low"])),
}
Typed = tuple[Any, st.SearchStrategy[Any]]


def nest(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    """Types made of other types, with the values that they have."""
    return st.one_of(
        inner.map(lambda typed: (tuple[typed[0], ...], st.lists(typed[1], max_size=3).map(tuple))),
        inner.map(lambda typed: (typed[0] | None, st.none() | typed[1])),
        inner.map(lambda typed: (Mapping[str, typed[0]], st.dictionaries(st.text("abc"), typed[1], max_size=3))),
        st.lists(inner, min_size=1, max_size=4).map(record),
    )


def record(typed: list[Typed]) -> Typed:
    made = make_dataclass("Made", [(f"f{i}", hint) for i, (hint, _) in enumerate(typed)], frozen=True)
    return made, st.builds(made, *(values for _, values in typed))


@given(st.data())
def test_what_was_written_is_read_back(data: st.DataObject) -> None:
    """For any dataclass, however its fields are nested; through YAML and through JSON too."""
    hint, values = record(data.draw(st.lists(st.recursive(st.sampled_from(list(LEAVES.items())), nest, max_leaves=8),
                                             min_size=1, max_size=4)))
    value = data.draw(values)
    plain = to_dict(value)
    check(value)
    assert from_dict(hint, plain) == value
    assert from_dict(hint, yaml.safe_load(yaml.safe_dump(plain))) == value
    assert from_dict(hint, json.loads(json.dumps(plain))) == value


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hint", "words"), [
    (Count, "a whole number >= 1"),
    (None | Share, "a number from 0 to 1 or null"),
    (Literal["a", "b", "c"], "'a', 'b' or 'c'"),
    (Literal["a"], "'a'"),
    (Keeps, "'keeps' or 'changes'"),
    (tuple[int, ...], "a list (each a whole number)"),
    (tuple[int, str], "a list of 2"),
    (Mapping[str, int], "a mapping (`key: value`)"),
    (Gpu, "a mapping with the keys memory_bytes, rate"),
])
def test_types_in_words(hint: Any, words: str) -> None:
    assert in_words(hint) == words


def test_a_long_row_of_digits_is_no_number_and_takes_no_time() -> None:
    with pytest.raises(SchemaError, match="expected a number"):
        from_dict(float, "9" * 200_000)  # minutes, if every way to divide the row were tried
