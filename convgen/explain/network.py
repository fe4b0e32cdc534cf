"""A network as a table: each node's result, and its size."""

from __future__ import annotations

from typing import Any

from convgen.spec.network import CONVOLUTIONS, Network, Node
from convgen.spec.text import number_of

MIB = 1 << 20


def network_text(network: Network) -> str:
    """The table that `convgen network` prints."""
    width = max(len(node.name) for node in network.nodes)
    lines = [f"{'node':<{width}}  {'kind':<15}  {'output':<22}  {'weights':>11}  {'MiB':>9}  {'GFLOP':>9}  reads"]
    for before, node in zip((None, *network.nodes), network.nodes, strict=False):
        reads = "" if before is not None and node.inputs == (before.name,) else ", ".join(node.inputs)
        shape = " ".join(map(str, node.shape)) or "one number"
        line = (
            f"{node.name:<{width}}  {said_kind(node):<15}  {shape:<22}  {node.weights or '-':>11}  "
            f"{_mib(network, node):>9.2f}  {node.flops / 1e9 if node.flops else 0:>9.3f}  {reads}"
        )
        lines.append(line.rstrip())
    total = network_json(network)["total"]
    lines.append(
        f"{network.name}: {len(network.nodes)} nodes, {total['convolutions']} convolutions and linear layers, "
        f"{total['weights']} weights, outputs {total['output_bytes'] / MIB:.1f} MiB in {network.dtype}, "
        f"forward {total['flops'] / 1e9:.3f} GFLOP for {number_of(network.batch, 'sample')} "
        f"({total['flops'] / 1e9 / network.batch:.3f} a sample)"
    )
    return "\n".join(lines)


def said_kind(node: Node) -> str:
    """The node's kind, with the kernel of a convolution or pooling: `conv 3x3/2`."""
    if node.conv is None or node.kind == "linear":
        return node.kind
    kernel = "x".join(str(s.kernel) for s in node.conv.spatial)
    strides = [s.stride for s in node.conv.spatial]
    stride = "x".join(map(str, strides if len(set(strides)) > 1 else strides[:1]))
    groups = f" g{node.conv.groups}" if node.kind in CONVOLUTIONS and node.conv.groups > 1 else ""
    return f"{node.kind} {kernel}" + (f"/{stride}" if stride != "1" else "") + groups


def network_json(network: Network) -> dict[str, Any]:
    """The table as plain data; bytes are in the network's dtype, flops those of the forward pass of the whole batch."""
    nodes = [
        {
            "name": node.name,
            "kind": node.kind,
            "inputs": list(node.inputs),
            "shape": list(node.shape),
            "weights": node.weights,
            "output_bytes": node.elements * network.element_bytes,
            "flops": node.flops,
        }
        for node in network.nodes
    ]
    total = {
        "convolutions": sum(node.kind in CONVOLUTIONS for node in network.nodes),
        "weights": sum(node.weights for node in network.nodes),
        "output_bytes": sum(node.elements for node in network.nodes) * network.element_bytes,
        "flops": sum(node.flops for node in network.nodes),
    }
    return {"name": network.name, "dtype": network.dtype, "nodes": nodes, "total": total}


def _mib(network: Network, node: Node) -> float:
    return node.elements * network.element_bytes / MIB
