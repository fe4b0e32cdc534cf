# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A batch norm's rows at once: fewer nodes of autograd's graph, and few passes over what is in memory.

    rows:      moments  merge  |  coefficients  y            dp  all_reduce  dcoefficients  dmoments  dx + dx
    at once:   moments  merge  |  y                          dp  all_reduce  dx

The collectives are the rows', with their names, elements and order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convgen.operations.batch_norm import (
    Centred,
    merged_statistics,
    normalised,
    normalised_dx,
    normalised_sums,
    statistics_of,
)
from convgen.operations.moments import batch_normed

from .blocks import Unmapped
from .buckets import Buckets
from .checks import refuse_vmap
from .conversions import named
from .lanes import noted
from .mesh import Place
from .rows import Stand
from .travel import Move, RowHere, moved, travel

Pair = tuple[Tensor | None, Tensor | None]


class Joined:
    """The rows of a batch norm as they stand in calls.

    Args:
        moments, coefficients, centred: its rows.
    """

    def __init__(self, moments: Stand, coefficients: Stand, centred: Stand, eps: float) -> None:
        self.moments, self.coefficients, self.centred, self.eps = moments, coefficients, centred, eps
        is_alone = isinstance(centred.operation, Centred)  # not one row with others behind it
        self.is_silent = is_alone and centred.is_silent and coefficients.is_silent and not moments.store[0]
        self.is_joint = is_alone and self._is_joint()
        self._shares: dict[tuple[int, torch.dtype], tuple[Tensor, float]] = {}

    def _is_joint(self) -> bool:
        """Whether nothing moves but moments forward, and backward the coefficients' gradient over the same ranks."""
        m, c, y = self.moments, self.coefficients, self.centred
        derived = m.derived.get(0)
        if derived is None or not (c.is_silent and derived.is_silent) or len(m.store[0]) != 1 or len(y.back[1]) != 1:
            return False
        others = (*m.fetch, *m.given, *m.back, *y.fetch, *y.store, *y.given, y.back[0])
        rows = (m.row, c.row, y.row, derived.row)
        kinds = self.there.kind == "merge" and self.back.kind == "all_reduce" and self.there.over == self.back.over
        return kinds and not any(others) and all(r.early is None and r.chunks is None for r in rows)

    @property
    def there(self) -> Move:
        """The merge of moments."""
        return self.moments.store[0][0]

    @property
    def back(self) -> Move:
        """The sum of the coefficients' gradient."""
        return self.centred.back[1][0]

    def shares(self, here: RowHere, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Of all elements those of each rank, and how many there are."""
        key = (here.place.me, dtype)
        if key not in self._shares:
            counts = self.moments.counts(here.members(self.there.over), self.moments.device, torch.float64)[:, 0]
            total = float(counts.sum())
            self._shares[key] = (counts / total).to(dtype), total
        return self._shares[key]

    def statistics(self, x: Tensor, here: RowHere) -> tuple[Tensor, Tensor]:
        """Mean and variance of all ranks' x."""
        with noted("local", self.moments.label):
            own = statistics_of(x)
        there = self.there
        with noted("move", there.step), named(there.step, "all_gather", there.over, here):
            group = here.group(there.over)
            parts = here.place.transport.all_gather(own, [own.numel()] * len(group.ranks), group)
        shares, _ = self.shares(here, own.dtype)
        return merged_statistics(parts.view(len(shares), -1), shares)

    def run(self, place: Place, x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """y; of all ranks' x the mean and the unbiased variance."""
        here = RowHere(self.moments, place, 0)  # type: ignore[arg-type]
        with torch.no_grad():
            mean, variance = self.statistics(x.detach(), here)
            _, total = self.shares(here, mean.dtype)
        y = AtOnce.apply(x, w, b, mean, variance, self, place)
        return y, mean, variance * (total / (total - 1))


class AtOnce(Unmapped):
    """y, and the gradients of x, weight and bias, through the statistics too."""

    @staticmethod
    def forward(
        x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, variance: Tensor, of: Joined, place: Place
    ) -> Tensor:
        with noted("local", of.centred.label):
            return normalised(x, (mean, variance), w, b, of.eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, b, mean, variance, ctx.of, ctx.place = inputs
        ctx.types = [None if t is None else t.dtype for t in (w, b)]
        ctx.save_for_backward(x, w, mean, variance)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        of, place, (x, w, mean, variance) = ctx.of, ctx.place, ctx.saved_tensors
        statistics = mean, variance
        refuse_vmap(of.moments.name)  # of jacrev, and of is_grads_batched
        here, x, dy = RowHere(of.centred, place, 0), x.contiguous(), dy.contiguous()  # type: ignore[arg-type]
        with torch.autocast(of.moments.device, enabled=False):
            a = torch.rsqrt(variance + of.eps)
            a = a if w is None else a.mul_(w)
            with noted("local", of.back.step):
                sums = normalised_sums(dy, x, statistics, a, of.eps)
            _, *found = gradients = travel(sums.view(3, -1), of.centred.back[1], here)
            dx = None
            if ctx.needs_input_grad[0]:
                _, total = of.shares(RowHere(of.moments, place, 0), a.dtype)  # type: ignore[arg-type]
                with noted("local", f"{of.moments.label}.dx"):
                    dx = normalised_dx(dy, x, statistics, a, gradients[1:] / total, of.eps)
        found = [None if kind is None else t.to(kind) for kind, t in zip(ctx.types, found, strict=True)]
        return dx, *found, None, None, None, None


class Alone:
    """The rows of a batch norm of a rank's block by its own statistics, which is ATen's: what moves are gradients of
    parameters, and running statistics.

    Args:
        statistics: the row of running ones.
    """

    def __init__(self, moments: Stand, coefficients: Stand, statistics: Stand | None, eps: float) -> None:
        self.moments, self.coefficients, self.statistics, self.eps = moments, coefficients, statistics, eps

    def run(self, place: Place, x: Tensor, vectors: Pair, buckets: Buckets | None) -> tuple[Tensor, Tensor]:
        """y, and a rank's addend of the running statistics: [2, C]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        w, b = self._moved(place, vectors, wide, buckets)
        own = x.new_zeros(2, x.shape[1], dtype=wide)
        if not x.numel():
            return of_nothing(x, w, b), own
        with noted("local", self.moments.label):
            y = batch_normed(x, w, b, own[0], own[1], True, 1.0, self.eps)
        return y, own * (x.numel() / x.shape[1] / cast(Any, self.moments.operation).of.count)  # autograd keeps own

    def evaluated(
        self, place: Place, x: Tensor, vectors: Pair, running: tuple[Tensor, Tensor], buckets: Buckets | None
    ) -> Tensor:
        """y by running statistics."""
        wide = torch.promote_types(x.dtype, torch.float32)
        w, b = self._moved(place, vectors, wide, buckets)
        mean, variance = (t.to(wide) for t in running)
        if not x.numel():
            return of_nothing(x, w, b)
        return batch_normed(x, w, b, mean, variance, False, 0.0, self.eps)

    def _moved(self, place: Place, vectors: Pair, wide: torch.dtype, buckets: Buckets | None) -> list[Tensor | None]:
        """Weight and bias, of which each rank has the gradient of its own block."""
        stand, here = self.coefficients, RowHere(self.coefficients, place, 0)  # type: ignore[arg-type]
        chains = iter(zip(stand.fetch[1:], stand.back[1:], strict=True))
        return [None if v is None else moved(v, *next(chains), here, buckets).to(wide) for v in vectors]

    def averaged(self, place: Place, own: Tensor) -> Tensor:
        """The sum of the ranks' addends."""
        stand = self.statistics
        assert stand is not None
        return travel(own, stand.store[0], RowHere(stand, place, 0))  # type: ignore[arg-type]


def of_nothing(x: Tensor, *vectors: Tensor | None) -> Tensor:
    """What a rank without elements makes; in the graph like any other, so that all come to the same gradients."""
    return sum((v.sum().to(x.dtype) * 0 for v in vectors if v is not None), x.clone())
