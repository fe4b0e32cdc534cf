"""Layers of a graph's rows (`convgen import`), of which a network file's are a graph, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from convgen.algebra.conv import Conv
from convgen.algebra.relations import Taps
from convgen.errors import InputError
from convgen.operations.average_pooling import AdaptiveAveragePool, AveragePool
from convgen.operations.bound import Bound
from convgen.operations.contraction import Contraction
from convgen.operations.convolution import Convolution
from convgen.operations.dropout import Dropout
from convgen.operations.local_response import LocalResponseNorm
from convgen.operations.max_pooling import MaxPool
from convgen.operations.rows import Concatenate
from convgen.spec.aten.describe import Described, describe
from convgen.spec.aten.responses import with_responses
from convgen.spec.graph import Graph
from convgen.spec.network import Network
from convgen.spec.network_graph import network_graph, node_of
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
    ResponseLayer,
)

# Rows that move nothing on the mesh: the management core's few numbers, and other names of the same elements.
FREE = ("Coefficients", "Moments", "RunningStatistics", "View")


def layers_of_network(network: Network) -> Layers:
    """Of a network file; its loss takes a pass over the scores.

    Raises:
        InputError: a node that the mesh has no program for; says which, and where.
    """
    if network.dtype != "float32":
        hint = "dtype: float32"
        raise InputError(f"{network.name} is of {network.dtype}; swCaffe trains in float32", hint=hint)

    def where(module: str) -> str:
        node = node_of(network, module)
        return "" if node is None else f"{network.where(node)}: "

    found = layers_of_graph(network_graph(network), network.batch, where)
    losses = [node for node in network.nodes if node.kind == "softmax_loss"]
    scored = [PointLayer(node.name, prod(network.node[node.inputs[0]].shape[1:])) for node in losses]
    return replace(found, layers=(*found.layers, *scored))


def layers_of_graph(graph: Graph, batch: int, where: Callable[[str], str] = lambda _: "") -> Layers:
    """The layers of a graph with so many samples; what is neither convolution, product, norm nor pooling and has no
    more operands than two is taken element by element.

    Args:
        where: what messages begin with, by the module of the source.
    Raises:
        InputError: a row that the mesh has no program for, or a graph that has not this number of samples.
    """
    if not graph.is_dynamic and graph.batch != batch:
        raise InputError(f"{graph.name} was exported with {graph.batch} samples for good, not {batch}")
    sized = graph.at(batch)
    described = with_responses(sized, describe(sized))
    sizes = {name: t.shape for name, t in described.tensors.items()}
    # What no parameter has a part in: nothing before it wants a gradient.
    plain = {value.name for value in (*graph.inputs, *graph.buffers, *graph.constants)}
    made = {name for row in described.rows for name in row.makes}
    readers = Counter(name for row in described.rows for name in set(row.reads) if name in made)
    parameters = {value.name for value in graph.parameters}
    found: list[Layer] = []
    for row in described.rows:
        if _is_bias(row, found, parameters):
            found[-1] = replace(found[-1], name=row.makes[0], bias=True)  # type: ignore[call-arg]
        else:
            try:
                found += _layers(row, described, plain, parameters)
            except InputError as error:
                raise InputError(f"{where(row.module)}{error.fact}", notes=error.notes, hint=error.hint) from None
        if plain.issuperset(row.reads):
            plain.update(row.makes)
        for name in row.makes:
            shape = sizes.get(name, ())
            if readers[name] > 1 and len(shape) > 1 and shape[0] == batch and not _is_norm_s(name, described):
                found.append(FanLayer(f"{name} (gradients)", prod(shape[1:]), readers[name]))
    return Layers(graph.name, tuple(found), batch)


def _is_bias(row: Bound, found: list[Layer], parameters: set[str]) -> bool:
    """A parameter added to what a convolution or product has just made."""
    if len(row.reads) != 2 or not found or not isinstance(found[-1], ConvLayer | DenseLayer) or found[-1].bias:
        return False
    return row.reads[0] == found[-1].name and row.reads[1] in parameters


def _is_norm_s(name: str, described: Described) -> bool:
    """A norm reads its x twice, for moments and for elements; that is one layer."""
    kinds = Counter(type(row.operation).__name__ for row in described.rows if name in row.reads)
    return set(kinds) == {"Moments", "Centred"}


def _layers(row: Bound, described: Described, plain: set[str], parameters: set[str]) -> list[Layer]:
    operation, name = row.operation, row.makes[0] or row.module
    kind = type(operation).__name__
    shapes = [described.tensors[read].shape for read in row.reads]
    made = described.tensors[row.makes[0]].shape if row.makes[0] in described.tensors else ()
    if isinstance(operation, Convolution):
        return [conv_layer(name, operation.conv, first=row.reads[0] in plain)]
    if isinstance(operation, Contraction):
        return [_dense(name, shapes, made, first=row.reads[0] in plain)]
    if isinstance(operation, MaxPool):
        return [pool_layer(name, operation.shape, operation.taps, "max")]
    if isinstance(operation, AveragePool):
        return [pool_layer(name, operation.shape, operation.taps, "average")]
    if isinstance(operation, AdaptiveAveragePool):
        if set(operation.out) == {1}:
            return [global_pool_layer(name, shapes[0])]
        if operation.out == tuple(shapes[0][2:]):
            return []  # every window is one element
        raise InputError(f"{name} pools {list(shapes[0][2:])} to {list(operation.out)}: no windows of one size")
    if isinstance(operation, LocalResponseNorm):
        numbers = (operation.size, operation.alpha, operation.beta, operation.k)
        return [ResponseLayer(name, shapes[0][1], prod(shapes[0][2:]), *numbers)]
    if kind in ("Centred", "EvaluatedNorm"):
        return [NormLayer(name, shapes[0][1], prod(shapes[0][2:]))]
    if kind in FREE or len(made) < 2:
        return []
    if isinstance(operation, Concatenate):
        return [JoinLayer(name, prod(made[1:]))]
    if isinstance(operation, Dropout):
        return [PointLayer(name, prod(made[1:]), reads=2)]
    operands = [s for read, s in zip(row.reads, shapes, strict=True) if s == made and read not in parameters]
    if operands and len(operands) <= 2:
        return [PointLayer(name, prod(made[1:]), reads=len(operands), gradient=len(operands) == 1)]
    raise InputError(f"{row.module or name}: the mesh has no program for {kind} of {[list(s) for s in shapes]}")


def _dense(name: str, shapes: list[tuple[int, ...]], made: tuple[int, ...], *, first: bool) -> DenseLayer:
    if [len(s) for s in shapes] != [2, 2] or len(made) != 2:
        fact = f"{name} multiplies {' and '.join(str(list(s)) for s in shapes)}: a layer's product is of two matrices"
        raise InputError(fact)
    return DenseLayer(name, shapes[0][1], made[1], first=first)


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
