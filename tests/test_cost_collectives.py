"""Ring collectives against [TRG]'s forms, worked out by hand for 2^20 words, 1 us, 1 ns and 0.1 ns a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from convgen.cost.collectives import (
    direct_exchange,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    seconds,
)

ALPHA, BETA, GAMMA, WORDS = 1e-6, 1e-9, 1e-10, 2**20


@pytest.mark.parametrize(
    ("form", "with_eight_s", "with_six_s"),
    [
        (ring_all_reduce, 0.0019407584, 0.001845008),
        (ring_reduce_scatter, 0.0010162544, 0.000966194667),
        (lambda p, n, a, b, g: ring_all_gather(p, n, a, b), 0.000924504, 0.000878813333),
    ],
)
def test_ring_forms(form: Callable[..., Any], with_eight_s: float, with_six_s: float) -> None:
    assert form(8, WORDS, ALPHA, BETA, GAMMA) == pytest.approx(with_eight_s, rel=1e-9)
    assert form(6, WORDS, ALPHA, BETA, GAMMA) == pytest.approx(with_six_s, rel=1e-6)


def test_one_rank_costs_nothing() -> None:
    assert ring_all_gather(1, WORDS, ALPHA, BETA) == 0
    assert ring_reduce_scatter(1, WORDS, ALPHA, BETA, GAMMA) == 0
    assert ring_all_reduce(1, WORDS, ALPHA, BETA, GAMMA) == 0


@pytest.mark.parametrize("p", [2, 3, 8])
def test_conversions_cost_what_the_rings_do(p: int) -> None:
    """`seconds` takes what a rank sends; with even blocks it is the ring's share of the whole vector."""
    n = 5 * p
    share = (p - 1) * n // p
    common = (ALPHA, BETA, GAMMA)
    assert seconds("all_gather", p - 1, share, *common) == pytest.approx(ring_all_gather(p, n, ALPHA, BETA))
    assert seconds("reduce_scatter", p - 1, share, *common) == pytest.approx(ring_reduce_scatter(p, n, *common))
    assert seconds("all_reduce", p - 1, 2 * share, *common) == pytest.approx(ring_all_reduce(p, n, *common))
    assert seconds("exchange", 3, n, *common) == pytest.approx(direct_exchange(3, n, ALPHA, BETA))
    assert seconds("all_to_all", p - 1, n, *common) == pytest.approx(direct_exchange(p - 1, n, ALPHA, BETA))
    assert seconds("slice", 0, 0, *common) == 0
