"""Picture: what each step of a GEMM sends over the mesh, and where it stands under the roof."""

from __future__ import annotations

from convgen.pictures.canvas import GREY, Canvas
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.core_group import MESH
from convgen.sw26010.machine.mesh import step_counts
from convgen.sw26010.machine.plot import BOTH, COLUMN_BUS, ROW_BUS, point_inside, roofline_axes


def gemm_page(plan: GemmPlan, seconds: float) -> Canvas:
    """The eight steps on the mesh, what they send, and where the GEMM stands under the roof.

    Args:
        seconds: of the whole GEMM.
    """
    canvas = Canvas(12.0, 5.6)
    canvas.text(0.3, 0.25, f"GEMM {plan.m} x {plan.n} x {plan.k}, {plan.dtype}: traffic of each step", 11, bold=True)
    one = step_counts(*plan.tile)
    note = (
        f"in each step and block: {one.putr:,} messages on the row buses, {one.putc:,} on the column buses, "
        f"{one.getr + one.getc:,} received"
    )
    canvas.text(0.3, 0.5, note, 8, colour=GREY)
    for step in range(MESH):
        left, top = 0.3 + step % 4 * 1.65, 0.95 + step // 4 * 2.1
        canvas.text(left, top - 0.12, f"t = {step}", 8)
        _draw_step(canvas, left, top, 1.44, step)
    canvas.rect(0.3, 5.18, 0.14, 0.14, fill=ROW_BUS, edge=GREY)
    canvas.text(0.5, 5.25, "sends A along its row", 8)
    canvas.rect(2.3, 5.18, 0.14, 0.14, fill=COLUMN_BUS, edge=GREY)
    canvas.text(2.5, 5.25, "sends B along its column", 8)
    canvas.rect(4.5, 5.18, 0.14, 0.14, fill=BOTH, edge=GREY)
    canvas.text(4.7, 5.25, "both", 8)
    axes = roofline_axes(canvas, 7.75, 1.0, 3.9, 3.8)
    counts = gemm_counts(plan)
    point_inside(
        canvas, axes, plan.useful_flops / counts.dma_bytes, plan.useful_flops / seconds / 1e9, BOTH, "this GEMM"
    )
    return canvas


def _draw_step(canvas: Canvas, left: float, top: float, size: float, step: int) -> None:
    cell = size / MESH
    for i in range(MESH):
        y = top + (i + 0.5) * cell
        canvas.line(left, y, left + size, y, colour=ROW_BUS, line=1.0)
        x = left + (i + 0.5) * cell
        canvas.line(x, top, x, top + size, colour=COLUMN_BUS, line=1.0)
    for i in range(MESH):
        for j in range(MESH):
            sends = (j == step, i == step)
            fill = {(True, True): BOTH, (True, False): ROW_BUS, (False, True): COLUMN_BUS}.get(sends, "white")
            canvas.rect(
                left + (j + 0.22) * cell, top + (i + 0.22) * cell, 0.56 * cell, 0.56 * cell, fill=fill, edge=GREY
            )
