"""Laws of the search: nothing that the model of an engine can express is better, and better parts make nothing slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest

from sim.costs.engine import FittedEngine
from sim.machine.hardware import Hardware
from sim.machine.parts import all_parts
from sim.machine.plausibility import HardwareError
from tests.kit.depth import DEEP
from traces.models.catalogue import load_model, model_names
from traces.models.quantisation import quantisations_of
from traces.models.shape import ShapeError
from trilane.engines.gains import PARTS, better_numbers
from trilane.engines.question import FitError, Question, check_engine, check_setting, engine_of
from trilane.engines.tune.expert_cache import hit_curve
from trilane.engines.tune.search import SettingSearch, searched, with_cache
from trilane.engines.tune.settings import GOALS, WORTH_FEWER_BITS, WORTH_SETTING, Setting, TuneQuestion
from trilane.engines.tune.tuned import Workbench

QUESTIONS = 1000 if DEEP else 25
DRAWN = 24  # settings of a question, half of them near the best one
NEAR = 0.01  # of the time that is compared
ENGINES = (None, None, "llama.cpp", "llama.cpp-vulkan", "llama.cpp-rocm", "ik_llama.cpp", "ktransformers")
MODELS = [name for name in model_names() if not name.startswith("mini")]


class Asked(NamedTuple):
    """A question, with what its search takes."""

    question: TuneQuestion
    hardware: Hardware
    engine: FittedEngine

    def search(self) -> SettingSearch:
        return searched(self.question, self.hardware, self.question.shape_with("f16"), self.engine)


def asked(random: Random) -> Asked | None:
    """A question about parts that are drawn one by one; None where they do not go together."""
    names = {kind: [part.name for part in all_parts() if part.kind == kind] for kind in ("gpu", "memory", "cpu")}
    model = random.choice(MODELS)
    prompt, generated = (round(2 ** random.uniform(0, most)) for most in (15, 10))
    try:
        question = Question(
            model=model, weights=random.choice([None, *quantisations_of(load_model(model))]),
            gpu=random.choice([*names["gpu"], *names["gpu"], "none"]), ram=random.choice(names["memory"]),
            cpu=random.choice([None, *names["cpu"]]), ram_gb=random.choice([None, 32, 64, 128, 512]),
            prompt_tokens=prompt, generated=generated, batch=random.choice([1, 1, 1, 2, 8]),
            window=random.choice([None, None, 8192, 65536]), engine=random.choice(ENGINES),
        )
        tuned = TuneQuestion(question, random.choice(GOALS), random.choice([("f16",), ("f16", "q8_0"), ("q4_0", "f16")]))
        hardware = tuned.hardware
        engine = engine_of(question, hardware)
        check_setting(question, engine, hardware)
        check_engine(engine, tuned.shape_with("f16"), hardware)
    except (FitError, HardwareError, ShapeError):
        return None
    return Asked(tuned, hardware, engine)


def questions(seed: int) -> Iterator[tuple[Asked, SettingSearch, Random]]:
    """As many as are asked for that have an answer."""
    random, answered = Random(seed), 0
    while answered < QUESTIONS:
        one = asked(random)
        done = one and one.search()
        if one and done and done.costs:
            answered += 1
            yield one, done, random


def drawn(random: Random, done: SettingSearch, best: Setting) -> Setting:
    """Any setting, or one near the best one."""
    bench, space, near = done.bench, done.space, random.random() < 0.5
    layers, most = bench.shapes["f16"].moe_layers, max(space.piece_tokens)
    pieces = round(2 ** random.uniform(0, most.bit_length()))
    host = random.choice([None, random.randint(0, layers)])
    if near:
        pieces = round(best.piece_tokens * random.uniform(0.6, 1.6))
        host = best.host_layers if best.host_layers is None else best.host_layers + random.randint(-2, 2)
    if best.cached and host is None:
        host = random.randint(1, layers)
    return Setting(
        random.choice(space.kv), min(max(pieces, 1), most), random.randint(1, bench.hardware.cpu.cores),
        host if host is None else min(max(host, 0), layers), best.cached,
        random.choice(space.pinned) and not best.cached, random.choice(space.gpu) or best.cached,
    )


def better(random: Random, done: SettingSearch) -> Iterator[tuple[Setting, float]]:
    """Settings that were drawn and are better than all that the search found, and by how much."""
    least, goal = min(map(done.score, done.costs)), done.bench.question.goal
    best = min(done.costs, key=done.score)
    for _ in range(DRAWN):
        setting = drawn(random, done, best)
        if not setting.gpu:
            setting = setting._replace(host_layers=None, pinned=False)
        if done.bench.hardware.one_memory or done.bench.engine.splits == "experts":
            setting = setting._replace(host_layers=None)
        try:
            cost = done.bench.tuned(setting).cost(goal)
        except FitError:
            continue
        score = cost * (1 + WORTH_FEWER_BITS) ** done.space.kv.index(setting.kv)
        if score * (1 + NEAR) < least:
            yield setting, least / score - 1


if __name__ == "__main__":
    import sys
    QUESTIONS = int(sys.argv[1])
    seed=int(sys.argv[2])
    import time
    t=0.0
    for n,(one, done, random) in enumerate(questions(seed)):
        for s,by in better(random, done):
            print(n, one.question.fit, one.question.goal, one.question.kv, '\n   best', min(done.costs,key=done.score), done.costs[min(done.costs,key=done.score)], '\n   ', s, f'{by:.3f}')
        if done.space.cached and len(sys.argv)>3:
            c=with_cache(done, hit_curve(one.question.fit))
            if c.costs:
                for s,by in better(random, c):
                    print('CACHE', n, one.question.fit, one.question.goal, '\n   best', min(c.costs,key=c.score), c.costs[min(c.costs,key=c.score)], '\n   ', s, f'{by:.3f}')
    print('done', n+1, time.process_time())
