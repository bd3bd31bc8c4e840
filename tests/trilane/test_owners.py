"""docs/notes/owners.md: twelve owners' questions, and the answers that the commands give."""

from __future__ import annotations

import pytest

from tests.trilane.owners import Owner, headline, owners
from trilane.cli import main
from trilane.output.pages.output import WIDTH

ROWS = owners()


@pytest.mark.parametrize("owner", ROWS, ids=lambda owner: owner.machine)
def test_answer_is_what_the_command_prints(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WIDTH, "200")
    monkeypatch.setattr("sys.argv", owner.command.split())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (None, 0)
    assert headline(capsys.readouterr().out) == owner.answer, "renew it with: python -m tests.trilane.owners"


def test_twelve_machines_are_answered() -> None:
    assert len({owner.machine for owner in ROWS}) == 12
    assert {owner.command.split()[1] for owner in ROWS} == {"recommend", "tune"}


def test_headline_changes_with_the_speed() -> None:
    output = "llama-server -m a.gguf --n-cpu-moe 3 -c 9\n\ndecode   4.5 tokens/s, 1 ms\nfirst token  2.1 min: experts\n"
    assert headline(output) == "`--n-cpu-moe 3`, 4.5 tokens/s, first token after 2.1 min"
    assert headline(output.replace("4.5", "4.6")) != headline(output)
