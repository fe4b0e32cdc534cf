"""The class Operation: a row of a table that algebra, program and price read. It knows nothing of ranks.

Local code is a few lines of ATen, told where it stands (`At`): the block of each index, the window that it wishes for
of each operand, and the part of the window that exists. The difference is padding, and operands come without it. Global
extents are fields of the row: divisors, positions and masks are those of the whole, never of what a rank holds.

Source: docs/design.md, One idea.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from convgen.algebra.conv import Conv, Phase
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.element_texts import ElementStep

if TYPE_CHECKING:
    from convgen.operations.convolution import Convolution

Interval = tuple[int, int]
# Backward goes over what the row read and made: once for each gradient, once for all, or never, where dx is dy.
Passes = Literal["each", "once", "none"]


@dataclass(frozen=True)
class At:
    """The place of a rank's part of an operation.

    Attributes:
        blocks: for each index, its block.
        windows: for each operand and dimension, the rows wished for, in the relation's numbering.
        inside: the rows of the windows that exist (all of them, where rows come round again).
        known: what local code has worked out for this place, kept for the next call.
        parts: by name, operands and results whose channels lie in so many equal parts one behind the other, flat.
        low: torch's type of products under autocast; None without it.
        spare: for each operand and dimension, how many rows come behind those that are read (`Operation.spare`);
            `windows` and `inside` include them.
        device: on which results are made of no operands; None: torch's default.
    """

    blocks: Mapping[str, Interval]
    windows: tuple[tuple[Interval, ...], ...]
    inside: tuple[tuple[Interval, ...], ...]
    known: dict[Any, Any] = field(default_factory=dict[Any, Any], compare=False, repr=False)
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    low: Any = None
    spare: tuple[tuple[int, ...], ...] = ()
    device: Any = None

    def extent(self, index: str) -> int:
        """The number of elements of an index's block."""
        lo, hi = self.blocks[index]
        return hi - lo

    def wished(self, operand: int, tensor: Any, value: float = 0.0) -> Any:
        """An operand with `value` in the rows that are wished for and don't exist."""
        return fit(tensor, self.inside[operand], self.windows[operand], value)


def standing(signature: Signature, blocks: Mapping[str, Any]) -> At:
    """The place of these blocks of a signature's indices; block ends are numbers, or arrays over ranks."""
    read = [
        [_side(made, n, signature, blocks) for made, n in zip(o.dims, o.shape, strict=True)] for o in signature.inputs
    ]
    return At(
        blocks,
        tuple([tuple([wished for wished, _ in operand]) for operand in read]),
        tuple([tuple([inside for _, inside in operand]) for operand in read]),
    )


def _side(made: Made, extent: int, signature: Signature, blocks: Mapping[str, Any]) -> tuple[Interval, Interval]:
    """The rows wished for, and those that exist, in the relation's numbering."""
    if made.relation is None:
        block = nest(made, signature, blocks) if made.indices else (0, extent)
        return block, block
    lo, hi = made.relation.window(*blocks[made.indices[0]])
    first, last = made.relation.hull(lo, hi, extent)
    return (lo, hi), ((lo, lo) if isinstance(lo, int) and first >= last else (first, last))


def nest(made: Made, signature: Signature, blocks: Mapping[str, Any]) -> Interval:
    """Flat numbers of a nest of blocks, outermost first."""
    start, count = 0, 1
    for i in made.indices:
        lo, hi = blocks[i]
        start, count = start * signature.extent[i] + lo, count * (hi - lo)
    return start, start + count


def fit(tensor: Any, have: Sequence[Interval], want: Sequence[Interval], value: float = 0.0) -> Any:
    """A tensor whose last dimensions have the rows `have`, as one with the rows `want`: more rows are cut, missing ones
    are `value`."""
    return with_sides(tensor, sides_of(have, want), value)


def sides_of(have: Sequence[Interval], want: Sequence[Interval]) -> list[int]:
    """How many rows `fit` puts on each side of the dimensions, the last dimension first; [] where it changes
    nothing."""
    sides: list[int] = []
    for (first, last), (lo, hi) in zip(reversed(have), reversed(want), strict=True):
        sides += [first - lo, hi - last] if last > first else [hi - lo, 0]
    return sides if any(sides) else []


def with_sides(tensor: Any, sides: list[int], value: float = 0.0) -> Any:
    """A tensor with so many rows of `value` on each side."""
    return torch.nn.functional.pad(tensor, sides, value=value) if sides else tensor


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's work: flops of products and sums, and elements read and made."""

    flops: int
    elements: int


