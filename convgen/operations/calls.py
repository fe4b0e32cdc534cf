"""Operators of ATen, called as they are: elementwise ones on blocks, and those that no row describes on whole tensors.

A call has all the arguments of the operator's schema; operands are `Slot`s among them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.along_gradients import Course, courses_of, gradients_by_course, kept_of_course
from convgen.operations.element_texts import ONE, SAME, TWO, ElementStep, of_one, text_of, with_number
from convgen.operations.elementwise_gradients import SLOPES, Sloped
from convgen.operations.row import At, EpilogueStep, Operation, Passes, Work, lies_as, numbered, own, read_here, touched
from convgen.operations.typed import under


@dataclass(frozen=True)
class Slot:
    """An operand's place among arguments."""

    k: int


def operator_of(op: str) -> Any:
    """The operator of a name such as `add.Tensor` or `relu`."""
    name, _, kind = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), kind or "default")


class Call:
    """An operator with its arguments, some of which are operands; its schema is looked up once."""

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        self.function, self.given = operator_of(op), dict[str, Any]()
        self.positional: list[Any] = []
        self.devices: list[str] = []  # arguments that name a device: the operands' is taken
        for wanted, arg in zip(self.function._schema.arguments, under(args, None), strict=True):
            if wanted.name == "device":
                self.devices.append(wanted.name)
            elif wanted.name in ("dtype", "layout", "memory_format") and isinstance(arg, str):
                arg = getattr(torch, arg)
            if wanted.kwarg_only:
                self.given[wanted.name] = arg
            else:
                self.positional.append(arg)
        plain = not (self.devices or any(isinstance(arg, (Slot, tuple)) for arg in self.given.values()))
        self.in_order = plain and self.positional == [Slot(k) for k in range(len(self.positional))]

    def __call__(self, operands: tuple[Any, ...], device: Any = None) -> Any:
        given = self.given
        if self.in_order and len(operands) == len(self.positional):
            return self.function(*operands, **given)
        if given:
            here = operands[0].device if operands else device
            given = {name: here if name in self.devices else _value(arg, operands) for name, arg in given.items()}
        return self.function(*[_value(arg, operands) for arg in self.positional], **given)


def call(op: str, args: tuple[Any, ...], operands: tuple[Any, ...], device: Any = None) -> Any:
    """Call an operator on operands; the result is on their device, whatever device the arguments name.

    Args:
        device: that of a result of no operands; None: torch's default.
    """
    return Call(op, args)(operands, device)


def _value(arg: Any, operands: tuple[Any, ...]) -> Any:
    if type(arg) is Slot:
        return operands[arg.k]
    if type(arg) is not tuple:
        return arg
    items: tuple[Any, ...] = arg  # pyright: ignore[reportUnknownVariableType]
    return [_value(a, operands) for a in items]


