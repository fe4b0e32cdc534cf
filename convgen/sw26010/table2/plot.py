"""Picture: Table 2, predicted against published, and its layers under the roof."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from convgen.pictures.canvas import INK, PALE, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.machine.plot import point_inside, roofline_axes
from convgen.sw26010.machine.rates import Rates
from convgen.sw26010.table2.cells import KINDS, ORDER, cells, plan_of, read_table2

COLOURS = {"implicit": "#44bb99", "explicit": "#ee8866"}


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
                point_inside(canvas, roof, flops / moved, flops / published / 1e9, COLOURS[kind])
    for x, y, colour, name in named.values():  # on top of the other points
        point_inside(canvas, roof, x, y, colour, name)
    return canvas
