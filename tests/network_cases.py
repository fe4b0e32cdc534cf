"""Random operations that only networks have: batch norm after its moments, operators of ATen as they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from random import Random

from operation_cases import CASES, Case, filled, moments_given, normal, shape_of, whole

from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import Centred, Coefficients
from convgen.operations.calls import Elementwise, Slot, Whole
from convgen.operations.evaluated_norm import EvaluatedNorm
from convgen.operations.running import RunningMoments


def centred_rows(draw: Random) -> Case:
    return filled(draw, Centred(Averaged(shape_of(draw, draw.randint(2, 5), 5), (1,))), normal)


def evaluated_norm(draw: Random) -> Case:
    """Of numbers a channel of any kind that networks have, with and without samples, scale and shift."""
    shape = tuple(max(1, n) for n in shape_of(draw, draw.randint(2, 5), 5))
    operation = EvaluatedNorm(shape, 1e-3, draw.random() < 0.7, draw.random() < 0.7)
    made = [normal(draw, o.shape) for o in operation.signatures[0].inputs]
    return operation, [t.square() + 0.1 if k == 2 else t for k, t in enumerate(made)]


def running_moments(draw: Random) -> Case:
    channels = draw.randint(1, 7)
    return RunningMoments((("C", channels),)), [normal(draw, (channels,)), normal(draw, (channels,)) ** 2]


def coefficients(draw: Random) -> Case:
    channels, weight, bias = draw.randint(1, 7), draw.random() < 0.7, draw.random() < 0.7
    vectors = [normal(draw, (channels,)) for there in (weight, bias) if there]
    m = moments_given(draw, Averaged((2, channels, 4), (1,)))
    return Coefficients((("C", channels),), 1e-3, weight, bias), [m, *vectors]


def elementwise(draw: Random) -> Case:
    """Broadcast in any way, with numbers among the arguments."""
    shape = shape_of(draw, draw.randint(1, 4), 5)
    op, args = draw.choice(
        (
            ("add.Tensor", (Slot(0), Slot(1), 3)),
            ("mul.Tensor", (Slot(0), Slot(1))),
            ("clamp", (Slot(0), -0.5, None)),
            ("leaky_relu", (Slot(0), 0.2)),
            ("pow.Tensor_Scalar", (Slot(0), 2)),
            ("rsub.Scalar", (Slot(0), 1.0, 2)),
        )
    )
    shapes = [shape] * sum(isinstance(a, Slot) for a in args)
    if len(shapes) > 1:
        shapes[draw.randrange(2)] = tuple(draw.choice((1, n)) for n in shape[draw.randrange(len(shape)) :])
    return filled(draw, Elementwise(op, args, shape, tuple(shapes)), normal)


def as_a_whole(draw: Random) -> Case:
    shape = shape_of(draw, draw.randint(1, 3), 4)
    n = prod(shape)
    op, args, results = draw.choice(
        (
            ("cumsum", (Slot(0), 0, None), (shape,)),
            ("flip", (Slot(0), (0,)), (shape,)),
            ("sort", (Slot(0), -1, False), (shape, shape)),
            ("reshape", (Slot(0), (n,)), ((n,),)),
        )
    )
    return filled(draw, Whole(op, args, (shape,), results, (), (1,) if len(results) > 1 else ()), whole)


NETWORK_CASES: Mapping[str, Callable[[Random], Case]] = {
    "centred": centred_rows,
    "evaluated norm": evaluated_norm,
    "running moments": running_moments,
    "coefficients": coefficients,
    "elementwise": elementwise,
    "whole": as_a_whole,
}
ALL_CASES: Mapping[str, Callable[[Random], Case]] = {**CASES, **NETWORK_CASES}
