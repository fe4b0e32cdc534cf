"""Gradients of elementwise operators, as autograd has them (torch's derivatives.yaml).

A slope says what it reads of a call, and makes a gradient of that and of the result's gradient. Behind it the gradient
is summed over what was broadcast, and cast to its operand's type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log, pi, sqrt
from typing import Any

from convgen.late import torch
from convgen.operations.row import summed_to

Back = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Slope:
    """The gradient of one argument.

    Attributes:
        reads: the numbers of the tensor arguments that it reads; `y` is the result.
        back: makes the gradient from dy, from what it reads, in that order, and from the arguments behind the tensors.
    """

    reads: str
    back: Back


def _backward(name: str) -> Back:
    """ATen's backward operator of this name, called with dy, x or y, and numbers."""

    def back(dy: Any, read: Any, numbers: Any) -> Any:
        return getattr(torch.ops.aten, name)(dy, *read, *numbers)

    return back


def _passed(dy: Any, read: Any, numbers: Any) -> Any:
    return dy


def _times(dy: Any, read: Any, numbers: Any) -> Any:
    return dy * read[0]


def _scaled(dy: Any, read: Any, numbers: Any) -> Any:
    """The gradient times alpha, which is the last number."""
    return dy if numbers[-1] == 1 else dy * numbers[-1]


def _taken(dy: Any, read: Any, numbers: Any) -> Any:
    return _scaled(-dy, read, numbers)


def _clamped(dy: Any, x: Any, least: Any, most: Any) -> Any:
    """The gradient of a clamp: it is passed on between the bounds, and at them."""
    if least is None or most is None:
        return torch.where(x >= least if most is None else x <= most, dy, 0)
    return torch.where((x >= least).logical_and_(x <= most), dy, 0)


def _power(dy: Any, x: Any, exponent: Any) -> Any:
    return torch.zeros_like(dy) if exponent == 0 else dy * (exponent * x.pow(exponent - 1))


def _rooted(dy: Any, y: Any) -> Any:
    """The gradient of `_root` in pointwise.py, which is 0 where the root has no slope."""
    there = y > 0
    return torch.where(there, torch.where(there, dy, 0) / (2 * torch.where(there, y, 1.0)), 0)


def _of_difference(name: str) -> tuple[Slope, Slope]:
    """The slopes of a loss of two arguments, of which it takes the difference."""
    back = _backward(f"{name}_backward")
    return Slope("01", back), Slope("10", back)


def _larger(sign: int) -> tuple[Slope, Slope]:
    """The slopes of maximum or minimum, the first argument's, then the second's. Equal elements get half of the
    gradient each."""

    def of_first(dy: Any, read: Any, numbers: Any) -> Any:
        a, b = read
        return torch.where(a == b, dy / 2, dy).masked_fill_(a < b if sign > 0 else a > b, 0)

    return Slope("01", of_first), Slope("10", of_first)


SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)  # alpha, scale

