"""Functions of one element of each operand: activations, add, gate, bias, affine. Nothing is communicated forward.

A dimension that an operand lacks, or has with extent 1 where the result has more, is a missing index: it is read whole,
and its gradient is partial over that index's axes. So a bias needs no rule of its own, nor has a gate one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.averaged import Averaged
from convgen.operations.element_texts import AFFINE, ONE, TWO, ElementStep, of_one
from convgen.operations.elementwise_gradients import SLOPES, Sloped
from convgen.operations.row import At, EpilogueStep, Launch, Operation, Work, numbered, own, read_here


def _aten(path: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        return reduce(getattr, path.split("."), torch)(*operands)

    return call


def _relu6(x: Any) -> Any:
    return torch.clamp(x, 0, 6)


def _prelu(x: Any, w: Any) -> Any:
    return torch.where(x >= 0, x, w * x)


def _affine(x: Any, w: Any, b: Any) -> Any:
    return torch.addcmul(b, x, w) if x.dtype == w.dtype == b.dtype else x * w + b


def _root(x: Any) -> Any:
    """The square root, whose gradient at 0 is 0, as that of a norm."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: _aten(name) for name in ("relu", "sigmoid", "tanh", "exp", "sqrt", "square", "add", "sub", "mul", "div")},
    **{name: _aten(f"nn.functional.{name}") for name in ("leaky_relu", "silu", "gelu", "softplus", "hardswish")},
    "root": _root,
    "relu6": _relu6,
    "prelu": _prelu,
    "affine": _affine,
}


# What a function is among `SLOPES`, and the numbers that it takes where a row says none.
SLOPES_OF: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **{name: (name, ()) for name in ("relu", "sigmoid", "tanh", "exp", "sqrt", "square", "silu", "hardswish")},
    **{name: (name, ()) for name in ("root", "prelu", "affine")},
    **{name: (f"{name}.Tensor", (1,)) for name in ("add", "sub")},
    **{name: (f"{name}.Tensor", ()) for name in ("mul", "div")},
    "leaky_relu": ("leaky_relu", (0.01,)),
    "gelu": ("gelu", ("none",)),
    "softplus": ("softplus", (1.0, 20.0)),
    "relu6": ("clamp", (0, 6)),
}


