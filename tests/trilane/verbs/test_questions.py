"""``trilane fit`` and ``pays``: answers, their JSON, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from sim.machine.hardware import load_hardware
from tests.kit.commands import Result, Trilane
from tests.kit.questions import WORDS, narrowed
from trilane.engines.gains import Gain
from trilane.engines.question import FitError, Question
from trilane.engines.speed import LargerPieces
from trilane.fit import answer
from trilane.fit.fit import Fit, fit
from trilane.output.pages.caveats import fit_record
from trilane.output.pages.fit import fit_page
from trilane.study.pays import ideas

MINI = ("fit", "--model", "deepseek-v2-lite", "--trace", "mini-deepseek", "--weights", "bf16", "--gpu", "rtx-3060",
        "--ram", "ddr4-3200", "--prompt", "64", "--policies", "fiddler,on-demand", "--jobs", "1")


def on_another(words: Sequence[str], gpu: str, other: str) -> list[str]:
    """A command on a machine with another GPU."""
    return [word.replace(gpu, other) for word in words]


def facts(done: Result) -> dict[str, str]:
    """Names and values of the page's lines; of those that stand twice, the first."""
    assert done.status == 0, done.err
    lines = [line.split("  ", 1) for line in done.out.splitlines() if "  " in line]
    return {name: value.strip() for name, value in reversed(lines)}


def test_the_page_answers_first_and_then_says_what_it_rests_on(trilane: Trilane) -> None:
    done = trilane(*MINI, "--json", "fit.json")
    told, kept = facts(done), json.loads(Path("fit.json").read_text())
    engine, kept = kept["engine"], kept["policies"]
    best, memory = kept["best"], kept["memory"]
    assert done.out.startswith("deepseek-v2-lite@bf16 on rtx-3060+ddr4-3200: a prompt of 64 tokens and 256 generated\n")
    assert told["best policy"] == "fiddler: popular experts stay; copies where they beat the CPU"
    bound, null = kept["bounds"]["lower_bound_tpot_ms"], kept["bounds"]["null_model_tpot_ms"]
    assert told["time per output token"] == (
        f"{best['tpot_ms']:.2f} +- {best['spread_ms']:.2f} ms (simulated; lower bound {bound:.2f}, "
        f"clairvoyant run {kept['clairvoyant']['tpot_ms']:.2f}, "
        f"null model {null:.2f})"
    )
    assert told["time to first token"].startswith(f"{best['ttft_ms'] / 1e3:.2f} s (lower bound ")
    assert f"\n\n{engine['command']}\n" in done.out
    assert told["decode"].startswith(f"{1000 / engine['tpot_ms']:.1f} tokens/s, {engine['tpot_ms']:.2f} ms a token ")
    assert told["first token"].startswith(f"{engine['ttft_ms'] / 1e3:.2f} s, the prompt in one piece: ")
    own = engine["error"]["like_models"]
    assert told["error to expect"].startswith(f"{own['median']:.0%} with deepseek2 models, by {own['rows']} speed")
    assert done.out.index("with llama.cpp: ") < done.out.index("with the best policy")
    assert told["routing"] == "mini-deepseek (recorded)"
    assert "12.9 GB = weights that every token needs 2.6 + KV cache 0.0 + staging 0.0 + " in done.out
    cached = memory["cached_experts"]
    assert told["experts on the GPU"] == f"{cached} of 1,664, {cached / 26:.1f} of 64 a layer ({cached / 1664:.0%})"


def test_policies_are_simulated_where_they_are_named(trilane: Trilane) -> None:
    """Otherwise a line says how, and only where there is something to decide."""
    asked = ("fit", "--model", "qwen3-30b-a3b", "--ram", "ddr4-3200", "--json", "fit.json")
    done = trilane(*asked, "--gpu", "rtx-3060")
    assert json.loads(Path("fit.json").read_text())["policies"] is None
    assert done.out.endswith("\n\npolicies that decide at run time: --policies usual simulates what they could reach\n")
    assert "- A generic CPU: " in done.out
    assert "best policy" not in done.out
    assert "--policies usual" not in trilane(*asked, "--gpu", "rtx-5090").out
    assert "--policies usual" not in trilane(*asked, "--gpu", "none").out


