"""Files of a user's own policies, valid and with mistakes: in what parts return, in declarations, and in the code."""

from __future__ import annotations

import ast
from random import Random
from typing import Any

from benchmarks.fuzz.samples import TINY
from benchmarks.fuzz.trees import changed_bytes
from benchmarks.fuzz.worker import Case

_PREFETCHING = """
from dataclasses import dataclass, replace
from trilane import register, system
from trilane.parts import ExpertId

class Nearest:
    into = "staging"

    def rank(self, view, forecasts, plan):
        keys = [ExpertId(view.layer + 1, expert) for expert in view.routing.active[:1]]
        return [key for key in keys if key.expert not in view.residency.resident[key.layer]]

    def protect(self, view, forecasts):
        return frozenset()

@register("NAME", "copies on")
@dataclass(frozen=True)
class Mine(system("fiddler").parameters):
    \"\"\"Copies on.\"\"\"

    window: int = 3

    def compose(self, context):
        made = super().compose(context)
        return replace(made, prefetcher=Nearest(), prefetch_slots=self.window, decision_cost="fiddler")
"""
_WHOLE = """
from dataclasses import dataclass
from trilane import Composition, Needs, Policy, register
from trilane.parts import Assignment, InitialPlacement, Swap, TrueRouter

class First:
    def place(self, budget):
        slots = budget.cache_bytes // max(budget.expert_bytes) // budget.layers
        return InitialPlacement((slots,) * budget.layers, (tuple(range(slots)),) * budget.layers)

class Own(TrueRouter):
    def route(self, view):
        return view.routing

    def commit(self, view, forecasts):
        return None

class Loads:
    def assign(self, view):
        active, ready = view.routing.active, view.ready_ns
        gpu = tuple(e for e in active if ready[e] == 0)
        loads = tuple(e for e in active if ready[e] > 0)[:1]
        cpu = tuple(e for e in active if e not in gpu and e not in loads)
        return Assignment(gpu + loads, cpu, loads, 1000)

class Oldest:
    admits = True

    def __init__(self):
        self.held = {}

    def observe(self, view):
        pass

    def admitted(self, key, group):
        self.held[key] = group

    def evicted(self, key, group):
        del self.held[key]

    def order(self, incoming):
        return incoming

    def victim(self, incoming, group, blocked):
        return next((key for key, its in self.held.items() if its == group and key not in blocked), None)

    def swaps(self, view, when):
        return ()

@register("NAME", "every part of its own", "nobody")
@dataclass(frozen=True)
class Mine(Policy):
    slots: int = 2
    needs = Needs(scores=True)

    def compose(self, context):

        return Composition(placement=First(), router=Own(), assigner=Loads(), cache=Oldest(), demand_slots=self.slots)
"""
SAMPLES = (_PREFETCHING, _WHOLE)
_VALUES = (
    "None", "0", "-1", "1", "2.5", "'two'", "b'2'", "[]", "{}", "()", "[3]", "(3,)", "{3}", "[None]", "[(0, 1)]",
    "True", "float('nan')", "10**30", "object()", "int", "print", "lambda *given: None", "iter(())", "range(3)",
    "'\\x1b[31m'", "(10**9,)", "[[0, 99]]", "frozenset({3})", "...", "'x' * 10000", "undefined", "1 / 0", "self",
    "self.missing",
)
_RAISED = ("ValueError('no')", "KeyError", "SystemExit", "SystemExit(0)", "RuntimeError('\\x1b[31m')",
           "StopIteration", "MemoryError", "RecursionError", "OSError(28, 'x', 'y')", "AssertionError",
           "UnicodeError('\\ud800')")
_COMMANDS = ("simulate {} --policy {}", "compare {} --policies {} --draws 1 --jobs 1",
             "ablate {1} {0} --draws 1 --jobs 1", "whatif {} --vary batch=1 --policies {} --jobs 1", "policies {1}")


def policy_case(random: Random, samples: Any, damaged: bool = True) -> Case:
    """A file with one mistake or two, under a name that no other has, since modules are remembered by theirs."""
    name, tree = f"own{random.getrandbits(60):x}", ast.parse(random.choice(SAMPLES))
    for _ in range(random.choice((1, 1, 2)) if damaged else 0):
        _damage(random, tree)
    source = ast.unparse(ast.fix_missing_locations(tree)).replace("NAME", name).encode("utf-8", "replace")
    if damaged and random.random() < 0.15:
        source = changed_bytes(random, source)
    command = random.choice(_COMMANDS).format(TINY, f"{name}.py")
    return Case(command.split(), {f"{name}.py": source}, runs=9, statuses=(2,))


def _damage(random: Random, tree: ast.Module) -> None:
    """Change one place of the code."""
    random.choice((_other_value, _other_value, _other_value, _lost, _raises, _other_name))(random, tree)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _other_value(random: Random, tree: ast.Module) -> None:
    """Another value in place of what is returned, given, or the default of a field."""
    kinds = random.choice((ast.Return, ast.Return | ast.keyword | ast.AnnAssign | ast.Assign))
    places: list[Any] = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    random.choice(places).value = _expression(random.choice(_VALUES))
    if random.random() < 0.1:
        call = random.choice([node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args])
        call.args[random.randrange(len(call.args))] = _expression(random.choice(_VALUES))


def _lost(random: Random, tree: ast.Module) -> None:
    """A decorator, a base class, or a line that is missing."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    lists = [its for owner in owners for its in (owner.decorator_list, getattr(owner, "bases", [])) if its] * 2
    lists += [owner.body for owner in owners if len(owner.body) > 1] + [tree.body]
    chosen = random.choice(lists)
    del chosen[random.randrange(len(chosen))]


def _raises(random: Random, tree: ast.Module) -> None:
    """An exception at the beginning of a function."""
    function = random.choice([node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)])
    function.body.insert(0, ast.Raise(_expression(random.choice(_RAISED)), None))


def _other_name(random: Random, tree: ast.Module) -> None:
    """A name that another node has: of a variable, an attribute, a function or a class."""
    named = [(node, part) for node in ast.walk(tree) for part in ("id", "attr", "name", "arg") if hasattr(node, part)]
    (one, part), (other, its) = random.choice(named), random.choice(named)
    setattr(one, part, getattr(other, its) or "nothing")
