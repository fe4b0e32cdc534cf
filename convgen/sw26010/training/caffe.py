"""Seconds of layers as the public code ran them when its profiles were taken (profiles.py), by what can be counted.

Convolutions are the same plans, but every product is a call of the general library (`library_seconds`), one an image,
and a bias is one more product, of K = 1. Implicit plans where the public code's rules allow them.

What [SW] 4 has no program for are Caffe's own loops on the management core, pass after pass over whole tensors; they
take their bytes at the 9.9 GB/s of [SW] Principle 2. ReLU, pooling by the maximum and copies have programs of the mesh.

| layer | bytes an element, forward | backward |
|---|---|---|
| normalisation, in place | mean 4, minus mean 8, square 8, variance 4, spread out 4, divide 12 | product 12, sum 4,
  spread out 4, product 12, sum 4, minus 8, both 12, divide 12 |
| scale and shift | copy and scale 16; the shift is a product with K = 1 | sum 4, product 12, sum 4, copy and scale 16 |
| sum of two | zero 4, add 12, add 12 | two copies |
| gradients of a value that several read | | add 12 for each but the first |
| average | what is read and written, once | the same |
| dropout | mask 4, product 12 | product 12 |

Copies that keep x beside these are the mesh's. Loops that a processor takes longer for than memory does are therefore
too fast here; how much is what the profiles say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import conv_terms, explicit_plan, layout_seconds
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.support import implicit_supported
from convgen.sw26010.gemm.cost import gemm_seconds, library_seconds, search_blocks
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.rates import Rates, load_rates, taken_rates
from convgen.sw26010.pointwise.stream import Stream, stream_seconds
from convgen.sw26010.pooling.windows import windows_seconds
from convgen.sw26010.training.layers import (
    ConvLayer,
    ConvTask,
    DenseLayer,
    FanLayer,
    JoinLayer,
    Layer,
    NormLayer,
    PointLayer,
    PoolLayer,
    PoolTask,
)

FLOAT = 4
NORM_BYTES, NORM_BACKWARD_BYTES = 40, 68
SCALE_BYTES, SCALE_BACKWARD_BYTES = 16, 36
SUM_BYTES, ADD_BYTES = 28, 12
DROPOUT_BYTES, DROPOUT_BACKWARD_BYTES = 16, 12


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a layer, or of one of the two that Caffe has for a normalisation; `kind` as in the profiles."""

    kind: str
    forward_s: float
    backward_s: float
    plans: tuple[str, ...] = ()


def caffe_parts(layer: Layer, n: int, *, implicit: bool = True) -> Iterator[Part]:
    """The parts of a layer on one core group with n samples.

    Args:
        implicit: use implicit plans where the public code's rules allow them: in both gradients, or in neither.
    """
    rates = taken_rates()
    match layer:
        case ConvLayer():
            yield _convolution(layer, n, rates, implicit=implicit)
        case DenseLayer():
            yield _dense(layer, n, rates)
        case PoolLayer():
            yield _pooling(layer, n, rates)
        case NormLayer():
            elements = n * layer.c * layer.pixels
            kept = _copies_s(elements, rates)
            forward = _passes_s(NORM_BYTES, elements, rates) + kept
            yield Part("normalisation", forward, _passes_s(NORM_BACKWARD_BYTES, elements, rates) + kept)
            forward = _passes_s(SCALE_BYTES, elements, rates) + kept
            forward += n * _bias_s(layer.c, layer.pixels, rates)
            yield Part("scale and shift", forward, _passes_s(SCALE_BACKWARD_BYTES, elements, rates))
        case PointLayer():
            yield _pointwise(layer, n, rates)
        case JoinLayer():
            copied = _copies_s(n * layer.elements, rates)
            yield Part("concatenation", copied, copied)
        case FanLayer():
            added = (layer.readers - 1) * n * layer.elements
            yield Part("sums of gradients", 0.0, _passes_s(ADD_BYTES, added, rates))


