"""Pictures: how many times as fast nodes are as one, and what communication takes, beside [SW]'s Figs. 10 and 11."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from convgen.pictures.canvas import GREY, PALE, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.training.layers import Layers
from convgen.sw26010.training.published import Scaling, read_scaling, read_table3
from convgen.sw26010.training.report import default_batches, tree_s
from convgen.sw26010.training.step import Plans, Step, step_of

COLOURS = ("#77aadd", "#ee8866", "#44bb99", "#ffaabb", "#bbcc33", "#99ddff")
LEAST_SHARE = 0.05  # percent


@dataclass(frozen=True, slots=True)
class Curve:
    """Steps of more and more nodes; `alone_s`: of one node, by Table 3 where it has this network, else the model."""

    layers: Layers
    batch: int
    steps: tuple[Step, ...]
    alone_s: float
    trees_s: tuple[float, ...]

    @property
    def points(self) -> list[Scaling]:
        """The text's."""
        most = self.steps[-1].nodes
        return [p for p in read_scaling() if (p.network, p.batch) == (self.layers.name, self.batch) and p.nodes <= most]


def curve_of(layers: Layers, batch: int, counts: Sequence[int], plans: Plans) -> Curve:
    """Of these numbers of nodes, from one on."""
    steps = tuple(step_of(layers, batch, count, plans=plans) for count in counts)
    speed = read_table3().get(layers.name)
    alone = steps[0].node_s if speed is None else batch / speed.images_per_s
    return Curve(layers, batch, steps, alone, tuple(tree_s(layers, count) if count > 1 else 0.0 for count in counts))


def scaling_page(networks: Sequence[Layers], batches: Sequence[int], nodes: int, plans: Plans) -> Canvas:
    """Speedups, and shares of communication in percent; the text's points on both."""
    canvas, most = Canvas(13.4, 5.6), max(2, nodes)
    canvas.text(0.3, 0.25, "[SW] Figs. 10 and 11: training on many nodes", 11, bold=True)
    said = "thick: the text's speed of one node with the public code's trees; thin: the model, with Eqs. 2, 5 and 6"
    canvas.text(0.3, 0.5, f"{said}; squares: the text's", 8, colour=GREY)
    left = LogAxes(1.0, 1.0, 5.5, 3.8, (0.9, most * 1.2), (0.9, most * 1.2))
    left.draw(canvas, "Speedup", "nodes", "times one node")
    left.segment(canvas, (1.0, 1.0), (most, most), PALE)
    right = LogAxes(7.6, 1.0, 5.5, 3.8, (1.8, most * 1.2), (LEAST_SHARE, 100.0))
    right.draw(canvas, "Share of communication", "nodes", "percent")
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    chosen = [(layers, batch) for layers in networks for batch in batches or default_batches(layers, nodes)]
    for place, (layers, batch) in enumerate(chosen):
        colour, y = COLOURS[place % len(COLOURS)], 1.15 + 0.17 * place
        canvas.line(1.15, y, 1.4, y, colour=colour, line=1.8)
        canvas.text(1.45, y, f"{layers.name}, {batch} a node", 7)
        _draw(canvas, left, right, curve_of(layers, batch, counts, plans), colour)
    return canvas


def _draw(canvas: Canvas, left: LogAxes, right: LogAxes, curve: Curve, colour: str) -> None:
    first, alone = curve.steps[0].images_per_s, curve.alone_s
    model = [(float(s.nodes), s.images_per_s / first) for s in curve.steps]
    both = list(zip(curve.steps, curve.trees_s, strict=True))
    trees = [(float(s.nodes), s.nodes * alone / (alone + tree)) for s, tree in both]
    by_equations = [(float(s.nodes), _share(s.reduce_s, alone)) for s in curve.steps[1:]]
    by_trees = [(float(s.nodes), _share(tree, alone)) for s, tree in both[1:]]
    for axes, points, line in (
        (left, model, 0.7),
        (left, trees, 1.8),
        (right, by_equations, 0.7),
        (right, by_trees, 1.8),
    ):
        for one, other in pairwise(points):
            canvas.line(*axes.at(*one), *axes.at(*other), colour=colour, line=line)
    for point in curve.points:
        left.point(canvas, point.nodes, point.speedup, colour)
        right.point(canvas, point.nodes, 100 * point.share, colour)


def _share(reduce_s: float, alone_s: float) -> float:
    """Percent, no less than the axis has."""
    return max(LEAST_SHARE, 100 * reduce_s / (alone_s + reduce_s))
