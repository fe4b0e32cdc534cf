"""Extents that stay open in an exported program: each symbol's letter, and the conditions that sizes must fulfil.

`torch.export` notes a guard for each decision that a module takes by a size. Guards on values stay as conditions of the
graph: at other sizes the module computes something else. Guards that fail only at small sizes are most often torch's
own, of memory and of broadcasting along an extent of 1: a trial tells whether they matter (exported_trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from itertools import product
from math import prod
from operator import eq, ge, gt, le, lt, ne
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from convgen.errors import InputError
from convgen.spec.exported_walk import FixedError
from convgen.spec.extents import LETTERS, Condition, condition_from_sympy

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

Opened = Mapping[str, Mapping[str, int]]  # by input: by letter, the number of the dimension
Follows = dict[str, dict[int, Callable[[Mapping[str, int]], Any]]]  # by input, by dimension: its extent from letters
FOLLOWS = "+"  # begins the letter of an extent that follows from letters of other inputs
PROBES = (*range(2, 17), 31, 64, 97, 1021, 65536)  # numbers of samples at which conditions must hold
LARGE = 256  # a guard that holds from here on fails only at small sizes
TRIED = (*range(LARGE, LARGE + 64), 509, 1021, 4099)


class Small(NamedTuple):
    """A guard that fails only at small sizes: its text, its letters, and a function that says whether it holds."""

    said: str
    letters: tuple[str, ...]
    holds: Callable[[Mapping[str, int]], Any]


@dataclass
class Symbols:
    """The symbols of an exported program.

    Attributes:
        letters: by symbol, its letter.
        sizes: by letter other than N, its size in the example.
        conditions: on sizes.
        small: guards that fail only at small sizes.
        follows: by input, by dimension, extents that follow from letters.
    """

    letters: dict[Any, str] = field(default_factory=dict[Any, str])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    conditions: list[Condition] = field(default_factory=list[Condition])
    small: list[Small] = field(default_factory=list["Small"])
    follows: Follows = field(default_factory=dict[str, "dict[int, Callable[[Mapping[str, int]], Any]]"])


def check_opened(opened: Opened, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Refuse extents that can't be open: of unknown names, letters or dimensions, or 0 or 1 in the example."""
    sizes: dict[str, tuple[int, str]] = {}
    for argument, dims in opened.items():
        if argument not in tensors:
            raise InputError(f"open: {name} has no input {argument}", hint=f"one of {', '.join(tensors)}")
        shape, letters = tensors[argument].shape, dict[int, str]()
        for letter, d in dims.items():
            if letter.startswith(FOLLOWS):
                continue
            if (other := letters.setdefault(d, letter)) != letter:
                fact = f"open: dimension {d} of {argument} is {other} and {letter}"
                raise InputError(fact, hint="a letter for each dimension: {'z': {'H': 2, 'W': 3}}")
            if letter not in LETTERS or (letter == "N") != (d == 0):
                hint = f"N is dimension 0; others are {', '.join(LETTERS[1:])}"
                raise InputError(f"open: dimension {d} of {argument} can't be {letter}", hint=hint)
            if not (hasattr(d, "__index__") and 0 <= d < len(shape)):
                raise InputError(f"open: {argument} {list(shape)} has no dimension {d}", hint="{'z': {'H': 2, 'W': 3}}")
            size = int(shape[d])
            if size < 2 and letter != "N":
                hint = "an example of 2 or more; whether 1 works is tried"
                raise InputError(f"open: {letter} of {argument} is {size} in the example", hint=hint)
            known, first = sizes.setdefault(letter, (size, argument))
            if known != size and letter != "N":
                raise InputError(
                    f"open: {letter} is {known} of {first} and {size} of {argument}", hint="another letter"
                )


def samples_of(program: ExportedProgram, opened: Mapping[str, torch.Tensor]) -> Symbols:
    """The symbols that stand for the number of samples.

    Raises:
        FixedError: the program holds for some numbers only.
    """
    true: Any = import_module("sympy").true
    found: set[Any] = set()
    guards: dict[str, Any] = {}
    for name, tensor in opened.items():
        size: Any = tensor.shape[0]
        if isinstance(size, int) or not size.node.expr.is_Symbol:
            raise FixedError(f"{name} has {size} of them by the way it is used")
        found.add(size.node.expr)
        guards |= guards_of(size)
    ranges: Any = cast("Any", program).range_constraints
    for symbol, allowed in ranges.items():
        if symbol in found and (allowed.lower > PROBES[0] or allowed.upper < PROBES[-1]):
            most = f"to {allowed.upper}" if allowed.upper.is_Integer else "or more"
            raise FixedError(f"the module's control flow is for {allowed.lower} {most}")
    for said, guard in guards.items():
        if guard.free_symbols & found:  # sympy's true and false have none
            for probe in PROBES:
                if guard.subs(dict.fromkeys(found, probe)) is not true:
                    raise FixedError(f"the module's control flow depends on it ({said})")
    return Symbols(dict.fromkeys(found, "N"))


