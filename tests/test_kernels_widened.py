"""Blocks of pixels as filters: what they gain, that every rank has the same, and where a NaN goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import PHASES, SM_90, interpret, operands, reference
from test_kernels_bound import of, square
from test_kernels_truth import assert_right

from convgen.kernels.choose import choose
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.families import box, widened
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel


def few(phase: str, count: int, **changes: object) -> Problem:
    """64 channels and so many filters, or the other way round for x's gradient."""
    sides = {"channels": count, "filters": 64} if phase == "backward_data" else {"channels": 64, "filters": count}
    return square(phase, **({"size": 112, "batch": 8} | sides | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", PHASES)
def test_bound_of_few_filters(phase: str) -> None:
    """A network's layer of 64 filters, split four ways: at most two thirds of the time of boxes; no spills."""
    p = few(phase, 16, batch=64)
    kernel = choose((p,), SM_90)
    assert kernel.config.family == widened.NAME
    b, spilled, narrowest = of(p)
    plain = Kernel((p,), box.default(p, SM_90), SM_90)
    (main,) = [one for one in launches(plain, p) if one.name == plain.name]
    boxes = bound(plain, p, main, facts(main, SM_90, loops=True))
    assert boxes is not None and b.us <= 0.67 * boxes.us and b.useful == pytest.approx(3 / 6, abs=0.01)
    assert spilled == 0 and narrowest == 16
    for launch in launches(kernel, p):
        assert facts(launch, SM_90).spill_bytes == 0, launch.name


def test_a_small_layer_is_not_worth_a_launch() -> None:
    assert choose((few("forward", 16, size=16, batch=1),), SM_90).config.family == box.NAME
    assert choose((few("forward", 64),), SM_90).config.family == box.NAME


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_are_those_of_the_rank_with_most_to_do(phase: str) -> None:
    """A kernel is printed once for ranks whose shares differ by one: what serves one rank's blocks serves all's."""
    for dtype in ("bfloat16", "float32"):
        for count in range(2, 34):
            pair = [few(phase, n, size=rows, dtype=dtype) for n in (count, count - 1) for rows in (16, 32)]
            able = [p for p in pair if widened.refusal(p, SM_90) is None]
            blocks = {widened.block(p) for p in able}
            for p in able:
                for m in blocks:
                    vectors = m * widened.few(p) * p.element_bytes
                    assert vectors % 16 == 0 and p.dims[-1].x % m == p.dims[-1].y % m == 0, (p, m)


def test_ranks_of_uneven_shares_are_right() -> None:
    rng = random.Random(5)
    dims = tuple(replace(d, x=n, y=n) for d, n in zip(few("forward", 5).dims, (3, 16), strict=True))
    shares = [few("forward", n, dims=dims, batch=1, dtype="float32", channels=16) for n in (5, 4)]
    config = replace(widened.default(shares[0], SM_90), split=1)
    module = Kernel(tuple(shares), config, SM_90).source()
    assert "of 8 pixels" in module
    for p in shares:
        assert_right(p, config, rng.randint(0, 9), integers=True)


def test_a_nan_reaches_its_block_and_no_other() -> None:
    p = few("forward", 16, size=16, batch=1)
    given = operands(p, 1)
    given["x"][0, 3, 5, 9] = torch.nan
    got, want = interpret(p, widened.default(p, SM_90), given), reference(p, given)
    spread = got.isnan()
    assert bool((spread | ~want.isnan()).all())
    rows, columns = spread[0].any(0).nonzero().T
    assert set(rows.tolist()) == {4, 5, 6} and set(columns.tolist()) == set(range(8, 12)), "8 to 10 read it"
    near = torch.where(spread, 0.0, want)
    assert float((torch.where(spread, 0.0, got.double()) - near).abs().max()) <= 2**-7 * float(near.abs().max())