def _results(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _in_place(own: str, other: str, k: int) -> tuple[str, str]:
    """The texts of two operands in their order, where `own` is number k."""
    return (own, other) if k == 0 else (other, own)


@dataclass(frozen=True)
class Elementwise(Operation):
    """An operator that makes each element of its operands' elements in the same place, by broadcasting.

    Attributes:
        op: ATen's name of it, with the overload.
        shape: the result's; `shapes`: the operands'.
        differentiable: for each operand, whether it is; () if all are.
    """

    op: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    differentiable: tuple[bool, ...] = ()

    any_order = True

    @property
    def name(self) -> str:
        return self.op.partition(".")[0]

    @property
    def passes(self) -> Passes:
        """How often backward goes over the row: addends of a sum get its gradient as it is; broadcast ones get sums of
        it."""
        if self.op != "add.Tensor" or self.args[-1] != 1:
            return "each"
        return "none" if {*self.shapes} == {self.shape} else "once"

    @property
    def casts_to(self) -> str:
        """The type that it only casts to, under any autocast; "" if it does anything else."""
        kind = self.args[1] if self.op == "_to_copy" else None
        return kind if isinstance(kind, str) else ""

    @property
    def hands_gradient_on(self) -> bool:
        return self.op in ("add.Tensor", "sub.Tensor")

    @property
    def rides(self) -> bool:
        """Whether it makes one number, such as how many batches there were, and so is no launch of its own."""
        return not self.shape

    @property
    def joins(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, inputs = numbered(len(self.shape)), list[Operand]()
        for k, shape in enumerate(self.shapes):
            last = len(self.shape) - len(shape)
            dims = (names[last + d] if n == self.shape[last + d] else None for d, n in enumerate(shape))
            inputs.append(
                Operand(f"x{k}", shape, own(*dims), gradient=not self.differentiable or self.differentiable[k])
            )
        y = Operand("y", self.shape, own(*names))
        return (Signature(tuple(zip(names, self.shape, strict=True)), tuple(inputs), (y,), runs_empty=True),)

    @cached_property
    def _call(self) -> Call:
        return Call(self.op, self.args)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        made = operands[0].to(self._call.given["dtype"]) if self.op == "_to_copy" else self._call(operands)
        if self.shape in self.shapes:
            return (made,)
        return (made.expand([at.extent(i) for i in numbered(len(self.shape))]),)

    def local_over(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x = operands[0]
        if not self.writes_over or 0 in x.stride():
            return self.local(way, at, *operands)
        if self.op == "relu":
            return (torch.relu_(x),)
        return (x.add_(operands[1]),) if x.dtype == operands[1].dtype else self.local(way, at, *operands)

    @property
    def writes_over(self) -> bool:
        return self._fits_over

    @cached_property
    def _fits_over(self) -> bool:
        """Whether the result can lie in the first operand's memory."""
        if self.op == "relu":
            return self.args == (Slot(0),)
        return self.op == "add.Tensor" and self.args == (Slot(0), Slot(1), 1) and {*self.shapes} == {self.shape}

    def kept_over(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (y,) = self.local_over(way, at, *operands)  # relu keeps y, a sum nothing
        assert self.sloped is not None
        return (y,), self.sloped.kept(wanted, operands, y)

    @property
    def leaves_results(self) -> bool:
        if self.op in ("alias", "_to_copy") or self.sloped is None or self.shape not in self.shapes:
            return False
        return not any("y" in slope.reads for slope in self.sloped.slopes if slope is not None)

    @cached_property
    def sloped(self) -> Sloped | None:
        """The slopes by which it is differentiated; None where these aren't known."""
        slopes = SLOPES.get(self.op)
        if slopes is None or any(isinstance(a, (Slot, tuple)) for a in self.args[len(slopes) :]):
            return None
        given, numbers = self.args[: len(slopes)], under(self.args[len(slopes) :], None)
        sources = tuple((a.k, None) if isinstance(a, Slot) else (None, a) for a in given)
        found = Sloped(slopes, sources, numbers)
        smooth = self.differentiable or (True,) * len(self.shapes)
        return found if found.knows(k for k, one in enumerate(smooth) if one) else None

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return self.sloped is not None

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (y,) = self.local(way, at, *operands)
        assert self.sloped is not None
        return (y,), self.sloped.kept(wanted, operands, y)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        assert self.sloped is not None
        if (shapes := at.known.get(self)) is None:
            shapes = at.known[self] = [read_here(at, k) for k in range(len(wanted))]
        return self.sloped.gradients(wanted, kept, dys[0], shapes)

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        """The step of an operator of one element and numbers, or of a sum, difference, product or quotient of two; None
        for a cast."""
        if self.shapes[k] != self.shape or len(self.shape) < 2:
            return None
        step = self.element_step()
        if step is None:
            return None
        if step.casts_to:
            return EpilogueStep("{x}", back="sum")
        if len(self.shapes) == 1:
            back = "input" if self.op not in ONE or not self._is_of_result else "result"
            return EpilogueStep(step.text.format("{x}"), back=back)
        kind = lies_as(self.shapes[1 - k], self.shape)
        if kind is None:
            return None
        is_sum = self.op == "add.Tensor"
        return EpilogueStep(step.text.format(*_in_place("{x}", "{0}", k)), ((kind, 1),), "sum" if is_sum else "input")

    def element_step(self) -> ElementStep | None:
        given = self.args
        if self.op == "gelu":
            return of_one("gelu_tanh" if "tanh" in given else "gelu") if given[0] == Slot(0) else None
        if self.op in ONE:
            if given[0] != Slot(0) or not all(isinstance(n, (int, float)) and isfinite(n) for n in given[1:]):
                return None
            return of_one(self.op, given[1:])
        if self.casts_to:
            return SAME._replace(casts_to=self.casts_to, is_free=True)
        name, _, overload = self.op.partition(".")
        if name not in TWO or overload != "Tensor" or len(given) < 2 or given[2:] not in ((), (1,)):
            return None
        first, second = given[:2]
        if first == Slot(0) and isinstance(second, (int, float)):
            return with_number(name, second) if isfinite(second) else None
        return TWO[name] if (first, second) == (Slot(0), Slot(1)) else None

    @property
    def _is_of_result(self) -> bool:
        """Whether its gradient is made from its result."""
        return text_of(self.op, self.args[1:]).is_of_result

    def back_of_result(self) -> EpilogueStep | None:
        step = self._back_of_one()
        if step is None or not self._is_of_result:
            return None
        return EpilogueStep(step.backs[0].format(y="{0}", dy="{x}"), (("element", 1),), "sum")

    def back_of_input(self) -> EpilogueStep | None:
        step = self._back_of_one()
        if step is None or self._is_of_result:
            return None
        return EpilogueStep(step.backs[0].format("{0}", dy="{x}"), (("element", 1),))

    def _back_of_one(self) -> ElementStep | None:
        return self.element_step() if self.op in ONE and self.shapes == (self.shape,) and len(self.shape) > 1 else None

    def from_result(self, dy: Any, y: Any) -> Any:
        aten, numbers = torch.ops.aten, self.args[1:]
        if self.op == "relu":
            return aten.threshold_backward(dy, y, 0)
        if self.op == "hardtanh":
            return aten.hardtanh_backward(dy, y, *numbers)
        if self.op == "leaky_relu":
            return aten.leaky_relu_backward(dy, y, *numbers, True)
        assert self.op == "sigmoid"
        return aten.sigmoid_backward(dy, y)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The operator called on one element at a time."""
        wide = [t.expand(self.shape).reshape(-1) for t in operands]
        made = [call(self.op, self.args, tuple(t[i] for t in wide)) for i in range(wide[0].numel())]
        return (torch.stack(made).reshape(self.shape),)


@dataclass(frozen=True)
class Whole(Operation):
    """An operator that no row describes: every rank has its operands whole, and computes it alike.

    Attributes:
        results: the results' shapes; results whose number is in `integers` have no gradient.
    """

    op: str
    args: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    differentiable: tuple[bool, ...] = ()
    integers: tuple[int, ...] = ()

    @property
    def runs_whole(self) -> str:
        return self.op

    @property
    def name(self) -> str:
        return f"whole_{self.op.partition('.')[0]}"

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        grads = self.differentiable or (True,) * len(self.shapes)
        inputs = tuple(
            Operand(f"x{k}", s, (WHOLE,) * len(s), gradient=g)
            for k, (s, g) in enumerate(zip(self.shapes, grads, strict=True))
        )
        results = tuple(
            Operand(f"y{k}", s, (WHOLE,) * len(s), gradient=k not in self.integers) for k, s in enumerate(self.results)
        )
        return (Signature((), inputs, results, runs_empty=True),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return _results(call(self.op, self.args, operands, at.device))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The same call: no other way is known."""
        return _results(call(self.op, self.args, operands))


@dataclass(frozen=True)
class ByCourse(Operation):
    """A call of an operator whose gradients its courses make (along_gradients.py), if it has any."""

    op: str
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.op.partition(".")[0]

    @cached_property
    @abstractmethod
    def courses(self) -> tuple[Course | None, ...] | None:
        """The course of each operand's gradient; None where these aren't known."""

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return _results(call(self.op, self.args, operands))

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return self.courses is not None

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        made = self.local(way, at, *operands)
        assert self.courses is not None
        return made, kept_of_course(self.courses, wanted, operands, made)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        assert self.courses is not None
        numbers = [a for a in self.args if not isinstance(a, Slot)]
        return gradients_by_course(self.courses, numbers, at, wanted, kept, dys[0])


@dataclass(frozen=True)
class Along(ByCourse):
    """An operator that computes along some dimensions, which are whole, and alike for every place along the others.

    Attributes:
        over: those dimensions.
        results: the results' shapes; in these, dimensions of `over` have any extents, or are dropped.
        integers: numbers of results that have no gradient.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    integers: tuple[int, ...] = ()
    differentiable: bool = True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        dims = own(*(None if d in self.over else i for d, i in enumerate(names)))
        left = own(*(i for d, i in enumerate(names) if d not in self.over))
        extents = tuple((i, n) for d, (i, n) in enumerate(zip(names, self.shape, strict=True)) if d not in self.over)
        results = tuple(
            Operand(
                f"y{k}",
                s,
                dims if len(s) == len(self.shape) else left,
                gradient=k not in self.integers,
                integer=k in self.integers,
            )
            for k, s in enumerate(self.results)
        )
        return (Signature(extents, (Operand("x", self.shape, dims, gradient=self.differentiable),), results),)

    @cached_property
    def courses(self) -> tuple[Course | None, ...] | None:
        return courses_of(self.op, (self.differentiable,)) if 0 not in self.integers else None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The operator called on one place at a time along a dimension that is not in `over`."""
        left = [d for d in range(len(self.shape)) if d not in self.over]
        if not left:
            return self.local(0, At({}, (), ()), *operands)
        d = left[-1]
        parts = [self.local(0, At({}, (), ()), x) for x in operands[0].split(1, d)]
        places = (d if len(s) == len(self.shape) else len(left) - 1 for s in self.results)
        return tuple(torch.cat([p[k] for p in parts], place) for k, place in enumerate(places))


@dataclass(frozen=True)
class Apart(ByCourse):
    """An operator that computes alike and independently for each place along some indices, with all else whole: a
    recurrent layer for each sample, places of maxima for each channel.

    Attributes:
        dims: for each operand, the index of each dimension; "" where it is whole.
        made: the same for each result.
        extents: the indices'.
        integers: numbers of results that have no gradient.
        differentiable: for each operand, whether it is; () if all are.
        flops: those for each element of the indices.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[str, ...], ...]
    results: tuple[tuple[int, ...], ...]
    made: tuple[tuple[str, ...], ...]
    extents: tuple[tuple[str, int], ...]
    integers: tuple[int, ...] = ()
    differentiable: tuple[bool, ...] = ()
    flops: int = 1

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        grads = self.differentiable or (True,) * len(self.shapes)
        inputs = tuple(
            Operand(f"x{k}", s, own(*(i or None for i in dims)), gradient=g)
            for k, (s, dims, g) in enumerate(zip(self.shapes, self.dims, grads, strict=True))
        )
        results = tuple(
            Operand(
                f"y{k}", s, own(*(i or None for i in dims)), gradient=k not in self.integers, integer=k in self.integers
            )
            for k, (s, dims) in enumerate(zip(self.results, self.made, strict=True))
        )
        return (Signature(self.extents, inputs, results),)

    @cached_property
    def courses(self) -> tuple[Course | None, ...] | None:
        in_order = [a.k for a in self.args if isinstance(a, Slot)] == [*range(len(self.shapes))]
        smooth = self.differentiable or (True,) * len(self.shapes)
        return courses_of(self.op, smooth) if in_order and 0 not in self.integers else None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The operator called on one place at a time along the first index."""
        index, extent = self.extents[0]
        parts = [
            _results(
                call(
                    self.op, self.args, tuple(_one_of(x, d, index, i) for x, d in zip(operands, self.dims, strict=True))
                )
            )
            for i in range(extent)
        ]
        return tuple(torch.cat([p[k] for p in parts], dims.index(index)) for k, dims in enumerate(self.made))

    def work(self, way: int, at: At) -> Work:
        return Work(self.flops * prod(at.extent(i) for i, _ in self.extents), touched(at, self.signatures[way]))


def _one_of(x: Any, dims: tuple[str, ...], index: str, number: int) -> Any:
    return x.narrow(dims.index(index), number, 1) if index in dims else x
