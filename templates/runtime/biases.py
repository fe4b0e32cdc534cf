"""Products that add the bias of the row behind them, as ATen's addmm does: in one call, and before the result is
rounded.

    step                its row says            here
    product             x * w, rounded          x * w + bias, rounded
    bias                + bias, rounded again   what the product has made

Backward is as the rows say: neither gradient reads the sum. Prices say the same (program/biases.py). Where a product
goes by chunks, the bias is added as these are put together, to the last bit as its row would; its price has one pass
over memory for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from torch import Tensor

from convgen.operations.pointwise import Pointwise
from convgen.operations.row import At

from .listing import Line, Steps
from .local_code import LocalCode
from .rows import Stand


class AddedBefore(Pointwise):
    """The bias row's operation where its first operand has the bias added already."""

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return operands[:1]

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        y, bias = operands
        return (y,), () if y.dtype == bias.dtype else self.sloped.kept(wanted, operands, y)

    local_over, kept_over = local, kept

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        if kept or not self._others:  # backward casts between several types, or has nothing to sum
            return super().vjp(way, at, wanted, kept, *dys)
        (dy,) = dys
        return dy if wanted[0] else None, dy.sum(self._others) if wanted[1] else None

    @cached_property
    def _others(self) -> list[int]:
        """The dimensions along which the bias is the same, over which its gradient is a sum."""
        return [d for d in range(len(self.shape)) if d != self.adds_along]


def added_before(stand: Stand) -> Stand:
    """The bias row where its product has added the bias."""
    made, of = copy(stand), stand.operation
    assert isinstance(of, Pointwise)
    made.operation = AddedBefore(of.function, of.shape, of.shapes, of.places, of.settings, of.keeps)
    return made


def biases_of(steps: Steps, stands: Mapping[str, Stand]) -> dict[str, Line]:
    """By product, the step that adds its bias, where nothing else reads the product and the rank has it whole, or puts
    it together from sums of chunks."""
    found: dict[str, Line] = {}
    products = {line.makes[0]: line for line in steps.forward if line.kind in ("forward", "join")}
    readers: dict[str, set[tuple[str, str]]] = {}
    for line in (*steps.forward, *steps.backward):
        for name in line.reads:
            readers.setdefault(name, set()).add((line.kind, line.key))
    outputs = {slot for slot, _ in steps.outputs.values()}
    for line in steps.forward:
        product, bias = products.get(line.reads[0]) if line.reads else None, stands.get(line.key)
        if product is None or bias is None or line.kind != "forward" or line.reads[0] in outputs:
            continue
        of, there = stands.get(product.key), readers[line.reads[0]] == {(line.kind, line.key)}
        is_parameter = len(line.reads) == 2 and line.reads[1].startswith("[")  # then it is there before the product
        if of is not None and there and is_parameter and product.when == line.when and _is_bias(of, bias):
            found[product.key] = line
    return found


def _is_bias(product: Stand, bias: Stand) -> bool:
    """Whether a row adds a vector to a product, and nothing moves between them."""
    chunks = product.row.chunks
    joined = chunks is not None and chunks[-1]  # the chunks that are joined have moved already
    whole = all(r.row.early is None for r in (product, bias)) and bias.row.chunks is None
    if not (whole and (joined or chunks is None)) or any((*bias.fetch, *bias.store)):
        return False
    if not joined and any(product.store):
        return False
    along = bias.operation.adds_along
    if along is None or product.operation.bias_along != along:
        return False
    # A chunk of the dimension that the bias lies along would take a part of it.
    return chunks is None or chunks[0] not in product.signature.results[0].dims[along].indices


class WithBias:
    """A product on this rank that adds a bias.

    Args:
        bias: the bias row's own local code.
    """

    def __init__(self, code: LocalCode, bias: LocalCode) -> None:
        self.code, self.bias = code, bias
        self.may = not (code.between or code.is_nothing) and not bias.is_nothing
        operation = code.stand.operation
        self.local, self.kept = code.bound(operation.local), code.bound(operation.kept, code.wants)
        self.adds = False  # set by the first call: types and shapes of plain code don't change

    def forward(self, *operands: Tensor) -> tuple[Any, ...]:
        """The sum, and what backward reads of the product."""
        code, stand = self.code, self.code.stand
        if self.adds and not code.keeps:
            return self.local(*operands)[0], None
        if self.adds and code.says:
            (y,), kept = self.kept(*operands)
            return y, kept
        *given, vector = operands
        if self.may:
            parts = code.cut(stand.taken(given))
            _, b = self.bias.stand.taken((parts[0], vector))
            same = all(t.dtype == parts[0].dtype for t in (*parts, b))
            if same and stand.operation.adds_bias(stand.row.way, code.at, *parts):
                self.adds = code.is_plain and self.bias.is_plain
                (y,), kept = code.forward(*given, behind=(self.bias.stand.cut(1, b, self.bias.boxes[1], self.bias.at),))
                return y, kept
        (y,), kept = code.forward(*given)
        bias = self.bias
        return (bias.run_over if bias.is_whole and not bias.is_nothing else bias.run)(y, vector)[0], kept


class JoinedWithBias:
    """Chunks of a product that are put together on this rank.

    Args:
        joined: puts them together, and adds a vector that it may be given.
        bias: the bias row's own local code.
    """

    def __init__(self, joined: Callable[..., Tensor], bias: LocalCode) -> None:
        self.joined, self.bias = joined, bias

    def __call__(self, *reads: Tensor) -> Tensor:
        *pieces, vector = reads
        bias, along = self.bias, self.bias.stand.operation.adds_along
        _, b = bias.stand.taken((pieces[0], vector))
        if b.dtype == pieces[0].dtype and not bias.is_nothing and along is not None:
            b = bias.stand.cut(1, b, bias.boxes[1], bias.at)
            return self.joined(pieces, b.view([-1 if d == along else 1 for d in range(pieces[0].dim())]))
        return bias.run(self.joined(pieces), vector)[0]