class EpilogueStep(NamedTuple):
    """A step that a kernel does on each element of its result, before it writes it.

    Attributes:
        text: Triton's; {x} is the element, {0}, {1}, ... are values of other operands there.
        operands: how each other operand lies, and how many values it has for an element: `element`, as the result does;
            `channel`, so many vectors over the result's channels, one behind the other.
        back: what its gradient reads beside the result's gradient: `sum`, nothing, as it is passed on; `result`, what
            the step makes; `input`, what the step reads.
    """

    text: str
    operands: tuple[tuple[str, int], ...] = ()
    back: str = "input"


Epilogue = tuple[EpilogueStep, ...]


class Prologue(NamedTuple):
    """A batch norm's last step, which a kernel does on each element that it reads before it multiplies.

    Attributes:
        gradient: whether it makes the gradient of what the norm normalises; else it makes the steps' result.
        steps: the steps behind the norm.
    """

    gradient: bool
    steps: Epilogue


@dataclass(frozen=True)
class Derived:
    """The gradient of an operand as a row of its own, with its own roles.

    Attributes:
        operation: the row's operation, whose result is the gradient.
        reads: its operands: operands and results of the row by their names, a result's gradient with a d before it.
    """

    operation: Operation
    reads: tuple[str, ...]


def _hash_once(self: Operation) -> int:
    if (found := self.__dict__.get("_hash")) is None:
        found = self.__dict__["_hash"] = hash((type(self), *(getattr(self, f.name) for f in fields(self))))  # type: ignore[arg-type]
    return found


