"""The structure of the source tree, read from the files: what import-linter's contracts cannot say."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "realrun", "sim", "tools", "traces", "trilane")
SOURCES = {path: path.read_text(encoding="utf-8") for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_SIM = 10_100  # 9,500 before GPUs that compute a layer together
ENGINES = frozenset(path.stem for path in (ROOT / "sim" / "costs" / "engines").glob("*.yaml"))
MATCHING = ("startswith", "endswith", "removesuffix", "removeprefix", "match", "search", "fullmatch", "sub", "get")
ELLIPTIC = re.compile(r"(Of|What(?! if )|Whether|Where|Those|The same)\b")
NOT_OF_THINGS = re.compile(r"\b(beside|nobody|somebody|whoever|whom|anybody|everybody)\b", re.IGNORECASE)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(text) for path, text in SOURCES.items()}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def lines_with(pattern: str, sources: Iterable[tuple[Path, str]]) -> list[str]:
    """Where a pattern is found, as FILE:LINE."""
    found = re.compile(pattern)
    return [where(p, n) for p, text in sources for n, line in enumerate(text.splitlines(), 1) if found.search(line)]


# --- imports ----------------------------------------------------------------------------------------------------------


def imported(module: str, tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    """The modules among ``known`` that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name in known and name != module)


def circle_in(modules: dict[str, ast.Module]) -> list[str] | None:
    """Modules that import each other in a circle, if there are any. A package's ``__init__`` that only hands on the
    names of its modules when they are first used is left out."""
    files = {name: tree for name, tree in modules.items() if name != "trilane" and not name.startswith("trilane.parts")}
    graph = {name: set(imported(name, tree, files)) for name, tree in files.items()}
    for name, others in graph.items():
        others -= {other for other in others if name.startswith(f"{other}.")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in(parsed()) is None


def test_a_circle_would_be_found_in_functions_too() -> None:
    trees = {"a": "from b import name", "b": "def f():\n    import c", "c": "from a import name"}
    assert circle_in({name: ast.parse(text) for name, text in trees.items()}) is not None


# --- names ------------------------------------------------------------------------------------------------------------


def twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Classes of one name in several modules."""
    homes = defaultdict(list)
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_class_name_exists_twice() -> None:
    assert twice(parsed()) == {}


def test_a_class_name_that_exists_twice_would_be_found() -> None:
    assert twice({"a": ast.parse("class Lane: ..."), "b": ast.parse("class Lane: ...")}) == {"Lane": ["a", "b"]}


@cache
def named_in_functions() -> dict[str, list[str]]:
    """Where functions have arguments and variables of a name; a column or a field may be called as it likes."""
    homes = defaultdict(list)
    for module, tree in parsed().items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.Lambda):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    homes[node.arg].append(f"{module}:{node.lineno}")
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    homes[node.id].append(f"{module}:{node.lineno}")
    return homes


@pytest.mark.parametrize("name", ["id", "bytes", "round"])
def test_builtins_are_not_shadowed(name: str) -> None:
    assert named_in_functions().get(name, []) == []


def test_things_are_not_persons() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {**SOURCES, **{page: page.read_text(encoding="utf-8") for page in pages}}
    assert lines_with(NOT_OF_THINGS.pattern, texts.items()) == []


def elliptic(modules: dict[str, ast.Module]) -> list[str]:
    """Modules, classes and functions whose docstring begins as an answer does, without its question."""
    return [
        f"{module}:{getattr(node, 'lineno', 1)}"
        for module, tree in modules.items() for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ELLIPTIC.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_say_what_a_value_is_or_what_a_function_does() -> None:
    assert elliptic(parsed()) == []


def test_an_elliptic_docstring_would_be_found() -> None:
    assert elliptic({"a": ast.parse("def f():\n    'Whether it is.'\n\n\ndef g():\n    'True if it is.'")}) == ["a:1"]


# --- rooms ------------------------------------------------------------------------------------------------------------


def test_sim_holds_machine_costs_runs_and_timeline_and_nothing_else() -> None:
    rooms = {path.name for path in (ROOT / "sim").iterdir() if path.name != "__pycache__"}
    assert rooms == {"__init__.py", "machine", "costs", "runs", "timeline", "simulate.py"}


def test_sim_can_be_read_in_a_day() -> None:
    lines = sum(text.count("\n") for path, text in SOURCES.items() if (ROOT / "sim") in path.parents)
    assert lines <= MOST_LINES_OF_SIM


def test_no_file_is_too_long_to_be_about_one_subject() -> None:
    lines = {str(path.relative_to(ROOT)): text.count("\n") for path, text in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_whether_a_machine_was_measured_is_asked_of_the_machine_alone() -> None:
    outside = [(path, text) for path, text in SOURCES.items() if (ROOT / "sim" / "machine") not in path.parents]
    assert lines_with(r"\.profile is (not )?None|if [\w.]*\.profile\b", outside) == []


def test_no_display_mark_is_data() -> None:
    """Marks are made of the kind of a policy when they are shown, in one file."""
    outside = [(path, text) for path, text in SOURCES.items() if path.name != "marks.py"]
    assert lines_with(r"""["'] [*~]["']|endswith\(["'][*~]|[!=]= ["'][*~]["']|name\[-2:\]""", outside) == []


def comparisons_of_engines(modules: dict[str, ast.Module], names: frozenset[str]) -> Iterator[str]:
    """Where an engine's name is compared, looked up or matched, and where an engine is named in a comparison."""
    for module, tree in modules.items():
        for node in ast.walk(tree):
            sides: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Attribute):
                sides = [node.slice]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATCHING:
                sides = [node.func.value, *node.args]
            texts = [ast.unparse(side) for side in sides]
            literals = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
            named = any("engine" in text for text in texts) and (names & {str(one) for one in literals})
            if named or any(re.search(r"engine\w*\.name\b", text) for text in texts):
                yield f"{module}:{node.lineno}"


def literals_of_engines(modules: dict[str, ast.Module], names: frozenset[str]) -> set[str]:
    """Modules with an engine's name as a text of its own."""
    return {
        module for module, tree in modules.items() for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in names
    }


def test_what_an_engine_does_is_asked_of_its_traits_alone() -> None:
    """Defaults are named: the plain engine, that of policies in a question, the usual ones of cards, and the one that
    made the requests of a file."""
    assert list(comparisons_of_engines(parsed(), ENGINES)) == []
    rooms = {name: tree for name, tree in parsed().items() if name.startswith(("sim.", "trilane.engines."))}
    defaults = {"sim.costs.engine", "trilane.engines.question", "trilane.engines.strata.predicted"}
    assert literals_of_engines(rooms, ENGINES) <= defaults


@pytest.mark.parametrize("text", [
    "engine.name.startswith('llama')", "if 'vulkan' in engine.name: ...", "engine.name == other.name",
    "COSTS[engine.name]", "engine == 'llama.cpp'", "run_engine in ('graphs', 'pytorch')",
    "re.match('-20', engine.name)",
])
def test_a_comparison_of_an_engines_name_would_be_found(text: str) -> None:
    assert list(comparisons_of_engines({"a": ast.parse(text)}, ENGINES)) == ["a:1"]


def test_labels_are_compared_as_members_of_their_enum() -> None:
    outside = [(path, text) for path, text in SOURCES.items() if path.name != "vocabulary.py"]
    assert lines_with(r"""["'](clairvoyant|changes routing|synthetic trace)["']( (not )?in\b|\s*==)""", outside) == []


# --- the page ---------------------------------------------------------------------------------------------------------

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
OF_THE_SERVER = {"trilane.page.server", "trilane.page.workers"}  # bytes that it keeps
OF_THE_PAGE = {"trilane.verbs.explore", "trilane.verbs.share"}


def arithmetic(modules: dict[str, ast.Module]) -> list[str]:
    return [f"{module}:{node.lineno}" for module, tree in modules.items() for node in ast.walk(tree)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC)]


def test_the_page_computes_nothing() -> None:
    """Its records hold numbers of the same functions as the verbs' answers."""
    page = {name: tree for name, tree in parsed().items() if name.startswith("trilane.page")}
    assert arithmetic({name: tree for name, tree in page.items() if name not in OF_THE_SERVER}) == []


def test_arithmetic_would_be_found() -> None:
    assert arithmetic({"a": ast.parse("x = 1000 / tpot_ms")}) == ["a:1"]


def test_no_other_verb_imports_the_page() -> None:
    others = {name: tree for name, tree in parsed().items() if not name.startswith("trilane.page")}
    importing = {name for name, tree in others.items() if any(
        each.startswith("trilane.page") for each in imported(name, tree, parsed())
    )}
    assert importing <= OF_THE_PAGE
