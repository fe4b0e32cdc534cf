# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Steps of norms that take few passes over memory. A batch norm's:

    step            as its row says                 here
    moments         [count, mean, M2]               mean and variance
    merge           [count, mean, M2] of all ranks  mean and variance of all ranks, by their shares
    coefficients    [mean, weight / deviation, bias] mean, variance, weight and bias as they are
    centred         (x - mean) * a + b              ATen's
    backward        dp; dcoefficients; dmoments; dx + dx    dp; dcoefficients; dx at once

The collectives are the rows', with their names, elements and order. Steps of rows between which anything else moves are
as their rows say. A layer, group or instance norm, with scale and shift behind it, is one call of ATen where a rank has
all elements that share moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, cast

import torch
from torch import Tensor

from convgen.operations.batch_norm import (
    Centred,
    merged_statistics,
    normalised,
    normalised_dx,
    normalised_sums,
    statistics_of,
)
from convgen.operations.moments import Moments, Normalise, settled
from convgen.operations.pointwise import Pointwise

from .conversions import named
from .listing import Line, Norm
from .mesh import Place
from .rows import Stand
from .travel import RowHere, dense

Step = Callable[..., Any]
Statistics = tuple[Tensor, Tensor]


class AtOnce:
    """Stands for statistics that are made together with y; `running`: the running statistics that are renewed then."""

    running: tuple[Tensor | None, Tensor | None] = (None, None)


