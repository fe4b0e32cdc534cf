"""What `convgen sw26010 network` prints: text for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convgen.errors import InputError
from convgen.sw26010.allreduce.tree import tree_seconds
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.training.layers import KINDS, Layers, blobs
from convgen.sw26010.training.published import beyond_one_node_s, read_scaling, read_table3
from convgen.sw26010.training.step import (
    CORE_GROUPS,
    Plans,
    Step,
    layer_times,
    nodes_network,
    step_of,
)

# Of a message of the public code's trees: fitted to one point of 6.3, ResNet-50 at 32; the other four are held out.
TREE_LATENCY_S = 1.53e-4

PLANS: dict[Plans, str] = {
    "model": "the faster plan by the model", "explicit": "explicit plans only",
    "caffe": "layers as the public code ran them when it was profiled",
}  # fmt: skip


def default_batches(layers: Layers, nodes: int) -> list[int]:
    """The batches that 6.3 has for these nodes, else Table 3's, else the file's."""
    points = [p.batch for p in read_scaling() if (p.network, p.nodes) == (layers.name, nodes)]
    if points:
        return points
    row = read_table3().get(layers.name)
    return [layers.batch if row is None else row.batch]


def tree_s(layers: Layers, nodes: int, latency_s: float = TREE_LATENCY_S) -> float:
    """Seconds of reducing every blob of parameters as the public code does; one core group adds."""
    adding = 3 / taken_rates().group.dma_bytes_per_s
    network = replace(nodes_network(nodes, latency_s), reduce_s_per_byte=adding)
    return tree_seconds(network, [size for layer in layers.layers for size in blobs(layer)])


def network_rows(networks: Sequence[Layers], batches: Sequence[int], nodes: int, plans: Plans) -> list[dict[str, Any]]:
    """Of each network and batch a step beside the paper's numbers, where it has them.

    Args:
        batches: of a node; empty for the paper's.
    """
    found: list[dict[str, Any]] = []
    for layers in networks:
        for batch in batches or default_batches(layers, nodes):
            step, alone = step_of(layers, batch, nodes, plans=plans), step_of(layers, batch, 1, plans=plans)
            found.append(_row(layers, step, alone, plans))
    return found


def _row(layers: Layers, step: Step, alone: Step, plans: Plans) -> dict[str, Any]:
    speed = read_table3().get(layers.name)
    known = speed is not None and speed.batch == step.batch and step.nodes == 1
    point = next(
        (p for p in read_scaling() if (p.network, p.batch, p.nodes) == (layers.name, step.batch, step.nodes)), None
    )
    row: dict[str, Any] = {
        "network": layers.name, "batch": step.batch, "nodes": step.nodes, "parameters": layers.parameters,
        "compute_s": step.compute_s, "sum_s": step.sum_s, "all_reduce_s": step.reduce_s, "update_s": step.update_s,
        "read_s": step.read_s, "step_s": step.seconds, "images_per_s": step.images_per_s,
        "speedup": step.images_per_s / alone.images_per_s,
        "images_per_s_as_profiled": _as_profiled(layers, step),
        "paper_images_per_s": speed.images_per_s if speed is not None and known else None,
    }  # fmt: skip
    if step.nodes > 1:
        row["share"] = 1 - row["speedup"] / step.nodes
        # What the equations and the public code's trees make of the paper's own speed of one node.
        base = None if speed is None else step.batch / speed.images_per_s
        row["share_at_paper_speed"] = None if base is None else step.reduce_s / (base + step.reduce_s)
        row["tree_s"] = tree_s(layers, step.nodes)
        row["share_by_trees"] = None if base is None else row["tree_s"] / (base + row["tree_s"])
        row["paper_share"] = None if point is None else point.share
        row["paper_speedup"] = None if point is None else point.speedup
        row["paper_beyond_one_node_s"] = None if point is None else beyond_one_node_s(point)
    return row


def _as_profiled(layers: Layers, step: Step) -> float | None:
    """Images a second with layers as in the public profiles; None where they have no plan for a convolution."""
    try:
        return step_of(layers, step.batch, step.nodes, plans="caffe").images_per_s
    except InputError:
        return None


def network_json(
    networks: Sequence[Layers], batches: Sequence[int], nodes: int, plans: Plans, *, layers: bool
) -> dict[str, Any]:
    """Rows, and with `layers` every layer's seconds on a core group."""
    found: dict[str, Any] = {"plans": plans, "rows": network_rows(networks, batches, nodes, plans)}
    if nodes > 1:
        found["tree_latency_s"] = TREE_LATENCY_S
    if layers:
        found["layers"] = {
            one.name: [
                {"name": t.layer.name, "kind": KINDS[type(t.layer)], "forward_s": t.forward_s,
                 "backward_s": t.backward_s, "plans": list(t.plans)}
                for t in layer_times(one.layers, -(-(batches or default_batches(one, nodes))[0] // CORE_GROUPS), plans)
            ]
            for one in networks
        }  # fmt: skip
    return found


def network_text(networks: Sequence[Layers], batches: Sequence[int], nodes: int, plans: Plans, *, layers: bool) -> str:
    """The same for people."""
    rows = network_rows(networks, batches, nodes, plans)
    said = PLANS[plans]
    title = f"a training step, float32, {said}; seconds of a node's step, parts and whole"
    lines = [title, ""]
    lines.append(_one_node(rows) if nodes == 1 else _many_nodes(rows))
    if nodes > 1:
        said = f"{TREE_LATENCY_S * 1e3:.3f} ms a message, fitted to ResNet-50 at 32 in 6.3"
        lines += ["", f"by trees: every blob to node 0 and back, as in the public code; {said}"]
    for one in networks:
        batch = (batches or default_batches(one, nodes))[0]
        lines += ["", _kinds(one, batch, plans)]
        if layers:
            lines += ["", _layers(one, batch, plans)]
    return "\n".join(lines)


def _one_node(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "network", "batch", "compute", "sum of 4", "update", "reading", "step", "images/s", "[SW]", "ratio",
        "as profiled", "ratio",
    )  # fmt: skip
    return table(head, [[*_parts(row), *_speeds(row)] for row in rows])


def _parts(row: dict[str, Any]) -> list[str]:
    names = ("compute_s", "sum_s", "update_s", "read_s", "step_s")
    return [row["network"], str(row["batch"]), *(f"{row[name]:.3f}" for name in names), f"{row['images_per_s']:.2f}"]


def _speeds(row: dict[str, Any]) -> list[str]:
    paper, profiled = row["paper_images_per_s"], row["images_per_s_as_profiled"]
    speeds = (paper, None if paper is None else row["images_per_s"] / paper)
    beside = (profiled, None if paper is None or profiled is None else profiled / paper)
    return ["-" if number is None else f"{number:.2f}" for number in (*speeds, *beside)]


def _many_nodes(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "network", "batch", "nodes", "all-reduce", "reading", "step", "images/s", "speedup", "[SW]",
        "share", "at [SW]'s speed", "by trees", "[SW]", "trees, s", "[SW] beyond one node, s",
    )  # fmt: skip
    body: list[list[str]] = []
    for row in rows:
        shares = [row["share"], row["share_at_paper_speed"], row["share_by_trees"], row["paper_share"]]
        beyond, speedup = row["paper_beyond_one_node_s"], row["paper_speedup"]
        body.append(
            [row["network"], str(row["batch"]), str(row["nodes"]),
             *(f"{row[name]:.3f}" for name in ("all_reduce_s", "read_s", "step_s")), f"{row['images_per_s']:.0f}",
             f"{row['speedup']:.1f}", "-" if speedup is None else f"{speedup:.2f}",
             *("-" if share is None else f"{share:.1%}" for share in shares),
             f"{row['tree_s']:.2f}", "-" if beyond is None else f"{beyond:.2f}"]
        )  # fmt: skip
    return table(head, body)


def _kinds(layers: Layers, batch: int, plans: Plans) -> str:
    """Seconds by kind of layer on a core group."""
    times = layer_times(layers.layers, -(-batch // CORE_GROUPS), plans)
    total = sum(t.forward_s + t.backward_s for t in times) or 1.0
    rows: list[list[str]] = []
    for kind in dict.fromkeys(KINDS.values()):
        mine = [t for t in times if KINDS[type(t.layer)] == kind]
        forth, back = sum(t.forward_s for t in mine), sum(t.backward_s for t in mine)
        if mine:
            share = f"{(forth + back) / total:.1%}"
            rows.append([kind, str(len(mine)), f"{forth:.4f}", f"{back:.4f}", share])
    title = f"{layers.name}: {layers.parameters:,} parameters; a core group with {-(-batch // CORE_GROUPS)} samples"
    return f"{title}\n{table(('kind', 'layers', 'forward s', 'backward s', 'share'), rows)}"


def _layers(layers: Layers, batch: int, plans: Plans) -> str:
    times = layer_times(layers.layers, -(-batch // CORE_GROUPS), plans)
    rows = [
        [t.layer.name, KINDS[type(t.layer)], f"{t.forward_s * 1e3:.3f}", f"{t.backward_s * 1e3:.3f}", " ".join(t.plans)]
        for t in times
    ]
    return table(("layer", "kind", "forward ms", "backward ms", "plans: forward, filter, data"), rows)
