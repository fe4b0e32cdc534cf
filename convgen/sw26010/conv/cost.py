"""Seconds of a convolution's phase on one core group: a sum of things counted times constants.

    seconds = fixed + sum over constants (count * constant)

`fixed` holds what the taken rates give; the counts go with the fitted constants, so that fitting is linear.

Implicit: flops at peak * slowdown, DMA by block size, and a round for every tile read, product and tile written; the
published nest overlaps nothing. Explicit, per image: im2col (DMA, and an operation's overhead) or col2im (the same
overhead, counted from the published nest, and a constant an element: DMA does not explain what was published), and the
GEMM, double buffered, for which the MPE repacks the weights: every image is a call of the library.

Planes of which two don't fit into an LDM (8 H_out W_out > 64 KB: VGG's 112 and 224) take longer than that. Counted for
them is what profiles of the public code show of every product by its general library: a call, and a row of the first
matrix, cost the same whatever the other extents (`library_seconds`); and copies of the three matrices, padded to the
library's multiples, by the management core, of the part of a plane that does not fit. That Table 2's smaller planes
are not multiplied by that library is an inference: they fit better without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from convgen.errors import InputError, Note
from convgen.program.nodes import Phase
from convgen.sw26010.conv.explicit_plan import ExplicitPlan, col2im_operations, gemm_of, im2col_operations
from convgen.sw26010.conv.implicit_plan import ImplicitPlan, implicit_counts, implicit_plan, implicit_trips, valid_flops
from convgen.sw26010.conv.layouts import Transform, transform_counts
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.support import implicit_refusal
from convgen.sw26010.gemm.cost import gemm_seconds, library_seconds, search_blocks
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import CPES
from convgen.sw26010.machine.rates import Rates

Plan = ImplicitPlan | ExplicitPlan
LIBRARY_MULTIPLES = (128, 32, 8)  # of M, N, K in the public library (swGEMM), which pads by copies


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds that the taken rates give, by cause; and how many times each fitted constant counts."""

    fixed: tuple[tuple[str, float], ...]
    counts: tuple[tuple[str, float], ...]

    @property
    def fixed_s(self) -> float:
        return sum(seconds for _, seconds in self.fixed)

    def seconds(self, constants: Mapping[str, float]) -> float:
        return self.fixed_s + sum(count * constants[name] for name, count in self.counts)


def explicit_plan(
    problem: ConvProblem, phase: Phase, rates: Rates, dtype: Dtype = "float32", images: int = 1
) -> ExplicitPlan:
    """The explicit plan with searched blocks.

    Args:
        images: whose dw is summed in LDM; one, as the public code has it, of other phases than backward-filter.
    Raises:
        InputError: as of ExplicitPlan.
    """
    smallest = replace(gemm_of(problem, phase, dtype), images=images)
    return ExplicitPlan(problem=problem, phase=phase, gemm=search_blocks(smallest, rates))


@cache
def conv_terms(plan: Plan, rates: Rates, *, library: bool = False) -> Terms:
    """The terms of a phase.

    Args:
        rates: the taken ones.
        library: products of all planes are calls of the general library, not those of large planes alone.
    """
    if isinstance(plan, ImplicitPlan):
        return _implicit_terms(plan, rates)
    return _explicit_terms(plan, rates, library=library)


def _implicit_terms(plan: ImplicitPlan, rates: Rates) -> Terms:
    counts, trips = implicit_counts(plan), implicit_trips(plan)
    rounds = trips.gemms + trips.data_tiles + trips.out_tiles
    moved = rates.transfer_s(counts.get) + rates.transfer_s(counts.put)
    return Terms(
        (("transfers", moved), ("rounds", rounds * rates.dma_round_s)),
        (("implicit_kernel_slowdown", valid_flops(plan) / rates.group.peak_flops_per_s),),
    )