@dataclass(frozen=True)
class Pointwise(Operation):
    """A function of one element of each operand.

    Attributes:
        function: its name in `FUNCTIONS`.
        shape: the result's.
        shapes: the operands'.
        places: for each operand the result's dimension that each of its dimensions is, in order; () means the last
            ones, as broadcasting has it.
        settings: numbers that the function takes after its operands, such as a slope or a factor.
        keeps: whether under autocast the result has the first operand's type, as a norm's has.
    """

    function: str
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, ...], ...] = ()
    settings: tuple[float, ...] = ()
    keeps: bool = False

    any_order = True

    @property
    def name(self) -> str:
        return self.function

    def vectors_of(self, of: Averaged) -> tuple[str, bool]:
        """The letters `w`, `b` or both, if it is the scale, the shift or both behind a norm, else ""; and whether these
        vectors have a number for each channel, or else one for each element that is normalised together."""
        vectors = {"mul": "w", "add": "b", "affine": "wb"}.get(self.function, "")
        if self.settings or not self.keeps or self.shape != of.shape:
            return "", False
        shapes, places = {*self.shapes[1:]}, {*(self.places[1:] or ((),))}
        by_channel = (shapes, places, of.keep) == ({of.shape[1:2]}, {(1,)}, (0, 1))
        each = of.shape[len(of.keep) :]
        by_element = (shapes, places, of.size) == ({each}, {()}, 1) and len(each) > 0
        return vectors if by_channel or by_element else "", by_channel

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        last = range(len(self.shape))
        places = self.places or ((),) * len(self.shapes)
        return tuple(p or tuple(last[len(last) - len(s) :]) for p, s in zip(places, self.shapes, strict=True))

    @property
    def joins(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, inputs = numbered(len(self.shape)), list[Operand]()
        for k, (shape, places) in enumerate(zip(self.shapes, self._places, strict=True)):
            dims = (names[d] if n == self.shape[d] else None for d, n in zip(places, shape, strict=True))
            inputs.append(Operand(f"x{k}", shape, own(*dims)))
        y = Operand("y", self.shape, own(*names))
        return (Signature(tuple(zip(names, self.shape, strict=True)), tuple(inputs), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (self._made(at, self._all_aligned(operands)),)

    def _all_aligned(self, operands: Sequence[Any]) -> list[Any]:
        dims = len(self.shape)
        return [_aligned(t, places, dims) for t, places in zip(operands, self._places, strict=True)]

    def _made(self, at: At, aligned: Sequence[Any]) -> Any:
        made = FUNCTIONS[self.function](*aligned, *self.settings)
        made = made.to(aligned[0].dtype) if self.keeps and at.low is not None else made
        return made if self.shape in self.shapes else made.expand([at.extent(i) for i in numbered(len(self.shape))])

    def local_over(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, kinds = operands[0], {t.dtype for t in operands}
        if self.function not in ("relu", "add") or self.settings or self.shapes[0] != self.shape or 0 in x.stride():
            return self.local(way, at, *operands)
        if self.function == "relu":
            return (torch.relu_(x),)
        return (x.add_(self._all_aligned(operands)[1]),) if len(kinds) == 1 else self.local(way, at, *operands)

    def kept_over(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (y,) = self.local_over(way, at, *operands)  # relu keeps y, a sum nothing
        return (y,), self.sloped.kept(wanted, self._all_aligned(operands), y)

    @property
    def writes_over(self) -> bool:
        return self.function in ("relu", "add") and not self.settings and self.shapes[0] == self.shape

    @property
    def adds_along(self) -> int | None:
        if self.function != "add" or self.settings or self.shapes[0] != self.shape or len(self.shapes[1]) != 1:
            return None
        (d,) = self._places[1]
        return d if self.shapes[1] == (self.shape[d],) else None

    @cached_property
    def sloped(self) -> Sloped:
        """The slopes by which it is differentiated."""
        name, numbers = SLOPES_OF[self.function]
        sources = tuple((k, None) for k in range(len(self.shapes)))
        return Sloped(SLOPES[name], sources, (*self.settings, *numbers[len(self.settings) :]))

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        aligned = self._all_aligned(operands)
        y = self._made(at, aligned)
        return (y,), self.sloped.kept(wanted, aligned, y)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        if (known := at.known.get(self)) is None:
            known = at.known[self] = self._extents(at)
        shapes, aligned = known
        found = self.sloped.gradients(wanted, kept, dys[0], aligned)
        same = zip(found, shapes, aligned, strict=True)
        return tuple([g if g is None or shape == wide else g.reshape(shape) for g, shape, wide in same])

    def _extents(self, at: At) -> tuple[list[list[int]], list[list[int]]]:
        """The operands' extents at a place: as they are, and with extents of 1 in dimensions that they lack."""
        shapes, aligned = [read_here(at, k) for k in range(len(self.shapes))], list[list[int]]()
        for shape, places in zip(shapes, self._places, strict=True):
            aligned.append(wide := [1] * len(self.shape))
            for d, n in zip(places, shape, strict=True):
                wide[d] = n
        return shapes, aligned

    def undone(self, way: int, at: At) -> tuple[Launch, ...]:
        """Launches for backward. An addend in the sum's shape gets the sum's gradient as it is, without a launch. The
        gradient of another, as a bias, is a sum that reads the sum's gradient once."""
        if self.function != "add" or self.settings:
            return self.launches(way, at)
        summed = tuple(k for k, shape in enumerate(self.shapes) if shape != self.shape)
        read, made = prod(at.extent(i) for i in numbered(len(self.shape))), sum(prod(read_here(at, k)) for k in summed)
        return (Launch(self, Work(read, read + made), summed, hands_on=True),)

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        """The step on the first operand's elements; the other operands must be vectors over channels, or have its
        shape."""
        step = self.element_step() if self.function in ("relu", "add", "mul", "affine") else None
        if step is None or k or self.shapes[0] != self.shape or len(self.shape) < 2:
            return None
        operands: list[tuple[str, int]] = []
        for shape, places in zip(self.shapes[1:], self._places[1:], strict=True):
            if shape != self.shape and (places, shape) != ((1,), self.shape[1:2]):
                return None
            operands.append(("element" if shape == self.shape else "channel", 1))
        text = step.text.format("{x}", *(f"{{{n}}}" for n in range(len(operands))))
        return EpilogueStep(text, tuple(operands), {"relu": "result", "add": "sum"}.get(self.function, "input"))

    def back_of_result(self) -> EpilogueStep | None:
        if self.function != "relu":
            return None
        return EpilogueStep(ONE["relu"].back.format(y="{0}", dy="{x}"), (("element", 1),), "sum")

    def element_step(self) -> ElementStep | None:
        if self.settings:
            return None
        if self.function in ONE and self.function != "leaky_relu":
            return of_one(self.function)
        return AFFINE if self.function == "affine" else TWO.get(self.function)

    def from_result(self, dy: Any, y: Any) -> Any:
        assert self.function == "relu"
        return torch.ops.aten.threshold_backward(dy, y, 0)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The function on operands that are expanded to the result's shape."""
        letters, whole = "abcdefgh"[: len(self.shape)], list[Any]()
        for t, places in zip(operands, self._places, strict=True):
            names, ones = "".join(letters[d] for d in places), torch.ones(self.shape, dtype=t.dtype)
            wide = t.expand([self.shape[d] for d in places])
            whole.append(torch.einsum(f"{letters},{names}->{letters}", ones, wide))
        return (FUNCTIONS[self.function](*whole, *self.settings),)


def _aligned(tensor: Any, places: Sequence[int], dims: int) -> Any:
    """A tensor with extents of 1 in the dimensions that an operand lacks."""
    if len(places) == dims:
        return tensor
    extents = [1] * dims
    for d, n in zip(places, tensor.shape, strict=True):
        extents[d] = n
    return tensor.reshape(extents)


def bias(shape: tuple[int, ...], d: int = 1) -> Pointwise:
    """x + b, where b is a vector over dimension d."""
    return Pointwise("add", shape, (shape, (shape[d],)), ((), (d,)))


def affine(shape: tuple[int, ...], d: int = 1) -> Pointwise:
    """x * w + b, where w and b are vectors over dimension d."""
    vector = (shape[d],)
    return Pointwise("affine", shape, (shape, vector, vector), ((), (d,), (d,)))


def prelu(shape: tuple[int, ...], weights: int) -> Pointwise:
    """PReLU, with one weight, or one for each channel, for elements below 0."""
    return Pointwise("prelu", shape, (shape, (weights,)), ((), (1,)))
