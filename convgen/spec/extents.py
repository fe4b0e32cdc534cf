"""Extents that are known at run time: expressions of letters, as `N`, `3*N` or `(H - 1)//2 + 1`.

    Extent = a letter | an integer | Extent (+ | - | * | // | %) Extent

Letters are those of a graph's open extents (`Graph.letters`): N counts samples, the others are rows. An expression is
read from text by a grammar, never run as code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from operator import add, eq, ge, gt, le, lt, mod, mul, ne, sub
from typing import Any, TypeAlias, cast

Tree: TypeAlias = "int | str | tuple[str, Tree, Tree]"
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "//": lambda a, b: a // b, "%": mod}
LETTERS = ("N", "T", "D", "H", "W")  # in the order in which packages have them
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
}  # fmt: skip
_BINDS = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}
LONGEST = 1000  # characters of an expression


@dataclass(frozen=True, slots=True)
class Extent:
    """An expression of letters.

    Example:
        >>> one = Extent.read("(H-1)//2 + 1")
        >>> str(one), one.at({"H": 8}), sorted(one.letters)
        ('(H - 1)//2 + 1', 4, ['H'])
    """

    tree: Tree

    @staticmethod
    def read(text: str) -> Extent | None:
        """The expression that a text says; None where it says none, or has no letter."""
        if len(text) > LONGEST or not text.isascii():
            return None
        try:
            tree = _tree(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return None if tree is None or isinstance(tree, int) or not {*_letters(tree)} else Extent(tree)

    @property
    def letters(self) -> frozenset[str]:
        return frozenset(_letters(self.tree))

    @property
    def times(self) -> tuple[int, str] | None:
        """(k, letter), if it is k times a letter."""
        match self.tree:
            case str(letter):
                return 1, letter
            case ("*", int(k), str(letter)):
                return k, letter
            case _:
                return None

    def at(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes of letters. Raises KeyError, ZeroDivisionError."""
        return _at(self.tree, sizes)

    def __str__(self) -> str:
        return _text(self.tree)

    @property
    def code(self) -> str:
        """The expression as Python, with spaces."""
        return _text(self.tree, spaces=True)


def samples(times: int = 1) -> Extent:
    """The number of samples, so many times."""
    return Extent("N") if times == 1 else Extent(("*", times, "N"))


def value_at(arg: Any, sizes: Mapping[str, int]) -> Any:
    """An extent at these sizes, as a number; in a tuple likewise; anything else as it is."""
    if isinstance(arg, Extent):
        return _at(arg.tree, sizes)
    return tuple([value_at(one, sizes) for one in cast("tuple[Any, ...]", arg)]) if isinstance(arg, tuple) else arg


def extents_in(arg: Any) -> Iterator[Extent]:
    """The extents in an argument."""
    if isinstance(arg, Extent):
        yield arg
    elif isinstance(arg, tuple):
        for one in cast("tuple[Any, ...]", arg):
            yield from extents_in(one)


def _letters(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, tuple):
        yield from _letters(tree[1])
        yield from _letters(tree[2])


@lru_cache(maxsize=1 << 12)
def _function(tree: Tree) -> Callable[[Mapping[str, int]], int]:
    if isinstance(tree, int):
        return lambda _: tree
    if isinstance(tree, str):
        return lambda sizes: sizes[tree]
    sign, a, b = OPERATORS[tree[0]], _function(tree[1]), _function(tree[2])
    return lambda sizes: sign(a(sizes), b(sizes))


def _at(tree: Tree, sizes: Mapping[str, int]) -> int:
    return _function(tree)(sizes)


def _tree(node: ast.expr) -> Tree | None:
    match node:
        case ast.Constant(int(value)) if type(value) is int and value < 2**63:
            return value
        case ast.Name(letter) if letter in LETTERS:
            return letter
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))) if type(value) is int and value < 2**63:
            return -value
        case ast.BinOp(left, sign, right) if type(sign) in _SIGNS:
            a, b = _tree(left), _tree(right)
            return None if a is None or b is None else (_SIGNS[type(sign)], a, b)
        case _:
            return None


def _text(tree: Tree, spaces: bool = False, above: int = 0, right: bool = False) -> str:
    if not isinstance(tree, tuple):
        return f"({tree})" if isinstance(tree, int) and tree < 0 and above else str(tree)
    sign, a, b = tree
    binds = _BINDS[sign]
    wide = f" {sign} " if spaces or binds == 1 else sign
    text = f"{_text(a, spaces, binds)}{wide}{_text(b, spaces, binds, True)}"
    return f"({text})" if above > binds or (above == binds and right) else text


