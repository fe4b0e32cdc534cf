"""Pictures: what each step sends over the mesh, the roofline, Table 2, and bytes between supernodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convgen.explain.canvas import GREY, INK, PALE, Align, Canvas
from convgen.sw26010.allreduce import simulate_traffic
from convgen.sw26010.allreduce_cost import NUMBERINGS, Network
from convgen.sw26010.conv_counts import conv_counts
from convgen.sw26010.gemm_counts import gemm_counts
from convgen.sw26010.gemm_plan import GemmPlan
from convgen.sw26010.machine import MESH, SW26010
from convgen.sw26010.mesh import step_counts
from convgen.sw26010.rates import Rates
from convgen.sw26010.table2 import KINDS, ORDER, cells, plan_of, read_table2

ROW_BUS, COLUMN_BUS, BOTH = "#77aadd", "#ee8866", "#ffaabb"  # Paul Tol's light scheme, as in the other pictures
COLOURS = {"implicit": "#44bb99", "explicit": "#ee8866"}


@dataclass(frozen=True, slots=True)
class LogAxes:
    """A frame of logarithmic axes on a page, in inches from the top left."""

    x: float
    y: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = math.log(x / self.x_range[0]) / math.log(self.x_range[1] / self.x_range[0])
        up = math.log(y / self.y_range[0]) / math.log(self.y_range[1] / self.y_range[0])
        return self.x + across * self.width, self.y + (1 - up) * self.height

    def draw(self, canvas: Canvas, title: str, x_name: str, y_name: str) -> None:
        """Frame, decades, names."""
        canvas.rect(self.x, self.y, self.width, self.height, edge=GREY)
        canvas.text(self.x, self.y - 0.16, title, 9, bold=True)
        canvas.text(self.x + self.width / 2, self.y + self.height + 0.38, x_name, 8, align="center")
        canvas.text(self.x - 0.52, self.y + self.height / 2, y_name, 8, align="center", upright=True)
        for value in ticks(self.x_range):
            px, _ = self.at(value, self.y_range[0])
            canvas.line(px, self.y, px, self.y + self.height, colour=PALE)
            canvas.text(px, self.y + self.height + 0.14, f"{value:g}", 7, align="center", colour=GREY)
        for value in ticks(self.y_range):
            _, py = self.at(self.x_range[0], value)
            canvas.line(self.x, py, self.x + self.width, py, colour=PALE)
            canvas.text(self.x - 0.08, py, f"{value:g}", 7, align="right", colour=GREY)

    def point(self, canvas: Canvas, x: float, y: float, colour: str, name: str = "", align: Align = "left") -> None:
        px, py = self.at(x, y)
        canvas.rect(px - 0.035, py - 0.035, 0.07, 0.07, fill=colour, edge=INK, line=0.4)
        canvas.text(px + (0.07 if align == "left" else -0.07), py - 0.06, name, 6, align=align, colour=INK)

    def segment(self, canvas: Canvas, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        canvas.line(*self.at(*start), *self.at(*end), colour=colour, line=1.2)


def ticks(bounds: tuple[float, float]) -> list[float]:
    """1, 2 and 5 times powers of ten inside the bounds."""
    low, high = (math.floor(math.log10(bound)) for bound in bounds)
    every = [digit * 10.0**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    return [value for value in every if bounds[0] <= value <= bounds[1]]


def roofline_axes(canvas: Canvas, x: float, y: float, width: float, height: float) -> LogAxes:
    """The roof: DMA at its best up to the ridge, then the mesh's peak."""
    axes = LogAxes(x, y, width, height, (1.0, 500.0), (1.0, 1000.0))
    axes.draw(canvas, "Roofline", "flops a byte of DMA", "Gflop/s")
    peak, ridge = SW26010.peak_flops_per_s / 1e9, SW26010.ridge_flops_per_byte
    axes.segment(canvas, (1.0, SW26010.dma_bytes_per_s / 1e9), (ridge, peak), INK)
    axes.segment(canvas, (ridge, peak), (500.0, peak), INK)
    axes.segment(canvas, (ridge, 1.0), (ridge, peak), GREY)
    px, py = axes.at(ridge, 1.25)
    canvas.text(px + 0.05, py, f"ridge {ridge:.1f}", 7, colour=GREY)
    px, py = axes.at(500.0, peak)
    canvas.text(px - 0.05, py - 0.1, f"{peak:.1f} Gflop/s", 7, align="right", colour=GREY)
    return axes


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
    _point_inside(
        canvas, axes, plan.useful_flops / counts.dma_bytes, plan.useful_flops / seconds / 1e9, BOTH, "this GEMM"
    )
    return canvas


