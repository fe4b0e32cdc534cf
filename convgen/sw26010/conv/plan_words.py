"""A plan of a convolution in words and numbers."""

from __future__ import annotations

from convgen.sw26010.conv.cost import Choice, Plan
from convgen.sw26010.conv.implicit_plan import ImplicitPlan


def plan_name(plan: Plan) -> str:
    return "implicit" if isinstance(plan, ImplicitPlan) else "explicit"


def sorted_plans(choice: Choice) -> list[tuple[Plan, float]]:
    """Explicit first, as a trial runs them."""
    return sorted(choice.plans, key=lambda item: plan_name(item[0]))


def plan_blocks(plan: Plan) -> dict[str, int]:
    """What of the problem lies in LDM at once."""
    if isinstance(plan, ImplicitPlan):
        return {"bb": plan.block_bb, "ni": plan.block_ni, "no": plan.block_no, "columns": plan.columns}
    images = {"images": plan.gemm.images} if plan.gemm.images > 1 else {}
    return {"m": plan.gemm.bm, "n": plan.gemm.bn, "k": plan.gemm.bk, **images}


def plan_ldm_bytes(plan: Plan) -> int:
    """LDM that the programs of a plan use in a CPE: the larger of the GEMM's and of im2col's or col2im's."""
    return plan.ldm_bytes if isinstance(plan, ImplicitPlan) else max(plan.gemm.ldm_bytes, plan.move_ldm_bytes)


def times_text(groups: int) -> str:
    """What a report says behind a group's problem."""
    return "" if groups == 1 else f", {groups} groups of them"