# By ATen's name, the slope of each tensor argument; None: it has no gradient.
SLOPES: Mapping[str, tuple[Slope | None, ...]] = {
    "relu": (Slope("y", lambda dy, t, n: torch.ops.aten.threshold_backward(dy, t[0], 0)),),
    **{name: (Slope("y", _backward(f"{name}_backward")),) for name in ("sigmoid", "tanh")},
    **{
        name: (Slope("0", _backward(f"{name}_backward")),)
        for name in ("silu", "hardswish", "hardsigmoid", "softplus", "hardtanh", "mish", "hardshrink", "softshrink")
    },
    "leaky_relu": (Slope("0", lambda dy, t, n: torch.ops.aten.leaky_relu_backward(dy, t[0], n[0], False)),),
    "threshold": (Slope("0", lambda dy, t, n: torch.ops.aten.threshold_backward(dy, t[0], n[0])),),
    "elu": (Slope("0", lambda dy, t, n: torch.ops.aten.elu_backward(dy, *n, False, t[0])),),
    "gelu": (Slope("0", lambda dy, t, n: torch.ops.aten.gelu_backward(dy, t[0], approximate=n[0])),),
    "selu": (Slope("0", lambda dy, t, n: torch.ops.aten.elu_backward(dy, *SELU, 1.0, False, t[0])),),
    "relu6": (Slope("0", lambda dy, t, n: torch.ops.aten.hardtanh_backward(dy, t[0], 0, 6)),),
    "log_sigmoid": (
        Slope("0", lambda dy, t, n: torch.ops.aten.log_sigmoid_backward(dy, t[0], torch.exp(-t[0].abs()))),
    ),
    "clamp": (Slope("0", lambda dy, t, n: _clamped(dy, t[0], *n)),),
    "clamp_min": (Slope("0", lambda dy, t, n: _clamped(dy, t[0], n[0], None)),),
    "clamp_max": (Slope("0", lambda dy, t, n: _clamped(dy, t[0], None, n[0])),),
    "add.Tensor": (Slope("", _passed), Slope("", _scaled)),
    "sub.Tensor": (Slope("", _passed), Slope("", _taken)),
    "rsub.Tensor": (Slope("", _taken), Slope("", _passed)),
    "mul.Tensor": (Slope("1", _times), Slope("0", _times)),
    "div.Tensor": (
        Slope("1", lambda dy, t, n: dy / t[0]),
        Slope("01", lambda dy, t, n: -dy * ((t[0] / t[1]) / t[1])),
    ),
    "add.Scalar": (Slope("", _passed),),
    "sub.Scalar": (Slope("", _passed),),
    "rsub.Scalar": (Slope("", _taken),),
    "mul.Scalar": (Slope("", _scaled),),
    "div.Scalar": (Slope("", lambda dy, t, n: dy / n[0]),),
    "neg": (Slope("", lambda dy, t, n: -dy),),
    "abs": (Slope("0", lambda dy, t, n: dy * t[0].sgn()),),
    "exp": (Slope("y", _times),),
    "expm1": (Slope("y", lambda dy, t, n: dy * (t[0] + 1)),),
    "log": (Slope("0", lambda dy, t, n: dy / t[0]),),
    "log1p": (Slope("0", lambda dy, t, n: dy / (t[0] + 1)),),
    "log2": (Slope("0", lambda dy, t, n: dy / (t[0] * log(2))),),
    "log10": (Slope("0", lambda dy, t, n: dy / (t[0] * log(10))),),
    "exp2": (Slope("y", lambda dy, t, n: dy * t[0] * log(2)),),
    "atan": (Slope("0", lambda dy, t, n: dy / (t[0] * t[0] + 1)),),
    "sin": (Slope("0", lambda dy, t, n: dy * t[0].cos()),),
    "cos": (Slope("0", lambda dy, t, n: dy * -t[0].sin()),),
    "erf": (Slope("0", lambda dy, t, n: 2.0 / sqrt(pi) * torch.exp(-(t[0].pow(2))) * dy),),
    "sqrt": (Slope("y", lambda dy, t, n: dy / (2 * t[0])),),
    "rsqrt": (Slope("y", lambda dy, t, n: -0.5 * dy * t[0].pow(3)),),
    "reciprocal": (Slope("y", lambda dy, t, n: -dy * (t[0] * t[0])),),
    "square": (Slope("0", lambda dy, t, n: _power(dy, t[0], 2)),),
    "pow.Tensor_Scalar": (Slope("0", lambda dy, t, n: _power(dy, t[0], n[0])),),
    "maximum": _larger(1),
    "minimum": _larger(-1),
    **{name: _of_difference(name) for name in ("mse_loss", "smooth_l1_loss", "huber_loss")},
    "where.self": (
        None,
        Slope("0", lambda dy, t, n: torch.where(t[0], dy, 0)),
        Slope("0", lambda dy, t, n: torch.where(t[0], 0, dy)),
    ),
    "masked_fill.Scalar": (Slope("1", lambda dy, t, n: dy.masked_fill(t[0], 0)), None),
    **{name: (Slope("", _passed),) for name in ("clone", "alias", "_to_copy")},
    # functions of pointwise.py that are no operators
    "root": (Slope("y", lambda dy, t, n: _rooted(dy, t[0])),),
    "prelu": (
        Slope("01", lambda dy, t, n: torch.where(t[0] >= 0, dy, 0) + torch.where(t[0] >= 0, 0, dy) * t[1]),
        Slope("0", lambda dy, t, n: torch.where(t[0] >= 0, 0, dy) * t[0]),
    ),
    "affine": (Slope("1", _times), Slope("0", _times), Slope("", _passed)),
}


