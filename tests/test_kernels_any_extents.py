"""Kernels that take extents as arguments: one text of each family and phase, at extents that it was not made for.

In Triton's interpreter, between NaN, against float64: ragged rows, single ones, fewer than taps reach, no padding and
much, other numbers of samples, more boxes around a block than a kernel was made for.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from kernel_cases import PHASES, SM_90, interpret, operands, reference, three_by_three
from sampling import draws
from test_kernels_truth import DRAWS, PHASES_OF, ROUNDING, cases

from convgen.kernels.choose import choose
from convgen.kernels.facts import facts, launches, specialised
from convgen.kernels.families import box, gemm, pointer, widened
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import read_target

BY_TRITON = {name: family for name, (family, *_) in DRAWS.items() if name != "aten"}


def kernel(p: Problem, family: Any) -> Kernel:
    """Made for a problem, with at most three boxes around a block, and three pieces of a sum."""
    config = family.default(p, SM_90)
    config = replace(config, split=min(config.split, 3))
    return Kernel((p if p.rim is None else replace(p, rim=3),), config, SM_90, open=True)


def elsewhere(rng: random.Random, p: Problem) -> Problem:
    """The same convolution at other extents; now and then at those that a family wants."""

    def dim(d: LocalDim) -> LocalDim:
        x = rng.choice((1, 2, 3, d.x, d.x + d.stride, rng.randint(1, 9)))
        y = rng.choice((1, x, d.y, rng.randint(1, 9)))
        return replace(d, x=x, y=y, below=rng.choice((d.below, 0, rng.randint(-2, 4))))

    return replace(p, batch=rng.randint(1, 4), dims=tuple(map(dim, p.dims)))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", BY_TRITON)
def test_one_text_is_right_at_any_extents(name: str, phase: str) -> None:
    found = cases(name, phase, int)
    assert found or phase not in PHASES_OF.get(name, PHASES)
    rng = random.Random(f"{name} {phase}")
    for seed, p in enumerate(rng.sample(found, min(len(found), draws(2)))):
        one = kernel(p, BY_TRITON[name])
        text = kernel_module([one])
        for other in (elsewhere(rng, p) for _ in range(2)):
            given = operands(other, seed, integers=p.dtype != "float64")
            got = interpret(other, one.config, given, seed=seed, boxes=rng.randint(0, 6), text=text).double()
            want = reference(other, given)
            error = float((got - want).abs().nan_to_num(float("inf")).max())
            assert error <= ROUNDING[p.dtype] * max(float(want.abs().max()), 1.0), f"{other} by {one.config} for {p}"


@pytest.mark.parametrize("phase", ["forward", "backward_filter"])
@pytest.mark.parametrize(("stride", "below"), [(2, -2), (2, -3), (3, -4), (3, 2)])
def test_rows_of_x_that_no_y_reads(stride: int, below: int, phase: str) -> None:
    """Quotients of a negative padding are rounded down, where Triton's are rounded to zero."""
    d = LocalDim("H", 12, 3, 1, stride, 1, below)
    p = three_by_three(phase, channels=8, filters=8, batch=1, dims=(d, LocalDim("W", 3, 3, 3, 1, 1, 1)))
    one, given = kernel(p, box), operands(p, integers=True)
    assert {launch.name for launch in launches(one, p)} == {one.name}
    got = interpret(p, one.config, given, text=kernel_module([one])).double()
    assert (got == reference(p, given)).all()


@pytest.mark.parametrize("name", BY_TRITON)
def test_a_family_convolves_just_what_it_can(name: str) -> None:
    """Of rows that are not empty, a launch's conditions are what `refusal` says; pointers do the rest."""
    family, ran = BY_TRITON[name], Counter[bool]()
    for phase in PHASES_OF.get(name, PHASES):
        some = [p for p in cases(name, phase, int) if family.NEEDS or p.channels_last]
        for seed, p in enumerate(some[:5]):
            one, rng = kernel(p, family), random.Random(seed)
            for other in (p, *(elsewhere(rng, p) for _ in range(8))):
                q = replace(other, rim=None if p.rim is None else rng.randint(0, 5))
                names = {launch.name for launch in launches(one, q)}
                able = family.refusal(q, SM_90) is None and (not family.NEEDS or (q.rim or 0) <= 3)
                if family is widened and q.dims[-1].x % widened.block(p) == q.dims[-1].y % widened.block(p) == 0:
                    able = box.refusal(widened.widened(q), SM_90) is None  # of whatever block a rank might have
                assert (one.name in names) is able, f"{q} by {one.config}"
                assert (f"{phase}_any" in names) is not able
                ran[able] += 1
    assert ran[True]
    assert bool(ran[False]) is (name in ("gemm", "box", "widened", "tiled", "converted"))


def test_rows_that_lie_side_by_side_are_read_together_where_they_are_as_many() -> None:
    p = three_by_three("forward", 8, 8, dtype="bfloat16", channels=64, filters=64, memory_format="contiguous")
    p = replace(p, dims=tuple(replace(d, kernel=1, below=0) for d in p.dims))
    one = kernel(p, gemm)
    for side, name in ((8, "forward_gemm"), (12, "forward_gemm"), (7, "forward_any"), (1, "forward_any")):
        q = replace(p, dims=tuple(replace(d, x=side, y=side) for d in p.dims))
        assert [launch.name for launch in launches(one, q)] == [name]


@pytest.mark.parametrize("name", BY_TRITON)
def test_no_extent_is_compiled_anew(name: str) -> None:
    """What Triton compiles by, at forty extents: one or two kernels of a phase; of constants one for each extent."""
    family = BY_TRITON[name]
    for phase in PHASES_OF.get(name, PHASES):
        p = next(p for p in cases(name, phase, int) if p.rim is None)
        rng, one = random.Random(name), kernel(p, family)
        others = [p, *(elsewhere(rng, p) for _ in range(40))]
        found = [compiled(one, others[:n]) for n in (12, 41)]
        assert found[0] == found[1]
        assert len(found[1]) <= 2 * len(launches(one, p)) + 1
        constant = replace(one, open=False)
        able = [q for q in others if family.refusal(q, SM_90) is None]
        assert len(compiled(constant, able)) > len(compiled(one, able)) or len({q.dims for q in able}) == 1


def compiled(kernel: Kernel, problems: list[Problem]) -> set[str]:
    """What is compiled for these."""
    return {f"{launch.name} {specialised(launch)}" for p in problems for launch in launches(kernel, p)}


@pytest.mark.parametrize("target", ["cuda:sm_90", "cuda:sm_80", "hip:gfx942"])
def test_they_compile_and_spill_nothing(target: str) -> None:
    made = read_target(target).known()
    for phase in PHASES:
        p = three_by_three(phase, 28, 28, dtype="bfloat16", channels=64, filters=64)
        one = replace(choose((p,), made), open=True)
        (main,) = [launch for launch in launches(one, p) if launch.name == one.name]
        found = facts(main, made)
        assert not found.spill_bytes and found.matrix_instructions and found.widest_global_load_bytes == 16


def test_more_pixels_than_are_numbered_are_refused() -> None:
    p = three_by_three("forward", 2**16, 2**15)
    with pytest.raises(ValueError, match="2147483648 pixels on one rank"):
        launches(kernel(p, pointer), p)
