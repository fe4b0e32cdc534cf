"""Symbolic index maps: the address of an operand's element, as sympy, printed as Triton.

A map is the memory order of an operand's coordinates. Kernels that convolve, pack and unpack print their
addresses from the same maps: a tensor, or the parts that a collective delivers, is one more coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Name = str | int
Expr = Any  # sympy.Expr; sympy has few types


@dataclass(frozen=True)
class IndexMap:
    """Coordinates of an operand, slowest first, and the extent of each (the first one's is never needed)."""

    order: tuple[tuple[str, str], ...]

    def offset(self, at: Mapping[str, Name | Expr]) -> Expr:
        """Elements from the start of the operand; coordinates that `at` leaves out are 0."""
        total: Expr = expression(0)
        for coordinate, extent in self.order:
            total = total * expression(extent) + expression(at.get(coordinate, 0))
        return total

    def text(self, **at: Name | Expr) -> str:
        return show(self.offset(at))


def expression(value: Name | Expr) -> Expr:
    """A name (or a product of names) as sympy."""
    sympy = _sympy()
    if not isinstance(value, str):
        return sympy.sympify(value)
    names = {n: sympy.Symbol(n, integer=True, nonnegative=True) for n in _names(value)}
    return sympy.sympify(value, locals=names)


def _sympy() -> Any:
    """The module sympy, imported when an address is printed: a CPU's modules have none."""
    import sympy  # pyright: ignore[reportMissingTypeStubs]

    return sympy


def _names(text: str) -> Sequence[str]:
    for mark in "+-*()":
        text = text.replace(mark, " ")
    return [word for word in text.split() if word.isidentifier()]


def show(value: Expr) -> str:
    """Triton's text of an index expression, in the order one reads an address: ((n * XH + xh) * XW + xw) * C + c."""
    if value.is_Add:
        terms = sorted(value.args, key=lambda t: (-_depth(t), str(t)))
        added = " + ".join(show(t) for t in terms if not t.could_extract_minus_sign())
        return added + "".join(f" - {show(-t)}" for t in terms if t.could_extract_minus_sign())
    if value.is_Mul:
        return " * ".join(f"({show(f)})" if f.is_Add else show(f) for f in sorted(value.args, key=_place))
    return str(value)


def _place(factor: Expr) -> tuple[int, str]:
    """The key that sorts factors: sums first, then coordinates, extents and numbers."""
    kind = 0 if factor.is_Add else 3 if factor.is_Integer else 1 if str(factor).islower() else 2
    return kind, str(factor)


def _depth(value: Expr) -> int:
    return 1 + max((_depth(a) for a in value.args), default=0)


def activation_map(letters: Sequence[str], tensor: str, channels: str, *, last: bool, parts: bool) -> IndexMap:
    """x or y: N, channels `c`, rows; in parts, the part is slowest.

    Args:
        letters: spatial dimensions, lower case, outermost first.
        tensor: "x" or "y": coordinates are xh, xw, extents XH, XW.
        channels: what one part has of them, a name or a product of names.
        last: channels are fastest.
        parts: the operand comes in parts along its channels.
    """
    rows = [(f"{tensor}{a}", f"{tensor}{a}".upper()) for a in letters]
    head = [("part", "PARTS")] if parts else []
    inner = [*rows, ("c", channels)] if last else [("c", channels), *rows]
    return IndexMap((*head, ("n", "N"), *inner))


def filter_map(letters: Sequence[str], channels: str, taps: Sequence[int], *, last: bool) -> IndexMap:
    """w: F, C, kernel; channels fastest where `last`."""
    kernel = [(f"k{a}", str(n)) for a, n in zip(letters, taps, strict=True)]
    inner = [*kernel, ("c", channels)] if last else [("c", channels), *kernel]
    return IndexMap((("f", "F"), *inner))