def _point_inside(canvas: Canvas, axes: LogAxes, x: float, y: float, colour: str, name: str = "") -> None:
    """A point, at the frame where it lies outside."""
    inside = [min(max(v, low), high) for v, (low, high) in ((x, axes.x_range), (y, axes.y_range))]
    axes.point(canvas, inside[0], inside[1], colour, name)


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


def table2_page(taken: Rates, constants: Mapping[str, float], fitted: Sequence[str]) -> Canvas:
    """Predicted against published seconds, and the layers under the roof at their published speed."""
    canvas = Canvas(12.0, 5.4)
    canvas.text(0.3, 0.25, "[SW] Table 2: VGG-16, 128 images, one core group", 11, bold=True)
    axes = LogAxes(1.0, 0.95, 4.6, 3.8, (0.2, 20.0), (0.2, 20.0))
    axes.draw(canvas, "Predicted against published", "published, s", "predicted, s")
    axes.segment(canvas, (0.2, 0.2), (20.0, 20.0), INK)
    for factor in (0.8, 1.25):
        start, end = (0.2 / min(factor, 1), 0.2 * max(factor, 1)), (20.0 / max(factor, 1), 20.0 * min(factor, 1))
        axes.segment(canvas, start, end, PALE)
    for cell in cells(taken):
        marked = "#ffffff" if set(cell.layers) & set(fitted) else COLOURS[cell.kind]
        axes.point(canvas, cell.published_s, cell.terms.seconds(constants), marked)
    for place, (kind, colour) in enumerate((*COLOURS.items(), ("fitted", "#ffffff"))):
        canvas.rect(1.2, 1.1 + 0.2 * place, 0.1, 0.1, fill=colour, edge=INK, line=0.4)
        canvas.text(1.4, 1.15 + 0.2 * place, kind, 7)
    roof = roofline_axes(canvas, 6.9, 0.95, 4.6, 3.8)
    named: dict[tuple[float, float], tuple[float, float, str, str]] = {}
    for row in read_table2():
        for phase in ORDER:
            for kind in KINDS:
                published = row.published_s.get((phase, kind))
                if published is None:
                    continue
                moved = conv_counts(plan_of(row.problem, phase, kind, taken)).dma_bytes
                flops = row.problem.flops
                place = roof.at(flops / moved, flops / published / 1e9)
                if phase == "forward" and kind == "explicit" and all(math.dist(place, p) > 0.25 for p in named):
                    named[place] = flops / moved, flops / published / 1e9, COLOURS[kind], row.name.removeprefix("conv")
                _point_inside(canvas, roof, flops / moved, flops / published / 1e9, COLOURS[kind])
    for x, y, colour, name in named.values():  # on top of the other points
        _point_inside(canvas, roof, x, y, colour, name)
    return canvas


def all_reduce_page(network: Network, elements: int) -> Canvas:
    """Bytes between supernodes in every step, for both numberings."""
    canvas = Canvas(12.0, 4.6)
    title = f"All-reduce of {4 * elements:,} B on {network.nodes} nodes in supernodes of {network.supernode}"
    canvas.text(0.3, 0.25, title, 11, bold=True)
    canvas.text(0.3, 0.5, "bytes of each step; dark: between supernodes, light: inside", 8, colour=GREY)
    for place, numbering in enumerate(NUMBERINGS):
        steps = simulate_traffic(network, numbering, elements, 4)
        left, top, width, height = 0.5 + place * 5.9, 1.0, 5.3, 2.8
        canvas.text(left, top - 0.18, f"{numbering}: {sum(s.crossing_bytes for s in steps):,} B cross", 9, bold=True)
        canvas.rect(left, top, width, height, edge=GREY)
        most = max((s.total_bytes for s in steps), default=1)
        wide = width / max(len(steps), 1)
        for at, step in enumerate(steps):
            for size, colour in ((step.total_bytes, faint(place)), (step.crossing_bytes, (ROW_BUS, COLUMN_BUS)[place])):
                tall = height * 0.95 * size / most
                canvas.rect(left + (at + 0.15) * wide, top + height - tall, 0.7 * wide, tall, fill=colour)
            if at == 0:
                canvas.text(left + 0.95 * wide, top + 0.08 * height, f"{step.total_bytes:,} B", 6, colour=GREY)
            canvas.text(
                left + (at + 0.5) * wide, top + height + 0.12, str(step.distance), 6, align="center", colour=GREY
            )
        canvas.text(left + width / 2, top + height + 0.36, "distance: halving, then doubling", 8, align="center")
    return canvas


def faint(place: int) -> str:
    """Light versions of the two buses' colours."""
    return ("#dde9f5", "#fadfd4")[place]
