"""Every command of the README and of docs/ runs, and the printed blocks are what the commands print."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from policies import user_files
from policies.registry import SYSTEMS
from tests.kit.commands import write_route_csv
from tests.kit.depth import deep
from tests.kit.tiny_gguf import write_tiny_gguf
from tests.trilane.engines.accuracy.test_outputs import TESTS
from tests.trilane.readme import (
    ACCURACY,
    LEADERBOARD,
    PAGES,
    PAPERS,
    PICTURES,
    PUBLISHED,
    QUALITY,
    README,
    REQUESTS,
    ROOT,
    WIDEST,
    block,
    blocks,
    command_with,
    commands,
    demo,
    shown_block,
)
from traces.importers import import_trace
from trilane import cli
from trilane.cli import main
from trilane.output.pages.output import WIDTH

OURS = [command for command in commands() if command.startswith("trilane ")]
FIT, TUNE, TABLE = map(command_with, ("trilane fit", "trilane tune", "trilane recommend"))
MAKE = {"make demo": "demo", "make test": "test", "make test-page": "test-page", "make gpu": "gpu"}
MEASURING = ("measure", "profile", "validate")
LONG = (  # many minutes, a GPU, or until Ctrl-C
    "trilane explore",
    "profile --engine llama.cpp", "validate examples/validation-llama.yaml", "validate examples/gpu-llama.yaml",
    "--engine mine.yaml",
)
INSTALLATION = {
    "git clone REPOSITORY trilane && cd trilane", "python3 -m venv .venv && . .venv/bin/activate", "pip install .",
    "pip install '.[page]'",
}
OTHER_PROGRAMS = {  # whose output the next command reads
    "llama-bench -m Qwen3-30B-A3B-Q4_K_M.gguf -ngl 99 -ncmoe 28 -p 512 -n 128 -o json > bench.json",
}
FOR_A_GPU = {  # minutes of compiling for CUDA; test_build_llama.py runs the script with compilers that do nothing
    "examples/build_llama.sh build/llama.cpp",
    "export LLAMA_LIBRARY=$PWD/build/llama.cpp/bin/libllama.so CUDA_VISIBLE_DEVICES=0",
}
TORCH = (  # in commands that need torch
    "trace capture", "profile", "measure", "validate", "smoke", "machine.yaml", "quality smoe",
)

SMALL = {  # replacements: a model that takes seconds for one that takes minutes
    "trace=mini-deepseek:6": "trace=mini-moe:2",
    "model=deepseek-v2-lite:6": "model=mini-moe:2",
    "--model deepseek-v2-lite": "--model mini-moe --quick --context 16,32 --prompt 8,16 --policies dali,fiddler",
    "trace capture": "trace capture --prompt-tokens 8 --generated-tokens 4",
    "--model qwen3-30b-a3b --gpu rtx-3060":
        "--model mixtral-8x7b:2 --weights bf16 --prompt 64 --generated 4 --draws 1 --gpu gtx-1650-super",
    "validate examples": "validate --set trace=mini-moe:2 --set model=mini-moe:2 --repeats 1 examples",
    "trilane report": "trilane report --for olmoe-1b-7b",
    "trilane smoke": "trilane smoke --lanes host-lanes",
}
ONCE = {"compare": ("--draws", "--jobs"), "ablate": ("--draws", "--jobs"), "whatif": ("--jobs",), "sweep": ("--jobs",),
        "pays": ("--jobs",)}
BRIEF = ("whatif", "ablate", "compare")  # with short texts
WRITES = ("-o", "--out", "--json", "--png", "--plot", "--template", "--spans", "--perfetto", "--gantt")


def brief(command: str) -> str:
    """The command on small models and short texts, with one draw and one process unless it asks for more."""
    for large, small in SMALL.items():
        command = command.replace(large, small)
    words = shlex.split(command)
    words += [word for option in ONCE.get(words[1], ()) if option not in words for word in (option, "1")]
    if words[1] in BRIEF and not {"trace=mine.safetensors", "trace=phone.safetensors"}.intersection(words):
        words += ["--set", "prompt_tokens=8", "--set", "generated_tokens=4"]
    return shlex.join(words)


def written(command: str) -> list[str]:
    """The files that a command is to write."""
    words = shlex.split(command)
    options = (*WRITES, "--trace") if "generate" in words else WRITES
    return [value for option, value in pairwise(words) if option in options]


MADE_BY = {name: command for command in reversed(OURS) for name in written(command)}  # the first that writes it


def read(command: str) -> list[str]:
    """The files of other commands that a command reads."""
    values = {part for word in shlex.split(command)[2:] for part in word.split("=")}  # after the verb
    return sorted(values.intersection(MADE_BY).difference(written(command)))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The policies that the pages register are forgotten."""
    systems, modules = dict(SYSTEMS), set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_files, "_loaded", {})
    yield
    SYSTEMS.clear()
    SYSTEMS.update(systems)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the examples, shortened, and the files that the pages take for granted."""
    made = tmp_path_factory.mktemp("reader")
    (made / "traces").symlink_to(ROOT / "traces")
    shutil.copytree(ROOT / "examples", made / "examples")
    shorten(made / "examples/validation.yaml", vary={"cached_share": [0.25]}, policies=["fiddler", "dali"])
    fewer = {"policy": ["on-demand", "fiddler", "dali"], "cached_share": [0.1, 0.5]}
    shorten(made / "examples/sweep.yaml", scenario={"prompt_tokens": 8, "generated_tokens": 4}, grid=fewer)
    (made / "bench.json").write_text(json.dumps(TESTS))
    (made / "prompts.txt").write_text("Once upon a time there was a small mixture of experts.\nWhat is a router?\n")
    for page in PAGES:
        for code in blocks("python", page):
            if match := re.match(r"# (\w+\.py)\n", code):
                (made / match[1]).write_text(code)
    write_tiny_gguf(made / "model.gguf")
    write_route_csv(made / "phone.route.csv", size=600 * 2**20)  # 7,200 MiB in all
    return made


def shorten(path: Path, **changes: Mapping[str, object] | list[str]) -> None:
    """Change an example: keys of its mappings, and its lists as a whole."""
    document = yaml.safe_load(path.read_text())
    for key, change in changes.items():
        document[key] = {**document[key], **change} if isinstance(change, Mapping) and key != "vary" else change
    path.write_text(yaml.safe_dump(document))


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command line, which must succeed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What commands have printed, of which pages show several blocks."""
    return {}


