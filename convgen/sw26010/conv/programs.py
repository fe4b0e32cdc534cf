"""The programs of a convolution, printed from its plans."""

from __future__ import annotations

from functools import cache
from typing import Literal

from convgen import __version__
from convgen.sw26010.conv.explicit_plan import row_slots
from convgen.sw26010.conv.implicit_plan import ImplicitPlan
from convgen.sw26010.conv.problem import ConvProblem, Meeting
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import SW26010
from convgen.sw26010.machine.printing import print_program, steps

NAMES = {"forward": ("x", "w", "y"), "backward_data": ("dy", "w", "dx"), "backward_filter": ("x", "dy", "dw")}


@cache
def implicit_program(plan: ImplicitPlan, *, messages: bool) -> str:
    """Text of the program for one CPE, or for the mesh at once."""
    return print_program("implicit", implicit_context(plan, messages=messages))


def implicit_context(plan: ImplicitPlan, *, messages: bool) -> dict[str, object]:
    """Everything that templates/sw26010/implicit.py.jinja names, and nothing else."""
    rows, columns = plan.rows_meet, plan.columns_meet
    ml, nl, kl = plan.tile
    data, weights, out = NAMES[plan.phase]
    return {
        **steps(messages=messages),
        "header": (
            f"Printed by convgen {__version__} (sw26010 conv).",
            f"layer     {plan.problem} {plan.dtype}, {plan.phase}",
            f"LDM       {plan.ldm_bytes} of {SW26010.ldm_bytes} B in each CPE",
        ),
        "phase": plan.phase, "data": data, "weights": weights, "out": out,
        "rows_out": rows.outs, "cols_out": columns.outs,
        "rows_taps": rows.taps, "cols_taps": columns.taps,
        "rows_in": rows.extent, "cols_in": columns.extent,
        "bb": plan.bb, "ni": plan.ni, "no": plan.no,
        "block_bb": plan.block_bb, "block_ni": plan.block_ni, "block_no": plan.block_no,
        "ml": ml, "nl": nl, "kl": kl,
        "columns": plan.columns,
        "axes": tuple(
            (name, _affine(meet), meet.divisor, extent)
            for name, meet, extent in (("row", rows, "ROWS_IN"), ("column", columns, "COLS_IN"))
        ),
        "one_more": plan.one_more,
        "floats": plan.dtype == "float32",
    }  # fmt: skip


def _affine(meet: Meeting) -> str:
    """out * a + tap * b + c without factors of 1 and terms of 0."""
    text = "out" if meet.per_out == 1 else f"out * {meet.per_out}"
    factor = abs(meet.per_tap)
    text += (" - " if meet.per_tap < 0 else " + ") + ("tap" if factor == 1 else f"tap * {factor}")
    return text + (f" {'-' if meet.shift < 0 else '+'} {abs(meet.shift)}" if meet.shift else "")


@cache
def columns_program(
    kind: Literal["im2col", "col2im"], problem: ConvProblem, dtype: Dtype, *, messages: bool = True
) -> str:
    """Text of im2col or col2im of one image, for one CPE, or for the mesh at once."""
    return print_program(kind if messages else f"{kind}_mesh", columns_context(kind, problem, dtype))


def columns_context(kind: Literal["im2col", "col2im"], problem: ConvProblem, dtype: Dtype) -> dict[str, object]:
    """Everything that the template names."""
    rows, columns = problem.rows, problem.columns
    context: dict[str, object] = {
        "header": (f"Printed by convgen {__version__} (sw26010 conv).", f"layer     {problem} {dtype}, {kind}"),
        "c": problem.c, "h": problem.h, "w": problem.w,
        "kernel": (rows.kernel, columns.kernel), "stride": (rows.stride, columns.stride),
        "padding": (rows.padding, columns.padding), "dilation": (rows.dilation, columns.dilation),
        "h_out": problem.h_out, "w_out": problem.w_out,
        "floats": dtype == "float32",
    }  # fmt: skip
    if kind == "col2im":
        at, shift = max(columns.padding, 0), max(-columns.padding, 0)
        return context | {"row_slots": row_slots(columns), "at": at, "shift": shift}
    first, last = columns.read
    itemsize = 4 if dtype == "float32" else 8
    return context | {
        "h_span": rows.span, "w_span": columns.span, "first": first, "last": last, "itemsize": itemsize
    }  # fmt: skip