def test_the_engines_part_is_printed_before_policies_are_simulated(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FitError("none of them can run")

    monkeypatch.setattr(answer, "policy_answer", refuse)
    done = trilane(*MINI)
    assert (done.status, done.err) == (2, "trilane: none of them can run\n")
    assert done.out.splitlines()[-1].startswith("llama-server ")
    assert "with llama.cpp: " in done.out


def test_better_parts_are_told_where_they_are_asked_for_and_real_ones_too(trilane: Trilane) -> None:
    asked = ("fit", "--model", "gpt-oss-20b", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--json", "fit.json")
    plain, more = trilane(*asked), trilane(*asked, "--explain", "--upgrade")
    found = json.loads(Path("fit.json").read_text())["upgrades"]
    assert ("25% better" in plain.out, "what to buy" in plain.out) == (False, False)
    assert "25% better, llama.cpp" in more.out
    assert found
    assert all(one["step"]["title"] in more.out.partition("what to buy\n")[2] for one in found)


@pytest.mark.parametrize(("machine", "hint"), [
    (("--gpu", "rtx-3060", "--ram", "ddr4-3200"), True), (("--gpu", "rtx-4060-laptop", "--ram", "ddr5-5600"), False),
    (("--gpu", "apple-m3-max"), False), (("--machine", "rtx4090-ddr5"), False),
])
def test_real_parts_are_offered_where_a_machine_takes_them(
    trilane: Trilane, machine: tuple[str, ...], hint: bool
) -> None:
    done = trilane("fit", "--model", "qwen3-30b-a3b", *machine)
    assert done.status == 0, done.err
    assert ("--upgrade shows what real parts give" in done.out) == hint


def test_a_host_memory_that_is_nearly_full_is_told_with_what_leaves_room(trilane: Trilane) -> None:
    full = ("fit", "--model", "gpt-oss-20b", "--gpu", "none", "--ram", "ddr4-3200", "--ram-gb", "16")
    done = trilane(*full, "--prompt", "max", "--json", "fit.json")
    assert done.status == 0, done.err
    assert "memory is used: other programs may leave no room" in done.out
    ways = json.loads(Path("fit.json").read_text())["roomier"]
    assert ways
    assert facts(done)["more room"].startswith("with --")


def test_a_best_policy_that_played_a_short_prompt_has_no_time_to_first_token(trilane: Trilane) -> None:
    done = trilane(*MINI, "--prompt", "600", "--generated", "16", "--policies", "moe-infinity")
    assert facts(done)["time to first token"].startswith("not simulated")


def test_the_table_has_every_policy_and_marks_who_knows_the_future(trilane: Trilane) -> None:
    done = trilane(*MINI, "--generated", "16", "--policies", "fiddler,on-demand,daop")
    table = done.out.partition("compared with others\n")[2].partition("\n\n")[0].splitlines()
    names = [line.split("  ")[0] for line in table[1:]]
    assert names == ["fiddler", "on-demand", "llama.cpp@impl +", "oracle *", "daop ~"]
    assert "*         knows the future" in done.out
    assert "+         for comparison" in done.out
    assert "~         sometimes runs other experts" in done.out


def test_parts_and_weak_numbers_and_traps_are_told(trilane: Trilane) -> None:
    done = trilane(*MINI, "--explain", "--json", "fit.json")
    out, kept = done.out, json.loads(Path("fit.json").read_text())["policies"]
    parts = out.partition("what a part 25% better gives with the policy fiddler, to about 2%\n")[2].partition("\n\n")[0]
    assert parts.splitlines()[0] == f"limited by: {kept['limited_by']}"
    assert len(parts.splitlines()[2:]) == 10
    read = load_hardware("rtx-3060+ddr4-3200").cpu.read_bytes_per_s
    assert f"low         cpu.read_bytes_per_s  {read:.4g}  " in out
    assert "- A generic CPU: its reads, its power and its products are typical figures" in out


def test_what_better_parts_give_with_a_policy_is_simulated_only_where_it_is_shown(
    trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page with --explain, else in JSON alone."""
    asked: list[str] = []
    monkeypatch.setattr(answer, "gains_of", lambda policy, *_: asked.append(policy) or [])
    plain, kept = trilane(*MINI, "--generated", "8"), trilane(*MINI, "--generated", "8", "--json", "fit.json")
    assert plain.out == kept.out
    assert "25% better" not in plain.out
    assert asked == ["fiddler"]


def test_the_page_says_of_how_many_steps_the_times_are_the_mean(trilane: Trilane) -> None:
    some, every = (facts(trilane(*MINI, "--generated", str(count))) for count in (1000, 8))
    stands = "whose mean stands for all later ones"
    assert some["decode steps played"] == f"56 of 1000: the first 28, and 28 {stands}"
    assert every["decode steps played"] == "all 8"


def test_an_answer_of_one_token_has_no_time_per_token(trilane: Trilane) -> None:
    told = facts(trilane(*MINI, "--generated", "1"))
    assert told["time per output token"].startswith("- ms (")
    assert told["tokens/s"] == "-"
    assert told["fiddler"].split()[1:3] == ["-", "-"]


def test_what_gets_worse_and_a_slower_clairvoyant_run_are_explained() -> None:
    whole = fit(Question("deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", trace="mini-deepseek", weights="bf16",
                         prompt_tokens=64, generated=8, policies=("fiddler",)))
    found = whole.policies
    assert found is not None
    assert found.clairvoyant is not None
    slower = replace(found.clairvoyant, tpot_ms=found.best.tpot_ms + 1, pcie_bytes_per_token=700 * 2**20)
    gains = (Gain("PCIe", "the link", 0.1), Gain("GPU kernels", "", -0.019), Gain("DRAM", "", -0.042))
    odd = replace(found, clairvoyant=slower, gains=gains,
                  best=replace(found.best, pcie_bytes_per_token=30 * 2**20))
    page = printed(replace(whole, policies=odd))
    assert "-4%  (the policy uses it badly)" in page
    assert page.count("uses it badly") == 1
    assert (
        "the clairvoyant run is slower here: it copies 700 MiB a token where fiddler copies 30, and knowing the "
        "future, it still decides layer by layer"
    ) in page
    assert "is slower here" not in printed(replace(whole, policies=replace(odd, clairvoyant=found.best)))


def printed(found: Fit) -> str:
    """The page as text."""
    console = Console(file=StringIO(), width=300)
    for part in fit_page(found):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_the_model_was_trained_for_and_long_times_and_larger_pieces_are_told() -> None:
    whole = fit(Question("deepseek-v2-lite:2", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=600, generated=2))
    assert whole.engine is not None
    assert "trained for" not in printed(whole)
    assert "trained for, 700 tokens with the answer." in printed(replace(whole, trained_tokens=700))
    assert "was trained for 601 tokens, and here are 602: " in printed(replace(whole, trained_tokens=601))
    slow = replace(whole.engine, ttft_ms=330e3, prompt_ms={"attention": 30e3, "copies": 300e3},
                   larger_pieces=LargerPieces("-b 4096 -ub 4096", 121e3, 50.0))
    page = printed(replace(whole, engine=slow))
    assert "5.5 min, the prompt in 2 pieces of 512: copies of experts 5.0 min, attention 30.00 s" in page
    assert "larger pieces    first token in 2.0 min and 20.0 tokens/s with -b 4096 -ub 4096" in page
    page = printed(replace(whole, engine=replace(slow, ttft_ms=119e3)))
    assert "119.00 s, the prompt in 2 pieces" in page


def test_several_sequences_have_their_speeds_in_all_and_no_error_that_is_known() -> None:
    whole = fit(Question("deepseek-v2-lite:2", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, generated=2, batch=3))
    assert whole.engine is not None
    page, each = printed(whole), 1000 / whole.engine.tpot_ms
    assert f"{each:,.1f} tokens/s per sequence, {3 * each:,.1f} in all, " in page
    assert ", the prompts of all sequences in 3 pieces of 64: " in page
    assert "error to expect  not known: others measured one sequence at a time" in page


def test_where_all_fits_no_offloading_is_needed(trilane: Trilane) -> None:
    done = trilane(*on_another(MINI, "rtx-3060", "rtx-4090"), "--weights", "q4_k_m", "--json", "fit.json")
    assert facts(done)["best policy"] == "none needed: every expert is on the GPU, nothing is offloaded"
    assert "compared with others" not in done.out
    assert facts(done)["host memory"] == "none for experts, once the model is loaded"
    assert json.loads(Path("fit.json").read_text())["policies"]["memory"]["host_bytes"] == 0


def test_made_up_routing_says_so(trilane: Trilane) -> None:
    done = trilane("fit", "--model", "deepseek-v2-lite:2", "--gpu", "rtx-3060", "--ram", "ddr4-3200", "--policies",
                   "usual")
    assert facts(done)["routing"].startswith("synthetic, like ")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--gpu", "rtx-3060"), "expected gpu and ram"),
    (("--gpu", "rtx-3060x", "--ram", "ddr4-3200"), "there is no gpu 'rtx-3060x'; others of that number: "),
    (("--gpu", "m3-maxx"), "apple-m3 is another one, without 'maxx'"),
    (("--machine", "rtx3090-ddr4", "--cores", "4"), "got machine 'rtx3090-ddr4' and cores"),
    (("--machine", "rtx3090-ddr4", "--weights", "q4"), "names several formats of weights: choose q4_k_m or"),
    (("--machine", "rtx3090-ddr4", "--ram-gb", "8", "--weights", "bf16"), "it runs with --ram-gb 16, or "),
    (("--gpu", "rtx-3060", "--ram", "ddr4-3200", "--prompt", "many"), "number of tokens, or max, got 'many'"),
    (("--gpu", "rtx-3060", "--ram", "ddr4-3200", "--kv", "q5_0"), "kv: expected"),
    (("--gpu", "rtx-3060", "--ram", "ddr4-3200", "--engine", "pytorch"), "`trilane fit --policy-engine pytorch`"),
    (
        ("--gpu", "rtx-3060", "--ram", "ddr4-3200", "--n-cpu-moe", "3", "--weights", "bf16"),
        "of 2 layers on the CPU needs",
    ),
    (("--machine", "rtx3090-ddr4", "--policies", "none"), "there is no policy 'none'"),
    (("--machine", "rtx3090-ddr4", "--json", "no/where.json"), "the folder no does not exist"),
])
def test_what_cannot_be_answered_is_a_sentence(trilane: Trilane, arguments: tuple[str, ...], sentence: str) -> None:
    done = trilane("fit", "--model", "deepseek-v2-lite", "--trace", "mini-deepseek", *arguments)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err


@pytest.mark.parametrize("verb", [("fit",), ("tune",), ("pays", "cache")])
def test_a_model_is_named_by_its_place_or_by_an_option(trilane: Trilane, verb: tuple[str, ...]) -> None:
    refused = [trilane(*verb, *model, "--gpu", "abacus") for model in (["eliza"], ["-m", "eliza"], ["--model=eliza"])]
    assert {done.status for done in refused} == {2}
    assert len({done.err for done in refused}) == 1
    assert "there is no model 'eliza'" in refused[0].err


def test_a_preset_is_a_machine_and_json_can_be_printed(trilane: Trilane) -> None:
    done = trilane(*MINI[:7], "--machine", "rtx3090-ddr4", "--prompt", "64", "--policies", "fiddler", "--json", "-")
    assert done.json["machine"] == "rtx3090-ddr4"
    assert done.json["policies"]["best"]["policy"] == "fiddler"


@cache
def small() -> Fit:
    """A small question, answered once."""
    return fit(Question("deepseek-v2-lite:4", gpu="rtx-3050", ram="ddr4-3200", prompt_tokens=64, generated=2,
                        policies=("on-demand",)))


def test_the_command_line_is_one_line_on_a_narrow_terminal() -> None:
    found = small()
    assert found.engine is not None
    shown = [part for part in fit_page(found) if isinstance(part, str) and found.engine.command in part]
    assert len(shown) == 1, "a line of its own, since tables are wrapped"
    assert shown == [found.engine.command]


@pytest.mark.parametrize(("slower", "told"), [(1.05, "the two models disagree by 5%"), (1.0, None), (0.9, None)])
def test_an_engine_that_is_faster_than_the_best_policy_is_told(slower: float, told: str | None) -> None:
    found = small()
    assert found.engine is not None
    assert found.policies is not None
    best = replace(found.policies.best, tpot_ms=slower * found.engine.tpot_ms)
    page = printed(replace(found, policies=replace(found.policies, best=best)))
    if told is None:
        assert "disagree" not in page
    else:
        speed = f"{1000 / found.engine.tpot_ms:.1f}"
        assert f"llama.cpp is predicted to be faster, {speed} tokens/s: {told}" in page


def test_a_prompt_in_one_piece_is_a_caveat_that_ends_its_sentence() -> None:
    found = fit(Question("deepseek-v2-lite", gpu="rtx-3050", ram="ddr4-3200", prompt_tokens=513, generated=1,
                         policies=("on-demand",)))
    assert found.policies is not None
    assert found.policies.caveats.one_piece_tokens == 513
    assert fit_record(found)["policies"]["traps"][-1].endswith("are copied once for each piece")


def test_the_help_says_when_llama_cpp_and_the_clairvoyant_run_are_added(trilane: Trilane) -> None:
    told = " ".join(trilane("fit", "--help").out.replace("│", " ").split())
    assert "always included" not in told
    assert "Where experts are offloaded" in told


# --- pays -------------------------------------------------------------------------------------------------------------

QUICK = (*WORDS, "--prompt", "64", "--generated", "4", "--draws", "2", "--jobs", "1")


@pytest.fixture(autouse=True)
def _small_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas, "IDEAS", {name: narrowed(idea) for name, idea in ideas.IDEAS.items()})


def test_the_page_the_json_and_the_data_of_the_picture_agree(trilane: Trilane) -> None:
    done = trilane("pays", "cache", *QUICK, "--out", "m.png", "--json", "m.json")
    assert done.status == 0, done.err
    answer, drawn = json.loads(Path("m.json").read_text()), pd.read_csv("m.csv")
    here = drawn[drawn["here"]].iloc[0]
    first = done.out.splitlines()[0]
    verdict = "pays here" if here["gain_min"] > 0 else "may pay here or not"
    assert first.startswith(f"A cache of experts on the GPU (llama-cache-lru) {verdict}: {100 * here['gain']:+.0f}% (")
    assert f" {here['using_tokens_per_s']:.1f} tokens/s; {here['without_tokens_per_s']:.1f} with whole layers" in first
    assert answer["here"] == {"x": here.iloc[0], "y": here.iloc[1]}
    assert len(answer["cells"]) == len(drawn) == 9
    assert [min(cell["gains"]) for cell in answer["cells"]] == pytest.approx(drawn["gain_min"].tolist())
    assert Path("m.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_of_ones_own_has_the_idea(trilane: Trilane) -> None:
    Path("own_of_pays.py").write_text(
        "from dataclasses import dataclass\n"
        "from policies.papers.llama_cpp import LlamaCacheStatic\n"
        "from trilane import register\n\n\n"
        "@register('mine', 'stays')\n@dataclass(frozen=True)\nclass Mine(LlamaCacheStatic):\n    pass\n"
    )
    done = trilane("pays", "cache", *QUICK, "--policy", "own_of_pays.py", "--json", "m.json")
    assert done.status == 0, done.err
    assert done.out.startswith("A cache of experts on the GPU (mine) ")
    cells = json.loads(Path("m.json").read_text())["cells"]
    assert {cell["using"]["policy"] for cell in cells} == {"mine"}
    refused = trilane("pays", "deferral", *QUICK, "--policy", "own_of_pays.py")
    assert (refused.status, "such as kt-deferral; mine has none" in refused.err) == (2, True)


def test_deferral_says_how_many_are_deferred_and_that_the_output_changes(trilane: Trilane) -> None:
    done = trilane("pays", "deferral", *QUICK)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Deferring experts of low weight to the next layer (kt-deferral) ")
    assert lines[1].startswith("simulated on the engine ktransformers: ")
    assert lines[2].startswith("why: a token takes ")
    assert lines[3].startswith("kt-deferral ~ changes the output, which costs quality: KL 0.")
    assert [line.split("  ")[0] for line in lines if line.startswith("with")] == [
        "without: kt-deferral, 0 deferred", "with it: kt-deferral ~, 1 deferred"
    ]


def test_what_is_bought_has_the_figure_of_fit_first(trilane: Trilane) -> None:
    asked = (*WORDS, "--prompt", "64", "--generated", "4", "--jobs", "1", "--json", "-")
    found = trilane("pays", "memory", *asked, "--draws", "1").json["plain_engine"]
    engine = trilane("fit", *asked).json["engine"]
    gains = {gain["part"]: gain["tpot"] for gain in engine["gains"]}
    assert found == {"engine": "llama.cpp", "tokens_per_s": 1e3 / engine["tpot_ms"], "gain": gains["GPU memory"]}
    first, second = trilane("pays", "memory", *QUICK).out.splitlines()[:2]
    gain = f"{100 * found['gain']:+.0f}% with llama.cpp as it is, in closed form"
    assert first.startswith(f"a GPU with a quarter more memory: {gain}")
    assert second.startswith("A GPU with a quarter more memory ")


def test_refusals(trilane: Trilane) -> None:
    assert "there is no idea 'chache'; did you mean 'cache'?" in trilane("pays", "chache", *QUICK).err
    assert "fit the memory of the GPU" in trilane("pays", "link", *on_another(QUICK, "gtx-1650-super", "rtx-4090")).err
    refused = trilane("pays", "cache", *QUICK, "--out", "map.jpg")
    assert (refused.status, "ending in .png" in refused.err) == (2, True)