def run_with_inputs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command, after those that write what it reads."""
    for name in read(command):
        if not (folder / name).exists():
            run_with_inputs(MADE_BY[name], folder, monkeypatch)
    run(brief(command), folder, monkeypatch)


def verb(command: str) -> str:
    """The verb of a command, such as ``trace capture`` or ``measure generate``; with llama.cpp another."""
    words = shlex.split(command)
    named = words[1:3] if words[1] == "trace" else [words[1], *(["generate"] if "generate" in words else [])]
    return " ".join([*named, *(["llama.cpp"] if runs_llama_cpp(command) else [])])


def runs_llama_cpp(command: str) -> bool:
    words = shlex.split(command)
    return "--gguf" in words or (words[1] == "tune" and "--check" in words)


FIRST = {verb(command): command for command in reversed(OURS)}  # of each verb; the others run in the deep profile
RUN = [
    pytest.param(
        command,
        marks=[deep] * (command not in FIRST.values()) + [pytest.mark.llama] * runs_llama_cpp(command),
        id=command,
    )
    for command in OURS
    if command not in (FIT, TUNE) and not any(words in command for words in LONG)  # tests of their own
]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_command_has_valid_options(command: str) -> None:
    parser, words = cli.command(), shlex.split(command)[1:]
    while hasattr(parser, "commands"):
        parser = parser.commands[words.pop(0)]
    parser.make_context(command, words)  # raises a usage error


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(words in command for words in TORCH) and not runs_llama_cpp(command):
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)  # more only wait for each other
    if "smoke" in command:  # every policy takes a minute: tests of the smoke test's own
        checks = pytest.importorskip("realrun.smoke.generation_checks")
        monkeypatch.setattr(checks, "generation_checks", partial(checks.generation_checks, policies=("fiddler",)))
    run_with_inputs(command, folder, monkeypatch)
    for name in written(command):
        path = folder / name
        assert path.stat().st_size > 0


def test_an_imported_trace_can_be_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_inputs(command_with("compare --set trace=phone.safetensors"), folder, monkeypatch)


@pytest.mark.parametrize(("language", "tokens"), [("json", 3), ("csv", 1)])
def test_the_logs_that_the_page_shows_are_imported(tmp_path: Path, language: str, tokens: int) -> None:
    [log] = blocks(language, ROOT / "docs/traces.md")
    (file := tmp_path / f"log.{language}").write_text(log)
    assert len(import_trace(file, model="mini-moe:2")) == tokens


def test_every_command_is_run_or_known() -> None:
    others = {command for command in commands() if not command.startswith("trilane ")}
    assert others == {*MAKE, *INSTALLATION, *OTHER_PROGRAMS, *FOR_A_GPU}


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_are_there(command: str) -> None:
    assert f"\n{MAKE[command]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", [README, ROOT / "docs/comparing.md"], ids=lambda page: page.name)
def test_python_examples_run(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for place, code in enumerate(blocks("python", page)):
        (file := folder / f"{page.stem}_{place}.py").write_text(code)
        runpy.run_path(str(file), run_name=file.stem)


@pytest.mark.parametrize("name", [
    *(pytest.param(each, marks=deep) for each in ("demo", "real")),
    *("fit", "accuracy", "regimes", "models", "papers", "by-paper", "recommend", "tune", "leaderboard",
      "leaderboard-whole", "quality", "published", "requests"),
])
def test_blocks_are_what_the_commands_print(
    name: str, folder: Path, printed: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    papers = dict.fromkeys(("papers", "by-paper"), command_with(PAPERS))
    boards = dict.fromkeys(("leaderboard", "leaderboard-whole"), command_with(LEADERBOARD))
    known = {"demo": demo(), "real": demo("REAL"), "fit": FIT, "tune": TUNE, "recommend": TABLE, **papers, **boards,
             "quality": command_with(QUALITY), "published": PUBLISHED, "requests": command_with(REQUESTS)}
    command = known.get(name, command_with(ACCURACY))
    if command not in printed:
        monkeypatch.setenv(WIDTH, str(WIDEST))
        run(command, folder, monkeypatch)
        printed[command] = capsys.readouterr().out
    assert block(name, printed[command]) == shown_block(name), "renew it with: .venv/bin/python tests/trilane/readme.py"


def test_rows_of_the_demo_are_what_compare_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ("llama.cpp", "fiddler", "oracle")  # the last one, for the column of regrets
    run(f"trilane compare --policies {','.join(some)} --jobs 1", folder, monkeypatch)
    shown, printed = rows(shown_block("demo"), some), rows(capsys.readouterr().out, some)
    assert printed == shown, "renew it with: .venv/bin/python tests/trilane/readme.py"


def rows(table: str, policies: Sequence[str]) -> dict[str, list[str]]:
    """The cells of some policies' rows."""
    cells = (line.split() for line in table.splitlines())
    return {name: rest for name, *rest in filter(None, cells) if name in policies}


