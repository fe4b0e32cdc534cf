"""Colours of the buses, and the roof that a program stands under."""

from __future__ import annotations

from convgen.pictures.canvas import GREY, INK, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.machine.core_group import SW26010

ROW_BUS, COLUMN_BUS, BOTH = "#77aadd", "#ee8866", "#ffaabb"  # Paul Tol's light scheme, as in the other pictures


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


def point_inside(canvas: Canvas, axes: LogAxes, x: float, y: float, colour: str, name: str = "") -> None:
    """A point, at the frame where it lies outside."""
    inside = [min(max(v, low), high) for v, (low, high) in ((x, axes.x_range), (y, axes.y_range))]
    axes.point(canvas, inside[0], inside[1], colour, name)
