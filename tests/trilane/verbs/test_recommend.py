"""``trilane recommend`` on the command line: its table, a model's own line, upgrades, options and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane

OWNER = ("recommend", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--cpu", "ryzen-5-5600", "--ram-gb", "32")


def test_a_model_has_its_command_line_and_its_formats(trilane: Trilane) -> None:
    out = trilane(*OWNER, "--for", "gpt-oss-20b", "--for", "documents").out
    assert "for documents: a prompt of 16,384 tokens and 512 generated, in a window of 32,768" in out.splitlines()[0]
    assert "\nllama-server -m gpt-oss-20b-mxfp4.gguf -ngl 99 " in out
    assert "\nits formats; -: does not run\n" in out


def test_the_line_is_that_of_tune(trilane: Trilane) -> None:
    line = next(line for line in trilane(*OWNER, "--for", "gpt-oss-20b").out.splitlines() if line.startswith("llama-"))
    lengths = ("--prompt", "1024", "--generated", "256", "--context", "16384")
    assert line in trilane("tune", "gpt-oss-20b", *OWNER[1:], *lengths).out


def test_what_does_not_run_says_what_it_lacks(trilane: Trilane) -> None:
    done = trilane(*OWNER, "--for", "gpt-oss-120b")
    assert "needs 64 GiB of RAM; then 17." in done.out
    assert "GiB  2^30 bytes, in which modules are sold (--ram-gb); GB: 10^9 bytes" in done.out
    assert done.status == 2  # nothing runs, as where tune refuses


def test_the_memory_of_the_cpu_alone_is_the_hosts(trilane: Trilane) -> None:
    """The model has no room next to the card: the line is -ngl 0."""
    out = trilane(*OWNER[:-1], "256", "--for", "glm-4.5").out
    row = next(line.split() for line in out.splitlines() if line.startswith("glm-4.5"))
    assert row[6] == "-"
    assert float(row[7].rstrip("!")) > 200
    assert " -ngl 0 " in out


def test_a_memory_that_is_nearly_full_is_marked_whosever_it_is(trilane: Trilane) -> None:
    server = ("recommend", "--gpu", "h100-sxm", "--ram", "ddr5-5600", "--ram-gb", "256")
    out = trilane(*server, "--for", "qwen3-235b-a22b").out
    row = next(line.split() for line in out.splitlines() if line.startswith("qwen3-235b-a22b"))
    assert [cell.endswith("!") for cell in row[6:8]] == [True, False]


@pytest.mark.parametrize("machine", [OWNER, ("recommend", "--gpu", "apple-m4-max"), OWNER[:-2]])
def test_a_memory_that_is_taken_as_enough_is_told_on_top(machine: tuple[str, ...], trilane: Trilane) -> None:
    out = trilane(*machine, "--for", "olmoe-1b-7b").out
    assert ("! the size of the host's memory is not named (--ram-gb)" in out) == (machine == OWNER[:-2])


def test_upgrades_of_a_model_are_a_table_of_parts(trilane: Trilane) -> None:
    out = trilane(*OWNER, "--for", "gpt-oss-20b", "--upgrade").out.partition("what to buy\n")[2]
    assert "RTX 5060 Ti 16GB" in out
    assert "no gain" in out


def test_a_mac_has_no_upgrades(trilane: Trilane) -> None:
    out = trilane("recommend", "--gpu", "apple-m4-max", "--for", "gpt-oss-20b", "--upgrade").out
    assert "what to buy: GPU, CPU and memory are one part, none can be replaced" in out


def test_above_a_disk_programs_that_read_it_by_themselves_stand_below(trilane: Trilane) -> None:
    """And so they do below the answer of tune."""
    machine = ("--gpu", "none", "--ram", "ddr5-5600", "--cpu", "ryzen-9-9950x", "--ram-gb", "128", "--disk", "8.8")
    pages = trilane("recommend", *machine, "--for", "glm-5.2").out, trilane("tune", "glm-5.2", *machine).out
    rows = [next(line.split() for line in page.splitlines() if line.startswith("glm-5.2  colibri")) for page in pages]
    assert rows[0] == rows[1] == ["glm-5.2", "colibri", "0.92", "100.7", "54%", "5.88", "24%", "65%"]


def test_a_long_wait_for_the_first_token_is_marked(trilane: Trilane) -> None:
    out = trilane("recommend", "--gpu", "none", "--ram", "ddr4-3200", "--ram-gb", "64", "--for", "mixtral-8x7b").out
    row = next(line.split() for line in out.splitlines() if line.startswith("mixtral-8x7b"))
    assert row[5].endswith("!")
    assert "!: more than 10 s, which is long for chat" in out


def test_a_mac_has_the_memory_that_macos_gives_its_gpu(trilane: Trilane) -> None:
    mac = ("recommend", "--gpu", "apple-m4-pro", "--ram-gb", "48", "--for", "qwen3-next-80b-a3b")
    out = trilane(*mac).out
    caveat = "macOS gives the GPU 36.0 of 48 GiB: `sudo sysctl iogpu.wired_limit_mb=45056` makes it 44 until"
    assert caveat in " ".join(out.split())
    raised = trilane(*mac, "--os", "linux").out
    lines = [next(line for line in page.splitlines() if line.startswith("llama-server")) for page in (out, raised)]
    assert "-ngl 99" in lines[1]
    assert lines[0] != lines[1]
    assert "macOS" not in raised


def test_the_answer_as_json(trilane: Trilane, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    trilane(*OWNER, "--for", "gpt-oss-20b", "--upgrade", "--json", str(file))
    record = json.loads(file.read_text())
    assert [row["model"] for row in record["runs"]] == ["gpt-oss-20b"]
    assert record["runs"][0]["tuned"]["arguments"][0] == "llama-server"
    assert {one["step"]["part"] for one in record["upgrades"]} == {"GPU", "second GPU", "memory modules", "CPU"}


@pytest.mark.parametrize(("options", "message"), [
    (("--sort", "price"), "--sort: expected size, speed or first, got 'price'"),
    (("--for", "chat", "--for", "code"), "--for: expected one of chat, code, documents, and one model, got chat, code"),
    (("--for", "poems"), "--for: expected chat, code, documents or a model: there is no model 'poems'"),
    (("--for", "chatt"), "--for: expected chat, code, documents or a model: did you mean 'chat'? there is no model"),
    (("--for", "coding"), "--for: expected chat, code, documents or a model: did you mean 'code'? there is no model"),
], ids=["sort", "two uses", "neither", "a misspelt use", "a use as a verb"])
def test_what_cannot_be_answered_is_refused(trilane: Trilane, options: tuple[str, ...], message: str) -> None:
    done = trilane(*OWNER, *options)
    assert done.status == 2
    assert message in done.err