def test_pictures_are_shown_and_small() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in PICTURES:
        assert name in text
        assert (ROOT / "docs" / name).stat().st_size < 600_000


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


FOR_USERS, NOTES = sorted((ROOT / "docs").glob("*.md")), sorted((ROOT / "docs/notes").glob("*.md"))
LINKING = [
    README, *FOR_USERS, *NOTES, ROOT / "traces/bundled/README.md", *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
NAMING = [ROOT / "NOTICE", README, *FOR_USERS, *NOTES]
MOST_WORDS = 46_400  # of the pages for users together; what only maintainers need is in docs/notes


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: no {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: no heading {anchor} in {path.name}"


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the root that a page names, with or without a link; not those that it calls new."""
    packages = "docs|examples|notebooks|policies|realrun|sim|tests|tools|traces|trilane"
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(rf"(?<![\w/.])(?:{packages})/[\w./-]+(?!\S* \(new\))", prose)
    assert [path for path in named if not (ROOT / path.rstrip(".")).exists()] == []


def test_pages_for_users_can_be_read() -> None:
    assert sum(len(page.read_text().split()) for page in FOR_USERS) <= MOST_WORDS


def test_every_note_is_in_their_list() -> None:
    listed = {target for target, _ in LINK.findall((ROOT / "docs/notes/README.md").read_text())}
    assert {page.name for page in NOTES} - {"README.md"} <= listed


@pytest.mark.parametrize("page", [README, *FOR_USERS, *NOTES], ids=lambda page: page.name)
def test_code_is_not_cut_off_on_the_page(page: Path) -> None:
    lines = [line for code in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
             for line in code.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
