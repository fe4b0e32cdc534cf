"""Formulas as a person writes them: `2*(|data| - 1)*C*F/(|data|*|chan|)`, `2*N*C*(H/|H| + W/|W| + 2)`.

In a product numbers come first, then what depends on the grid alone, then extents in the papers' order.
Common factors of a sum stand before it, and local extents such as H/|H| stay together inside.
"""

from __future__ import annotations

from convgen.algebra.blocks import Uneven
from convgen.algebra.grid import Grid
from convgen.cost.symbolic import Expr, Formula, axis_size, sympy

_EXTENTS = ("N", "C", "F", "G", "D", "H", "W", "Do", "Ho", "Wo", "K", "K_D", "K_H", "K_W")
NO_FORM = "counted by index sets"


def formula_text(formula: Formula, grid: Grid) -> str:
    """Elements that a conversion sends, or flops of a local operation; nothing for a slice.

    A formula holds for ranks with equal shares: a quantity that depends on an axis with unequal ones has none.
    """
    found = formula.elements if formula.flops == 0 else formula.flops
    uneven = {axis_size(axis) for axis, size in grid.axes if isinstance(size, Uneven)}
    if found is None or not uneven.isdisjoint(found.free_symbols):
        return NO_FORM
    return Printer(grid.names).text(found) if found != 0 else ""


class Printer:
    """Prints expressions in a fixed order: sympy's order would depend on the axes' names."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        names = (*(f"|{a}|" for a in axes), *_EXTENTS)
        self.order = {name: i for i, name in enumerate(names)}
        self.axes = frozenset(names[: len(axes)])

    def text(self, expression: Expr) -> str:
        if expression.is_Add:
            common, terms = _common_factor(expression)
            if common == 1:
                return self._sum(terms)
            return self._product((*sympy().Mul.make_args(common), sympy().Add(*terms)))
        return self._product(sympy().Mul.make_args(expression))

    def _product(self, factors: tuple[Expr, ...]) -> str:
        number = sympy().Integer(1)
        above: list[tuple[Expr, Expr]] = []
        below: list[tuple[Expr, Expr]] = []
        for factor in factors:
            if factor.is_number:
                number *= factor
                continue
            base, power = factor.as_base_exp()
            if base.is_Add:  # sympy likes (2*|a| - 2), people 2*(|a| - 1)
                content, base = base.as_content_primitive()
                number *= content**power
            (above if power > 0 else below).append((base, abs(power)))
        over, under = self._powers(above), self._powers(below)
        if number.p != 1 or not over:
            over.insert(0, str(number.p))
        if number.q != 1:
            under.insert(0, str(number.q))
        text = "*".join(over)
        if not under:
            return text
        return f"{text}/{under[0]}" if len(under) == 1 else f"{text}/({'*'.join(under)})"

    def _powers(self, factors: list[tuple[Expr, Expr]]) -> list[str]:
        """A product's powers in groups: sums over axes, symbols, other sums."""
        texts: list[tuple[int, int, str]] = []
        for base, power in factors:
            raised = "" if power == 1 else f"**{power}"
            if base.is_Add:
                texts.append((0 if self._of_axes(base) else 2, 0, f"({self.text(base)}){raised}"))
            else:
                texts.append((1, self.order.get(str(base), len(self.order)), f"{base}{raised}"))
        return [text for *_, text in sorted(texts)]

    def _of_axes(self, expression: Expr) -> bool:
        return all(str(s) in self.axes for s in expression.free_symbols)

    def _sum(self, terms: tuple[Expr, ...]) -> str:
        """The text of a sum, products of extents first, numbers last."""
        text = ""
        for term in sorted(terms, key=self._place):
            negative = term.could_extract_minus_sign()
            body = self.text(-term if negative else term)
            if text:
                text += f" - {body}" if negative else f" + {body}"
            else:
                text = f"-{body}" if negative else body
        return text

    def _place(self, term: Expr) -> tuple[bool, int, list[int], str]:
        symbols = [str(s) for s in term.free_symbols]
        extents = [s for s in symbols if s not in self.axes]
        return term.is_number, -len(extents), sorted(self.order.get(s, len(self.order)) for s in symbols), str(term)


def _common_factor(expression: Expr) -> tuple[Expr, tuple[Expr, ...]]:
    """The factor that all terms of a sum share, and the terms without it; `H/|H|` is taken out whole or not at all."""
    sp = sympy()
    terms = sp.Add.make_args(sp.expand(expression))
    number = sp.gcd_list([term.as_coeff_Mul()[0] for term in terms])
    powers = [term.as_coeff_Mul()[1].as_powers_dict() for term in terms]
    common = number
    for base in sorted(powers[0], key=str):
        if base == 1:
            continue
        found = [p.get(base, 0) for p in powers]
        if all(f > 0 for f in found):
            common *= base ** min(found)
        elif all(f < 0 for f in found):
            common *= base ** max(found)
    return common, tuple(sp.expand(term / common) for term in terms)
