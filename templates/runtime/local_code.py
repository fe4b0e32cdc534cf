# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A row's local code on this rank, forward and backward.

An operation that says its own gradient (`Operation.vjp`) is called as plain functions of tensors. For any other, torch
records a graph of its own, which holds what autograd saves and nothing more: its leaves and roots are edges, no
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from convgen.operations.rimmed import Rimmed
from convgen.operations.row import At, empty_as

from .blocks import Function
from .checkpoints import is_kept_elsewhere
from .layout import Box

if TYPE_CHECKING:
    from .last_steps import Later
    from .rows import Stand

Narrowed = tuple[tuple[int, int, int], ...]  # of an operand: dimension, first row, rows


class Graph(NamedTuple):
    """The graph that torch keeps for local code: an edge for each result and for each operand that wants a gradient."""

    roots: tuple[Any, ...]
    leaves: tuple[Any, ...]
    types: tuple[torch.dtype, ...]


class Nothing(NamedTuple):
    """What a rank that computes nothing keeps for backward: the operands' types."""

    types: tuple[torch.dtype, ...]


class Leaf(Function):
    """A tensor at which a graph begins without holding it."""

    @staticmethod
    def forward(anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def leaf(tensor: Any) -> Any:
    if isinstance(tensor, Rimmed):
        stands = leaf(tensor.new_zeros(1).expand(tensor.shape))
        return Rimmed(tensor.own, tensor.rim, tensor.around, stands)
    return Leaf.apply(torch.zeros((), requires_grad=True), tensor.detach())


class LocalCode:
    """Local code for a part of a row on this rank.

    Args:
        at: where the part stands: its blocks of the row's indices.
        boxes: for each operand the box that is given; local code may take fewer rows of it.
        wants: for each operand, whether its gradient is wanted.
        between: whether the gradient of what a convolution makes within the row is wanted (Fused).
    """

    def __init__(
        self, stand: Stand, at: At, boxes: Sequence[Box], wants: Sequence[bool] = (), between: bool = False
    ) -> None:
        self.stand, self.at, self.boxes, self.between = stand, at, boxes, between
        self.wants = tuple(wants) or (False,) * len(boxes)
        self.keeps = any(self.wants) or between
        self.cuts: tuple[Narrowed, ...] = tuple([stand.narrowed(k, box, at) for k, box in enumerate(boxes)])
        self.is_whole = not any(self.cuts)
        self.shapes = [stand.made_shape(r, at) for r in stand.signature.results]
        read = [math.prod(hi - lo for lo, hi in operand) for operand in at.inside]
        self.is_nothing = not (stand.signature.runs_empty or (all(read) and all(map(math.prod, self.shapes))))
        self.says: bool | None = None  # whether the operation says its gradient
        # Whether operands are taken whole, in the types that they have, and something is made of them.
        self.is_plain = self.is_whole and not (self.is_nothing or stand.mixes)

    def bound(self, call: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        """A method of the operation, bound to where this part stands."""
        return partial(call, self.stand.row.way, self.at, *given)

    def run_over(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """The results, which may lie in the first operand's memory; nothing is kept for backward."""
        if self.stand.autocast:
            operands = tuple(self.stand.taken(operands))
        return self.stand.operation.local_over(self.stand.row.way, self.at, *operands)

    def run(self, *operands: Tensor, behind: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The results; nothing is kept for backward."""
        if self.stand.autocast:
            operands = tuple(self.stand.taken(operands))
        if not self.is_whole:
            operands = self.cut(operands)
        return self.stand.local(self.at, (*operands, *behind), self.is_nothing)

    def cut(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The rows that local code takes of what is given."""
        if self.is_whole:
            return tuple(operands)
        return tuple([self.stand.cut(k, t, self.boxes[k], self.at) for k, t in enumerate(operands)])

    def forward(
        self, *operands: Tensor, over: bool = False, behind: tuple[Tensor, ...] = ()
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Results, and what backward reads.

        Args:
            over: whether results may lie in the first operand's memory.
            behind: a bias that a product adds, as `adds_bias` says; it has no gradient here.
        """
        if not self.keeps:
            return self.run(*operands, behind=behind), None
        if self.stand.mixes:
            given = tuple([t.dtype for t in operands])
            made, kept = self._forward(tuple(self.stand.taken(operands)), over and not self.stand.autocast, behind)
            return made, (kept, given, tuple([t.dtype for t in made]))
        return self._forward(operands, over, behind)

    def _forward(
        self, operands: tuple[Tensor, ...], over: bool, behind: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Any]:
        operation, way = self.stand.operation, self.stand.row.way
        if self.says is None and not self.is_nothing:
            self.says = not self.between and operation.has_vjp(way, self.at, *self.cut(operands))
        if self.says:
            given = operands if self.is_whole else self.cut(operands)
            return (operation.kept_over if over else operation.kept)(way, self.at, self.wants, *given, *behind)
        types = tuple([t.dtype for t in operands])
        if self.is_nothing:
            return self.stand.local(self.at, operands, True), Nothing(types)
        if is_kept_elsewhere():  # by hooks, which see no graphs: what torch differentiates is computed again
            return self.run(*operands), ("operands", *operands)
        return self._graph(operands, types)[:2]

    def _graph(
        self, operands: Sequence[Tensor], types: tuple[torch.dtype, ...], kernel: Any = None
    ) -> tuple[tuple[Tensor, ...], Graph, Any]:
        """The results, the graph that torch keeps, and the result's moments if a kernel is given that makes them."""
        with torch.enable_grad():
            leaves = [leaf(t) if w else t for t, w in zip(operands, self.wants, strict=True)]
            begun = [
                (t.stands if isinstance(t, Rimmed) else t) if w else None
                for t, w in zip(leaves, self.wants, strict=True)
            ]
            parts = self.cut(leaves)
            stands = moments = None
            if self.between:
                stands = leaf(parts[0].new_zeros(1).expand(self.shapes[0]))
                begun.append(stands)
            if kernel is not None:
                one, moments = kernel.differentiated(self.stand.operation, self.at, stands, *parts)
                made = (one,)
            elif stands is not None:
                made = (self.stand.fused(self.at, parts, stands),)
            else:
                made = self.stand.local(self.at, parts, False)
            roots = tuple([get_gradient_edge(t) if t.requires_grad else None for t in made])
            edges = tuple([None if t is None else get_gradient_edge(t) for t in begun])
        return tuple([t.detach() for t in made]), Graph(roots, edges, types), moments

    def with_moments(self, *operands: Tensor) -> tuple[tuple[Tensor, ...], Any, Any]:
        """What `forward` gives, and moments of the result, which are None where no kernel makes them."""
        taken, kernel = self._taken(operands), None
        if not self.is_nothing and self.is_whole:
            kernel = self.stand.operation.moments_kernel(self.stand.row.way, self.at, taken)
        if kernel is None:
            return *self.forward(*operands), None
        return self._by_kernel(kernel, operands, taken, taken[0])

    def behind_norm(self, later: Later, *others: Tensor) -> tuple[tuple[Tensor, ...], Any, Any]:
        """What `with_moments` gives, of an operand that a norm has left to this product to make; then the operand is
        made."""
        operands, kernel = (later.made, *others), None
        if self.takes(later) and len(others) == 1:
            taken = self._taken(operands)
            kernel = self.stand.operation.behind_norm(self.stand.row.way, self.at, later.of, *taken)
            if kernel is not None and (not self.keeps or self._has_vjp(taken)):
                return self._by_kernel(kernel, operands, taken, later)
        return self.with_moments(later.done(), *others)

    def takes(self, later: Later) -> bool:
        """Whether local code takes the operand that a norm has left as it is: all its rows, in its own type."""
        kind = later.made.dtype
        as_taken = kind == later.read.dtype and (not self.stand.autocast or kind == self.stand.low)
        return as_taken and self.is_whole and not self.is_nothing

    def _taken(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.stand.taken(operands)) if self.stand.autocast else tuple(operands)

    def _has_vjp(self, operands: Sequence[Any]) -> bool:
        if self.says is None:
            self.says = not self.between and self.stand.operation.has_vjp(self.stand.row.way, self.at, *operands)
        return self.says

    def _by_kernel(
        self, kernel: Any, given: Sequence[Tensor], operands: tuple[Any, ...], first: Any
    ) -> tuple[tuple[Tensor, ...], Any, Any]:
        """The results of a kernel that makes moments, too.

        Args:
            given: operands in the types that their gradients get; operands: the same as local code takes them.
            first: the first operand, or what a norm has left to make it of.
        """
        stand, types = self.stand, tuple([t.dtype for t in given])
        if self.keeps and not self._has_vjp(operands) and not is_kept_elsewhere():
            made, kept, moments = self._graph(operands, tuple([t.dtype for t in operands]), kernel)
        else:
            one, moments = kernel.with_moments(first, *operands[1:])
            made = (one,)
            kept = stand.operation.kept_of(kernel, one, operands) if self.says else ("operands", *operands)
        if not self.keeps:
            return made, None, moments
        return made, (kept, types, tuple([t.dtype for t in made])) if stand.mixes else kept, moments

    def run_behind(self, before: Tensor, *operands: Tensor) -> Tensor:
        """The sum of `before` and of the only result."""
        if not (self.stand.autocast or self.is_nothing) and self.is_whole:
            made = self.stand.operation.added(self.stand.row.way, self.at, False, operands, before)
            if made is not None:
                return made
        return before + self.run(*operands)[0]

    def backward(
        self,
        kept: Any,
        needed: Sequence[bool],
        dys: Sequence[Tensor | None],
        keep: bool,
        before: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Gradients of the operands, and of what lies between.

        Args:
            needed: for each operand, and last for what lies between, whether its gradient is needed.
            keep: whether another backward pass may come.
            before: another gradient of the first operand, to which its gradient is added.
        """
        if before is not None:
            return self._behind(before, kept, needed, dys, keep)
        count = len(self.boxes) + self.between
        if len(needed) > count:
            return [*self.backward(kept, needed[:count], dys, keep), None]
        if not self.stand.mixes:
            return self._backward(kept, needed, dys, keep)
        kept, given, made = kept
        dys = [d if d is None else d.to(kind) for d, kind in zip(dys, made, strict=True)]
        found = self._backward(kept, needed, dys, keep)
        kinds = (*given, *made[:1])  # of what lies between, too
        return [g if g is None else g.to(kind) for g, kind in zip(found, kinds, strict=False)]

    def _behind(
        self, before: Tensor, kept: Any, needed: Sequence[bool], dys: Sequence[Tensor | None], keep: bool
    ) -> list[Tensor | None]:
        own, given = (kept[0], kept[1]) if self.stand.mixes else (kept, None)
        fits = self.says and self.is_whole and (given is None or given[0] == before.dtype)
        if fits and (dy := dys[0]) is not None:
            dy = dy if given is None else dy.to(kept[2][0])
            made = self.stand.operation.added(self.stand.row.way, self.at, True, (*own, dy), before)
            if made is not None:
                return [made, *self.backward(kept, (False, *needed[1:]), dys, keep)[1:]]
        first, *others = self.backward(kept, needed, dys, keep)
        return [before if first is None else before + first, *others]

    def _backward(
        self, kept: Any, needed: Sequence[bool], dys: Sequence[Tensor | None], keep: bool
    ) -> list[Tensor | None]:
        if self.says:
            found = self.stand.operation.vjp(self.stand.row.way, self.at, needed, kept, *dys)
            if self.is_whole:
                return list(found)
            return [None if g is None else self._widened(k, g) for k, g in enumerate(found)]
        if kept and isinstance(kept[0], str):
            _, *operands = kept
            _, kept, _ = self._graph(operands, tuple([t.dtype for t in operands]))
            keep = False
        if isinstance(kept, Nothing):
            return [self._zeros(k, kept.types) if n else None for k, n in enumerate(needed)]
        return self._through(kept, needed, dys, keep)

    def _through(
        self, kept: Graph, needed: Sequence[bool], dys: Sequence[Tensor | None], keep: bool
    ) -> list[Tensor | None]:
        pairs = [(r, dy) for r, dy in zip(kept.roots, dys, strict=True) if r is not None and dy is not None]
        edges = [e for e, n in zip(kept.leaves, needed, strict=True) if n]
        found: Sequence[Tensor | None] = [None] * len(edges)
        if pairs and edges:
            roots, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(roots, edges, given, retain_graph=keep, allow_unused=True)
        each = iter(found)
        gradients = [next(each) if n else None for n in needed]
        return [
            self._zeros(k, kept.types) if g is None and n else g
            for k, (g, n) in enumerate(zip(gradients, needed, strict=True))
        ]

    def _zeros(self, k: int, types: Sequence[torch.dtype]) -> Tensor:
        if k == len(self.boxes):  # of what lies between
            return torch.zeros(self.shapes[0], dtype=types[0], device=self.stand.device)
        return torch.zeros([hi - lo for lo, hi in self.boxes[k]], dtype=types[k], device=self.stand.device)

    def _widened(self, k: int, gradient: Tensor) -> Tensor:
        """The gradient of all rows that were given: zeros around the gradient of the rows that were taken."""
        if not self.cuts[k]:
            return gradient
        out = inner = empty_as(gradient, [hi - lo for lo, hi in self.boxes[k]]).zero_()
        for d, first, rows in self.cuts[k]:
            inner = inner.narrow(d, first, rows)
        inner.copy_(gradient)
        return out
