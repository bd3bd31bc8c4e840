"""What a shell is told when a name is half written."""

from __future__ import annotations

import pytest

from tests.kit.commands import Trilane


@pytest.mark.parametrize(("words", "completed"), [
    ("trilane tu", ["tune"]),
    ("trilane tune gpt-oss", ["gpt-oss-120b", "gpt-oss-20b"]),
    ("trilane tune gpt-oss-20b --gpu rtx-509", ["rtx-5090", "rtx-5090-laptop"]),
    ("trilane tune gpt-oss-20b --gpu rtx-5090 --cpu ryzen-9-99", ["ryzen-9-9900x", "ryzen-9-9950x", "ryzen-9-9950x3d"]),
    ("trilane tune gpt-oss-20b --ram ddr5-56", ["ddr5-5600", "ddr5-5600-ecc"]),
    ("trilane tune gpt-oss-20b --engine ik", ["ik_llama.cpp"]),
    ("trilane fit --model qwen3-30b-a3b@q4_k", ["qwen3-30b-a3b@q4_k_m", "qwen3-30b-a3b@q4_k_s"]),
    ("trilane fit --model qwen3-30b-a3b --weights q5", ["q5_k_m"]),
    ("trilane compare --policies dali,fidd", ["dali,fiddler", "dali,fiddler@impl"]),
    ("trilane simulate --policy oracl", ["oracle"]),
])
def test_names_are_completed(
    words: str, completed: list[str], trilane: Trilane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TRILANE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert trilane().out.split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_each_shell_has_its_script(shell: str, trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TRILANE_COMPLETE", f"source_{shell}")
    assert "_TRILANE_COMPLETE" in trilane().out
