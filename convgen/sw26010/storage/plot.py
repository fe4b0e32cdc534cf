"""Picture: bytes a second against processes, on one array and striped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from convgen.pictures.canvas import GREY, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.spec.text import number_of
from convgen.sw26010.machine.plot import COLUMN_BUS, ROW_BUS
from convgen.sw26010.storage.report import Question, io_rows
from convgen.sw26010.storage.striping import MIB


def io_page(question: Question, counts: Sequence[int]) -> Canvas:
    """One line for the default of one array, one for the stripes."""
    canvas = Canvas(7.4, 5.0)
    striping, disks = question.striping, question.disks
    canvas.text(0.3, 0.25, "[SW] 5.2: processes that read a mini-batch each", 11, bold=True)
    said = f"{question.size / MIB:g} MiB each; an array gives {disks.array_bytes_per_s / 1e9:g} GB/s (assumed)"
    canvas.text(0.3, 0.5, said, 8, colour=GREY)
    rows = io_rows(question, counts)
    ends = [disks.array_bytes_per_s, *(row["striped_bytes_per_s"] for row in rows)]
    most = max(*ends, striping.arrays * disks.array_bytes_per_s) / 1e9
    axes = LogAxes(1.0, 1.0, 5.9, 3.2, (max(1, min(counts)) * 0.9, max(2, *counts) * 1.1), (min(ends) / 2e9, 2 * most))
    axes.draw(canvas, "Bytes a second of all processes", "processes", "GB/s")
    named = (
        ("single_split_bytes_per_s", "one array", ROW_BUS),
        (
            "striped_bytes_per_s",
            f"{number_of(striping.arrays, 'array')}, stripes of {striping.stripe_bytes / MIB:g} MiB",
            COLUMN_BUS,
        ),
    )
    for name, words, colour in named:
        points = [(float(row["processes"]), row[name] / 1e9) for row in rows]
        for one, other in pairwise(points):
            axes.segment(canvas, one, other, colour)
        for i, (x, y) in enumerate(points):
            axes.point(canvas, x, y, colour, words if i == len(points) - 1 else "", align="right")
    return canvas