class Operation(ABC):
    """A row of the table: frozen, with the extents of the tensors that it is applied to.

    Attributes:
        gives_anew: whether gradients by `vjp` have memory of their own.
        any_order: whether `vjp` takes gradients without gaps in any memory order, as it works element by element, or
            only changes their shape.
        any_order_by_aten: the same where the gradient is one call of ATen, which reorders gradients itself.
        draws: whether it draws random numbers.
        in_evaluation: its result in evaluation, of a network that is also trained: its own, its first operand, or ones.
    """

    gives_anew: ClassVar[bool] = False
    any_order: ClassVar[bool] = False
    any_order_by_aten: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    in_evaluation: ClassVar[Literal["itself", "same", "fill"]] = "itself"

    def __init_subclass__(cls) -> None:
        cls.__hash__ = _hash_once  # every cache has rows as keys, so each hashes once

    @property
    def passes(self) -> Passes:
        """How often backward goes over what the row read and made."""
        return "each"

    @property
    def rides(self) -> bool:
        """Whether it makes one number, or a few for each channel, and so is done within another row's call."""
        return False

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution, a transposed one, or a contraction, of which linear layers are some.

        These take most of a step, hold what they gather, and have roles of their own; other rows follow them.
        """
        return False

    @property
    def joins(self) -> bool:
        """Whether it may be fused with the rows around it: it is elementwise, or reads rows in order."""
        return False

    @property
    def normalises(self) -> bool:
        """Whether it is a norm's row over elements, whose other operand has a few numbers for each channel or
        sample."""
        return False

    @property
    def has_between(self) -> bool:
        """Whether the rows of its operands' gradients read the gradient of a value within it."""
        return False

    @property
    def convolves(self) -> tuple[Phase, Conv] | None:
        """The phase and the convolution that it is, plain or transposed; None for any other operation."""
        return None

    @property
    def takes_steps(self) -> bool:
        """Whether its kernel on a GPU can do further steps on its result before it writes it."""
        return False

    @property
    def kernel_steps(self) -> tuple[Epilogue, bool, str]:
        """The steps that its convolution's kernel does on each element of its result, before it writes it.

        Returns:
            the steps; whether the kernel is backward-data's, else it is forward's; what files call the steps.
        """
        return (), False, ""

    @property
    def casts_to(self) -> str:
        """The type that it only casts to, if it does nothing else."""
        return ""

    @property
    def hands_gradient_on(self) -> bool:
        """Whether its operands' gradients are its result's gradient, or views of it."""
        return False

    @property
    def runs_whole(self) -> str:
        """The operator of ATen, with its overload, that every rank runs whole as no row describes it; "" for a row."""
        return ""

    @property
    def as_convolution(self) -> Mapping[str, str]:
        """For a row that is a convolution of one pixel under other names: by index, the convolution's name of it."""
        return {}

    @property
    def name(self) -> str:
        """The operation's word in the text of a program."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @cached_property
    @abstractmethod
    def signatures(self) -> tuple[Signature, ...]:
        """The ways to compute it; the price chooses."""

    @abstractmethod
    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """A rank's part of the results, by signature number `way`."""

    def local_over(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """What `local` gives, where nobody else has operand 0: the result may lie in its memory."""
        return self.local(way, at, *operands)

    def kept_over(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What `kept` gives, where nobody else has operand 0: the result may lie in its memory."""
        return self.kept(way, at, wanted, *operands)

    @property
    def writes_over(self) -> bool:
        """Whether `local_over` and `kept_over` may write where operand 0 lies."""
        return False

    @property
    def leaves_results(self) -> bool:
        """Whether results have memory of their own that `vjp` does not read, so that their only reader may write
        there."""
        return False

    @property
    def bias_along(self) -> int | None:
        """For a product, the result's dimension along which ATen can add a vector before it rounds; else None."""
        return None

    @property
    def adds_along(self) -> int | None:
        """For the sum of a tensor and a vector, the dimension along which the vector lies; None for any other
        operation."""
        return None

    def adds_bias(self, way: int, at: At, *operands: Any) -> bool:
        """Whether `local` and `kept` take a rank's part of that vector behind the operands; `vjp` never reads it."""
        return False

    def may_add(self, is_vjp: bool) -> bool:
        """Whether its kernel can add another gradient to its first operand's gradient, or to its result, if that is a
        gradient.

        Args:
            is_vjp: whether `vjp` is asked about, else `local`.
        """
        return False

    def added(self, way: int, at: At, is_vjp: bool, given: Sequence[Any], before: Any) -> Any:
        """The sum of `before` and the gradient that `may_add` speaks of, by one kernel; None where there is no kernel
        for them.

        Args:
            given: for `vjp`, what is kept and the result's gradient; else the operands.
        """
        return None

    @property
    def may_have_moments(self) -> bool:
        """Whether its kernel can also make moments of its result."""
        return False

    def moments_kernel(self, way: int, at: At, operands: Sequence[Any]) -> Any:
        """The kernel that also makes moments of the result, by tiles; None where there is none for these operands."""
        return None

    def kept_of(self, kernel: Any, made: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        """What `vjp` reads, where `moments_kernel` has made the result."""
        raise NotImplementedError(f"{self.name} has no kernel that makes moments")

    def behind_norm(self, way: int, at: At, of: Prologue, operand: Any, w: Any, before: Any = None) -> Any:
        """The kernel that also does a batch norm's last step on an operand; None where there is none.

        Args:
            operand: what that step makes: the first operand, or the result's gradient as it reaches local code.
            before: another gradient of the first operand, which is added to the one that is made.
        """
        return None

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        """Whether `kept` and `vjp` differentiate local code; elsewhere torch does."""
        return False

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The results, and what `vjp` reads: tensors, with None in the place of those not needed, numbers, types of
        elements, a kernel.

        Args:
            wanted: for each operand, whether its gradient may be asked for.
        """
        return self.local(way, at, *operands), ()

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """Gradients of the operands as local code takes them; None for those that aren't wanted.

        It calls ATen without a graph. A gradient may be a result's gradient, or a view of it; nothing is written over.

        Args:
            wanted: as for `kept`; fewer may be wanted.
            dys: gradients of the results; None for a result without one.
        """
        raise NotImplementedError(f"{self.name} leaves its gradient to torch")

    @abstractmethod
    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The whole operation on one device, computed in another way than `local` does, where there is one."""

    def for_any(self, many: Operation, more: Operation) -> Operation:
        """The same operation, with signatures that hold for any sizes that are known at run time only.

        Args:
            many, more: the operation at two sets of sizes that no other extent has.
        """
        return self

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        """By operand, the row that makes its gradient, beside torch's vjp of local code.

        Where results are merged, or are the largest of many, the vjp is no gradient, and there are these rows alone.
        """
        return {}

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        """The operation as a step behind the kernel that makes operand k; None where it can't be one."""
        return None

    def from_result(self, dy: Any, y: Any) -> Any:
        """The gradient of the element that a step reads, made from the gradient of the step's result and the result."""
        raise NotImplementedError

    def back_of_result(self) -> EpilogueStep | None:
        """The step `from_result`, behind the kernel that makes the result's gradient; its operand is the result."""
        return None

    def back_of_input(self) -> EpilogueStep | None:
        """A step that makes the gradient of what a step reads from that of its result; its operand is what the step
        reads."""
        return None

    def element_step(self) -> ElementStep | None:
        """How it makes an element from its operands' elements in the same place, by broadcasting; None where it
        doesn't."""
        return None

    def spare(self, way: int) -> tuple[tuple[int, ...], ...]:
        """For each operand and dimension, how many rows behind those that are read `local` may also be given: its
        result is the same, and their gradient is zero."""
        return ()

    def convolutions(self, way: int, at: At) -> Iterator[tuple[Convolution, int, At]]:
        """The convolutions that it computes, each with a rank's signature number and place."""
        return iter(())

    def work(self, way: int, at: At) -> Work:
        """The work of `local` at a place: one flop for each element of the indices, unless a row knows better."""
        signature = self.signatures[way]
        return Work(prod(at.extent(i) for i, _ in signature.extents), touched(at, signature))

    def launches(self, way: int, at: At) -> tuple[Launch, ...]:
        """The launches of `local` at a place, one after the other."""
        return (Launch(self, self.work(way, at), tuple(range(len(self.signatures[way].inputs)))),)

    def undone(self, way: int, at: At) -> tuple[Launch, ...]:
        """Launches whose gradients backward takes, in the order of forward."""
        return self.launches(way, at)


@dataclass(frozen=True, slots=True)
class Launch:
    """A part of a row that is computed at once.

    Attributes:
        operation: the operation that it computes.
        operands: numbers of the row's operands that it reads, beside the result of the launch before.
        hands_on: whether the gradients of all else that it reads are its result's gradient as it is.
    """

    operation: Operation
    work: Work
    operands: tuple[int, ...]
    hands_on: bool = False


def repeats(launches: Sequence[Launch], asked: Collection[int], derived: Collection[int] = ()) -> list[int]:
    """For each launch, how many times its work backward takes.

    Args:
        asked: numbers of the operands whose gradients are wanted.
        derived: those of them whose gradients other rows make, from the gradient of their launch's result.
    """
    found: list[int] = []
    wants = False  # whether the gradient of the launch before is wanted
    for one in launches:
        gradients = sum(k in asked and k not in derived for k in one.operands) + (wants and not one.hands_on)
        wants = wants or any(k in asked for k in one.operands)
        found.append({"each": gradients, "once": int(wants), "none": 0}[one.operation.passes])
    return found


def touched(at: At, signature: Signature) -> int:
    """How many elements a rank reads and makes."""
    read = sum(prod(hi - lo for lo, hi in operand) for operand in at.inside)
    return read + sum(prod(made_here(at, result)) for result in signature.results)


def made_here(at: At, result: Operand) -> list[int]:
    """The extents of a rank's part of a result."""
    return [
        prod(at.extent(i) for i in d.indices) if d.indices else n
        for d, n in zip(result.dims, result.shape, strict=True)
    ]


def lies_as(shape: tuple[int, ...], result: tuple[int, ...]) -> str | None:
    """How an operand lies beside a result[N, C, ...] by broadcasting; None where a kernel's epilogue can't read it."""
    if shape == result:
        return "element"
    wide = (1,) * (len(result) - len(shape)) + shape
    return "channel" if wide == (1, result[1], *[1] * (len(result) - 2)) else None


def read_here(at: At, k: int) -> list[int]:
    """The extents of a rank's part of operand k, as local code takes it."""
    return [hi - lo for lo, hi in at.inside[k]]


def summed_to(gradient: Any, shape: Sequence[int]) -> Any:
    """The gradient of a tensor of this shape, from the gradient of what it was broadcast to."""
    return gradient if list(gradient.shape) == list(shape) else gradient.sum_to_size(shape)


def unfit(gradient: Any, have: Sequence[Interval], want: Sequence[Interval]) -> Any:
    """The gradient of what `fit` takes, from that of what it gives; rows that it cut get zeros."""
    return fit(gradient, want, have)


def empty_as(dy: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Memory for a tensor in dy's memory format, channels last or not, and in dy's type unless another is given."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    dtype = dy.dtype if dtype is None else dtype
    if last is None or dy.is_contiguous() or not dy.is_contiguous(memory_format=last):
        return dy.new_empty(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=dy.device, memory_format=last)


def numbers(block: Interval, like: Any) -> Any:
    """The global numbers of a block's rows, on like's device."""
    return torch.arange(*block, device=like.device)


def on_device(values: tuple[float, ...], dtype: Any, device: Any) -> Any:
    """A table of numbers on a device, copied there once: a step that copied it again couldn't be in a CUDA graph."""
    table = _on_device(values, dtype, device)
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        _RECORDED.append(table)  # a CUDA graph goes on reading it, even when the cache has dropped it
    return table


_RECORDED: list[Any] = []


@lru_cache(maxsize=1 << 10)  # tables of extents that are known at run time only come and go
def _on_device(values: tuple[float, ...], dtype: Any, device: Any) -> Any:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def numbered(count: int) -> tuple[str, ...]:
    """Names of indices, one for each dimension: d0, d1, ..."""
    return tuple(f"d{i}" for i in range(count))


@cache
def own(*indices: str | None) -> tuple[Made, ...]:
    """Dimensions that are each the blocks of one index; None makes a dimension whole."""
    return tuple(WHOLE if i is None else Made((i,)) for i in indices)
