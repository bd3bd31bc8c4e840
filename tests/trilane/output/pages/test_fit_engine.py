"""Sentences on the error to expect of a predicted speed."""

from __future__ import annotations

import pytest

from trilane.engines.accuracy.errors import ErrorToExpect, RegimeAccuracy
from trilane.output.pages.fit_engine import error_text

MACHINES = RegimeAccuracy("mixed", "", "llama.cpp", "", 0.25, 0.0, 0.6, 6, 16)
MODELS = RegimeAccuracy("mixed", "qwen3moe", "", "", 0.1, 0.04, 0.2, 4, 13)
CARD = RegimeAccuracy("", "qwen3moe", "", "RTX 3060 12GB", 0.5, 0.5, 1.0, 1, 3)
ALL = RegimeAccuracy("", "", "", "", 0.2, 0.0, 0.25, 40, 400)
LIKE_MACHINES = "25% with all models on such machines, by 16 speeds of 6 machines (llama.cpp)"
WITHIN = "four of five such speeds are within"


@pytest.mark.parametrize(("error", "text"), [
    (ErrorToExpect(ALL, MACHINES, MODELS, None),
     f"10% with qwen3moe models, by 13 speeds of 4 machines on such machines (mixed); {LIKE_MACHINES}; "
     f"{WITHIN} 60%: 62.5 to 160.0 tokens/s"),
    (ErrorToExpect(ALL, MACHINES, MODELS._replace(bias=-0.1), CARD),
     "10% with qwen3moe models, by 13 speeds of 4 machines on such machines (mixed), predicted too slow by 10%; "
     "50% with such models on RTX 3060 12GB, by 3 speeds of 1 machine, predicted too fast by 50%; "
     f"{LIKE_MACHINES}; {WITHIN} 100%: 50.0 to 200.0 tokens/s"),
    (ErrorToExpect(ALL, MACHINES, MODELS._replace(regime="", machines=1, rows=1), None),
     f"{LIKE_MACHINES}; 10% with qwen3moe models, by 1 speed of 1 machine on all machines, few or none of them such "
     f"(mixed), too few to go by; {WITHIN} 60%: 62.5 to 160.0 tokens/s"),
    (ErrorToExpect(ALL, MACHINES, MODELS._replace(regime="", machines=2, rows=3), None),
     "10% with qwen3moe models, by 3 speeds of 2 machines on all machines, few or none of them such (mixed); "
     f"{LIKE_MACHINES}; {WITHIN} 60%: 62.5 to 160.0 tokens/s"),
    (ErrorToExpect(ALL, MACHINES._replace(engine=""), None, None),
     f"models of this architecture were never measured; {LIKE_MACHINES.replace('llama.cpp', 'all engines')}; "
     f"{WITHIN} 60%: 62.5 to 160.0 tokens/s"),
    (ErrorToExpect(ALL, MACHINES._replace(machines=4, band=0.1), None, None),
     "models of this architecture were never measured; 25% with all models on such machines, by 16 speeds of 4 "
     f"machines (llama.cpp), measured on 4 machines only; {WITHIN} 25%: 80.0 to 125.0 tokens/s"),
    (ErrorToExpect(ALL, None, None, None),
     f"models of this architecture were never measured; no such machine (mixed) was measured; {WITHIN} 25%: 80.0 to "
     "125.0 tokens/s"),
])
def test_the_error_is_that_of_the_architecture_the_card_and_such_machines(error: ErrorToExpect, text: str) -> None:
    assert error_text(error, "mixed", 1, 100.0) == text


def test_no_error_is_known_of_several_sequences() -> None:
    assert error_text(None, "mixed", 4, 100.0) == "not known: others measured one sequence at a time"
    assert error_text(ErrorToExpect(ALL, MACHINES, MODELS, None), "mixed", 4, 100.0).startswith("not known")