@dataclass(frozen=True)
class Sloped:
    """A call whose operands have slopes.

    Attributes:
        slopes: one for each tensor argument.
        sources: for each tensor argument, the number of its operand, or None and the number that stands in its place.
        numbers: the arguments behind the tensors.
    """

    slopes: tuple[Slope | None, ...]
    sources: tuple[tuple[int | None, Any], ...]
    numbers: tuple[Any, ...]

    def of(self, operand: int) -> list[Slope | None]:
        """The slopes of the arguments in whose place an operand stands."""
        return [slope for slope, (k, _) in zip(self.slopes, self.sources, strict=True) if k == operand]

    def knows(self, operands: Iterable[int]) -> bool:
        """Whether each of these operands has a slope. With three addends their order would matter; no operand has as
        many."""
        return all(0 < len(found := self.of(k)) <= 2 and None not in found for k in operands)

    def reads(self, wanted: Sequence[bool]) -> set[int]:
        """The numbers of the operands that the wanted gradients read; the number behind the last one is y's."""
        found: set[int | None] = set()
        for slope, (k, _) in zip(self.slopes, self.sources, strict=True):
            if k is not None and wanted[k] and slope is not None:
                found |= {len(wanted) if r == "y" else self.sources[int(r)][0] for r in slope.reads}
        return {k for k in found if k is not None}

    @cached_property
    def _reads(self) -> dict[tuple[bool, ...], set[int]]:
        return {}

    def kept(self, wanted: Sequence[bool], operands: Sequence[Any], y: Any) -> tuple[Any, ...]:
        """The operands, then y, each if it is read, else None; then the operands' types where they differ from y's."""
        which = tuple(wanted)
        if which not in self._reads:
            self._reads[which] = self.reads(which)
        read, mixed = self._reads[which], any(t.dtype != y.dtype for t in operands)
        if not mixed and not read:
            return ()
        found = [t if k in read else None for k, t in enumerate((*operands, y))]
        return (*found, tuple(t.dtype for t in operands)) if mixed else tuple(found)

    def gradients(
        self, wanted: Sequence[bool], kept: Sequence[Any], dy: Any, shapes: Sequence[Sequence[int]]
    ) -> tuple[Any, ...]:
        """The gradients of the operands, which have these shapes."""
        found: list[Any] = [None] * len(wanted)
        mixed = len(kept) > len(wanted) + 1
        for k, back, sources in self._backs:
            if not wanted[k]:
                continue
            read = [number if source is None else kept[source] for source, number in sources]
            made = summed_to(back(dy, read, self.numbers), shapes[k])
            if mixed and made.dtype != kept[-1][k]:
                made = made.to(kept[-1][k])
            found[k] = made if found[k] is None else found[k] + made
        return tuple(found)

    @cached_property
    def _backs(self) -> list[tuple[int, Back, list[tuple[int | None, Any]]]]:
        """For each argument that has a slope: its operand, the function that makes its gradient, and where each thing
        that this reads is kept, or the number that stands in its place. y is kept behind the operands."""
        count = 1 + max((k for k, _ in self.sources if k is not None), default=-1)
        return [
            (k, slope.back, [(count, None) if r == "y" else self.sources[int(r)] for r in slope.reads])
            for slope, (k, _) in zip(self.slopes, self.sources, strict=True)
            if k is not None and slope is not None
        ]
