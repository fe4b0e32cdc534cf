"""Layers of a network file's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from convgen.algebra.conv import Conv
from convgen.algebra.relations import Taps
from convgen.errors import InputError
from convgen.spec.network import Network, Node
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.pooling.windows import Windows
from convgen.sw26010.training.layers import (
    ConvLayer,
    DenseLayer,
    FanLayer,
    JoinLayer,
    Layer,
    Layers,
    NormLayer,
    PointLayer,
    PoolLayer,
)


def layers_of_network(network: Network) -> Layers:
    """Raises InputError: a node that the mesh has no program for; says which, and where."""
    if network.dtype != "float32":
        hint = "dtype: float32"
        raise InputError(f"{network.name} is of {network.dtype}; swCaffe trains in float32", hint=hint)
    found: list[Layer] = []
    for node in network.nodes:
        try:
            found += _layers(network, node)
        except InputError as error:
            raise InputError(f"{network.where(node)}: {error.fact}", notes=error.notes, hint=error.hint) from None
        readers = len(network.readers[node.name])
        if readers > 1 and node.kind != "input":
            found.append(FanLayer(f"{node.name} (gradients)", _sample(node.shape), readers))
    return Layers(network.name, tuple(found), network.batch)


def _sample(shape: tuple[int, ...]) -> int:
    return prod(shape[1:])


def _layers(network: Network, node: Node) -> list[Layer]:
    name, conv = node.name, node.conv
    before = [network.node[read].shape for read in node.inputs]
    match node.kind:
        case "conv" if conv is not None:
            return [conv_layer(name, conv, first=network.node[node.inputs[0]].kind == "input")]
        case "linear" if conv is not None:
            return [DenseLayer(name, conv.channels, conv.filters, conv.bias)]
        case "max_pool" | "avg_pool" if conv is not None:
            taps = [s.taps for s in conv.spatial]
            return [pool_layer(name, before[0], taps, "max" if node.kind == "max_pool" else "average")]
        case "global_avg_pool":
            return [global_pool_layer(name, before[0])]
        case "batch_norm":
            return [NormLayer(name, node.shape[1], prod(node.shape[2:]))]
        case "relu":
            return [PointLayer(name, _sample(node.shape))]
        case "dropout":
            return [PointLayer(name, _sample(node.shape), reads=2)]
        case "add":
            return [
                PointLayer(name if i == 1 else f"{name} {i}", _sample(node.shape), reads=2, gradient=False)
                for i in range(1, len(before))
            ]
        case "concat":
            return [JoinLayer(name, _sample(node.shape))]
        case "softmax_loss":
            return [PointLayer(name, _sample(before[0]))]
        case "input" | "flatten":
            return []
        case _:
            raise InputError(f"{name} is a {node.kind}, which the mesh has no program for")


def conv_layer(name: str, conv: Conv, *, first: bool) -> ConvLayer:
    """Raises InputError: not two spatial dimensions, or a transposed one."""
    if len(conv.spatial) != 2 or conv.transposed:
        raise InputError(f"{name} is no convolution over two dimensions, which [SW]'s plans are for")
    rows, columns = (Axis(s.extent, s.out, s.kernel, s.stride, s.pad_lo, s.dilation) for s in conv.spatial)
    groups = conv.groups
    return ConvLayer(name, conv.channels // groups, conv.filters // groups, rows, columns, groups, conv.bias, first)


def pool_layer(name: str, shape: tuple[int, ...], taps: Sequence[Taps], kind: str) -> PoolLayer:
    """Of x[N, C, H, W]. Raises InputError: windows that aren't square, or dilated."""
    if len(shape) != 4 or len(set(taps)) != 1 or taps[0].dilation != 1:
        raise InputError(f"{name}: the mesh pools square windows of two dimensions, without dilation")
    tap = taps[0]
    which = "max" if kind == "max" else "average"
    return PoolLayer(name, Windows(1, shape[1], shape[2], shape[3], tap.kernel, tap.stride, tap.pad, which))


def global_pool_layer(name: str, shape: tuple[int, ...]) -> PoolLayer:
    """Of a whole plane [N, C, H, W]. Raises InputError: it is not square."""
    if len(shape) != 4 or shape[2] != shape[3]:
        raise InputError(f"{name} pools planes {list(shape[2:])}: the mesh pools square windows")
    return PoolLayer(name, Windows(1, shape[1], shape[2], shape[3], shape[2], 1, 0, "average"))
