"""`convgen sw26010 conv --run`: every plan of every phase on the emulated mesh, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.program.nodes import PHASES, Phase
from convgen.sw26010.conv.cost import explicit_plan
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.plan_words import plan_ldm_bytes, plan_name
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.conv.run import operand_shapes, run_conv
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.gemm.run import Level
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """A run of a phase's plan: its largest error, what rounding allows, and whether events and LDM are as predicted."""

    phase: str
    plan: str
    error: float
    allowed: float
    counted: bool
    counts: Counts
    ldm_bytes: int

    @property
    def right(self) -> bool:
        return self.counted and self.error <= self.allowed


def reference(problem: ConvProblem, phase: Phase, first: Array, second: Array) -> Array:
    """The phase in float64, a tap at a time, from its definition."""
    rows, columns = problem.rows, problem.columns
    x = np.zeros((problem.n, problem.c, problem.h, problem.w))
    w = np.zeros((problem.f, problem.c, rows.kernel, columns.kernel))
    y = np.zeros((problem.n, problem.f, problem.h_out, problem.w_out))
    given = {"forward": (x, w), "backward_data": (y, w), "backward_filter": (x, y)}[phase]
    for tensor, value in zip(given, (first, second), strict=True):
        tensor[...] = value
    for i in range(rows.kernel):
        for j in range(columns.kernel):
            (yr, xr), (yc, xc) = _met(rows, i), _met(columns, j)
            if not yr.size or not yc.size:
                continue
            at_x, at_y = np.ix_(xr, xc), np.ix_(yr, yc)
            if phase == "forward":
                y[:, :, *at_y] += np.einsum("nchw,fc->nfhw", x[:, :, *at_x], w[:, :, i, j])
            elif phase == "backward_data":
                x[:, :, *at_x] += np.einsum("nfhw,fc->nchw", y[:, :, *at_y], w[:, :, i, j])
            else:
                w[:, :, i, j] = np.einsum("nfhw,nchw->fc", y[:, :, *at_y], x[:, :, *at_x])
    return {"forward": y, "backward_data": x, "backward_filter": w}[phase]


def _met(axis: Axis, tap: int) -> tuple[Array, Array]:
    """Elements of y and of x that meet at a tap."""
    out = np.arange(axis.out)
    at = out * axis.stride + tap * axis.dilation - axis.padding
    inside = (at >= 0) & (at < axis.extent)
    return out[inside], at[inside]


def check_conv(problem: ConvProblem, dtype: Dtype, groups: int, level: Level) -> list[Checked]:
    """Both plans of every phase, `groups` times, on random numbers; implicit too where its public code refuses."""
    found: list[Checked] = []
    for phase in PHASES:
        for plan in (explicit_plan(problem, phase, taken_rates(), dtype), implicit_plan(problem, phase, dtype)):
            rng = np.random.default_rng(0)
            counts, wanted, error, allowed, ldm = Counts(), Counts(), 0.0, 0.0, 0
            for _ in range(groups):
                shapes = operand_shapes(problem, phase)
                first, second = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
                run = run_conv(plan, first, second, level=level)
                want = reference(problem, phase, first, second)
                error = max(error, float(np.abs(run.result - want).max()))
                unit = 1e-12 if dtype == "float64" else 2.0**-21
                allowed = max(allowed, unit * (1.0 + float(np.abs(want).max())))
                counts.add(run.counts)
                ldm = max(ldm, run.ldm_bytes)
            wanted.add(conv_counts(plan), groups)
            counted = counts == wanted and ldm == plan_ldm_bytes(plan)
            found.append(Checked(phase, plan_name(plan), error, allowed, counted, wanted, ldm))
    return found


def checked_text(found: list[Checked], level: Level) -> str:
    """A line a plan of a phase."""
    head = ("phase", "plan", "error", "allowed", "DMA B", "messages", "vmad", "events")
    rows = [
        [c.phase, c.plan, f"{c.error:.1e}", f"{c.allowed:.1e}", f"{c.counts.dma_bytes:,}", f"{c.counts.messages:,}",
         f"{c.counts.vmad:,}", "as the closed form" if c.counted else "DIFFER"]
        for c in found
    ]  # fmt: skip
    return f"run ({level}), against float64\n{table(head, rows)}"
