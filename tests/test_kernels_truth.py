"""Every family and phase against a float64 reference, in Triton's interpreter.

Inputs lie between NaN, and the output is NaN beforehand: a lane that reads or leaves what it should not shows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import (
    LETTERS,
    PHASES,
    SM_90,
    interpret,
    operands,
    random_dim,
    random_problem,
    reference,
    three_by_three,
    to_tf32,
)
from sampling import draws
from triton.tools.tensor_descriptor import TensorDescriptor

from convgen.kernels.config import Config
from convgen.kernels.families import (
    FAMILIES,
    aten,
    box,
    converted,
    depthwise,
    gemm,
    packed,
    pointer,
    stem,
    tiled,
    widened,
)
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem

Draw = Callable[[random.Random, str], Problem]


def any_problem(rng: random.Random, phase: str) -> Problem:
    """Parts, or a rim of up to eight boxes, or neither."""
    p = random_problem(rng, phase)
    if rng.random() < 0.5:
        p = replace(p, x_parts=1, y_parts=1, rim=rng.choice((None, 0)))
    return p


def few_channels(rng: random.Random, phase: str) -> Problem:
    plain: dict[str, Any] = {"groups": 1, "x_parts": 1, "y_parts": 1}
    return random_problem(rng, phase, channels=rng.choice((1, 2, 3, 5, 7)), **plain)


def a_channel_a_group(rng: random.Random, phase: str) -> Problem:
    groups, filters = rng.choice((2, 3, 5, 8, 17)), rng.choice((1, 2, 3))
    fixed: dict[str, Any] = {"x_parts": 1, "y_parts": 1, "channels": 1, "filters": filters, "groups": groups}
    return random_problem(rng, phase, rim=rng.choice((None, 0)), **fixed)


def pointwise(rng: random.Random, phase: str) -> Problem:
    p = random_problem(rng, phase, batch=rng.randint(1, 5))
    return replace(p, dims=tuple(LocalDim(d.name, d.x, d.x, 1, 1, 1, 0) for d in p.dims))


def skipped(rng: random.Random, d: LocalDim) -> LocalDim:
    """A stride of 1, 2 or 4; one tap goes with any; x has whole pairs of rows."""
    stride = d.stride if d.kernel == 1 else rng.choice((1, 1, 2, 4))
    return replace(d, stride=stride, x=-(-d.x // stride) * stride)


def haloed(rng: random.Random, phase: str) -> Problem:
    """Rows in a block and boxes around it, strides of 1."""
    p = aligned(rng, phase)
    dims = tuple(replace(d, stride=1) for d in p.dims)
    return replace(p, dims=dims, x_parts=1, y_parts=1, rim=0, bias=p.bias)


def aligned(rng: random.Random, phase: str) -> Problem:
    dtype = rng.choice(("float32", "bfloat16", "float16", "tfloat32"))
    vector, dims = 4 if dtype.endswith("32") else 8, rng.choice((2, 2, 3))
    sizes = {2: 9, 3: 5}
    return random_problem(
        rng,
        phase,
        dims=tuple(skipped(rng, random_dim(rng, name, sizes[dims])) for name in LETTERS[dims]),
        memory_format="channels_last",
        dtype=dtype,
        groups=1,
        channels=vector * rng.choice((1, 2, 3, 4, 8)),
        filters=vector * rng.choice((1, 2, 3, 5)),
        x_parts=rng.choice((1, 2)),
        y_parts=rng.choice((1, 3)),
    )


def few_strided(rng: random.Random, phase: str) -> Problem:
    """Few channels and a stride, as a network's first layer has."""
    p = few_channels(rng, phase)
    dtype = rng.choice(("float32", "bfloat16", "float16", "tfloat32"))
    dims = tuple(replace(d, dilation=1, stride=rng.choice((1, 2, 2, 3, 4))) for d in p.dims[-2:])
    form = rng.choice(("channels_last", "channels_last", "contiguous")) if len(dims) > 1 else "contiguous"
    sides = {"filters": 8 * rng.choice((1, 2, 3)), "y_parts": rng.choice((1, 1, 2, 3))}
    return replace(p, dims=dims, dtype=dtype, memory_format=form, **sides)


def sixty_four_channels(rng: random.Random, phase: str) -> Problem:
    p = replace(aligned(rng, phase), dtype="tfloat32", channels=rng.choice((64, 68, 132)))
    return replace(p, filters=4 * rng.choice((1, 3, 5, 17)), dims=p.dims[-2:])


def few_filters(rng: random.Random, phase: str) -> Problem:
    """Or few channels of x's gradient; whole blocks of rows in the last dimension, which has no stride."""
    p, few = aligned(rng, phase), rng.choice((1, 2, 3, 5, 8, 12, 16, 20, 24, 32))
    plain = phase == "backward_data"
    others = tuple(replace(d, stride=1) if plain else d for d in p.dims[1 if len(p.dims) > 2 else 0 : -1])
    x, y = rng.choice(((16, 16), (16, 16), (32, 16), (16, 32)))
    last = replace(p.dims[-1], x=x, y=y, kernel=rng.choice((2, 3, 3, 4, 5)), stride=1, dilation=1)
    many = 16 * rng.choice((1, 2, 3))
    channels, filters = (few, many) if plain else (many, few)
    return replace(p, dims=(*others, last), channels=channels, filters=filters)


