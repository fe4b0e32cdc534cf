"""Messages between two nodes by size ([SW] Figure 6): alpha + beta n, inside a supernode and across.

The text has 12 GB/s of 16 with MPI, "a latency at the level of micro-second", and a quarter of the bandwidth across
when all nodes of a supernode send. The figure's curves, Infiniband's among them, are not in the text.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from convgen.pictures.canvas import GREY, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.allreduce.cost import Network
from convgen.sw26010.allreduce.run import simulate_traffic
from convgen.sw26010.machine.plot import COLUMN_BUS, ROW_BUS
from convgen.sw26010.machine.table import table

SIZES = tuple(4 * 4**i for i in range(12))  # 4 B to 16 MB


def half_bandwidth_bytes(network: Network) -> float:
    """n of which half of the time is latency: alpha / beta."""
    return network.latency_s / network.inside_s_per_byte


def latency_rows(network: Network) -> list[dict[str, Any]]:
    """Of each size seconds and bytes a second, and whether two simulated nodes that exchange it take the same.

    The nodes all-reduce twice the message: their one step of halving sends it.
    """
    found: list[dict[str, Any]] = []
    for size in SIZES:
        row: dict[str, Any] = {"bytes": size}
        for name, supernode, beta in (
            ("inside", 2, network.inside_s_per_byte), ("across", 1, network.across_s_per_byte)
        ):  # fmt: skip
            pair = Network(2, supernode, network.latency_s, network.inside_s_per_byte, network.across_s_per_byte)
            seconds = network.latency_s + beta * size
            ran = simulate_traffic(pair, "adjacent", size // 2, 4)[0]
            row[f"{name}_s"] = seconds
            row[f"{name}_bytes_per_s"] = size / seconds
            row["run_equal"] = row.get("run_equal", True) and ran.message_bytes == size
            row["run_equal"] = row["run_equal"] and abs(ran.seconds - seconds) <= 1e-9 * seconds
        found.append(row)
    return found


def latency_text(network: Network) -> str:
    """The same for people."""
    rows = latency_rows(network)
    body = [
        [f"{r['bytes']:,}", f"{r['inside_s'] * 1e6:.3f}", f"{r['across_s'] * 1e6:.3f}",
         f"{r['inside_bytes_per_s'] / 1e9:.3f}", f"{r['across_bytes_per_s'] / 1e9:.3f}"]
        for r in rows
    ]  # fmt: skip
    same = "equal" if all(row["run_equal"] for row in rows) else "DIFFER FROM"
    lines = [
        "a message between two nodes: alpha + beta n",
        "",
        table(("bytes", "us inside", "us across", "GB/s inside", "GB/s across"), body),
        "",
        f"half of the bandwidth at {half_bandwidth_bytes(network):,.0f} B; two simulated nodes {same} the closed form",
    ]
    return "\n".join(lines)


def latency_page(network: Network) -> Canvas:
    """Bandwidth and latency against size."""
    canvas = Canvas(12.0, 5.0)
    canvas.text(0.3, 0.25, "[SW] Figure 6: messages between two nodes", 11, bold=True)
    canvas.text(0.3, 0.5, "model of the text's numbers; the figure's own curves are not in the text", 8, colour=GREY)
    rows = latency_rows(network)
    for place, (part, unit, factor) in enumerate((("bytes_per_s", "GB/s", 1e-9), ("s", "us", 1e6))):
        every = [r[f"{name}_{part}"] * factor for r in rows for name in ("inside", "across")]
        x = 1.0 + 5.9 * place
        axes = LogAxes(x, 1.0, 4.7, 3.2, (SIZES[0] / 2, SIZES[-1] * 2.0), (min(every) / 1.5, max(every) * 1.5))
        axes.draw(canvas, ("Bandwidth", "Latency")[place], "bytes", unit)
        for name, colour in (("inside", ROW_BUS), ("across", COLUMN_BUS)):
            points = [(float(r["bytes"]), r[f"{name}_{part}"] * factor) for r in rows]
            for one, other in pairwise(points):
                axes.segment(canvas, one, other, colour)
            axes.point(canvas, *points[-3 if name == "inside" else -2], colour, f"{name} a supernode", align="right")
    return canvas
