"""What is sent: the counting rule, conserved over ranks, and equal to index sets where these say it all."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from generate import random_problem

from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.space import Space
from convgen.cost.traffic import elements_received, elements_sent
from convgen.operations.layer import wanted


def conversions(rng: Random) -> tuple[Space, list[Conversion]]:
    """Every conversion of a random problem."""
    problem = random_problem(rng, 12)
    space, stored = Space(problem.conv, problem.grid), problem.stored
    found: list[Conversion] = []
    for phase in PHASES:
        first, second, out = wanted(space, phase, problem.roles[phase])
        found += redistribute(space, stored[first.tensor], first)
        found += redistribute(space, stored[second.tensor], second)
        found += redistribute(space, out, stored[out.tensor])
    return space, found


@pytest.mark.parametrize("seed", range(8))
def test_what_is_sent_is_received(seed: int) -> None:
    rng, kinds = Random(seed), Counter[str]()
    for _ in range(25):
        space, steps = conversions(rng)
        for step in steps:
            kinds[step.kind] += 1
            what = (space, step.kind, step.over, step.src, step.dst)
            sent, received = elements_sent(*what), elements_received(*what)
            assert sent.sum() == received.sum(), step
            assert sent.min() >= 0, step
            assert received.min() >= 0, step
            if step.kind in ("all_gather", "all_to_all", "exchange"):
                moves = space.moves(step.src, step.dst)
                assert (sent == moves.sum(axis=1)).all(), step
                assert (received == moves.sum(axis=0)).all(), step
    assert len(kinds) == 6, "every kind of conversion came up"


def test_uneven_all_reduce() -> None:
    """7 elements over 3 ranks: pieces of 3, 2, 2. A rank sends the others' pieces, then its own sum to both."""
    space = Space(Conv(3, 7, 1, (Spatial("W", 1, 1),)), Grid((("a", 3),)))
    partial, whole = Layout("w", ((), ()), partial=("a",)), Layout("w", ((), ()))
    sent = elements_sent(space, "all_reduce", ("a",), partial, whole)
    assert sent.tolist() == [4 + 2 * 3, 5 + 2 * 2, 5 + 2 * 2]


def test_uneven_reduce_scatter_and_all_gather() -> None:
    space = Space(Conv(1, 7, 1, (Spatial("W", 1, 1),)), Grid((("a", 3),)))
    whole, split = Layout("x", ((), (), ())), Layout("x", ((), ("a",), ()))
    partial = Layout("x", ((), (), ()), partial=("a",))
    assert elements_sent(space, "reduce_scatter", ("a",), partial, split).tolist() == [4, 5, 5]
    assert elements_received(space, "reduce_scatter", ("a",), partial, split).tolist() == [6, 4, 4]
    assert elements_sent(space, "all_gather", ("a",), split, whole).tolist() == [6, 4, 4]
    assert elements_received(space, "all_gather", ("a",), split, whole).tolist() == [4, 5, 5]


def test_segmented_collectives_count_their_own_group() -> None:
    """An all-gather over one axis of two sends to the others of that axis only."""
    space = Space(Conv(4, 8, 1, (Spatial("W", 1, 1),)), Grid((("a", 2), ("b", 4))))
    src, dst = Layout("x", (("a",), ("b",), ())), Layout("x", (("a",), (), ()))
    assert (elements_sent(space, "all_gather", ("b",), src, dst) == 3 * 2 * 2).all()
    assert np.array_equal(space.moves(src, dst).sum(axis=1), np.full(8, 12))
