"""Picture: how many times as fast nodes are as one, beside the paper's points on 1024 ([SW] Fig. 10)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from convgen.pictures.canvas import GREY, PALE, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.training.layers import Layers
from convgen.sw26010.training.published import read_scaling, read_table3
from convgen.sw26010.training.report import default_batches, tree_s
from convgen.sw26010.training.step import Plans, step_of

COLOURS = ("#77aadd", "#ee8866", "#44bb99", "#ffaabb", "#bbcc33", "#99ddff")


def scaling_page(networks: Sequence[Layers], batches: Sequence[int], nodes: int, plans: Plans) -> Canvas:
    """Speedups of the model (lines), and of the paper's speeds of one node with the public code's trees (white)."""
    canvas = Canvas(7.4, 5.6)
    canvas.text(0.3, 0.25, "[SW] Fig. 10: times as fast as one node", 11, bold=True)
    said = "lines: the model; squares: the text's; white: the text's speed of one node with the public code's trees"
    canvas.text(0.3, 0.5, said, 8, colour=GREY)
    most = max(2, nodes)
    axes = LogAxes(1.0, 1.0, 5.9, 3.8, (0.9, most * 1.2), (0.9, most * 1.2))
    axes.draw(canvas, "Speedup", "nodes", "times one node")
    axes.segment(canvas, (1.0, 1.0), (most, most), PALE)
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    curves = [(layers, batch) for layers in networks for batch in batches or default_batches(layers, nodes)]
    for place, (layers, batch) in enumerate(curves):
        colour = COLOURS[place % len(COLOURS)]
        alone = step_of(layers, batch, 1, plans=plans).images_per_s
        steps = [step_of(layers, batch, count, plans=plans) for count in counts]
        points = [(float(s.nodes), s.images_per_s / alone) for s in steps]
        for one, other in pairwise(points):
            canvas.line(*axes.at(*one), *axes.at(*other), colour=colour, line=1.2)
        canvas.line(1.15, 1.15 + 0.17 * place, 1.4, 1.15 + 0.17 * place, colour=colour, line=1.4)
        canvas.text(1.45, 1.15 + 0.17 * place, f"{layers.name}, {batch} a node", 7)
        for point in read_scaling():
            if (point.network, point.batch) == (layers.name, batch) and point.nodes <= most:
                base = batch / read_table3()[layers.name].images_per_s
                beside = tree_s(layers, point.nodes)
                axes.point(canvas, point.nodes / 1.12, point.nodes * base / (base + beside), "#ffffff")
                axes.point(canvas, point.nodes, point.speedup, colour)
    return canvas
