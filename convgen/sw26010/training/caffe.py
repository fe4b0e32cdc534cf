"""Seconds of layers as the public code ran them when its profiles were taken (profiles.py), by what can be counted.

Convolutions are the same plans, but every product is a call of the general library (`library_seconds`), one an image,
and a bias is one more product, of K = 1. Implicit plans where the public code's rules allow them.

What [SW] 4 has no program for are Caffe's own loops on the management core, pass after pass over whole tensors
(`PASSES`); they take their bytes at the 9.9 GB/s of [SW] Principle 2. ReLU, pooling by the maximum, and the copies that
Caffe keeps of what it overwrites have programs of the mesh. The shift of a normalisation is a product with K = 1.

Loops that a processor takes longer for than memory does are therefore too fast here; how much is what the profiles say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convgen.errors import InputError
from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import conv_terms, explicit_plan, layout_seconds
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.support import implicit_supported
from convgen.sw26010.gemm.cost import gemm_seconds, library_seconds, search_blocks
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.rates import Rates, load_rates, taken_rates
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds
from convgen.sw26010.pooling.windows import Pool
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
    ResponseLayer,
)

FLOAT = 4
# Of every element: what a pass does, operands that it reads, and whether it writes one.
PASSES: dict[str, tuple[tuple[str, int, int], ...]] = {
    "normalisation": (
        ("mean of x", 1, 0), ("x less its mean", 1, 1), ("square", 1, 1), ("mean of squares", 1, 0),
        ("deviation of every element", 0, 1), ("divide", 2, 1),
    ),
    "normalisation, backward": (
        ("y dy", 2, 1), ("sum of y dy", 1, 0), ("that of every element", 0, 1), ("times y", 2, 1), ("sum of dy", 1, 0),
        ("less that", 1, 1), ("dy less their mean", 2, 1), ("divide", 2, 1),
    ),
    "scale": (("copy", 1, 1), ("scale", 1, 1)),
    "scale and shift, backward": (
        ("sum of dy", 1, 0), ("x dy", 2, 1), ("sum of x dy", 1, 0), ("copy", 1, 1), ("scale", 1, 1)
    ),
    "sum of two": (("zero", 0, 1), ("add a", 2, 1), ("add b", 2, 1)),
    "gradients added": (("add", 2, 1),),
    "dropout": (("mask", 0, 1), ("product", 2, 1)),
    "dropout, backward": (("product", 2, 1),),
    "read once": (("read", 1, 0),),
}  # fmt: skip


def pass_bytes(name: str) -> int:
    """Bytes that all passes of that name read and write for an element of float32."""
    return FLOAT * sum(reads + writes for _, reads, writes in PASSES[name])


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
            forward = _passes_s("normalisation", elements, rates) + kept
            yield Part("normalisation", forward, _passes_s("normalisation, backward", elements, rates) + kept)
            forward = _passes_s("scale", elements, rates) + kept
            forward += n * _bias_s(layer.c, layer.pixels, rates)
            yield Part("scale and shift", forward, _passes_s("scale and shift, backward", elements, rates))
        case ResponseLayer():
            fact = f"{layer.name}: no loops of Caffe's local response normalisation are counted"
            raise InputError(fact, hint="--plans model, whose mesh has a program of it")
        case PointLayer():
            yield _pointwise(layer, n, rates)
        case JoinLayer():
            copied = _copies_s(n * layer.elements, rates)
            yield Part("concatenation", copied, copied)
        case FanLayer():
            added = (layer.readers - 1) * n * layer.elements
            yield Part("sums of gradients", 0.0, _passes_s("gradients added", added, rates))


def _passes_s(name: str, elements: int, rates: Rates) -> float:
    return pass_bytes(name) * elements / rates.group.copy_bytes_per_s


def _copies_s(elements: int, rates: Rates) -> float:
    return operation_seconds(Stream("relu", elements), rates)  # what a copy reads and writes, too


def _product_s(m: int, n: int, k: int, rates: Rates) -> float:
    """Seconds of a product by the general library; m is the axis along which C lies together."""
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
        seconds[1] += _passes_s("read once", n * filters * pixels, rates)
    return Part("convolution", seconds[0], seconds[1], tuple(plans))


def _phase_s(task: ConvTask, rates: Rates, *, implicit: bool) -> float:
    constants = load_rates().fitted()
    if implicit:
        plan = implicit_plan(task.problem, task.phase)
        return conv_terms(plan, rates).seconds(constants) + layout_seconds(plan, rates)
    plan = explicit_plan(task.problem, task.phase, rates)
    return task.groups * conv_terms(plan, rates, library=True).seconds(constants)


def _dense(layer: DenseLayer, n: int, rates: Rates) -> Part:
    forward = _product_s(layer.outputs, n, layer.inputs, rates)
    backward = _product_s(layer.inputs, layer.outputs, n, rates)
    if not layer.first:
        backward += _product_s(layer.inputs, n, layer.outputs, rates)
    if layer.bias:
        forward += _product_s(layer.outputs, n, 1, rates)
        backward += _passes_s("read once", n * layer.outputs, rates)
    return Part("inner product", forward, backward)


def _pooling(layer: PoolLayer, n: int, rates: Rates) -> Part:
    tasks = (*layer.forward(n), *layer.backward(n))
    forth, back = (task for task in tasks if isinstance(task, Pool))
    if layer.windows.kind == "max":
        return Part("max pooling", operation_seconds(forth, rates), operation_seconds(back, rates))
    elements = prod(forth.windows.out_shape) + n * layer.windows.c * layer.windows.h * layer.windows.w
    once = _passes_s("read once", elements, rates)
    return Part("average pooling", once, once)


def _pointwise(layer: PointLayer, n: int, rates: Rates) -> Part:
    elements = n * layer.elements
    if layer.reads == 1:
        return Part("ReLU", _copies_s(elements, rates), operation_seconds(Stream("relu_backward", elements), rates))
    if layer.gradient:
        backward = _passes_s("dropout, backward", elements, rates)
        return Part("dropout and loss", _passes_s("dropout", elements, rates), backward)
    return Part("sums", _passes_s("sum of two", elements, rates), 2 * _copies_s(elements, rates))