def symbols_of(program: ExportedProgram, inputs: Mapping[str, torch.Tensor], opened: Opened, name: str) -> Symbols:
    """The symbols of all open extents, and the conditions on them.

    Args:
        opened: by input, its letters, N among them.
    Raises:
        InputError: an extent is fixed by the way it is used, or a guard is no condition of letters.
    """
    found = Symbols()
    guards: dict[str, Any] = {}
    for argument, dims in opened.items():
        for letter, d in dims.items():
            size: Any = inputs[argument].shape[d]
            if letter.startswith(FOLLOWS):
                guards |= {} if isinstance(size, int) else guards_of(size)
                continue
            if isinstance(size, int) or not size.node.expr.is_Symbol:
                fact = f"{name}: {letter}, dimension {d} of {argument}, is {size} by the way it is used"
                raise InputError(fact, hint=f"without {letter} open: an import for this size")
            found.letters[size.node.expr] = letter
            if letter != "N":
                found.sizes[letter] = int(size.node.hint)
            guards |= guards_of(size)
    for argument, dims in opened.items():
        for d in (d for letter, d in dims.items() if letter.startswith(FOLLOWS)):
            extent: Any = inputs[argument].shape[d]
            of = _always(extent) if isinstance(extent, int) else evaluated(extent.node.expr, found.letters)
            if of is None:
                fact = f"{name}: dimension {d} of {argument} does not follow from {', '.join(found.letters.values())}"
                raise InputError(
                    fact, hint="what a chunk makes and what the next one takes, of extents that are its own"
                )
            found.follows.setdefault(argument, {})[d] = of
    ours = {s: import_module("sympy").Symbol(a, positive=True, integer=True) for s, a in found.letters.items()}
    names = {one: one.name for one in ours.values()}
    ranges: Any = cast("Any", program).range_constraints
    for symbol, allowed in ranges.items():
        if (letter := found.letters.get(symbol)) is not None:
            if allowed.lower.is_Integer and int(allowed.lower) > 2:
                least = Condition(letter, ">=", int(allowed.lower))
                found.small.append(Small(str(least), (letter,), least.holds))
            if allowed.upper.is_Integer and int(allowed.upper) < 2**31 - 1:
                found.conditions.append(Condition(letter, "<=", int(allowed.upper)))
    for said, guard in guards.items():
        known = guard.subs(ours)
        if not known.free_symbols or not known.free_symbols <= {*names}:
            continue
        letters = sorted(names[one] for one in known.free_symbols)
        holds, fails = evaluated(known, names), list[dict[str, int]]()
        if holds is not None:
            holds = _without_faults(holds)
            fails = [at for at in _tried(letters) if not holds(at)]
        condition = condition_from_sympy(known, names)
        if holds is None or (fails and condition is None):
            fact = (
                f"{name}: the module's control flow depends on {', '.join(letters)} by {known}, which is no condition"
            )
            raise InputError(fact, hint=f"without {', '.join(letters)} open")
        if fails and condition is not None and condition not in found.conditions:
            found.conditions.append(condition)
        elif not fails:
            found.small.append(Small(said, tuple(letters), holds))
    return found


def _always(n: int) -> Callable[[Mapping[str, int]], Any]:
    return lambda _: n


def _tried(letters: Sequence[str]) -> Iterator[dict[str, int]]:
    """Large sizes: all letters equal; with several letters each varied alone, and 2000 random ones."""
    draw = Random(0)
    for size in TRIED:
        yield dict.fromkeys(letters, size)
    if len(letters) > 1:
        for letter, size in product(letters, TRIED):
            yield dict.fromkeys(letters, LARGE) | {letter: size}
        for _ in range(2000):
            yield {letter: draw.choice(TRIED) for letter in letters}


def _without_faults(holds: Callable[[Mapping[str, int]], Any]) -> Callable[[Mapping[str, int]], bool]:
    """A guard that does not hold where it divides by zero."""

    def of(sizes: Mapping[str, int]) -> bool:
        try:
            return bool(holds(sizes))
        except ZeroDivisionError:
            return False

    return of


def guards_of(size: Any) -> dict[str, Any]:
    """Guards by their text, which is from before equal symbols became one."""
    env = size.node.shape_env
    return {str(guard.expr): guard.expr.subs(env.replacements) for guard in env.guards}


_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "Equality": eq, "Unequality": ne, "LessThan": le, "StrictLessThan": lt, "GreaterThan": ge, "StrictGreaterThan": gt,
    "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "IntTrueDiv": lambda a, b: a / b,
    "PythonMod": lambda a, b: a % b, "Mod": lambda a, b: a % b, "Pow": lambda a, b: a**b,
}  # fmt: skip
_MANY: dict[str, Callable[[Iterable[Any]], Any]] = {
    "Add": sum, "Mul": prod, "Max": max, "Min": min, "And": all, "Or": any, "Not": lambda one: not next(iter(one)),
}  # fmt: skip


def evaluated(e: Any, names: Mapping[Any, str]) -> Callable[[Mapping[str, int]], Any] | None:
    """A guard as a function of letters' sizes; None where it has anything but arithmetic in it.

    Args:
        names: by symbol, its letter.
    """
    kind = type(e).__name__
    if e.is_Symbol:
        letter = names.get(e)
        return None if letter is None else lambda sizes: sizes[letter]
    if e.is_Integer:
        whole = int(e)
        return lambda _: whole
    if e.is_Rational:
        ratio = Fraction(int(e.p), int(e.q))
        return lambda _: ratio
    if e.is_Float:
        number = float(e)
        return lambda _: number
    if kind in ("BooleanTrue", "BooleanFalse"):
        true = kind == "BooleanTrue"
        return lambda _: true
    found = [evaluated(one, names) for one in e.args]
    parts = [one for one in found if one is not None]
    if len(parts) < len(found) or not parts:
        return None
    if (many := _MANY.get(kind.removeprefix("Python"))) is not None:
        return lambda sizes: many(one(sizes) for one in parts)
    if (sign := _SIGNS.get(kind)) is not None and len(parts) == 2:
        a, b = parts
        return lambda sizes: sign(a(sizes), b(sizes))
    return None
