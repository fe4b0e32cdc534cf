"""What an operation is: the row of a table that algebra, program and price read. It knows nothing of ranks.

Local code is a few lines of ATen, told where it stands (`At`): the block of each index, the window wished for of each
operand, and how much of it there is. The difference is padding. Operands come without it. Global extents are fields
of the row: divisors, positions and masks are of the whole, never of what a rank holds.

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
# Backward, over what the row read and made: once for each gradient, once for all, not at all where dx is dy.
Passes = Literal["each", "once", "none"]


@dataclass(frozen=True)
class At:
    """Where a rank's part of an operation stands.

    Attributes:
        blocks: of each index, its block.
        windows: of each operand and dimension, the rows wished for, in the relation's numbering.
        inside: of these, the rows that there are (all of them, where rows come round again).
        known: what local code has worked out there.
        parts: by name, operands and results whose channels lie in so many equal parts one behind the other, flat.
        low: torch's type of products under autocast; None without it.
        spare: of each operand and dimension, how many rows behind those that are read come too (`Operation.spare`);
            `windows` and `inside` have them.
    """

    blocks: Mapping[str, Interval]
    windows: tuple[tuple[Interval, ...], ...]
    inside: tuple[tuple[Interval, ...], ...]
    known: dict[Any, Any] = field(default_factory=dict[Any, Any], compare=False, repr=False)
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    low: Any = None
    spare: tuple[tuple[int, ...], ...] = ()

    def extent(self, index: str) -> int:
        """Elements of an index's block."""
        lo, hi = self.blocks[index]
        return hi - lo

    def wished(self, operand: int, tensor: Any, value: float = 0.0) -> Any:
        """An operand with `value` in the rows that are wished for and not there."""
        return fit(tensor, self.inside[operand], self.windows[operand], value)


def standing(signature: Signature, blocks: Mapping[str, Any]) -> At:
    """Where these blocks of a signature's indices stand; numbers, or arrays over ranks."""
    read = [
        [_side(made, n, signature, blocks) for made, n in zip(o.dims, o.shape, strict=True)] for o in signature.inputs
    ]
    return At(
        blocks,
        tuple([tuple([wished for wished, _ in operand]) for operand in read]),
        tuple([tuple([inside for _, inside in operand]) for operand in read]),
    )


def _side(made: Made, extent: int, signature: Signature, blocks: Mapping[str, Any]) -> tuple[Interval, Interval]:
    """Rows wished for, and those that there are, in the relation's numbering."""
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
    """Rows `have` of the last dimensions as rows `want`: cut where there are more, `value` where there are none."""
    return with_sides(tensor, sides_of(have, want), value)


def sides_of(have: Sequence[Interval], want: Sequence[Interval]) -> list[int]:
    """What `fit` puts on the sides of dimensions, the last one first; [] where that is nothing."""
    sides: list[int] = []
    for (first, last), (lo, hi) in zip(reversed(have), reversed(want), strict=True):
        sides += [first - lo, hi - last] if last > first else [hi - lo, 0]
    return sides if any(sides) else []