def _explicit_terms(plan: ExplicitPlan, rates: Rates, *, library: bool) -> Terms:
    problem, gemm = plan.problem, plan.gemm
    pixels, columns = problem.h_out * problem.w_out, problem.taps * problem.c
    fixed = [("product", sum(times * gemm_seconds(one, rates) for one, times in plan.products))]
    calls = sum(times for _, times in plan.products)
    if plan.phase != "backward_filter":
        repacked_bytes = problem.n * gemm.itemsize * columns * problem.f
        fixed.append(("repacked weights", repacked_bytes / rates.group.copy_bytes_per_s))
    counts: list[tuple[str, float]] = []
    if not plan.moves:
        pass
    elif plan.phase == "backward_data":
        counts.append(("col2im_element_s", problem.n * columns * pixels))
        counts.append(("im2col_operation_s", problem.n * col2im_operations(problem, gemm.itemsize)))
    else:
        operations = problem.n * im2col_operations(problem)
        line_bytes = gemm.itemsize * problem.w_out
        fixed.append(("im2col", operations * CPES * line_bytes / rates.bytes_per_s(line_bytes)))
        counts.append(("im2col_operation_s", operations))
    outside = max(0.0, 1 - rates.group.ldm_bytes / (2 * gemm.itemsize * pixels))
    if outside or library:
        fixed.append(("library", calls * library_seconds(gemm, rates)))
    if outside:
        m, n, k = (round_up(e, to) for e, to in zip((gemm.m, gemm.n, gemm.k), LIBRARY_MULTIPLES, strict=True))
        copied_bytes = 2 * gemm.itemsize * (m * n + n * k + k * m)  # read and written
        fixed.append(("copies", outside * problem.n * copied_bytes / rates.group.copy_bytes_per_s))
    return Terms(tuple(fixed), tuple(counts))


def layout_seconds(plan: ImplicitPlan, rates: Rates) -> float:
    """Seconds to bring images to (R, C, N, B) and the result back ([SW] 4.3); layers that keep the layout save them."""
    p = plan.problem
    x, y = (p.n, p.c, p.h, p.w), (p.n, p.f, p.h_out, p.w_out)
    to, back = {"forward": ([x], [y]), "backward_data": ([y], [x]), "backward_filter": ([x, y], [])}[plan.phase]
    moved = [transform_counts(Transform(*shape, plan.dtype, "to_implicit")) for shape in to]
    moved += [transform_counts(Transform(*shape, plan.dtype, "to_explicit")) for shape in back]
    return sum(rates.transfer_s(counts.get) + rates.transfer_s(counts.put) for counts in moved)


@dataclass(frozen=True, slots=True)
class Choice:
    """The plans that a phase can have, with seconds; the first is the fastest."""

    plans: tuple[tuple[Plan, float], ...]
    refusal: str | None  # why implicit is not among them

    @property
    def plan(self) -> Plan:
        return self.plans[0][0]

    @property
    def seconds(self) -> float:
        return self.plans[0][1]


def choose_plan(
    problem: ConvProblem, phase: Phase, taken: Rates, fitted: Mapping[str, float], dtype: Dtype = "float32"
) -> Choice:
    """The faster plan of a phase by the cost model; swCaffe runs both in its first two iterations ([SW] 6.1).

    Raises:
        InputError: a row of the image is too long for the explicit plan, and the implicit one is not possible.
    """
    refusal = implicit_refusal(problem, phase)
    plans: list[Plan] = [] if refusal is not None else [implicit_plan(problem, phase, dtype)]
    try:
        plans.insert(0, explicit_plan(problem, phase, taken, dtype))
    except InputError as error:
        if not plans:
            notes = (*error.notes, Note("implicit", f"{refusal}, for the public code"))
            raise InputError(error.fact, notes=notes, hint=error.hint) from None
    timed = sorted(((plan, conv_terms(plan, taken).seconds(fitted)) for plan in plans), key=lambda item: item[1])
    return Choice(tuple(timed), refusal)