class NormHere:
    """A batch norm on this rank.

    Args:
        training: whether its module is in training.

    Attributes:
        behind: keys of the rows behind it whose steps it does, too.
        reads_result: whether backward reads the result of the last of these rows.
        by_tiles: kind and key of the step that takes moments of x by tiles, if the kernel that makes x makes them.
    """

    behind: Sequence[str] = ()
    reads_result: bool = False
    by_tiles: Sequence[tuple[str, str]] = ()

    def __init__(self, norm: Norm, stands: dict[str, Stand], place: Place, training: bool) -> None:
        self.norm, self.place, self.eps = norm, place, norm.eps
        self.training = training or f"{norm.moments}_running" not in stands  # whether it takes the batch's statistics
        self.moments, self.coefficients = stands[norm.moments], stands[norm.coefficients]
        self.centred = stands[norm.centred]
        self.of_parts = bool(cast(Any, self.moments.operation).of.parts)
        if training:
            self._refuse_one()
        is_alone = self.of_parts or isinstance(self.centred.operation, Centred)  # it isn't fused with another row
        silent = self.centred.is_silent and self.coefficients.is_silent and not self.moments.store[0]
        self.is_local = is_alone and (silent or self.of_parts)
        self.is_joint = is_alone and not self.is_local and self._is_joint()
        self.is_quick = self.is_local or self.is_joint  # its steps take the few passes of this file
        self.is_alone = self.is_local and self.training and not self.of_parts  # one call of ATen makes all
        self.here = RowHere(self.moments, place, 0)  # type: ignore[arg-type]

    def _refuse_one(self) -> None:
        of = cast(Any, self.moments.operation).of
        if self.of_parts:
            of.check()
        elif of.count == 1:
            name, module, shape = self.moments.name, self.norm.module, list(of.shape)
            raise ValueError(
                f"{name}: {module}: expected more than 1 value per channel when training, got input size {shape}"
            )

    def _is_joint(self) -> bool:
        """Whether nothing moves but moments forward, and backward the coefficients' gradient over the same ranks."""
        m, c, y = self.moments, self.coefficients, self.centred
        derived = m.derived.get(0)
        if derived is None or not (c.is_silent and derived.is_silent) or len(m.store[0]) != 1 or len(y.back[1]) != 1:
            return False
        others = (*m.fetch, *m.given, *m.back, *y.fetch, *y.store, *y.given, y.back[0])
        rows = (m.row, c.row, y.row, derived.row)
        (there,), (back,) = m.store[0], y.back[1]
        kinds = there.kind == "merge" and back.kind == "all_reduce" and there.over == back.over
        return kinds and not any(others) and all(r.early is None and r.chunks is None for r in rows)

    def steps(self) -> dict[tuple[str, str], Step]:
        """By kind and key, the steps of its rows that are done otherwise here than the rows say."""
        norm = self.norm
        if not self.is_quick:
            return {}
        known: dict[tuple[str, str], Step] = {
            ("forward", norm.moments): self._moments,
            ("forward", f"{norm.moments}_running"): self._running,
            ("forward", norm.coefficients): self._coefficients,
            ("forward", norm.centred): self._centred,
            ("vjp", norm.centred): self._sums,
            ("vjp", norm.coefficients): self._vectors,
            ("forward", f"{norm.moments}.dx"): self._dx,
        }
        if self.is_joint:
            known["store", norm.moments] = self._merge
        if norm.averaged:
            known["forward", norm.averaged] = self._averaged
        return known | self.in_place()

    def in_place(self) -> dict[tuple[str, str], Step]:
        """The steps of `steps` that renew buffers themselves, so that no other step has to."""
        renew = self._renew_by_parts if self.of_parts else self._renew
        found: dict[str | None, Step] = {self.norm.counted: self._count, self.norm.renewed: renew}
        return {("forward", name): step for name, step in found.items() if name and self.is_quick}

    # ---- forward ----

    def _moments(self, x: Tensor) -> Any:
        if self.is_alone:
            return AtOnce()
        own = statistics_of(x)
        return own if self.is_joint else tuple(own.view(2, x.shape[1]).unbind())

    def _merge(self, own: Tensor) -> Statistics:
        ((there,), here) = self.moments.store[0], self.here
        with named(there.step, "all_gather", there.over, here):
            group = here.group(there.over)
            parts = here.place.transport.all_gather(own, [own.numel()] * len(group.ranks), group)
        shares, _ = self._shares(own.dtype)
        return self._merged(parts.view(len(shares), own.numel()), shares)

    def _merged(self, parts: Tensor, shares: Tensor) -> Statistics:
        return merged_statistics(parts, shares)

    def _shares(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Each rank's share of the elements that statistics are of, and how many elements there are in all."""
        return self.moments.shares(self.here.members(self.moments.store[0][0].over), dtype)

    def _running(self, mean: Tensor, variance: Tensor) -> Statistics:
        wide = torch.promote_types(mean.dtype, torch.float32)
        return mean.to(wide), variance.to(wide)

    def _renew(self, running_mean: Tensor, running_var: Tensor, statistics: Statistics | AtOnce) -> tuple[None, None]:
        """Renew running statistics in place."""
        if isinstance(statistics, AtOnce):
            statistics.running = running_mean, running_var
            return None, None
        (mean, variance), momentum = statistics, self.norm.momentum
        count = self._count_of(mean.dtype)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        return None, None

    def _count_of(self, dtype: torch.dtype) -> int:
        """How many elements of each channel the statistics are of."""
        return int(self._shares(dtype)[1]) if self.is_joint else cast(Any, self.moments.operation).of.count

    def _count(self, counted: Tensor) -> None:
        """Add one to the buffer that counts batches, in place."""
        counted.add_(1)

    def _averaged(self, statistics: Statistics) -> Tensor:
        """A rank's addend of running statistics that are averages of the parts'."""
        mean, variance = statistics
        operation: Any = self.moments.operation
        (box,) = self.moments.at(self.place).inside
        count = math.prod(hi - lo for d, (lo, hi) in enumerate(box) if d != 1)
        unbiased = variance * (count / max(count - 1, 1))
        return torch.stack([mean, unbiased]) * (count / operation.of.count)

    def _renew_by_parts(self, running_mean: Tensor, running_var: Tensor, averaged: Tensor) -> tuple[None, None]:
        for old, new in zip((running_mean, running_var), averaged, strict=True):
            old.lerp_(new.to(old.dtype), self.norm.momentum)
        return None, None

    def _coefficients(self, statistics: Statistics | AtOnce, *vectors: Tensor) -> tuple[Any, None]:
        operation: Any = self.coefficients.operation
        w = vectors[0] if operation.weight else None
        b = vectors[-1] if operation.bias else None
        return (statistics, w, b), None

    def _centred(self, x: Tensor, p: Any) -> tuple[Tensor, Any]:
        statistics, w, b = p
        if isinstance(statistics, AtOnce):
            return self._at_once(x, w, b, statistics)
        mean, variance = statistics
        y = normalised(x, (mean, variance), w, b, self.eps) if x.numel() else x.clone()
        return y, (x, w, b, mean, variance)

    def _at_once(self, x: Tensor, w: Tensor | None, b: Tensor | None, of: AtOnce) -> tuple[Tensor, Any]:
        """The norm on a rank that has all of x: one call of ATen makes statistics, running ones and y."""
        if not x.numel():
            nothing = torch.zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            return x.clone(), (x, w, b, nothing, nothing)
        x, shape = settled(x), x.shape
        given = x.flatten(2) if x.dim() > 3 and 1 in shape[:2] else x  # as in batch_normed
        found = torch.native_batch_norm(given, w, b, *of.running, True, self.norm.momentum, self.eps)
        return found[0].view(shape), (x, w, b, *found[1:])

    # ---- backward ----

    def _sums(self, kept: Any, dy: Tensor, needed: Sequence[bool]) -> tuple[Any, Any]:
        """The gradient of x, if it is complete here, and the sums of which the gradients of weight, bias and moments
        are made."""
        x, w, b, mean, variance = kept
        x, shape = dense(x), x.shape
        dy = dense(dy.to(x.dtype), x)
        if self.is_joint:
            a = self._scale(w, variance)
            dx = None if self.training or not needed[0] else dy * a.view(-1, *[1] * (x.dim() - 2)).to(dy.dtype)
            return dx, normalised_sums(dy, x, (mean, variance), a, self.eps).view(3, len(mean))
        if not x.numel():
            return dy, (torch.zeros_like(mean), torch.zeros_like(mean))
        if x.dim() > 3 and 1 in shape[:2]:  # as in batch_normed
            x, dy = x.flatten(2), dy.flatten(2)
        wide = None if w is None else w.to(mean.dtype)
        if not self.training:
            of = mean, variance, None, None
        elif self.is_alone:
            of = None, None, mean, variance  # this variance is 1 / deviation, as ATen keeps it
        else:
            of = None, None, mean, torch.rsqrt(variance + self.eps)
        backward = torch.ops.aten.native_batch_norm_backward
        mask = [needed[0], needed[1] and w is not None, needed[1] and b is not None]
        dx, dw, db = backward(dy, x, wide, *of, self.training, self.eps, mask)
        return None if dx is None else dx.view(shape), (dw, db)

    def _scale(self, w: Tensor | None, variance: Tensor) -> Tensor:
        a = torch.rsqrt(variance + self.eps)
        return a if w is None else a.mul_(w)

    def _vectors(self, kept: Any, dp: Any, needed: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients of moments, weight and bias."""
        operation: Any = self.coefficients.operation
        moments, dw, db = (dp, dp[1], dp[2]) if self.is_joint else (None, *dp)
        found = [t for t, there in ((dw, operation.weight), (db, operation.bias)) if there]
        return moments, *found

    def _dx(self, dm: Any, statistics: Any, x: Tensor, kept: Any = None, dy: Tensor | None = None) -> Tensor | None:
        """The gradient of x, through y and through moments."""
        if not self.is_joint or dm is None:
            return None
        _, w, _, mean, variance = kept
        assert dy is not None
        _, total = self._shares(mean.dtype)
        a = self._scale(w, variance)
        x = dense(x)
        return normalised_dx(dense(dy.to(x.dtype), x), x, (mean, variance), a, dm[1:] / total, self.eps)


def is_whole(moments: Stand, y: Stand, place: Place) -> bool:
    """Whether this rank has, and normalises, all elements that share moments."""
    of, derived = getattr(moments.operation, "of", None), moments.derived.get(0)
    if type(moments.operation) is not Moments or type(y.operation) is not Normalise or derived is None or of is None:
        return False
    rows = (moments, derived, y)
    leads = of.keep == tuple(range(len(of.keep))) and not of.parts and not y.operation.rms
    silent = all(r.is_silent and r.row.early is None and r.row.chunks is None for r in rows)
    return leads and silent and moments.at(place).inside[0] == y.at(place).inside[0]


def left(*reads: Tensor) -> None:
    pass


class NormAtOnce:
    """A layer, group or instance norm on this rank, in the steps of its rows: the last one computes, the others hand on
    what it reads; backward it is the other way round.

    Attributes:
        vectors: for the vectors of the rows behind, in order, whether each is the weight, `w`, or the bias, `b`.
        by_channel: whether a vector has a number for each channel; else it has one for each element that is normalised
            together.
    """

    def __init__(self, of: Any, eps: float, stand: Stand) -> None:
        self.of, self.eps, self.stand = of, eps, stand
        self.vectors, self.by_channel = "", False

    def takes(self, stand: Stand | None, line: Line, name: str) -> bool:
        """Whether the row behind is the scale, the shift, or both: by channels, or by the elements that are normalised
        together."""
        operation = None if stand is None else stand.operation
        if stand is None or not isinstance(operation, Pointwise) or line.kind != "forward":
            return False
        if line.reads[0] != name or name in line.reads[1:]:
            return False
        vectors, by_channel = operation.vectors_of(self.of)
        moves = (stand.fetch[0], stand.back[0], *stand.store, *stand.given)
        is_next = bool(vectors) and self.vectors + vectors in ("w", "b", "wb")
        if any(moves) or stand.row.early is not None or stand.row.chunks is not None or not is_next:
            return False
        if self.vectors and by_channel != self.by_channel:
            return False
        self.vectors, self.by_channel = self.vectors + vectors, by_channel
        return True

    def hand_on(self, given: Any, *vectors: Tensor | None) -> tuple[Any, Any]:
        """What a row before the last one hands on: x, and the vectors so far."""
        return _all_read(given, vectors), ()

    def compute(self, given: Any, *more: Tensor | None) -> tuple[Tensor, Any]:
        read: Any = _all_read(given, more)
        x, *vectors = read
        w, b = (vectors[n] if name in self.vectors else None for n, name in ((0, "w"), (-1, "b")))
        types = tuple([t.dtype for t in read])
        x = self.stand.taken((x, None))[0] if self.stand.autocast else x
        made = x.dtype if self.stand.low is not None or len({*types}) == 1 else _promoted(types)
        if not x.numel():
            return x.to(made, copy=True), (None, None, None, w, b, types, ())
        kind = _type_of_sums(x.dtype) if x.is_cpu else x.dtype  # on a CPU ATen's statistics would be in x's type
        rows, sizes = self._rows(_of_type(x, kind))
        wide: Any = [None if v is None else _of_type(v, kind) for v in (w, b)]
        if self.by_channel:
            n, channels, each, groups = sizes
            y, mean, deviation = torch.native_group_norm(rows, wide[0], wide[1], n, channels, each, groups, self.eps)
        else:
            y, mean, deviation = torch.native_layer_norm(rows, sizes, wide[0], wide[1], self.eps)
        y = _of_type(y, made)
        return y if y.shape == x.shape else y.view(x.shape), (rows, mean, deviation, w, b, types, sizes)

    def _rows(self, x: Any) -> tuple[Any, Any]:
        """The tensor x as ATen takes it, and the sizes that ATen wants: for a layer norm, those of the dimensions that
        share moments; for a group norm samples, channels, elements a channel and groups."""
        of, shape = self.of, x.shape
        if self.by_channel:
            return x.contiguous(), [shape[0], shape[1], math.prod(shape[2:]), shape[1] // of.size]
        if of.size == 1:
            return x.contiguous(), shape[len(of.keep) :]
        rows = x.reshape(math.prod(shape[: len(of.keep)]) // of.size, -1)
        return rows, (rows.shape[1],)

    def back(self, kept: Any, dy: Any, needed: Sequence[bool]) -> tuple[Any, ...]:
        """The gradient of x, moments' part included, and those of vectors; those for rows before this one go with
        x's."""
        rows, mean, deviation, w, b, types, sizes = kept
        vectors = [v for v in (w, b) if v is not None]
        own = len(needed) - 1 if vectors else 0  # the last row's vectors
        if rows is None:
            found = [dy.to(types[0]), *(torch.zeros_like(v) for v in vectors)]
        else:
            asked = [needed[0], w is not None, b is not None]
            given = dy if dy.shape == rows.shape else dy.reshape(rows.shape)
            given = _of_type(given, rows.dtype).contiguous()  # ATen's group norm takes it for contiguous without asking
            wide: Any = [None if v is None else _of_type(v, rows.dtype) for v in (w, b)]
            if self.by_channel:
                back = torch.ops.aten.native_group_norm_backward
                made = back(given, rows, mean, deviation, wide[0], *sizes, asked)
            else:
                back = torch.ops.aten.native_layer_norm_backward
                made = back(given, rows, sizes, mean, deviation, *wide, asked)
            dx = made[0]
            if dx is not None:
                dx = _of_type(dx if dx.shape == dy.shape else dx.view(dy.shape), types[0])
            found = [dx, *[_of_type(g, v.dtype) for g, v in zip(made[1:], (w, b), strict=True) if v is not None]]
        before, last = (found, [None]) if not vectors else (found[: len(found) - own], found[len(found) - own :])
        return tuple(before) if len(before) > 1 else before[0], *last

    def hand_back(self, kept: Any, given: Any, needed: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients that the last row has made for the rows before it: the first gets x's, and None for moments."""
        return given if isinstance(given, tuple) else (given, None)


def _all_read(given: Any, more: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The tensors that are handed on: x and the vectors so far; moments are not used."""
    before: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
    return (*before, *[v for v in more if v is not None])


def _of_type(tensor: Any, kind: torch.dtype) -> Any:
    return tensor if tensor.dtype == kind else tensor.to(kind)


@cache
def _type_of_sums(kind: torch.dtype) -> torch.dtype:
    """The type in which elements of a type are summed."""
    return torch.promote_types(kind, torch.float32)


def _promoted(types: Sequence[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, types)