def _passes_s(size: int, elements: int, rates: Rates) -> float:
    return size * elements / rates.group.copy_bytes_per_s


def _copies_s(elements: int, rates: Rates) -> float:
    return stream_seconds(Stream("relu", elements), rates)  # what a copy reads and writes, too


def _product_s(m: int, n: int, k: int, rates: Rates) -> float:
    """Of a product by the general library; m is the axis along which C lies together."""
    smallest = GemmPlan(m=m, n=n, k=k, bm=32, bn=8, bk=8, dtype="float32", accumulate=False)
    plan = search_blocks(smallest, rates)
    return gemm_seconds(plan, rates) + library_seconds(plan, rates)


def _bias_s(channels: int, pixels: int, rates: Rates) -> float:
    return _product_s(pixels, channels, 1, rates)


def _convolution(layer: ConvLayer, n: int, rates: Rates, *, implicit: bool) -> Part:
    forth, back = list(layer.forward(n)), list(layer.backward(n))
    plans: list[str] = []
    seconds: list[float] = []
    for tasks in (forth, back):
        problems = [task for task in tasks if isinstance(task, ConvTask)]
        phases: tuple[Phase, ...] = ("forward",) if tasks is forth else ("backward_filter", "backward_data")
        possible = implicit and layer.groups == 1
        possible = possible and all(implicit_supported(problems[0].problem, phase) for phase in phases)
        seconds.append(sum(_phase_s(task, rates, implicit=possible) for task in problems))
        plans += ["implicit" if possible else "explicit"] * len(problems)
    if layer.bias:
        filters, pixels = layer.groups * layer.f, layer.rows.out * layer.columns.out
        seconds[0] += n * _bias_s(filters, pixels, rates)
        seconds[1] += _passes_s(FLOAT, n * filters * pixels, rates)
    return Part("convolution", *seconds, tuple(plans))


def _phase_s(task: ConvTask, rates: Rates, *, implicit: bool) -> float:
    constants = load_rates().fitted()
    if implicit:
        plan = implicit_plan(task.problem, task.phase)
        return conv_terms(plan, rates).seconds(constants) + layout_seconds(plan, rates)
    plan = explicit_plan(task.problem, task.phase, rates)
    return task.groups * conv_terms(plan, rates, library=True).seconds(constants)


def _dense(layer: DenseLayer, n: int, rates: Rates) -> Part:
    forward = _product_s(layer.outputs, n, layer.inputs, rates)
    backward = _product_s(layer.inputs, layer.outputs, n, rates) + _product_s(layer.inputs, n, layer.outputs, rates)
    if layer.bias:
        forward += _product_s(layer.outputs, n, 1, rates)
        backward += _passes_s(FLOAT, n * layer.outputs, rates)
    return Part("inner product", forward, backward)


def _pooling(layer: PoolLayer, n: int, rates: Rates) -> Part:
    tasks = (*layer.forward(n), *layer.backward(n))
    forth, back = (task for task in tasks if isinstance(task, PoolTask))
    if layer.windows.kind == "max":
        seconds = (windows_seconds(task.windows, rates, backward=task.backward) for task in (forth, back))
        return Part("max pooling", *seconds)
    elements = prod(forth.windows.out_shape) + n * layer.windows.c * layer.windows.h * layer.windows.w
    once = _passes_s(FLOAT, elements, rates)
    return Part("average pooling", once, once)


def _pointwise(layer: PointLayer, n: int, rates: Rates) -> Part:
    elements = n * layer.elements
    if layer.reads == 1:
        return Part("ReLU", _copies_s(elements, rates), stream_seconds(Stream("relu_backward", elements), rates))
    if layer.gradient:
        backward = _passes_s(DROPOUT_BACKWARD_BYTES, elements, rates)
        return Part("dropout and loss", _passes_s(DROPOUT_BYTES, elements, rates), backward)
    return Part("sums", _passes_s(SUM_BYTES, elements, rates), 2 * _copies_s(elements, rates))
