"""Nodes that are no convolutions: what they move and what they touch, given how their inputs and output are stored.

| kind | reads its inputs | moves |
|---|---|---|
| batch_norm, relu, dropout | as they are; the output is stored alike | statistics, sums of gradients: C numbers each |
| max_pool, avg_pool | with the rows of its windows, like a depthwise convolution | halos of x and dy |
| global_avg_pool | as they are | its addends over split rows are reduced |
| add | each as the output is stored | what is stored otherwise |
| concat | as the output is, whose channels are not split | what is stored otherwise |
| flatten | as the output is; rows whole | what is stored otherwise |
| softmax_loss | channels whole | what is split by channel |

Gradients go the same ways back. Local work is bound by memory: bytes read and written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.operations.layer import wanted
from convgen.plan.network.node_step import NodeStep, conversions, passes
from convgen.plan.network.reduced import ReducedModel, largest, reduced_model
from convgen.plan.network.setting import Setting
from convgen.plan.network.splits import Shape, Split
from convgen.spec.layer import DTYPE_BYTES
from convgen.spec.network import pixel

IN_PLACE = ("batch_norm", "relu", "dropout")  # their output is stored as their input


@dataclass(frozen=True, slots=True)
class Move:
    """A redistribution that a node needs."""

    phase: str
    what: str
    model: ReducedModel
    src: Layout
    dst: Layout


@dataclass(frozen=True, slots=True)
class Touch:
    """A pass over memory: bytes that the busiest rank reads and writes."""

    phase: str
    kind: str
    moved_bytes: int


class OtherNode:
    """One kind of node with given shapes on one grid; nodes alike share it."""

    def __init__(
        self,
        kind: str,
        inputs: tuple[Shape, ...],
        shape: Shape,
        conv: Conv | None,
        grid: Grid,
        dtype: str,
        setting: Setting,
    ) -> None:
        self.kind, self.inputs, self.shape, self.grid, self.dtype, self.setting = (
            kind,
            inputs,
            shape,
            grid,
            dtype,
            setting,
        )
        self.size = DTYPE_BYTES[dtype]
        self.conv = conv

    def allows(self, y: Split) -> bool:
        """Whether the output may be stored so, without work that the kind doesn't have."""
        parts = prod(self.grid.sizes[a] for a in y[1])
        if self.kind == "concat":
            return parts == 1
        if self.kind == "flatten":
            return self.inputs[0][1] % parts == 0
        return True

    def time_ps(self, xs: Sequence[Split], y: Split) -> int:
        """Picoseconds of all its steps."""
        total = sum(self.pass_step(touch).cost.time_ps for touch in self.touches(xs, y))
        for move in self.moves(xs, y):
            total += sum(cost.time_ps for _, cost in move.model.chain(move.src, move.dst))
        return total

    def steps(self, xs: Sequence[Split], y: Split) -> Iterator[NodeStep]:
        """The steps, in order."""
        for phase in ("forward", "backward"):
            for move in self.moves(xs, y):
                if move.phase == phase:
                    yield from conversions(phase, move.what, move.model.chain(move.src, move.dst))
            yield from (self.pass_step(touch) for touch in self.touches(xs, y) if touch.phase == phase)

    def pass_step(self, touch: Touch) -> NodeStep:
        return passes(touch.phase, touch.kind, "memory", touch.moved_bytes, self.setting.machine)

    def moves(self, xs: Sequence[Split], y: Split) -> Iterator[Move]:
        """What travels."""
        match self.kind:
            case "max_pool" | "avg_pool":
                yield from self._pool_moves(xs[0], y)
            case "global_avg_pool":
                model = self.model(pixel(self.shape))
                rows = self.grid.ordered(a for axes in xs[0][2:] for a in axes)
                blocks = (*xs[0][:2], *(() for _ in self.shape[2:]))
                stored, whole = Layout("x", y), Layout("x", blocks)
                yield Move("forward", "sums", model, replace(whole, partial=rows), stored)
                yield Move("backward", "dy", model, stored, whole)
            case "add" | "concat" | "flatten" | "softmax_loss":
                for x, shape in zip(xs, self.inputs, strict=True):
                    model, want = self.model(pixel(shape)), Layout("x", self.read(x, shape, y))
                    yield Move("forward", "x", model, Layout("x", x), want)
                    yield Move("backward", "dx", model, want, Layout("x", x))
            case "batch_norm":
                yield from self._sums(xs[0])
            case _:
                return

    def read(self, x: Split, shape: Shape, y: Split) -> Split:
        """How an input is read."""
        if self.kind == "flatten":
            return (*y[:2], *(() for _ in shape[2:]))
        if self.kind == "softmax_loss":
            return (x[0], (), *x[2:])
        return y

    def _pool_moves(self, x: Split, y: Split) -> Iterator[Move]:
        assert self.conv is not None
        model = self.model(self.conv)
        nests = (("N", y[0]), ("G", y[1]), *zip(self.conv.letters, y[2:], strict=True))
        roles = Roles(tuple((role, axes) for role, axes in nests if axes))
        stored_x, stored_y = Layout("x", x), Layout("y", y)
        want, _, _ = wanted(model.space, "forward", roles)
        yield Move("forward", "x", model, stored_x, want)
        want, _, made = wanted(model.space, "backward_data", roles)
        yield Move("backward", "dy", model, stored_y, want)
        yield Move("backward", "dx", model, made, stored_x)

    def _sums(self, x: Split) -> Iterator[Move]:
        """Two vectors of C: the gradients of scale and shift; with global statistics the moments too."""
        over = self.grid.ordered(a for d, axes in enumerate(x) if d != 1 for a in axes)
        model = self.model(pixel((2, self.shape[1])))
        vectors = Layout("x", ((), x[1]))
        addends = replace(vectors, partial=over)
        if self.setting.statistics == "global":
            yield Move("forward", "moments", model, addends, vectors)
        elif self.setting.hide_dw:
            return  # gradients of parameters and nothing else: hidden like filters'
        yield Move("backward", "sums of gradients", model, addends, vectors)

    def touches(self, xs: Sequence[Split], y: Split) -> Iterator[Touch]:
        """Passes over memory of the busiest rank."""
        if self.kind == "concat":
            xs = [self.read(x, shape, y) for x, shape in zip(xs, self.inputs, strict=True)]
        x_bytes = sum(self.block_bytes(shape, x) for shape, x in zip(self.inputs, xs, strict=True))
        y_bytes = self.block_bytes(self.shape, y) if self.shape else 0
        match self.kind:
            case "batch_norm":  # moments, then the result; two sums, then dx
                yield Touch("forward", self.kind, 3 * x_bytes)
                yield Touch("backward", self.kind, 5 * x_bytes)
            case "relu" | "dropout":
                yield Touch("forward", self.kind, 2 * x_bytes)
                yield Touch("backward", self.kind, 3 * x_bytes)
            case "add":
                yield Touch("forward", self.kind, y_bytes * (len(self.inputs) + 1))
            case "softmax_loss":
                read = self.block_bytes(self.inputs[0], self.read(xs[0], self.inputs[0], ()))
                yield Touch("forward", self.kind, 3 * read)
                yield Touch("backward", self.kind, 2 * read)
            case "flatten":
                return
            case _:
                yield Touch("forward", self.kind, x_bytes + y_bytes)
                yield Touch("backward", self.kind, x_bytes + y_bytes)

    def block_bytes(self, shape: Shape, split: Split) -> int:
        """Bytes of the largest block of an activation."""
        return block_elements(shape, split, self.grid) * self.size

    def model(self, conv: Conv) -> ReducedModel:
        padding = self.setting.target.pads_virtually
        return reduced_model(conv, self.grid, self.setting.machine, self.dtype, virtual_padding=padding)


def block_elements(shape: Shape, split: Split, grid: Grid) -> int:
    """Elements of the largest block.

    Example:
        >>> block_elements((7, 4), (("a",), ()), Grid((("a", 2),)))
        16
    """
    return prod(largest(n, 1, tuple(grid.sizes[a] for a in axes)) for n, axes in zip(shape, split, strict=True))