def as_they_lie(rng: random.Random, phase: str) -> Problem:
    """What boxes can once channels are last; some of one dimension."""
    p = replace(rng.choice((aligned, aligned, haloed))(rng, phase), memory_format="contiguous")
    return replace(p, dims=p.dims[-1:]) if rng.random() < 0.3 else p


DRAWS: dict[str, tuple[Any, Draw, int]] = {
    "pointer": (pointer, any_problem, 16),
    "packed": (packed, few_channels, 13),
    "depthwise": (depthwise, a_channel_a_group, 13),
    "gemm": (gemm, pointwise, 14),
    "box": (box, lambda rng, phase: rng.choice((aligned, aligned, haloed))(rng, phase), 14),
    "widened": (widened, few_filters, 14),
    "tiled": (tiled, sixty_four_channels, 12),
    "converted": (converted, as_they_lie, 20),
    "stem": (stem, few_strided, 20),
    "aten": (aten, any_problem, 16),
}
PHASES_OF = {"packed": ("forward", "backward_filter"), "tiled": ("backward_filter",)}
ROUNDING = {"float64": 1e-12, "float32": 1e-6, "tfloat32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def cases(name: str, phase: str, of: Callable[[int], int] = draws) -> list[Problem]:
    family, draw, count = DRAWS[name]
    drawn = (draw(random.Random(f"{name} {phase} {seed}"), phase) for seed in range(of(count)))
    return [p for p in drawn if family.refusal(p, SM_90) is None]


def assert_right(p: Problem, config: Config, seed: int, *, integers: bool = False) -> None:
    given = operands(p, seed, integers=integers)
    got, want = (
        interpret(p, config, given, seed=seed, boxes=1 + seed % (8 if config.family == pointer.NAME else 3)).double(),
        reference(p, given),
    )
    assert got.shape == want.shape
    scale = float(want.abs().max()) if want.numel() else 0.0
    error = float((got - want).abs().nan_to_num(torch.inf).max()) if want.numel() else 0.0
    assert error <= ROUNDING[p.dtype] * max(scale, 1.0), f"{error} of {scale}: {p} {config}"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", DRAWS)
def test_family_is_right(name: str, phase: str) -> None:
    family = DRAWS[name][0]
    found = cases(name, phase)
    assert found or phase not in PHASES_OF.get(name, PHASES)
    for seed, p in enumerate(found):
        # Integers are exact in every type's products and sums; only the result is rounded, to the type.
        assert_right(p, family.default(p, SM_90), seed, integers=p.dtype != "float64")


def test_draws_have_everything() -> None:
    seen: Counter[str] = Counter()
    for name in DRAWS:
        for phase in PHASES:
            for p in cases(name, phase, int):  # all of them, whatever share a plain run draws
                seen[f"{len(p.dims)}d"] += 1
                seen[p.memory_format] += 1
                seen[p.dtype] += 1
                seen[f"{phase} {name}"] += 1
                for d in p.dims:
                    seen["stride"] += d.stride > 1
                    seen["stride 3"] += d.stride == 3
                    seen["dilation"] += d.dilation > 1
                    seen["stride and dilation share a factor"] += d.stride == d.dilation > 1
                    seen["even kernel"] += d.kernel % 2 == 0
                    seen["negative padding"] += d.below < 0
                    seen["wide padding"] += d.below > d.kernel * d.dilation
                seen["bias"] += p.bias
                seen["groups"] += p.groups > 1
                seen["x in parts"] += p.x_parts > 1
                seen["y in parts"] += p.y_parts > 1
                seen["rim"] += p.rim is not None
                seen["rim and groups"] += p.rim is not None and p.groups > 1
                seen["odd channels"] += p.channels % 16 > 0
    few = {name: n for name, n in seen.items() if n < 3}
    assert not few, few


@pytest.mark.parametrize("dtype", ["float32", "tfloat32", "bfloat16", "float16"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["pointer", "packed", "depthwise", "gemm"])
def test_dtypes(name: str, phase: str, dtype: str) -> None:
    family, draw, _ = DRAWS[name]
    done = 0
    for seed in range(40):
        p = replace(draw(random.Random(f"{name} {phase} {dtype} {seed}"), phase), dtype=dtype)
        if family.refusal(p, SM_90) is None and done < draws(2):
            done += 1
            assert_right(p, family.default(p, SM_90), seed, integers=True)
    assert done == draws(2) or (name, phase) == ("packed", "backward_data")


@pytest.mark.parametrize("phase", PHASES)
def test_random_numbers_in_every_dtype(phase: str) -> None:
    """Real numbers: sums are float32, and tfloat32 rounds its operands to 11 bits, no more and no less."""
    for dtype, limit in (("float32", 3e-7), ("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("tfloat32", 2.0**-10)):
        p = three_by_three(phase, dtype=dtype)
        given = operands(p, 1)
        error = (interpret(p, pointer.default(p, SM_90), given).double() - reference(p, given)).abs().max()
        scale = float(reference(p, given).abs().max())
        assert float(error) <= limit * scale, (dtype, float(error) / scale)
        if dtype == "tfloat32":
            assert float(error) > 1e-5 * scale, "tfloat32 did not round"


@pytest.mark.parametrize("phase", PHASES)
def test_boxes_are_rounded_as_they_are_copied(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton can say so to the copy engine, and in registers where it can't. Ties go to even, and infinities and
    NaN stay."""
    whole = three_by_three(phase, 8, 8, dtype="tfloat32")
    halves = tuple(replace(d, y=4, stride=2) for d in whole.dims)
    changes: tuple[Any, ...] = ({}, {"rim": 0}, {"memory_format": "contiguous"}, {"channels": 3, "dims": halves})
    for more, family in zip(changes, (box, box, converted, stem), strict=True):
        p = replace(whole, **more)
        given, config = operands(p, 1), family.default(p, SM_90)
        for name in ("x", "w", "dy"):
            value = given[name].view(-1)
            value[:: max(1, len(value) // 50)] = 1 + 2.0**-11  # between two neighbours: down to 1
            value[1 :: max(2, len(value) // 50)] = 1 + 3 * 2.0**-11  # and up
        copied = interpret(p, config, given, boxes=2)
        want = reference(p, {n: to_tf32(t) for n, t in given.items()})
        scale = float(want.abs().max())
        assert float((copied.double() - want).abs().max()) <= 1e-6 * scale, family.NAME
        assert float((reference(p, given) - want).abs().max()) > 1e-5 * scale
        with monkeypatch.context() as patched:
            patched.setattr(TensorDescriptor, "__annotations__", {})
            load_text.cache_clear()
            by_hand = interpret(p, config, given, boxes=2)
            assert float((by_hand.double() - want).abs().max()) <= 1e-6 * scale, family.NAME
        load_text.cache_clear()
    p = Problem(phase=phase, batch=1, channels=4, filters=4, dims=(LocalDim("W", 4, 4, 1, 1, 1, 0),), dtype="tfloat32",
                memory_format="channels_last")  # fmt: skip  # type: ignore[arg-type]
    given = {n: torch.ones_like(t) for n, t in operands(p).items()}
    for n, value in (("x", torch.inf), ("w", torch.nan), ("dy", -torch.inf)):
        given[n].view(-1)[3] = value
    assert torch.equal(
        interpret(p, box.default(p, SM_90), given).nan_to_num(7, 8, 9), reference(p, given).float().nan_to_num(7, 8, 9)
    )


@pytest.mark.parametrize("name", DRAWS)
def test_other_configurations(name: str) -> None:
    """A sample of what tuning may choose, whatever its tiles."""
    family = DRAWS[name][0]
    rng = random.Random(name)
    for phase in PHASES:
        found = [p for p in cases(name, phase) if p.pixels < 400]
        for seed, p in enumerate(found[:2]):
            offered = list(family.configs(p, SM_90))
            assert offered[0] == family.default(p, SM_90)
            for config in rng.sample(offered, min(draws(2), len(offered))):
                assert_right(p, config, seed, integers=p.dtype != "float64")


def test_backward_filter_is_deterministic() -> None:
    p = three_by_three("backward_filter", 9, 9, batch=4, channels=17, filters=18, memory_format="contiguous")
    config = Config("pointer", (("BF", 16), ("BC", 16), ("BP", 32)), 4, 2, split=5)
    given = operands(p, 3)
    first = interpret(p, config, given)
    assert torch.equal(first, interpret(p, config, given))
    assert float((first.double() - reference(p, given)).abs().max()) < 1e-4


@pytest.mark.parametrize("phase", PHASES[:2])
def test_tiles_in_pieces_are_deterministic(phase: str) -> None:
    """Steps of a tile that several programs share: the last one adds, always in the same order."""
    p = three_by_three(phase, 9, 9, batch=3, channels=24, filters=40, bias=phase == "forward")
    given = operands(p, 5)
    for split in (2, 5):
        config = replace(box.default(p, SM_90), split=split)
        first = interpret(p, config, given)
        assert torch.equal(first, interpret(p, config, given))
        assert float((first.double() - reference(p, given)).abs().max()) < 1e-4


def test_every_problem_has_a_family() -> None:
    for seed in range(300):
        for phase in PHASES:
            p = any_problem(random.Random(f"any {seed}"), phase)
            assert any(f.refusal(p, SM_90) is None for f in FAMILIES)
