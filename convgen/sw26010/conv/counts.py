"""What a phase of a convolution counts, by closed form, in either plan."""

from __future__ import annotations

from convgen.sw26010.conv.cost import Plan
from convgen.sw26010.conv.implicit_plan import ImplicitPlan, implicit_counts
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.machine.counts import Counts


def conv_counts(plan: Plan) -> Counts:
    """Events of a run of the plan, on any level of emulation."""
    if isinstance(plan, ImplicitPlan):
        return implicit_counts(plan)
    counts = Counts()
    for gemm, times in plan.products:
        counts.add(gemm_counts(gemm), times)
    counts.add(plan.move_counts, plan.problem.n)
    return counts
