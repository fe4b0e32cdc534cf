"""A whole network as frozen data: nodes in topological order, every shape inferred. Reading: network_reader.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from convgen.algebra.conv import Conv, Spatial
from convgen.spec.layer import DTYPE_BYTES, Layer
from convgen.spec.source import KeyPath, Source

# Keys that say how a node is laid out, as in a layer's file.
PLACED = ("distribution", "roles")
# What a node does, and the keys that it takes besides name, kind and from; "!" marks those it needs.
KINDS: dict[str, tuple[str, ...]] = {
    "conv": ("out_channels!", "kernel_size!", "stride", "padding", "dilation", "groups", "bias", *PLACED),
    "conv_transpose": (
        "out_channels!", "kernel_size!", "stride", "padding", "output_padding", "dilation", "groups", "bias", *PLACED,
    ),
    "max_pool": ("kernel_size!", "stride", "padding", "dilation"),
    "avg_pool": ("kernel_size!", "stride", "padding"),
    "global_avg_pool": (),
    "batch_norm": (),
    "relu": (),
    "dropout": (),
    "lrn": ("size", "alpha", "beta", "k"),
    "add": (),
    "concat": (),
    "flatten": (),
    "linear": ("out_features!", "bias", *PLACED),
    "softmax_loss": (),
}  # fmt: skip
JOINS = ("add", "concat")
CONVOLUTIONS = ("conv", "conv_transpose", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation.

    Attributes:
        kind: "input", or one of KINDS.
        inputs: names of the nodes that it reads, in order.
        shape: of the node's output, (N, C, spatial...); () for the loss.
        conv: the index space of a convolution, transposed or not; of a linear layer, as a 1x1 convolution on one
            pixel; of a pooling, as a depthwise convolution. None for the others.
        layer: a convolution as a layer, on a grid of the axes that its `distribution` and `roles` name; None where it
            has neither.
        numbers: size, alpha, beta and k of a local response normalisation.
        path: where the file says it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    conv: Conv | None = None
    layer: Layer | None = None
    numbers: tuple[float, ...] = ()
    path: KeyPath = field(default=(), compare=False)

    @property
    def elements(self) -> int:
        """Elements of the whole output."""
        return prod(self.shape)

    @property
    def weights(self) -> int:
        """Parameters: filters and bias, or scale and shift."""
        if self.kind == "batch_norm":
            return 2 * self.shape[1]
        if self.kind in CONVOLUTIONS and self.conv is not None:
            return self.conv.elements("w") + (self.conv.filters if self.conv.bias else 0)
        return 0

    @property
    def flops(self) -> int:
        """Flops of a convolution's forward pass, two for a multiplication and addition; padding counts."""
        if self.kind not in CONVOLUTIONS or self.conv is None:
            return 0
        direct = self.conv.direct
        return 2 * direct.elements("y") * (direct.channels // direct.groups) * direct.taps


@dataclass(frozen=True, kw_only=True)
class Network:
    """A graph of nodes; the first is the input, and only the last is read by no other.

    Attributes:
        nodes: in topological order, which is the written order if that is topological.
        dtype: the type of activations, weights and gradients.
    """

    name: str
    dtype: str
    nodes: tuple[Node, ...]
    source: Source = field(default=Source(), compare=False)

    @cached_property
    def node(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def readers(self) -> Mapping[str, tuple[Node, ...]]:
        """By node, the nodes that read it."""
        return {n.name: tuple(m for m in self.nodes if n.name in m.inputs) for n in self.nodes}

    @property
    def batch(self) -> int:
        return self.nodes[0].shape[0]

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def where(self, node: Node) -> str:
        """`file:line` of a node."""
        return self.source.where(node.path)


def pixel(shape: tuple[int, ...]) -> Conv:
    """The index space of a tensor of this shape: a 1x1 convolution without mixing, whose x and y are both the tensor.

    Example:
        >>> pixel((8, 64, 14, 14)).elements("x")
        100352
    """
    names = {0: (), 1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}[len(shape) - 2]
    spatial = tuple(Spatial(name, extent, kernel=1) for name, extent in zip(names, shape[2:], strict=True))
    return Conv(shape[0], shape[1], shape[1], spatial)
