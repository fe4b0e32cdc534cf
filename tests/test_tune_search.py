"""The search asks for legal configurations once each, corrects the model by what it is told, and beats chance."""

from __future__ import annotations

import math
import random
import statistics
from itertools import product

import pytest

from convgen.kernels.config import Config
from convgen.tune.search import Ranked, Search, limit_of

SPACE = product((16, 32, 64, 128), (16, 32, 64, 128), (16, 32, 64), (4, 8), (2, 3, 4))
CONFIGS = (
    *(
        Config("pointer", (("BP", bp), ("BF", bf), ("BC", bc)), warps, stages)
        for bp, bf, bc, warps, stages in SPACE
        if bp * bf <= 8192
    ),
    Config("aten", warps=0, stages=0),
)


def landscape(seed: int) -> dict[Config, float]:
    """Times with a best place that depends on the seed, interactions, and noise."""
    rng = random.Random(seed)
    want = {n: math.log2(rng.choice(v)) for n, v in {"BP": (32, 64, 128), "BF": (16, 32, 64), "BC": (32, 64)}.items()}
    times: dict[Config, float] = {}
    for c in CONFIGS:
        off = sum(0.15 * (math.log2(c.tile[n]) - want[n]) ** 2 for n in c.tile)
        off += 0.1 * (c.warps == (4 if seed % 2 else 8)) + 0.05 * abs(c.stages - 3)
        times[c] = 10 * math.exp(off + rng.gauss(0, 0.03)) if c.tile else 18.0
    return times


def ranked(times: dict[Config, float], seed: int, error: float) -> Ranked:
    """A model that is off by so much, in logarithms."""
    rng = random.Random(1000 + seed)
    modelled = {c: t * math.exp(rng.gauss(0, error)) for c, t in times.items()}
    order = sorted(modelled, key=lambda c: modelled[c])
    return Ranked(tuple(order), tuple(modelled[c] for c in order))


def found(times: dict[Config, float], search: Search) -> float:
    while batch := search.ask():
        for c in batch:
            search.tell(c, times[c])
    return search.best()[0][0]


@pytest.mark.parametrize("batch", [1, 5])
def test_each_configuration_is_asked_for_once(batch: int) -> None:
    times = landscape(1)
    search = Search(ranked(times, 1, 0.5), 40)
    asked: list[Config] = []
    while some := search.ask(batch):
        asked += some
        for i, c in enumerate(some):
            search.tell(c, None if i % 3 == 2 else times[c])
    assert len(asked) == len(set(asked)) == 40 and set(asked) <= set(CONFIGS)


def test_what_is_told_counts_and_is_not_asked_again() -> None:
    times = landscape(2)
    before = dict(list(times.items())[:30])
    search = Search(ranked(times, 2, 0.5), 40, before)
    asked = search.ask(100)
    assert len(asked) == 10 and not set(asked) & set(before)
    assert search.best()[0][0] == min(before.values())


def test_where_everything_fails_the_search_ends() -> None:
    search = Search(ranked(landscape(3), 3, 0.5), 12)
    count = 0
    while batch := search.ask(2):
        for c in batch:
            search.tell(c, None)
            count += 1
    assert count == 12 and search.best() == []


def test_a_family_is_never_left_out() -> None:
    times = landscape(4)
    last = ranked({**times, Config("aten", warps=0, stages=0): 1e6}, 4, 0.1)
    assert last.configs[-1].family == "aten"
    assert any(c.family == "aten" for c in Search(last, 20).ask(20))


def test_it_beats_chance_with_the_same_number_of_measurements() -> None:
    limit = limit_of(len(CONFIGS), "full")
    assert limit == math.ceil(len(CONFIGS) / 10)
    ours, chance = [], []
    for seed in range(12):
        times = landscape(seed)
        best = min(times.values())
        ours.append(found(times, Search(ranked(times, seed, 0.6), limit)) / best)
        rng = random.Random(seed)
        chance.append(statistics.mean(min(rng.sample(list(times.values()), limit)) for _ in range(50)) / best)
    assert statistics.geometric_mean(ours) < 0.5 * (1 + statistics.geometric_mean(chance))


def test_a_model_that_is_off_in_one_direction_is_corrected() -> None:
    """It takes tiles of many pixels, or of few filters, for faster than they are; the ranking alone never learns."""
    ours, alone = [], []
    for seed in range(12):
        times, best = landscape(seed), min(landscape(seed).values())
        off = {c: 0.3 * math.log2(c.tile["BF"] / c.tile["BP"]) if c.tile else 0.0 for c in times}
        modelled = {c: us * math.exp(off[c]) for c, us in times.items()}
        order = sorted(modelled, key=lambda c: modelled[c])
        limit = limit_of(len(order), "full")
        ours.append(found(times, Search(Ranked(tuple(order), tuple(modelled[c] for c in order)), limit)) / best)
        alone.append(min(times[c] for c in order[:limit]) / best)
    assert statistics.geometric_mean(ours) - 1 < 0.7 * (statistics.geometric_mean(alone) - 1)


def test_the_same_times_ask_the_same() -> None:
    times = landscape(5)
    one, two = (Search(ranked(times, 5, 0.6), 30) for _ in range(2))
    assert found(times, one) == found(times, two) and list(one.asked) == list(two.asked)
