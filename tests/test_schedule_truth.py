"""Whole schedules, executed step by step over all ranks in numpy and compared with one device's results.

Every value on the way is compared too: each rank holds what the type says, and addends add up to the whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from generate import Problem, algorithm_problem, named_problem, random_conv, random_problem
from oracle import Oracle, direct, random_tensors
from passing import passed

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import nest
from convgen.algebra.space import Space
from convgen.operations.layer import ROWS_OF_X
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.program.nodes import Convert, Schedule, is_convolution
from convgen.program.verify import verify


def naive(problem: Problem, space: Space) -> Schedule:
    return lower("s", space, problem.stored, problem.roles, bias=problem.conv.bias)


def compiled(problem: Problem, space: Space, hold: str = "gathered") -> Schedule:
    held = HoldX(choice="stored" if hold == "stored" else "gathered")
    return passed(naive(problem, space), space, FuseBias(), held, Share())


def check(problem: Problem, seed: int, *schedules: Schedule) -> None:
    oracle = Oracle(problem.conv, problem.grid)
    data, truth = random_tensors(oracle, seed)
    for schedule in schedules:
        verify(schedule, Space(problem.conv, problem.grid))
        oracle.run(schedule, data, truth)


@pytest.mark.parametrize("chunk", range(20))
def test_random_problems(chunk: int) -> None:
    """Any storage, any roles, different in each phase, after all passes."""
    for seed in range(chunk * 10, chunk * 10 + 10):
        rng = Random(seed)
        problem = random_problem(rng)
        check(problem, seed, compiled(problem, Space(problem.conv, problem.grid), rng.choice(("gathered", "stored"))))


@pytest.mark.parametrize("chunk", range(6))
def test_naive_schedules(chunk: int) -> None:
    """What passes start from, axes of one rank and repeated conversions included."""
    for seed in range(1000 + chunk * 8, 1008 + chunk * 8):
        problem = random_problem(Random(seed))
        check(problem, seed, naive(problem, Space(problem.conv, problem.grid)))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_named_algorithms(name: str) -> None:
    for seed in range(8):
        problem = named_problem(Random(seed), algorithm=name)
        check(problem, seed, compiled(problem, Space(problem.conv, problem.grid)))


@pytest.mark.parametrize("grid", ["D2 H2 W2", "N2 H3 C2", "C2 F3", "H5", "G2 C3", "N3 G3"])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_hybrids_in_three_dimensions(grid: str, kernel: int) -> None:
    half = kernel // 2
    rows = tuple(Spatial(n, e, kernel, s, half, half) for n, e, s in (("D", 4, 1), ("H", 5, 1), ("W", 3, 2)))
    conv = Conv(2, 6, 4, rows, groups=2 if "G" in grid else 1)
    problem = algorithm_problem("stationary-w", conv, Grid(tuple((a[0], int(a[1])) for a in grid.split())))
    check(problem, kernel, compiled(problem, Space(conv, problem.grid)))


def test_a_schedule_holds_for_any_number_of_samples() -> None:
    """Compiled for one batch, run with others."""
    for seed in range(2000, 2025):
        problem = random_problem(Random(seed))
        schedule = compiled(problem, Space(problem.conv, problem.grid))
        for batch in (1, 5):
            check(problem._replace(conv=replace(problem.conv, batch=batch)), seed, schedule)


def test_the_problems_drawn_are_hard_enough() -> None:
    seen = Counter[str]()
    for seed in range(200):
        problem = random_problem(Random(seed))
        space = Space(problem.conv, problem.grid)
        schedule = compiled(problem, space)
        steps = [step for _, step in schedule.steps()]
        seen.update(step.kind for step in steps if isinstance(step, Convert))
        seen["empty ranks"] += any(space.empty_ranks(t) for t in schedule.types().values())
        seen["groups"] += problem.conv.groups > 1
        seen["bias"] += problem.conv.bias
        seen["uneven padding"] += any(s.pad_lo != s.pad_hi for s in problem.conv.spatial)
        seen["dilation and stride"] += any(s.dilation > 1 and s.stride > 1 for s in problem.conv.spatial)
        seen["even kernel"] += any(s.kernel % 2 == 0 for s in problem.conv.spatial)
        types = schedule.types()
        seen["rows of the input"] += any(
            is_convolution(s) and s.way == ROWS_OF_X and types[s.inputs[0]].has_window for s in steps
        )
        seen["several windows"] += any(sum(w is not None for w in s.type.windows) > 1 for s in steps)
        for dims in (1, 2, 3):
            seen[f"{dims} dimensions"] += len(problem.conv.spatial) == dims
        for d in range(2, 5):
            seen[f"ranks of {d} axes"] += len(problem.grid.axes) == d
    assert min(seen.values()) >= 15, seen


def test_the_reference_is_the_sum_over_all_indices() -> None:
    """Equations 1 to 3 of [CF], scalar by scalar, once."""
    for seed in range(12):
        conv = random_conv(Random(seed))
        oracle = Oracle(conv, Grid((("a", 1),)))
        data, _ = random_tensors(oracle, seed)
        x, w, dy = data["x"], data["w"], data["dy"]
        y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
        per_c, per_f = conv.channels // conv.groups, conv.filters // conv.groups
        for n, f, *o in np.ndindex(dy.shape):
            for c, *k in np.ndindex(w.shape[1:]):
                i = tuple(a * s.stride - s.pad_lo + s.dilation * b for a, b, s in zip(o, k, conv.spatial, strict=True))
                if all(0 <= a < s.extent for a, s in zip(i, conv.spatial, strict=True)):
                    at_x, at_w, at_y = (n, f // per_f * per_c + c, *i), (f, c, *k), (n, f, *o)
                    y[at_y] += x[at_x] * w[at_w]
                    dx[at_x] += dy[at_y] * w[at_w]
                    dw[at_w] += dy[at_y] * x[at_x]
        for got, expected in zip(direct(conv, x, w, dy), (y, dx, dw), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_gradients_are_adjoints() -> None:
    """<dy, A x> == <A'dy, x> == <dw, w>, for the reference that everything is compared with."""
    for seed in range(40):
        oracle = Oracle(random_conv(Random(seed)), Grid((("a", 1),)))
        data, truth = random_tensors(oracle, seed)
        product_of = (data["dy"] * truth["y without bias"]).sum()
        assert product_of == (truth["dx"] * data["x"]).sum() == (truth["dw"] * data["w"]).sum()


@pytest.mark.parametrize("roles", ["HH", "HW", "H-", "WH", "WW", "W-", "-H", "-W", "--"])
def test_a_window_from_a_block_on_another_dimension(roles: str) -> None:
    """x and y stored by rows of one dimension, convolved by rows of either, both, or nested."""
    conv = Conv(1, 2, 2, (Spatial("H", 7, 3, 2, 1, 1), Spatial("W", 5, 4, 1, 1, 2)))
    grid = Grid((("a", 2), ("b", 3)))
    pairs = [(a, "none" if r == "-" else r) for a, r in zip("ab", roles, strict=True)]
    for rows in (((), ("a", "b")), (("b",), ("a",)), (("b", "a"), ()), (("a",), ())):
        stored = {
            "x": Layout("x", ((), (), *rows)),
            "w": Layout("w", ((), ())),
            "y": Layout("y", ((), (), *reversed(rows))),
        }
        phases = {p: nest(pairs) for p in ("forward", "backward_data")}
        problem = Problem(conv, grid, stored, {**phases, "backward_filter": nest(pairs, "input")})
        check(problem, 1, compiled(problem, Space(conv, grid)))
