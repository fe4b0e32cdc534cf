"""What `convgen sw26010 conv --images` prints: B as a blocking dimension of the explicit GEMM ([SW] 4.2.1).

A product of B images, phase by phase:

- backward_filter sums dw over the images in LDM, reads and writes it once for them. That is built (`GemmPlan.images`).
- forward and backward_data have a longer M instead, which wastes less of the last block; but y lies image by image, so
  it has to be copied to or from a matrix of all images, a plane at a time. That is a model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from convgen.program.nodes import PHASES, Phase
from convgen.sw26010.conv.check import reference
from convgen.sw26010.conv.cost import conv_terms, explicit_plan
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.plan_words import times_text
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.run import operand_shapes, run_conv
from convgen.sw26010.gemm.cost import gemm_seconds, search_blocks
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.rates import load_rates, taken_rates
from convgen.sw26010.machine.table import table


@dataclass(frozen=True, slots=True)
class Blocked:
    """Seconds of a phase of all images with B images a product: of the whole, of the products, and of copies of y."""

    phase: Phase
    images: int
    seconds: float
    products_s: float
    copies_s: float


def blocked(problem: ConvProblem, phase: Phase, images: int, dtype: Dtype = "float32") -> Blocked:
    """The phase with B images a product, by the model. Raises InputError: more images than there are."""
    rates, fitted = taken_rates(), load_rates().fitted()
    if phase == "backward_filter":
        terms = conv_terms(explicit_plan(problem, phase, rates, dtype, images), rates)
        return Blocked(phase, images, terms.seconds(fitted), dict(terms.fixed)["product"], 0.0)
    plan = explicit_plan(problem, phase, rates, dtype)
    terms = conv_terms(plan, rates)
    whole, one = terms.seconds(fitted), dict(terms.fixed)["product"]
    if images == 1:
        return Blocked(phase, 1, whole, one, 0.0)
    pixels = problem.h_out * problem.w_out
    wide = search_blocks(replace(plan.gemm, m=images * pixels, bm=32, bn=8, bk=8), rates)
    product = gemm_seconds(wide, rates) * problem.n / images
    plane_bytes = pixels * plan.gemm.itemsize
    copies = rates.transfer_s({plane_bytes: 2 * problem.n * problem.f * plane_bytes})  # read and written
    return Blocked(phase, images, whole - one + product + copies, product, copies)


def blocked_text(problem: ConvProblem, sizes: Sequence[int], dtype: Dtype = "float32", groups: int = 1) -> str:
    """A line a phase and number of images.

    Args:
        groups: the problem so many times.
    """
    rows: list[list[str]] = []
    for phase in PHASES:
        found = [blocked(problem, phase, images, dtype) for images in sizes]
        rows += [
            [phase, str(one.images),
             *(f"{groups * seconds:.4f}" for seconds in (one.seconds, one.products_s, one.copies_s)),
             f"{found[0].seconds / one.seconds:.3f} x"]
            for one in found
        ]  # fmt: skip
    head = ("explicit", "B", "seconds", "products", "copies of y", "is")
    return f"{problem} {dtype}{times_text(groups)}, B images a product\n{table(head, rows)}"


def blocked_run(problem: ConvProblem, images: int) -> tuple[str, bool]:
    """dw by products of B images on the emulated mesh, against float64; and whether it is right."""
    plan = explicit_plan(problem, "backward_filter", taken_rates(), "float64", images)
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape) for shape in operand_shapes(problem, "backward_filter"))
    done = run_conv(plan, x, dy)
    want = reference(problem, "backward_filter", x, dy)
    error, allowed = float(np.abs(done.result - want).max()), 1e-12 * (1.0 + float(np.abs(want).max()))
    right = error <= allowed and done.counts == conv_counts(plan)
    verdict = "events equal the closed form" if right else "WRONG"
    return f"run of dw by {images} images: largest error {error:.1e}, allowed {allowed:.1e}; {verdict}", right
