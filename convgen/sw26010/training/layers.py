"""What a network's layers do in a training step, as the tasks of one core group.

A layer is told how many samples its core group has, and answers with tasks: programs of the mesh that have closed
forms, forward and backward. Extents are of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.operations.batch_norm import Norm
from convgen.sw26010.operations.inner_product import InnerProduct
from convgen.sw26010.operations.local_response import LocalResponse
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import Operation
from convgen.sw26010.pooling.windows import Pool, Windows


@dataclass(frozen=True, slots=True)
class ConvTask:
    """A phase of a convolution, `groups` times."""

    problem: ConvProblem
    phase: Phase
    groups: int


Task: TypeAlias = ConvTask | InnerProduct | Operation


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """A convolution; c and f of one group. `first`: nothing before it wants dx."""

    name: str
    c: int
    f: int
    rows: Axis
    columns: Axis
    groups: int = 1
    bias: bool = False
    first: bool = False

    @property
    def parameters(self) -> int:
        """Filters and bias."""
        weights = self.groups * self.f * self.c * self.rows.kernel * self.columns.kernel
        return weights + self.groups * self.f * self.bias

    def forward(self, n: int) -> Iterator[Task]:
        yield self._phase(n, "forward")

    def backward(self, n: int) -> Iterator[Task]:
        yield self._phase(n, "backward_filter")
        if not self.first:
            yield self._phase(n, "backward_data")

    def _phase(self, n: int, phase: Phase) -> ConvTask:
        return ConvTask(ConvProblem(n, self.c, self.f, self.rows, self.columns), phase, self.groups)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """An inner product and its two gradients, a GEMM each. `first`: nothing before it wants dx."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    first: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.outputs * self.bias

    def forward(self, n: int) -> Iterator[Task]:
        yield InnerProduct(n, self.inputs, self.outputs)

    def backward(self, n: int) -> Iterator[Task]:
        yield InnerProduct(n, self.inputs, self.outputs, "backward_filter")
        if not self.first:
            yield InnerProduct(n, self.inputs, self.outputs, "backward_data")


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """Pooling of `c` planes; `windows` has one sample."""

    name: str
    windows: Windows
    parameters: int = 0

    def forward(self, n: int) -> Iterator[Task]:
        yield Pool(self._of(n))

    def backward(self, n: int) -> Iterator[Task]:
        yield Pool(self._of(n), backward=True)

    def _of(self, n: int) -> Windows:
        w = self.windows
        return Windows(n, w.c, w.h, w.w, w.kernel, w.stride, w.padding, w.kind, w.dtype)


@dataclass(frozen=True, slots=True)
class NormLayer:
    """Batch normalisation over the samples of a core group, with a factor and a shift a channel."""

    name: str
    c: int
    pixels: int

    @property
    def parameters(self) -> int:
        return 2 * self.c

    def forward(self, n: int) -> Iterator[Task]:
        yield from Norm(n, self.c, self.pixels).steps(backward=False)

    def backward(self, n: int) -> Iterator[Task]:
        yield from Norm(n, self.c, self.pixels).steps(backward=True)


@dataclass(frozen=True, slots=True)
class ResponseLayer:
    """Local response normalisation across channels, in windows of `size`."""

    name: str
    c: int
    pixels: int
    size: int
    alpha: float
    beta: float
    k: float
    parameters: int = 0

    def forward(self, n: int) -> Iterator[Task]:
        yield self._of(n, backward=False)

    def backward(self, n: int) -> Iterator[Task]:
        yield self._of(n, backward=True)

    def _of(self, n: int, *, backward: bool) -> LocalResponse:
        numbers = (self.size, self.alpha, self.beta, self.k)
        return LocalResponse(n, self.c, self.pixels, *numbers, backward=backward)


@dataclass(frozen=True, slots=True)
class PointLayer:
    """Element by element.

    Args:
        elements: of a sample.
        reads: elements' operands: ReLU and a copy have one, a sum of two branches two, dropout two with its mask.
        gradient: the backward pass does as much, with dy beside what the function needs again; a sum's does nothing.
    """

    name: str
    elements: int
    reads: int = 1
    gradient: bool = True
    parameters: int = 0

    def forward(self, n: int) -> Iterator[Task]:
        yield Stream("relu" if self.reads == 1 else "add", n * self.elements)

    def backward(self, n: int) -> Iterator[Task]:
        if self.gradient:
            yield Stream("relu_backward", n * self.elements)


@dataclass(frozen=True, slots=True)
class JoinLayer:
    """Channels of several values side by side: a copy there, and one back."""

    name: str
    elements: int
    parameters: int = 0

    def forward(self, n: int) -> Iterator[Task]:
        yield Stream("relu", n * self.elements)

    def backward(self, n: int) -> Iterator[Task]:
        yield Stream("relu", n * self.elements)


@dataclass(frozen=True, slots=True)
class FanLayer:
    """A value that `readers` layers read: their gradients are added up."""

    name: str
    elements: int
    readers: int
    parameters: int = 0

    def forward(self, n: int) -> Iterator[Task]:
        yield from ()

    def backward(self, n: int) -> Iterator[Task]:
        for _ in range(self.readers - 1):
            yield Stream("add", n * self.elements)


Layer: TypeAlias = ConvLayer | DenseLayer | PoolLayer | NormLayer | ResponseLayer | PointLayer | JoinLayer | FanLayer
KINDS: dict[type, str] = {
    ConvLayer: "convolution", DenseLayer: "inner product", PoolLayer: "pooling", NormLayer: "normalisation",
    ResponseLayer: "local response normalisation",
    PointLayer: "element by element", JoinLayer: "copies and sums", FanLayer: "copies and sums",
}  # fmt: skip


def blobs(layer: Layer) -> tuple[int, ...]:
    """Elements of the blobs of parameters that Caffe has for a layer: a norm has its mean, variance and count too."""
    match layer:
        case ConvLayer():
            shifts = layer.groups * layer.f * layer.bias
            return (layer.parameters - shifts, shifts) if shifts else (layer.parameters,)
        case DenseLayer():
            weights = layer.inputs * layer.outputs
            return (weights, layer.outputs) if layer.bias else (weights,)
        case NormLayer():
            return (layer.c, layer.c, 1, layer.c, layer.c)
        case _:
            return ()


@dataclass(frozen=True, slots=True)
class Layers:
    """A network: layers in the order of the forward pass, and the samples that its file says."""

    name: str
    layers: tuple[Layer, ...]
    batch: int

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)
