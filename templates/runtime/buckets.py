# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Gradients of parameters that are summed together while backward goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.algebra.layout import Axes

from .checks import refuse_vmap
from .conversions import named
from .lanes import Pending, begin, noted
from .layout import block

GRADIENTS = "gradients"


class Bucket(NamedTuple):
    """One all-reduce for the gradients of several parameters.

    Attributes:
        steps: by the name of the step that each would be, its parameter; in the order in which backward comes to them.
    """

    name: str
    over: Axes
    steps: Mapping[str, str]


class Reduced(NamedTuple):
    """A bucket in flight, and the shapes of its gradients by step."""

    pending: Pending
    shapes: dict[str, torch.Size]


class Buckets:
    """The buckets of one call of a network, in its backward pass.

    A gradient is handed in instead of being reduced, and zeros that take no memory go through autograd in its place.
    When a bucket's last one is there, its all-reduce is started; when all of backward has been, the one node of all
    parameters calls `complete`, and the sums take the zeros' places. So gradients are whole before anyone sees them.

    Args:
        wanted: parameters that want gradients; others' never come.
    """

    def __init__(self, buckets: Sequence[Bucket], wanted: Collection[str], here: Any) -> None:
        self.buckets, self.here = buckets, here
        self.steps = {b.name: [s for s, p in b.steps.items() if p in wanted] for b in buckets}
        self.of = {step: b for b in buckets for step in self.steps[b.name]}
        self.given: dict[str, Tensor] = {}
        self.flying: dict[str, Reduced] = {}

    def __contains__(self, step: object) -> bool:
        return step in self.of

    def give(self, step: str, gradient: Tensor) -> Tensor:
        """Hand in this rank's addend; what autograd gets for it."""
        bucket = self.of[step]
        refuse_vmap(self.here.layer.name)  # of jacrev, and of is_grads_batched
        if step in self.given or bucket.name in self.flying:
            name = self.here.layer.name
            raise RuntimeError(f"{name}: step %{step} twice in one backward pass: a row's call can't be repeated")
        self.given[step] = gradient.detach()
        if all(s in self.given for s in self.steps[bucket.name]):
            self._start(bucket)
        return gradient.new_zeros(()).expand(gradient.shape)

    def _start(self, bucket: Bucket) -> None:
        """Of what has been given, which is all but what no output of this backward pass depends on."""
        parts = {s: self.given.pop(s) for s in self.steps[bucket.name] if s in self.given}
        group = self.here.group(bucket.over)
        packed = torch.cat([t.reshape(-1) for t in parts.values()])
        ranks = len(group.ranks)
        splits = [hi - lo for lo, hi in (block(0, packed.numel(), ranks, i) for i in range(ranks))]
        with named(bucket.name, "all_reduce", bucket.over, self.here):
            pending = begin(self.here.place.transport, "all_reduce", packed, splits, group, GRADIENTS, owns=True)
        self.flying[bucket.name] = Reduced(pending, {s: t.shape for s, t in parts.items()})

    def complete(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of parameters, with the sums in the zeros' places; nothing is in flight afterwards."""
        for bucket in self.buckets:
            if any(s in self.given for s in self.steps[bucket.name]):
                self._start(bucket)
        sums: dict[str, Tensor] = {}
        for bucket in self.buckets:
            if bucket.name not in self.flying:
                continue
            pending, shapes = self.flying.pop(bucket.name)
            with noted("wait", bucket.name), named(bucket.name, "all_reduce", bucket.over, self.here):
                whole = pending.wait()
            parts = whole.split([s.numel() for s in shapes.values()])
            for (step, shape), part in zip(shapes.items(), parts, strict=True):
                parameter, gradient = bucket.steps[step], part.view(shape)
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        return [g if n not in sums else one_of(g, sums[n]) for n, g in zip(names, gradients, strict=True)]


def one_of(through: Tensor | None, total: Tensor) -> Tensor:
    """A sum; with what came through autograd, unless that is the zeros alone."""
    steps = [] if through is None else [s for s, n in zip(through.stride(), through.shape, strict=True) if n > 1]
    if through is None or (steps and not any(steps) and not through.requires_grad):
        return total
    return through + total  # with a graph, where gradients are to have gradients: that is refused further on
