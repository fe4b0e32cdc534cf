"""What describers work with: values, the rows found so far, and the table of describers by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from convgen.errors import InputError
from convgen.late import torch
from convgen.operations.bound import Bound
from convgen.operations.calls import Elementwise, Slot
from convgen.operations.row import Operation
from convgen.operations.views import View
from convgen.spec.graph import FLOATS, Call, Ref


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value; its shape is the whole tensor's at the sizes that are described."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str  # input, parameter, buffer, constant or made

    @property
    def floats(self) -> bool:
        return self.dtype in FLOATS


@dataclass
class Reader:
    """The rows and values of a network, as they are found call by call.

    Attributes:
        rows: the rows so far; `calls`: for each, the number of its call.
        whole: numbers of calls that run whole.
        norm: the name of the batch norm whose rows are being added.
        taken: names of all results of calls, also later ones, which no value between rows may have.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    rows: list[Bound] = field(default_factory=list[Bound])
    calls: list[int] = field(default_factory=list[int])
    whole: list[int] = field(default_factory=list[int])
    number: int = 0
    module: str = ""
    norm: str = ""
    taken: frozenset[str] = frozenset()

    def of(self, arg: Any) -> Tensor:
        """The value that an argument names."""
        assert isinstance(arg, Ref), arg
        return self.tensors[arg.name]

    def add(self, operation: Operation, reads: Sequence[Tensor], makes: Sequence[str]) -> None:
        """Add a row; its results have the types of the call's, or types known already."""
        self.rows.append(Bound(operation, tuple(t.name for t in reads), tuple(makes), self.module, self.norm))
        self.calls.append(self.number)

    def add_in(self, dtype: str, operation: Operation, reads: Sequence[Tensor], makes: Sequence[str]) -> None:
        """Add a row that computes in a type of its own, and casts of its results to theirs."""
        ys = [self.tensors[n] for n in makes if n and self.tensors[n].dtype != dtype]
        wide = {y.name: self.made(f"{y.name}_{dtype}", y.shape, dtype) for y in ys}
        self.add(operation, reads, [wide[n].name if n in wide else n for n in makes])
        for y in ys:
            self._cast(wide[y.name], y)

    def cast(self, x: Tensor, dtype: str, name: str) -> Tensor:
        """A value in a type; the value itself if it has that type."""
        if x.dtype == dtype:
            return x
        made = self.made(f"{name}_{dtype}", x.shape, dtype)
        self._cast(x, made)
        return made

    def _cast(self, x: Tensor, y: Tensor) -> None:
        self.elementwise("_to_copy", (Ref(x.name), y.dtype, None, None, None, False, None), y)

    def elementwise(self, op: str, args: Any, y: Tensor, *, smooth: bool = True) -> bool:
        """Add an operator that makes each element of y from elements in the same place; gives whether it is that."""
        found: list[Tensor] = []
        there = slots(args, self, found)
        shapes = tuple(t.shape for t in found)
        if not found or np.broadcast_shapes(*shapes) != y.shape:
            return False
        differentiable = tuple(t.floats and smooth for t in found)
        self.add(Elementwise(op, there, y.shape, shapes, differentiable), found, [y.name])
        return True

    def shapes(self, args: Any) -> list[tuple[int, ...]]:
        """Shapes of all values among arguments."""
        found: list[Tensor] = []
        slots(args, self, found)
        return [t.shape for t in found]

    def floats(self, args: Any) -> bool:
        """Whether all values among arguments are floating-point."""
        found: list[Tensor] = []
        slots(args, self, found)
        return all(t.floats for t in found)

    def made(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        """A new value between the rows of a call."""
        found, n = name, 1
        while found in self.tensors or found in self.taken:
            n += 1
            found = f"{name}_{n}"
        self.tensors[found] = Tensor(found, tuple(shape), dtype, "made")
        return self.tensors[found]


def promoted(*tensors: Tensor) -> str:
    """The type of a sum or product of floating-point values; values without dimensions count only among themselves."""
    most = [t for t in tensors if t.shape] or tensors
    kinds = [getattr(torch, t.dtype) for t in most]
    return str(reduce(torch.promote_types, kinds)).removeprefix("torch.")


def wide_of(x: Tensor) -> str:
    """The type of moments of x."""
    return "float64" if x.dtype == "float64" else "float32"


Describer = Callable[[Reader, Call], bool]  # gives whether it has described the call
KNOWN: dict[str, Describer] = {}


def knows(*operators: str) -> Callable[[Describer], Describer]:
    """Register a describer for operators, with or without an overload."""

    def register(function: Describer) -> Describer:
        for name in operators:
            KNOWN[name] = function
        return function

    return register


def one_sample(describer: Describer) -> Describer:
    """A describer of an operator on samples, channels and rows, so that it also takes one sample without dimension."""

    def described(reader: Reader, call: Call) -> bool:
        x, result = reader.of(call.args[0]), call.results[0]
        n = next(int(c) for c in call.op if c.isdigit())
        if len(x.shape) != n + 1 or result is None or any(call.results[1:]) or not prod(x.shape):
            return describer(reader, call)
        y = reader.tensors[result.name]
        alone = reader.made(f"{y.name}_of", (1, *x.shape), x.dtype)
        reader.add(View(x.shape, alone.shape), [x], [alone.name])
        more = reader.made(f"{y.name}_one", (1, *y.shape), y.dtype)
        results = (replace(result, name=more.name, shape=more.shape), *call.results[1:])
        if not describer(reader, replace(call, args=(Ref(alone.name), *call.args[1:]), results=results)):
            raise AssertionError(f"{call.op} of one sample, and not without")
        reader.add(View(more.shape, y.shape), [more], [y.name])
        return True

    return described


def slots(args: Any, reader: Reader, found: list[Tensor]) -> Any:
    """Arguments with a slot in place of each value; the values are added to `found`."""
    if isinstance(args, Ref):
        found.append(reader.of(args))
        return Slot(len(found) - 1)
    if not isinstance(args, tuple):
        return args
    items: tuple[Any, ...] = args  # pyright: ignore[reportUnknownVariableType]
    return tuple(slots(a, reader, found) for a in items)


def many(value: Any, count: int) -> tuple[int, ...]:
    """One number for each dimension, from one for all or one for each. Raises InputError: it is neither."""
    values: tuple[int, ...] = value if isinstance(value, tuple) else (value,)  # pyright: ignore[reportUnknownVariableType]
    if len(values) not in (1, count):
        fact = f"{list(values)} stands in the place of a number for each of {count} dimensions"
        raise InputError(fact, hint=f"one number, or a list of {count}")
    return values if len(values) == count else values * count