def from_sympy(expression: Any, names: Mapping[Any, str]) -> Extent | int | None:
    """A size of torch.export's as an expression of letters; None where it is none.

    Args:
        names: by symbol, its letter.
    """
    tree = _read(expression, names)
    return None if tree is None else tree if isinstance(tree, int) else Extent(tree)


def _read(e: Any, names: Mapping[Any, str]) -> Tree | None:
    """Sums, products, powers, and quotients rounded down; a product with a fraction becomes a quotient of the whole."""
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        return names.get(e)
    kind = type(e).__name__
    if kind in ("FloorDiv", "CleanDiv", "PythonMod", "Mod"):
        return _joined("%" if kind in ("PythonMod", "Mod") else "//", [_read(a, names) for a in e.args])
    if e.is_Add:
        return _sum(e, names)
    if e.is_Mul:
        factor, rest = e.as_coeff_Mul()
        if factor.is_Rational and not factor.is_Integer:
            top = _read(rest * factor.p, names)
            return _joined("//", [top, int(factor.q)])
        first = [] if factor == 1 else [int(factor)]
        others = sorted((rest.args if rest.is_Mul else (rest,)), key=str)
        return _joined("*", [*first, *(_read(a, names) for a in others)])
    if e.is_Pow and e.exp.is_Integer and 1 < int(e.exp) < 9:
        return _joined("*", [_read(e.base, names)] * int(e.exp))
    return None


def _sum(e: Any, names: Mapping[Any, str]) -> Tree | None:
    found: Tree | None = None
    constant, rest = e.as_coeff_Add()
    if constant.is_Rational and not constant.is_Integer:
        return None
    for term in sorted((rest.args if rest.is_Add else (rest,)), key=str):
        factor, _ = term.as_coeff_Mul()
        minus = bool(factor.is_negative) and found is not None
        one = _read(-term if minus else term, names)
        found = one if found is None else _joined("-" if minus else "+", [found, one])
        if found is None:
            return None
    k = int(constant)
    return found if not k else _joined("+" if k > 0 else "-", [found, abs(k)])


def _joined(sign: str, parts: Sequence[Tree | None]) -> Tree | None:
    found = parts[0]
    for one in parts[1:]:
        if found is None or one is None:
            return None
        found = (sign, found, one)
    return found


COMPARED: dict[str, Callable[[int, int], bool]] = {"==": eq, "!=": ne, "<=": le, "<": lt, ">=": ge, ">": gt}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.LtE: "<=", ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that sizes have to fulfil: `H%8 == 0`.

    Example:
        >>> one = Condition.read("H%8 == 0")
        >>> str(one), one.holds({"H": 24}), one.holds({"H": 12})
        ('H%8 == 0', True, False)
    """

    left: Tree
    sign: str
    right: Tree

    @staticmethod
    def read(text: str) -> Condition | None:
        """The condition that a text says; None where it says none."""
        if len(text) > LONGEST or not text.isascii():
            return None
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        match node:
            case ast.Compare(left, [sign], [right]) if type(sign) in _COMPARED:
                a, b = _tree(left), _tree(right)
                return None if a is None or b is None else Condition(a, _COMPARED[type(sign)], b)
            case _:
                return None

    @property
    def letters(self) -> frozenset[str]:
        return frozenset((*_letters(self.left), *_letters(self.right)))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds at these sizes; it does not where it divides by zero."""
        try:
            return COMPARED[self.sign](_at(self.left, sizes), _at(self.right, sizes))
        except ZeroDivisionError:
            return False

    def __str__(self) -> str:
        return f"{_text(self.left)} {self.sign} {_text(self.right)}"

    @property
    def code(self) -> str:
        """The condition as Python."""
        return f"{_text(self.left, spaces=True)} {self.sign} {_text(self.right, spaces=True)}"


_RELATIONS = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "StrictLessThan": "<",
              "GreaterThan": ">=", "StrictGreaterThan": ">"}  # fmt: skip


def condition_from_sympy(guard: Any, names: Mapping[Any, str]) -> Condition | None:
    """A guard of torch.export's as a condition on letters; None where it is none."""
    sign = _RELATIONS.get(type(guard).__name__)
    if sign is None:
        return None
    a, b = guard.args
    if type(a).__name__ == "IntTrueDiv" and a.args[1].is_Integer and a.args[1].is_positive and b.is_number:
        bound = Fraction(float(b)) * int(a.args[1])  # x/b <= c becomes x <= b*c, without fractions
        a, b = a.args[0] * bound.denominator, bound.numerator
    left, right = _read(a, names), b if isinstance(b, int) else _read(b, names)
    if left is None or right is None:
        return None
    if sign == "<" and isinstance(right, int):
        return Condition(left, "<=", right - 1)
    return Condition(left, sign, right)
