"""What `convgen sw26010 dma` prints, and its picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from convgen.pictures.canvas import GREY, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.machine.dma import MEASURED_STREAM, SIZES, Moves, events_seconds, moves_seconds, run_moves
from convgen.sw26010.machine.plot import BOTH, COLUMN_BUS, ROW_BUS
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table


def dma_rows() -> list[dict[str, Any]]:
    """Of each size both kinds, bytes a second by the closed form, and whether a run's events give the same."""
    rates = taken_rates()
    found: list[dict[str, Any]] = []
    for size in SIZES:
        row: dict[str, Any] = {"bytes": size, "measured_bytes_per_s": MEASURED_STREAM.get(size, 0.0) * 1e9 or None}
        equal = True
        for strided in (False, True):
            for direction in ("get", "put"):
                moves = Moves(size, strided, direction)
                events, moved = run_moves(moves)
                seconds = moves_seconds(moves, rates)
                ran = events_seconds(events, rates, strided=strided)
                equal = equal and moved == moves.total_bytes and abs(ran - seconds) <= 1e-9 * seconds
            row["strided_bytes_per_s" if strided else "continuous_bytes_per_s"] = moved / seconds
        found.append(row | {"run_equal": equal})
    return found


def dma_text(rows: list[dict[str, Any]]) -> str:
    """The same for people."""
    body = [
        [f"{row['bytes']:,}", f"{row['continuous_bytes_per_s'] / 1e9:.1f}",
         "-" if row["measured_bytes_per_s"] is None else f"{row['measured_bytes_per_s'] / 1e9:.1f}",
         f"{row['strided_bytes_per_s'] / 1e9:.1f}"]
        for row in rows
    ]  # fmt: skip
    same = "equal" if all(row["run_equal"] for row in rows) else "DIFFER FROM"
    lines = [
        "DMA of 64 CPEs by what lies together, GB/s; every transfer is waited for",
        "",
        table(("bytes", "continuous", "swCandle", "strided"), body),
        "",
        f"events of gets and puts {same} the closed form",
    ]
    return "\n".join(lines)


def dma_page(rows: list[dict[str, Any]]) -> Canvas:
    """Both curves, with the points that the benchmark behind the figure measured."""
    canvas = Canvas(7.4, 5.0)
    canvas.text(0.3, 0.25, "[SW] Figure 2: DMA bandwidth of a core group", 11, bold=True)
    canvas.text(0.3, 0.5, "model; squares: measured continuous streams, [SW]'s reference 27", 8, colour=GREY)
    axes = LogAxes(1.0, 1.0, 5.9, 3.2, (SIZES[0] / 1.2, SIZES[-1] * 1.2), (1.0, 40.0))
    axes.draw(canvas, "GB/s", "bytes that lie together", "GB/s")
    for name, words, colour in (
        ("continuous_bytes_per_s", "continuous", ROW_BUS), ("strided_bytes_per_s", "strided, 32 KB a CPE", COLUMN_BUS)
    ):  # fmt: skip
        points = [(float(row["bytes"]), row[name] / 1e9) for row in rows]
        for one, other in pairwise(points):
            axes.segment(canvas, one, other, colour)
        axes.point(canvas, *points[3], colour, words)
    for size, speed in MEASURED_STREAM.items():
        axes.point(canvas, size, speed, BOTH)
    return canvas
