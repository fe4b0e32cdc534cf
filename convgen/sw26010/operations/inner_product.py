"""An inner product in its three phases, each a blocked GEMM ([SW] 4.1).

    forward          y [N, OUTPUTS] = x [N, INPUTS] w^T
    backward_data    dx [N, INPUTS] = dy [N, OUTPUTS] w
    backward_filter  dw [OUTPUTS, INPUTS] = dy^T x

w is [OUTPUTS, INPUTS], as Caffe and PyTorch have it. Memory holds every operand as its layer does; where the GEMM wants
it turned round, that happens to tiles in LDM. The bias is an operation of its own (rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from convgen.errors import InputError
from convgen.program.nodes import Phase
from convgen.sw26010.gemm.cost import gemm_seconds, search_blocks
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.plan import Dtype, GemmPlan
from convgen.sw26010.gemm.run import GemmRun, Level, run_gemm
from convgen.sw26010.machine.core_group import LANES, MESH, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import Rates, taken_rates


@dataclass(frozen=True)
class InnerProduct:
    """A phase of an inner product."""

    n: int
    inputs: int
    outputs: int
    phase: Phase = "forward"
    dtype: Dtype = "float32"

    @cached_property
    def plan(self) -> GemmPlan:
        """In the fastest blocks by the model. Raises InputError: an extent below 1."""
        m, n, k = {
            "forward": (self.outputs, self.n, self.inputs),
            "backward_data": (self.inputs, self.n, self.outputs),
            "backward_filter": (self.inputs, self.outputs, self.n),
        }[self.phase]
        smallest = GemmPlan(
            m=m, n=n, k=k, bm=MESH * LANES, bn=MESH, bk=MESH, dtype=self.dtype, accumulate=False,
            a_transposed=self.phase == "forward", b_transposed=self.phase == "backward_filter",
        )  # fmt: skip
        return search_blocks(smallest, taken_rates())

    def cost(self) -> Counts:
        """Events of a run, by closed form."""
        return gemm_counts(self.plan)

    def seconds(self, rates: Rates) -> float:
        return gemm_seconds(self.plan, rates)


def run_inner_product(
    product: InnerProduct, first: Any, second: Any, *, level: Level = "fast", group: CoreGroup = SW26010
) -> GemmRun:
    """y, dx or dw, row-major in `c`, and what the mesh did.

    Args:
        first, second: x and w; dy and w; or dy and x.
        level: as `run_gemm` has it.
    Raises:
        InputError: another shape.
    """
    x, w, y = (product.n, product.inputs), (product.outputs, product.inputs), (product.n, product.outputs)
    shapes = {"forward": (x, w), "backward_data": (y, w), "backward_filter": (y, x)}[product.phase]
    given = [np.asarray(operand) for operand in (first, second)]
    for operand, shape in zip(given, shapes, strict=True):
        if operand.shape != shape:
            fact = f"{product.phase} of {product.inputs} to {product.outputs} reads {list(shape)}"
            raise InputError(f"{fact}, given is {list(operand.shape)}")
    # The GEMM is of columns: C^T [outputs, N] = w x^T, and so on.
    one, other = given
    a, b = {
        "forward": (other, one.T), "backward_data": (other.T, one.T), "backward_filter": (other.T, one),
    }[product.phase]  # fmt: skip
    done = run_gemm(product.plan, a, b, level=level, group=group)
    return GemmRun(done.c.T, done.plan, done.counts, done.ldm_bytes, done.events, done.stalls)
