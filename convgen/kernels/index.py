"""Symbolic index maps: where an element of an operand lies, as sympy, printed as Triton.

A map is the memory order of an operand's coordinates. Kernels that convolve, pack and unpack print their
addresses from the same maps: a tensor, or the parts that a collective delivers, is one more coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from sympy.printing.str import StrPrinter

Name = str | int


@dataclass(frozen=True)
class IndexMap:
    """Coordinates of an operand, slowest first, and the extent of each (the first one's is never needed)."""

    order: tuple[tuple[str, str], ...]

    def offset(self, at: Mapping[str, Name | sympy.Expr]) -> sympy.Expr:
        """Elements from the start of the operand; coordinates that `at` leaves out are 0."""
        total: sympy.Expr = sympy.Integer(0)
        for coordinate, extent in self.order:
            total = total * expression(extent) + expression(at.get(coordinate, 0))
        return total

    def text(self, **at: Name | sympy.Expr) -> str:
        return show(self.offset(at))


def expression(value: Name | sympy.Expr) -> sympy.Expr:
    """A name (or a product of names) as sympy."""
    if isinstance(value, sympy.Expr):
        return value
    if isinstance(value, int):
        return sympy.Integer(value)
    names = {n: sympy.Symbol(n, integer=True, nonnegative=True) for n in _names(value)}
    return sympy.sympify(value, locals=names)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _names(text: str) -> Sequence[str]:
    for mark in "+-*()":
        text = text.replace(mark, " ")
    return [word for word in text.split() if word.isidentifier()]


class _Printer(StrPrinter):
    """Sums and products in the order one reads an address: ((n * XH + xh) * XW + xw) * C + c."""

    def _print_Add(self, expr: sympy.Expr, order: object = None) -> str:
        terms = sorted(expr.args, key=lambda a: (a.could_extract_minus_sign(), -_depth(a), str(a)))
        text = " + ".join(self._print(a) for a in terms if not a.could_extract_minus_sign())
        return text + "".join(f" - {self._print(-a)}" for a in terms if a.could_extract_minus_sign())

    def _print_Mul(self, expr: sympy.Expr) -> str:
        def place(a: sympy.Basic) -> tuple[int, str]:
            kind = 0 if isinstance(a, sympy.Add) else 3 if a.is_Integer else 1 if str(a).islower() else 2
            return kind, str(a)

        parts = [(f"({self._print(a)})" if isinstance(a, sympy.Add) else self._print(a), a) for a in expr.args]
        return " * ".join(text for text, a in sorted(parts, key=lambda pair: place(pair[1])))


def _depth(a: sympy.Basic) -> int:
    return 1 + max((_depth(b) for b in a.args), default=0)


def show(value: sympy.Expr) -> str:
    """Triton's text of an index expression; sums and products only, so Python's is Triton's."""
    return _Printer().doprint(value)


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
    return IndexMap(tuple([*head, ("n", "N"), *inner]))


def filter_map(letters: Sequence[str], channels: str, taps: Sequence[int], *, last: bool) -> IndexMap:
    """w: F, C, kernel; channels fastest where `last`."""
    kernel = [(f"k{a}", str(n)) for a, n in zip(letters, taps, strict=True)]
    inner = [*kernel, ("c", channels)] if last else [("c", channels), *kernel]
    return IndexMap((("f", "F"), *inner))
