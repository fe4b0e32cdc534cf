"""Picture: bytes between supernodes in each step of an all-reduce."""

from __future__ import annotations

from convgen.pictures.canvas import GREY, Canvas
from convgen.sw26010.allreduce.cost import NUMBERINGS, Network
from convgen.sw26010.allreduce.run import simulate_traffic
from convgen.sw26010.machine.plot import COLUMN_BUS, ROW_BUS


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
