"""What `convgen sw26010 packing` prints, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from convgen.pictures.canvas import GREY, Canvas
from convgen.pictures.log_axes import LogAxes
from convgen.sw26010.machine.plot import COLUMN_BUS, ROW_BUS
from convgen.sw26010.machine.table import table
from convgen.sw26010.training.layers import Layers
from convgen.sw26010.training.packing import (
    PACKS,
    Packing,
    Reduced,
    backward_s,
    gradients,
    packing_of,
    packs_of,
    reduce_packs,
)
from convgen.sw26010.training.published import read_table3
from convgen.sw26010.training.step import nodes_network


def paper_batch(layers: Layers) -> int:
    """Table 3's batch, or the file's."""
    row = read_table3().get(layers.name)
    return layers.batch if row is None else row.batch


def packing_rows(
    networks: Sequence[Layers], batches: Sequence[int], nodes: Sequence[int], latency_s: float
) -> list[Packing]:
    """Of each network, batch and number of nodes; without batches the paper's."""
    return [
        packing_of(one, batch, count, latency_s=latency_s)
        for one in networks
        for batch in batches or [paper_batch(one)]
        for count in nodes
    ]


def packing_json(
    networks: Sequence[Layers], batches: Sequence[int], nodes: Sequence[int], latency_s: float
) -> dict[str, Any]:
    """The rows as dictionaries."""
    return {"rows": [_json(packing) for packing in packing_rows(networks, batches, nodes, latency_s)]}


def _json(packing: Packing) -> dict[str, Any]:
    def reduced(one: Reduced) -> dict[str, Any]:
        return {"packs": one.packs, "network_s": one.network_s, "exposed_s": one.exposed_s}

    return {
        "network": packing.network, "batch": packing.batch, "nodes": packing.nodes, "layers": packing.layers,
        "bytes": 4 * packing.elements, "one_a_layer": reduced(packing.alone), "packed": reduced(packing.packed),
        "packed_in_place": reduced(packing.in_place), "best_pack_bytes": packing.best_bytes,
        "best_packs": reduced(packing.best), "break_even_bytes": packing.break_even_bytes,
    }  # fmt: skip


def packing_text(networks: Sequence[Layers], batches: Sequence[int], nodes: Sequence[int], latency_s: float) -> str:
    """The same for people, in milliseconds."""
    head = (
        "network", "batch", "nodes", "layers", "MB", "one a layer", "packed", "in place", "packed is",
        "alone from KB", "exposed: a layer", "packed", "best", "in packs of KB",
    )  # fmt: skip
    rows = [_row(packing) for packing in packing_rows(networks, batches, nodes, latency_s)]
    lines = [
        "gradients reduced one layer at a time and packed: ms of all-reduces and copies",
        "exposed: what is left of them after the backward pass, each as soon as its gradients are there",
        "",
        table(head, rows),
    ]
    return "\n".join(lines)


def _row(p: Packing) -> list[str]:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.3f}"

    gain = p.alone.network_s / p.packed.network_s if p.packed.network_s else 1.0
    return [
        p.network, str(p.batch), str(p.nodes), str(p.layers), f"{4 * p.elements / 1e6:.1f}",
        ms(p.alone.network_s), ms(p.packed.network_s), ms(p.in_place.network_s), f"{gain:.3f} x",
        f"{p.break_even_bytes / 1e3:,.0f}",
        ms(p.alone.exposed_s), ms(p.packed.exposed_s), ms(p.best.exposed_s), f"{p.best_bytes / 1e3:,.0f}",
    ]  # fmt: skip


def packing_page(layers: Layers, batch: int, nodes: int, latency_s: float) -> Canvas:
    """Milliseconds against the least bytes of a pack: of all-reduces and copies, and exposed."""
    canvas = Canvas(7.4, 5.0)
    canvas.text(0.3, 0.25, f"{layers.name}: gradients in packs, {nodes} nodes, {batch} samples each", 11, bold=True)
    canvas.text(0.3, 0.5, "left: nearly one all-reduce a layer; right: one of everything", 8, colour=GREY)
    network, given, backward = nodes_network(nodes, latency_s), gradients(layers, batch), backward_s(layers, batch)
    tried = [(least, reduce_packs(packs_of(given, least), network, backward, copied=True)) for least in PACKS]
    seen = [s * 1e3 for _, one in tried for s in (one.network_s, one.exposed_s) if s > 0]
    axes = LogAxes(1.0, 1.0, 5.9, 3.2, (PACKS[0] / 1.2e6, PACKS[-1] * 1.2e-6), (min(seen) / 1.5, max(seen) * 1.5))
    axes.draw(canvas, "Milliseconds", "MB of a pack, at least", "ms")
    for name, words, colour in (
        ("network_s", "all-reduces and copies", ROW_BUS), ("exposed_s", "after the backward pass", COLUMN_BUS)
    ):  # fmt: skip
        points = [(least / 1e6, getattr(one, name) * 1e3) for least, one in tried if getattr(one, name) > 0]
        for one, other in pairwise(points):
            axes.segment(canvas, one, other, colour)
        if points:
            axes.point(canvas, *points[len(points) // 2], colour, words)
    return canvas