def with_sides(tensor: Any, sides: list[int], value: float = 0.0) -> Any:
    """With so many rows of `value` on each side."""
    return torch.nn.functional.pad(tensor, sides, value=value) if sides else tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does: products and sums, and elements read and made."""

    flops: int
    elements: int


class EpilogueStep(NamedTuple):
    """What a kernel does with each element of what it has made, before it writes it.

    Attributes:
        text: Triton's; {x} is the element, {0}, {1}, ... are values of other operands there.
        operands: how each other operand lies, and how many values it has for an element: `element`, as the result does;
            `channel`, so many vectors over the result's channels, one behind the other.
        back: what its gradient is made of beside the result's: `sum`, nothing, it is passed on; `result`, what it
            makes; `input`, what it reads.
    """

    text: str
    operands: tuple[tuple[str, int], ...] = ()
    back: str = "input"


Epilogue = tuple[EpilogueStep, ...]


class Prologue(NamedTuple):
    """What a kernel does with each element that it reads before it multiplies: what a batch norm does last.

    Attributes:
        gradient: it makes the gradient of what is normalised; else what the steps make of what is normalised.
        steps: behind what is normalised.
    """

    gradient: bool
    steps: Epilogue


@dataclass(frozen=True)
class Derived:
    """The gradient of an operand as a row of its own, with roles of its own.

    Attributes:
        operation: its result is the gradient.
        reads: its operands: operands and results of the row by their names, a result's gradient with a d before it.
    """

    operation: Operation
    reads: tuple[str, ...]


def _hash_once(self: Operation) -> int:
    if (found := self.__dict__.get("_hash")) is None:
        found = self.__dict__["_hash"] = hash((type(self), *(getattr(self, f.name) for f in fields(self))))  # type: ignore[arg-type]
    return found


class Operation(ABC):
    """A row. Frozen, with the extents of what it is applied to.

    Attributes:
        gives_anew: whether gradients by `vjp` are memory of their own.
        any_order: whether `vjp` takes gradients without gaps in whatever order they lie in memory, as it makes an
            element of an element, or looks at them in another shape.
        any_order_by_aten: the same where the gradient is one call of ATen, which turns gradients itself.
        draws: whether it makes random numbers.
        in_evaluation: what it is there, of a network that is trained, too: itself, its first operand, or ones.
    """

    gives_anew: ClassVar[bool] = False
    any_order: ClassVar[bool] = False
    any_order_by_aten: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    in_evaluation: ClassVar[Literal["itself", "same", "fill"]] = "itself"

    def __init_subclass__(cls) -> None:
        cls.__hash__ = _hash_once  # rows are keys of every cache

    @property
    def passes(self) -> Passes:
        """What backward goes over."""
        return "each"

    @property
    def rides(self) -> bool:
        """Whether it makes a few numbers a channel, or one, within a call that others need."""
        return False

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution, a transposed one, or a contraction, of which linear layers are some.

        These take most of a step, hold what they gather, and have roles of their own; other rows follow them.
        """
        return False

    @property
    def joins(self) -> bool:
        """Whether it may be one row with those around it: element by element, or by rows that are read in order."""
        return False

    @property
    def normalises(self) -> bool:
        """Whether it is a norm's row over elements, whose other operand is a few numbers a channel or a sample."""
        return False

    @property
    def has_between(self) -> bool:
        """Whether gradients' rows of its operands read the gradient of what lies within it."""
        return False

    @property
    def convolves(self) -> tuple[Phase, Conv] | None:
        """Which phase of which convolution it is, plain or transposed; None of anything else."""
        return None

    @property
    def takes_steps(self) -> bool:
        """Whether a GPU's kernel of it can do more with what it has made before it writes it."""
        return False

    @property
    def kernel_steps(self) -> tuple[Epilogue, bool, str]:
        """What a convolution's kernel in it does with each element that it has made, before it writes it.

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
        """Whether the gradients of its operands are that of its result, or views of it."""
        return False

    @property
    def runs_whole(self) -> str:
        """The operator of ATen, with its overload, that every rank runs alike as no row describes it; "" if none is."""
        return ""

    @property
    def as_convolution(self) -> Mapping[str, str]:
        """Of a row that is a convolution of one pixel under other names: by index, what a convolution calls it."""
        return {}

    @property
    def name(self) -> str:
        """One word, in the text of a program."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @cached_property
    @abstractmethod
    def signatures(self) -> tuple[Signature, ...]:
        """The ways to compute it; the price chooses."""

    @abstractmethod
    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """A rank's part of the results, by signature number `way`."""

    def local_over(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """The same, where operand 0 is nobody else's: the result may lie in its memory."""
        return self.local(way, at, *operands)

    def kept_over(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """`kept`, where operand 0 is nobody else's: the result may lie in its memory."""
        return self.kept(way, at, wanted, *operands)

    @property
    def writes_over(self) -> bool:
        """Whether `local_over` and `kept_over` may write where operand 0 lies."""
        return False

    @property
    def leaves_results(self) -> bool:
        """Whether results are memory of their own that `vjp` does not read: their only reader may write there."""
        return False

    @property
    def bias_along(self) -> int | None:
        """Of a product, the dimension of its result over which ATen adds a vector to it before it rounds."""
        return None

    @property
    def adds_along(self) -> int | None:
        """Of the sum of a tensor and a vector, the dimension over which the vector is; None of anything else."""
        return None

    def adds_bias(self, way: int, at: At, *operands: Any) -> bool:
        """Whether `local` and `kept` take that vector, of a rank's part, behind the operands; `vjp` never reads it."""
        return False

    def may_add(self, is_vjp: bool) -> bool:
        """Whether a kernel of it can add something to the gradient of its first operand, or to its result, which is
        one.

        Args:
            is_vjp: of `vjp`, else of `local`.
        """
        return False

    def added(self, way: int, at: At, is_vjp: bool, given: Sequence[Any], before: Any) -> Any:
        """`before` and what `may_add` says, by one kernel; None where there is none for them.

        Args:
            given: what `vjp` keeps and the result's gradient; else operands.
        """
        return None

    @property
    def may_have_moments(self) -> bool:
        """Whether a kernel of it can make moments of its result, too."""
        return False

    def moments_kernel(self, way: int, at: At, operands: Sequence[Any]) -> Any:
        """The kernel that makes moments of the result by tiles, too; None where there is none for these operands."""
        return None

    def kept_of(self, kernel: Any, made: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        """What `vjp` reads, where that kernel has made the result."""
        raise NotImplementedError(f"{self.name} has no kernel that makes moments")

    def behind_norm(self, way: int, at: At, of: Prologue, operand: Any, w: Any, before: Any = None) -> Any:
        """The kernel that does what a batch norm does last with what it reads first; None where there is none.

        Args:
            operand: what is made so: the first operand, or the result's gradient as it reaches local code.
            before: another gradient of the first operand, which is added to the one that is made.
        """
        return None

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        """Whether `kept` and `vjp` differentiate local code; elsewhere torch does."""
        return False

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Results, and what `vjp` reads: tensors, None in the place of others, numbers and types of elements, a kernel.

        Args:
            wanted: the operands that a gradient may be asked of.
        """
        return self.local(way, at, *operands), ()

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """Gradients of the operands as local code takes them; None for those that aren't wanted.

        Calls of ATen, without a graph. A gradient may be a result's, or a view of it; nothing is written over.

        Args:
            wanted: some of those that `kept` was told.
            dys: gradients of the results; None for a result without one.
        """
        raise NotImplementedError(f"{self.name} leaves its gradient to torch")

    @abstractmethod
    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The whole operation on one device, by another way than `local` where there is one."""

    def for_any(self, many: Operation, more: Operation) -> Operation:
        """The same operation, with signatures that hold for any sizes of what is known at run time only.

        Args:
            many, more: the operation for sizes that no other extent has.
        """
        return self

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        """Of operands, by name, that have a row of their own beside torch's vjp of local code.

        Where results are merged or the largest of many the vjp is no gradient, and these rows are the only ones.
        """
        return {}

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        """As a step behind the kernel that makes operand k; None where that can't be."""
        return None

    def from_result(self, dy: Any, y: Any) -> Any:
        """The gradient of the element that a step is of whose gradient is made of its result."""
        raise NotImplementedError

    def back_of_result(self) -> EpilogueStep | None:
        """`from_result` as a step behind the kernel that makes the result's gradient; its operand is the result."""
        return None

    def back_of_input(self) -> EpilogueStep | None:
        """The gradient of the element that a step reads, of that of its result; its operand is what the step reads."""
        return None

    def element_step(self) -> ElementStep | None:
        """Where it makes each element of its operands' elements in the same place, as broadcasting has it: how."""
        return None

    def spare(self, way: int) -> tuple[tuple[int, ...], ...]:
        """Of each operand and dimension how many rows behind those that are read `local` may be given, too: what it
        makes is the same, and their gradient is zero."""
        return ()

    def convolutions(self, way: int, at: At) -> Iterator[tuple[Convolution, int, At]]:
        """The convolutions that it computes, with the signature and the place of a rank in each."""
        return iter(())

    def work(self, way: int, at: At) -> Work:
        """What `local` takes there: one flop for each element that an index says, unless a row knows better."""
        signature = self.signatures[way]
        return Work(prod(at.extent(i) for i, _ in signature.extents), touched(at, signature))

    def launches(self, way: int, at: At) -> tuple[Launch, ...]:
        """The same, one after the other."""
        return (Launch(self, self.work(way, at), tuple(range(len(self.signatures[way].inputs)))),)

    def undone(self, way: int, at: At) -> tuple[Launch, ...]:
        """Launches whose gradients backward takes, in the order of forward."""
        return self.launches(way, at)


@dataclass(frozen=True, slots=True)
class Launch:
    """Something that is computed at once.

    Attributes:
        operation: what it is of.
        operands: numbers of the row's that it reads, beside what the one before has made.
        hands_on: gradients of all else that it reads are its result's as it is.
    """

    operation: Operation
    work: Work
    operands: tuple[int, ...]
    hands_on: bool = False


def repeats(launches: Sequence[Launch], asked: Collection[int], derived: Collection[int] = ()) -> list[int]:
    """How often backward takes what each launch takes.

    Args:
        asked: numbers of operands that want one.
        derived: those of them whose gradients rows of their own make, of that of what their launch makes.
    """
    found: list[int] = []
    wants = False  # what was made before
    for one in launches:
        gradients = sum(k in asked and k not in derived for k in one.operands) + (wants and not one.hands_on)
        wants = wants or any(k in asked for k in one.operands)
        found.append({"each": gradients, "once": int(wants), "none": 0}[one.operation.passes])
    return found


def touched(at: At, signature: Signature) -> int:
    """Elements that a rank reads and makes."""
    read = sum(prod(hi - lo for lo, hi in operand) for operand in at.inside)
    return read + sum(prod(made_here(at, result)) for result in signature.results)


def made_here(at: At, result: Operand) -> list[int]:
    """Extents of a rank's part of a result."""
    return [
        prod(at.extent(i) for i in d.indices) if d.indices else n
        for d, n in zip(result.dims, result.shape, strict=True)
    ]


def lies_as(shape: tuple[int, ...], result: tuple[int, ...]) -> str | None:
    """How an operand lies beside a result[N, C, ...], as broadcasting has it, where a kernel's epilogue can read it."""
    if shape == result:
        return "element"
    wide = (1,) * (len(result) - len(shape)) + shape
    return "channel" if wide == (1, result[1], *[1] * (len(result) - 2)) else None


def read_here(at: At, k: int) -> list[int]:
    """Extents of a rank's part of operand k, as local code takes it."""
    return [hi - lo for lo, hi in at.inside[k]]


def summed_to(gradient: Any, shape: Sequence[int]) -> Any:
    """The gradient of what was broadcast, of what it was broadcast from."""
    return gradient if list(gradient.shape) == list(shape) else gradient.sum_to_size(shape)


def unfit(gradient: Any, have: Sequence[Interval], want: Sequence[Interval]) -> Any:
    """The gradient of what `fit` takes: rows that it cut have none."""
    return fit(gradient, want, have)


def empty_as(dy: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Memory for a tensor that lies as dy, channels last or not; of its type, unless another is said."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    dtype = dy.dtype if dtype is None else dtype
    if last is None or dy.is_contiguous() or not dy.is_contiguous(memory_format=last):
        return dy.new_empty(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=dy.device, memory_format=last)


def numbers(block: Interval, like: Any) -> Any:
    """The global numbers of a block's rows, where `like` is."""
    return torch.arange(*block, device=like.device)


def on_device(values: tuple[float, ...], dtype: Any, device: Any) -> Any:
    """A table of numbers, copied to a device once: what a step copies there again can't be in a CUDA graph."""
    table = _on_device(values, dtype, device)
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        _RECORDED.append(table)  # a graph reads it wherever it lies, though it be forgotten here
    return table


_RECORDED: list[Any] = []


@lru_cache(maxsize=1 << 10)  # tables of extents that are known at run time only come and go
def _on_device(values: tuple[float, ...], dtype: Any, device: Any) -> Any:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def numbered(count: int) -> tuple[str, ...]:
    """Names of indices, one a dimension: d0, d1, ..."""
    return tuple(f"d{i}" for i in range(count))


@cache
def own(*indices: str | None) -> tuple[Made, ...]:
    """Dimensions that are the blocks of an index each; None: whole."""
    return tuple(WHOLE if i is None else Made((i,)) for i in indices)
