"""Batch normalisation: the moments of every channel, then its elements; backward the same two steps.

    forward    y = a (x - mean) + h                 a = g / sqrt(var + eps)
    backward   dx = a dy + p (x - mean) + q         from the sums of dy and of dy (x - mean)

The few numbers of a channel between the two steps are the management core's: ranks merge theirs there.
Source: Ioffe and Szegedy 2015; [SW] 6.1 puts it in the place of AlexNet's local response normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.machine.rates import Rates
from convgen.sw26010.operations.channels import ChannelMap, ChannelSums
from convgen.sw26010.operations.task import Operation, operation_seconds, run_operation

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of x [N, C, PIXELS] over samples and pixels."""

    n: int
    c: int
    pixels: int
    dtype: Dtype = "float32"
    eps: float = 1e-5

    def steps(self, *, backward: bool) -> tuple[Operation, Operation]:
        """The two operations. Raises InputError: an extent below 1."""
        sizes = (self.n, self.c, self.pixels, self.dtype)
        if backward:
            return ChannelSums(*sizes, "products"), ChannelMap(*sizes, "combine")
        return ChannelSums(*sizes, "moments"), ChannelMap(*sizes, "normalise")

    def cost(self, *, backward: bool) -> Counts:
        """Events of both steps, by closed form."""
        return total(step.cost() for step in self.steps(backward=backward))

    def seconds(self, rates: Rates, *, backward: bool) -> float:
        return sum(operation_seconds(step, rates) for step in self.steps(backward=backward))


def run_norm(norm: Norm, x: Any, scale: Any, shift: Any, group: CoreGroup = SW26010) -> tuple[Array, Array, Counts]:
    """y [N, C, PIXELS]; count, mean and sum of squared deviations [C, 3] in double; and what the mesh did.

    Args:
        x: of that shape; scale, shift: [C].
    Raises:
        InputError: another shape.
    """
    sums, makes = norm.steps(backward=False)
    found, first = run_operation(sums, x, group=group)
    moments = found["sums"]
    factors = np.stack([np.asarray(scale) * inverse_spread(norm, moments), moments[:, 1], np.asarray(shift)], axis=1)
    made, second = run_operation(makes, x, factors, group=group)
    return made["y"], moments, total((first, second))


def run_norm_backward(
    norm: Norm, x: Any, dy: Any, scale: Any, moments: Array, group: CoreGroup = SW26010
) -> tuple[dict[str, Array], Counts]:
    """dx [N, C, PIXELS], dscale and dshift [C] in double, and what the mesh did.

    Args:
        moments: that the forward pass made.
    Raises:
        InputError: another shape.
    """
    sums, makes = norm.steps(backward=True)
    mean, inverse = moments[:, 1], inverse_spread(norm, moments)
    found, first = run_operation(sums, dy, x, mean[:, None], group=group)
    dshift, along = found["sums"][:, 0], found["sums"][:, 1] * inverse
    a = np.asarray(scale) * inverse
    # With u = (x - mean) / spread: dx = a (dy - mean of dy - u * mean of dy u).
    factors = np.stack([a, -a * along * inverse / moments[:, 0], mean, -a * dshift / moments[:, 0]], axis=1)
    made, second = run_operation(makes, x, dy, factors, group=group)
    return {"dx": made["dx"], "dscale": along, "dshift": dshift}, total((first, second))


def inverse_spread(norm: Norm, moments: Array) -> Array:
    """1 / sqrt(variance + eps) of every channel."""
    return 1 / np.sqrt(moments[:, 2] / moments[:, 0] + norm.eps)
