"""``trilane tune`` on the command line: the line to paste, what it is compared with, options and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.kit.commands import ROOT, Trilane
from trilane.engines.tune import machine_found
from trilane.engines.tune import tune as tuning

SMALL = ("tune", "deepseek-v2-lite:4", "--gpu", "rtx-3050", "--ram", "ddr4-3200", "--prompt", "600", "--generated",
         "16", "--threads", "8", "--kv", "f16")
LINE = re.compile(r"^llama-server -m \S+\.gguf -ngl \d+ .*-np 1$", re.MULTILINE)


def test_the_line_to_paste_stands_alone(trilane: Trilane) -> None:
    found = LINE.findall(trilane(*SMALL).out)
    assert found[0].endswith("-t 8 -ctk f16 -ctv f16 -np 1")
    assert " -c 616 " in found[0]


def test_the_window_is_that_of_the_option(trilane: Trilane) -> None:
    done = trilane(*SMALL, "--context", "2048")
    assert " -c 2048 " in LINE.findall(done.out)[0]
    assert done.out.splitlines()[0].endswith("600 tokens and 16 generated, in a window of 2,048")


def test_the_page_says_what_limits_it_and_what_other_engines_give(trilane: Trilane) -> None:
    out = trilane(*SMALL).out
    for text in ("decode   ", "first token", "GPU memory", "limit", "error to expect", "chosen from"):
        assert text in out
    assert re.search(r"^ik_llama\.cpp:\nllama-server ", out, re.MULTILINE)


def test_upgrade_adds_parts_that_can_be_bought(trilane: Trilane, tmp_path: Path) -> None:
    done = trilane(*SMALL, "--upgrade", "--json", str(tmp_path / "tune.json"))
    titles = [one["step"]["title"] for one in json.loads((tmp_path / "tune.json").read_text())["upgrades"]]
    assert titles
    assert all(title in done.out.partition("what to buy\n")[2] for title in titles)


def test_explain_adds_the_parts_of_a_tokens_time(trilane: Trilane) -> None:
    out = trilane(*SMALL, "--explain").out.partition("one token, in the mean of the answer\n")[2]
    timeline, _, gains = out.partition("\n\n")
    rows = timeline.splitlines()
    assert gains.startswith("25% better, llama.cpp")
    assert rows[0].split() == ["part", "layers", "ms", "a", "layer", "ms", "share"]
    shares = [int(re.search(r"(\d+)%", row)[1]) for row in rows[1:] if "%" in row]  # type: ignore[index]
    assert 97 <= sum(shares) <= 103


def test_the_result_as_json_has_the_line(trilane: Trilane, tmp_path: Path) -> None:
    done = trilane(*SMALL, "--json", str(tmp_path / "tune.json"))
    record = json.loads((tmp_path / "tune.json").read_text())
    assert record["command"] in done.out
    assert record["best"]["threads"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--for", "speed"), "--for: expected decode, prompt or both, got 'speed'"),
        (("--kv", "f8"), "kv"),
        (("--keep-free-gb", "-1"), "keep_free_gb"),
        (("--engine", "smoe-2025"), "use `trilane fit --policy-engine smoe-2025`"),
        (("--check",), "--check runs the model: expected a GGUF file"),
        (("--draft-acceptance", "2"), "draft_acceptance: expected "),
        (("--draft-acceptance", "0.5", "--batch", "2"), "draft_acceptance: expected one sequence, got 2"),
    ],
    ids=["goal", "kv", "less than nothing", "an engine of policies", "no file", "no share",
         "drafts of several"],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(
    trilane: Trilane, options: tuple[str, ...], message: str
) -> None:
    done = trilane(*SMALL, *options)
    assert done.status == 2
    assert message in done.err
    assert done.err.strip().count("\n") == 0


def test_memory_that_is_short_is_refused_in_three_lines(trilane: Trilane) -> None:
    done = trilane(*SMALL, "--keep-free-gb", "100", "--ram-gb", "4")
    short, works, speed = done.err.splitlines()
    assert done.status == 2
    assert short.endswith("GB are missing")
    assert works.startswith("it runs with ")
    assert speed.startswith("tokens/s then, about: ")


def test_what_cannot_be_checked_is_refused_before_settings_are_tried(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tune", lambda asked: pytest.fail("settings were tried"))
    done = trilane(*SMALL, "--batch", "2", "--check")
    assert (done.status, done.out) == (2, "")
    assert "--check runs the model: expected a GGUF file" in done.err


MEASURED = str(ROOT / "docs/validation/llama.cpp/engine.yaml")
HERE = machine_found.MachineFound("none", "ddr4-3200", None, 2, None, 24, ())


def test_the_engine_that_was_measured_on_the_machine_at_hand_is_taken(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_found, "found_machine", lambda cpu: HERE)
    monkeypatch.setenv("TRILANE_ENGINE", MEASURED)
    asked = ("tune", "deepseek-v2-lite:2", "--weights", "q4_0", "--prompt", "64", "--generated", "8")
    done, other = trilane(*asked), trilane(*asked, "--engine", "llama.cpp")
    assert done.err.strip() == f"engine: {MEASURED} (TRILANE_ENGINE)"
    assert "limit            decode: not known: times that were measured as a whole" in done.out
    assert "! times are those of the machine on which engine was measured" in done.out
    assert (other.err, "decode: not known" in other.out) == ("", False)


def test_an_engine_that_was_measured_here_says_nothing_of_named_parts(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRILANE_ENGINE", MEASURED)
    assert "engine:" not in trilane(*SMALL).err


def test_drafts_are_told_where_an_acceptance_is_named(trilane: Trilane) -> None:
    out = trilane(*SMALL, "--draft-acceptance", "0.9").out
    rows = out.partition("drafts by the model's own layers (--spec-type draft-mtp)")[2].splitlines()[1:8]
    assert rows[0].split() == ["drafts", "ms", "a", "step", "worth", "it", "from", "tokens/s,", "90%", "accepted"]
    assert [row.split()[0] for row in rows[1:]] == ["none", "1", "2", "3", "4", "5"]
    assert "drafts" not in trilane(*SMALL).out


def test_without_parts_the_machine_at_hand_is_meant(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    assumed = (machine_found.Assumption("ram", "ddr4-3200"), machine_found.Assumption("cpu"))
    here = machine_found.MachineFound("none", "ddr4-3200", None, 2, None, 24, assumed)
    monkeypatch.setattr(machine_found, "found_machine", lambda cpu: here)
    done = trilane("tune", "deepseek-v2-lite:4", "--prompt", "64", "--generated", "8", "--ram", "ddr5-5600")
    assert "on none+ddr5-5600+2-cores+24gb" in done.out
    assert [line.partition(",")[0] for line in done.err.splitlines()] == ["assumed cpu: a generic one"]


def test_an_answer_of_one_token_has_no_speed(trilane: Trilane) -> None:
    words = [*SMALL]
    words[words.index("--generated") + 1] = "1"
    out = trilane(*words, "--upgrade").out
    assert re.search(r"^decode +- \(an answer of one token\)$", out, re.MULTILINE)
    assert "error to expect" not in out
    bought = out.partition("what to buy\n")[2]
    assert re.search(r"^RTX .* GPU +\d+ +- +\d", bought, re.MULTILINE)


@pytest.mark.parametrize(("engine", "model", "machine"), [
    ("colibri", "glm-5", ("--gpu", "none", "--ram", "ddr5-5600", "--ram-gb", "64", "--disk", "nvme-4x4")),
    ("strata", "qwen3.8-flash-next", ("--gpu", "rtx-4090", "--ram", "ddr5-5600")),
])
def test_options_that_an_answer_does_not_depend_on_are_refused(
    engine: str, model: str, machine: tuple[str, ...], trilane: Trilane
) -> None:
    asked = ("tune", model, *machine, "--engine", engine)
    for option in (("--check",), ("--explain",), ("--kv", "q8_0"), ("--for", "prompt"), ("--draft-acceptance", "0.7")):
        refused = trilane(*asked, *option)
        assert (refused.status, refused.out) == (2, "")
        assert refused.err.endswith(f"got {option[0]}\n")
    assert trilane(*asked, "--for", "both").status == 0


def test_names_that_were_taken_for_others_stand_in_the_json_of_every_engine(trilane: Trilane) -> None:
    machine = ("--gpu", "none", "--ram", "DDR5-5600 MT/s", "--ram-gb", "64", "--disk", "nvme-4x4")
    assert trilane("tune", "glm-5", *machine, "--engine", "colibri", "--json", "-").json["taken"]["memory"]
