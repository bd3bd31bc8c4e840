"""Policies in a user's own file: found, registered under their names, and refused with the reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policies import user_files
from policies.registry import SYSTEMS, BuildContext, compose, system
from policies.system import ChoiceError
from policies.user_errors import PolicyFileError
from policies.user_files import load_policies, loaded_policies, names_file
from trilane.common.errors import TrilaneError

CODE = """
from dataclasses import dataclass
from trilane import Policy, register, system

PARENT = system("fiddler").parameters

@register("mine", "as Fiddler")
@dataclass(frozen=True)
class Mine(PARENT):
    pass

@register("other", "the same")
@dataclass(frozen=True)
class Other(PARENT):
    pass
"""
COMPOSING = """
from dataclasses import dataclass

from policies.protocols import Composition
from trilane import Policy, register


@register("mine", "raises")
@dataclass(frozen=True)
class Mine(Policy):
    \"\"\"Raises.\"\"\"

    def compose(self, context):
        # the line below
        {body}

    def helper(self):
        return 1 / 0
"""
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registry, modules and search path are restored."""
    systems, modules = dict(SYSTEMS), set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_files, "_loaded", {})
    yield
    SYSTEMS.clear()
    SYSTEMS.update(systems)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes ``own_file_of_a_test.py`` into the current folder."""
    monkeypatch.chdir(tmp_path)

    def written(code: str) -> Path:
        path = tmp_path / "own_file_of_a_test.py"
        path.write_text(code)
        return path

    return written


@pytest.mark.parametrize(
    ("text", "names"), [("own_file_of_a_test.py", ("mine", "other")), ("own_file_of_a_test.py:Mine", ("mine",)),
                        ("{folder}/own_file_of_a_test.py:Mine", ("mine",))],
)
def test_policies_are_registered_under_their_names(write: Write, text: str, names: tuple[str, ...]) -> None:
    path = write(CODE)
    assert load_policies(text.format(folder=path.parent)) == names
    assert [system(name).name for name in names] == list(names)
    assert loaded_policies() == dict.fromkeys(("mine", "other"), str(path))


def test_a_file_is_imported_once(write: Write) -> None:
    write(CODE)
    load_policies("own_file_of_a_test.py:Mine")
    first = system("mine")
    assert load_policies("own_file_of_a_test.py") == ("mine", "other")
    assert system("mine") is first


def test_an_edited_file_is_executed_again(write: Write) -> None:
    write(CODE)
    load_policies("own_file_of_a_test.py")
    write(CODE.replace("fiddler", "on-demand"))
    assert load_policies("own_file_of_a_test.py") == ("mine", "other")
    assert issubclass(system("mine").parameters, system("on-demand").parameters)


def test_policies_that_an_edit_removes_are_no_longer_registered(write: Write) -> None:
    path = write(CODE)
    load_policies("own_file_of_a_test.py")
    write(CODE.replace('"other"', '"another"'))
    assert load_policies("own_file_of_a_test.py") == ("mine", "another")
    assert "other" not in SYSTEMS
    assert loaded_policies() == dict.fromkeys(("mine", "another"), str(path))


@pytest.mark.parametrize("edit", ["1 / 0\n", "raise SystemExit\n", "def f(:\n"])
def test_a_file_that_fails_leaves_nothing(write: Write, edit: str) -> None:
    path = write(CODE + edit)
    systems = dict(SYSTEMS)
    with pytest.raises(ChoiceError):
        load_policies("own_file_of_a_test.py")
    assert systems == SYSTEMS
    assert str(path.parent) not in sys.path
    assert "own_file_of_a_test" not in sys.modules
    assert not loaded_policies()
    write(CODE.replace("Mine", "Renamed"))
    assert load_policies("own_file_of_a_test.py:Renamed") == ("mine",)


def test_an_edit_that_fails_leaves_the_policies_that_were_loaded(write: Write) -> None:
    write(CODE)
    load_policies("own_file_of_a_test.py")
    before, module = system("mine"), sys.modules["own_file_of_a_test"]
    write(CODE + "1 / 0\n")
    with pytest.raises(ChoiceError, match="ZeroDivisionError"):
        load_policies("own_file_of_a_test.py")
    assert system("mine") is before
    assert sys.modules["own_file_of_a_test"] is module


@pytest.mark.parametrize("name", ["Mine", "MINE"])
def test_a_class_may_have_another_name(write: Write, name: str) -> None:
    write(CODE + "MINE = Mine\n")
    assert load_policies(f"own_file_of_a_test.py:{name}") == ("mine",)


def test_a_file_finds_its_neighbours(write: Write) -> None:
    path = write("from neighbour_of_a_test import Mine")
    (path.parent / "neighbour_of_a_test.py").write_text(CODE)
    assert load_policies("own_file_of_a_test.py") == ("mine",)


@pytest.mark.parametrize(("code", "text", "said"), [
    (None, "own_file_of_a_test.py", "own_file_of_a_test.py: no such file"),
    (CODE, "own_file_of_a_test.py:Yours", "the file has Mine, Other"),
    (CODE, "own_file_of_a_test.py:PARENT", "the file has Mine, Other"),
    (CODE, "own_file_of_a_test.py:dataclass", "the file has Mine, Other"),
    ("x = 1\n", "own_file_of_a_test.py", "expected a policy"),
    ("\n1 / 0\n", "own_file_of_a_test.py", "line 2: ZeroDivisionError"),
    ("\n\nimport nothing_of_that_name\n", "own_file_of_a_test.py", "line 3: ModuleNotFoundError"),
    ("\nraise SystemExit\n", "own_file_of_a_test.py", "own_file_of_a_test.py, line 2: SystemExit"),
    ("import sys\nsys.exit(0)\n", "own_file_of_a_test.py", "line 2: SystemExit: 0"),
    ("a = 1\ndef f(:\n", "own_file_of_a_test.py", "line 2: SyntaxError"),
    (CODE.replace('"mine"', '"dali"'), "own_file_of_a_test.py", "there is a policy 'dali' already"),
    ("", "json.py", "the name 'json' belongs to another Python module"),
    ("", "time.py", "the name 'time' belongs to another Python module"),  # which has no file
    (None, "fiddler", "expected FILE.py or FILE.py:NAME"),
])
def test_refusals(write: Write, code: str | None, text: str, said: str) -> None:
    if code is not None:
        write(code)
    with pytest.raises(ChoiceError) as error:
        load_policies(text)
    assert said in str(error.value)
    assert "own_file_of_a_test" not in sys.modules or code is not None


@pytest.mark.parametrize(("body", "said"), [
    ("return Composition()", r"line 15, in compose: TypeError: .* missing .* 'cache'"),
    ("return self.helper()", "line 18, in helper: ZeroDivisionError: division by zero"),
    ("import json; return json.loads('')", "line 15, in compose: JSONDecodeError: Expecting value"),
    ("raise SystemExit", "line 15, in compose: SystemExit"),
    ("return None", "line 13, in compose: policy 'mine': compose: expected to return a Composition, got None"),
])
def test_an_error_in_compose_names_its_line(write: Write, body: str, said: str) -> None:
    path = write(COMPOSING.format(body=body))
    assert load_policies(path.name) == ("mine",)
    with pytest.raises(PolicyFileError, match=f"^{re.escape(str(path))}, {said}"):
        compose("mine", context=BuildContext("toy", 4, 2))


@pytest.mark.parametrize(("edit", "said"), [
    (("@dataclass(frozen=True)\nclass Mine", "class Mine"), "line 7, Mine: expected a frozen dataclass"),
    (("class Mine(PARENT)", "class Mine(Policy)"), "line 7, Mine: .* compose is missing"),
    (("    steps", "    needs = 3\n    steps"), r"line 7, Mine: needs: expected Needs\(\), .* got 3"),
    (("    steps", "    needs = property(lambda self: 1 / 0)\n    steps"), "line 10, in <lambda>: ZeroDivisionError"),
    (('"mine"', "None"), "line 7: register: expected a name, a summary and a source, each a text, got None"),
    (('"as Fiddler"', "5"), "line 7: register: expected a name, .* got 5"),
])
def test_a_class_that_is_no_policy_is_refused_with_its_line(write: Write, edit: tuple[str, str], said: str) -> None:
    write(CODE.replace("    pass", "    steps: int = 3", 1).replace(*edit, 1))
    with pytest.raises(TrilaneError, match=rf"^own_file_of_a_test\.py, {said}"):
        load_policies("own_file_of_a_test.py")
    assert not loaded_policies()


def test_what_has_no_line_is_refused_without_one(write: Write) -> None:
    (write("").parent / "folder_of_a_test.py").mkdir()
    with pytest.raises(ChoiceError, match=r"^folder_of_a_test\.py: \w+Error: "):
        load_policies("folder_of_a_test.py")


@pytest.mark.parametrize(
    ("text", "is_file"), [("mine.py", True), ("a/mine.py:MINE", True), ("llama.cpp", False), ("dali", False)]
)
def test_what_names_a_file(text: str, is_file: bool) -> None:
    assert names_file(text) == is_file
