"""Extents that stay open in an exported program: which symbols are which letters, and what they have to fulfil.

`torch.export` notes a guard for each decision that a module took by a size. Those on values stay as conditions of the
graph: for other sizes the module computes something else. Those that hold for all sizes but where something is 0 or 1
are torch's own, of memory and of broadcasting; `Trial` (exported_trial.py) tells whether they matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.spec.exported_walk import FixedError
from convgen.spec.extents import LETTERS, Condition, condition_from_sympy

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

Opened = Mapping[str, Mapping[str, int]]  # by input, by letter the number of the dimension
PROBES = (*range(2, 17), 31, 64, 97, 1021, 65536)  # numbers of samples for which conditions must hold
TRIED = (2, 3, 5, 8, 13, 16, 30, 48, 97, 256)  # sizes at which a condition that always holds is found to


@dataclass
class Symbols:
    """Of an exported program.

    Attributes:
        letters: by symbol.
        sizes: by letter other than N, the example's.
        conditions: of sizes.
        small: those that hold but where something is 0 or 1.
    """

    letters: dict[Any, str] = field(default_factory=dict[Any, str])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    conditions: list[Condition] = field(default_factory=list[Condition])
    small: list[Condition] = field(default_factory=list[Condition])


def check_opened(opened: Opened, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Refuse what can't be open: other names, letters, dimensions, and examples of extents 0 and 1."""
    sizes: dict[str, tuple[int, str]] = {}
    for argument, dims in opened.items():
        if argument not in tensors:
            raise InputError(f"open: {name} has no input {argument}", hint=f"one of {', '.join(tensors)}")
        shape = tensors[argument].shape
        for letter, d in dims.items():
            if letter not in LETTERS or (letter == "N") != (d == 0):
                hint = f"N is dimension 0; others are {', '.join(LETTERS[1:])}"
                raise InputError(f"open: dimension {d} of {argument} can't be {letter}", hint=hint)
            if not 0 <= d < len(shape):
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
    """Symbols of all open extents, and the conditions on them.

    Args:
        opened: of each input its letters, N among them.
    Raises:
        InputError: an extent is fixed by the way it is used, or a guard is no condition of letters.
    """
    found = Symbols()
    guards: dict[str, Any] = {}
    for argument, dims in opened.items():
        for letter, d in dims.items():
            size: Any = inputs[argument].shape[d]
            if isinstance(size, int) or not size.node.expr.is_Symbol:
                fact = f"{name}: {letter}, dimension {d} of {argument}, is {size} by the way it is used"
                raise InputError(fact, hint=f"without {letter} open: an import for this size")
            found.letters[size.node.expr] = letter
            if letter != "N":
                found.sizes[letter] = int(size.node.hint)
            guards |= guards_of(size)
    ours = {s: import_module("sympy").Symbol(a, positive=True, integer=True) for s, a in found.letters.items()}
    names = {one: one.name for one in ours.values()}
    ranges: Any = cast("Any", program).range_constraints
    for symbol, allowed in ranges.items():
        if (letter := found.letters.get(symbol)) is not None:
            if allowed.lower.is_Integer and int(allowed.lower) > 2:
                found.conditions.append(Condition(letter, ">=", int(allowed.lower)))
            if allowed.upper.is_Integer and int(allowed.upper) < 2**31 - 1:
                found.conditions.append(Condition(letter, "<=", int(allowed.upper)))
    for said, guard in guards.items():
        if not guard.free_symbols:
            continue
        known = guard.subs(ours)
        if not known.free_symbols:
            continue
        condition = condition_from_sympy(known, names)
        if condition is None:
            fact = f"{name}: the module's control flow depends on sizes by {said}, which is no condition of letters"
            raise InputError(fact, hint=f"without {', '.join(found.sizes)} open")
        kind = kind_of(condition)
        if kind != "always" and condition not in (*found.conditions, *found.small):
            (found.small if kind == "small" else found.conditions).append(condition)
    return found


def guards_of(size: Any) -> dict[str, Any]:
    """Guards by their texts, as said before symbols that are equal became one."""
    env = size.node.shape_env
    return {str(guard.expr): guard.expr.subs(env.replacements) for guard in env.guards}


def kind_of(condition: Condition) -> str:
    """always: it holds for all sizes from 1 on that are tried; small: but where something is 0 or 1; else sizes."""
    letters = sorted(condition.letters)
    grid: Sequence[tuple[int, ...]] = [*product((1, *TRIED), repeat=len(letters))][:4000]
    fails = [at for at in grid if not condition.holds(dict(zip(letters, at, strict=True)))]
    if not fails:
        return "always"
    return "small" if _is_of_one(condition) else "sizes"


def _is_of_one(condition: Condition) -> bool:
    """Whether it compares something with 0 or 1: `(H - 1)//2 + 1 != 1`, `2 <= H`."""
    for a, sign, b in (
        (condition.left, condition.sign, condition.right),
        (condition.right, _TURNED[condition.sign], condition.left),
    ):
        if isinstance(b, int) and not isinstance(a, int):
            if sign == "!=" and b in (0, 1):
                return True
            if (sign == ">" and b in (0, 1)) or (sign == ">=" and b in (1, 2)):
                return True
    return False


_TURNED = {"==": "==", "!=": "!=", "<=": ">=", "<": ">", ">=": "<=", ">": "<"}
