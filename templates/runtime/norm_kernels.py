# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Steps of batch norms on a GPU, forward and backward. Their kernels also do the steps behind the norm. What moves
between ranks is as norms.py has it.

    step            here
    moments         mean and variance, in one pass over x, or of the tiles' that the convolution before has made; and a
                    part's addend of running ones
    merge           of all ranks' parts, and running ones, in a launch each
    centred         where steps stand behind it: x and its numbers, handed on
    the last step   y, in one pass over x; where a product reads it first, it may be left to that (last_steps.py)
    its vjp         the gradient's sums a channel, in one pass over x and dy; of a sum the masked dy, too
    centred's vjp   dx, or where moments are of several ranks the sums alone
    dx              dx, in one pass over x and dy; or left to the product that made x
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.operations.autocast import ASKED
from convgen.operations.batch_norm import NORM_KERNELS, chain_of, steps_behind
from convgen.operations.row import Operation, Prologue

from .last_steps import Later
from .listing import Line, Norm, Steps
from .mesh import Place
from .norms import NormHere, Statistics, Step
from .rows import Stand
from .travel import CHANNELS_LAST


class Handed(NamedTuple):
    """What a norm gives to the steps behind it in the place of y."""

    kept: tuple[Any, ...]  # x, weight, bias, mean, variance
    others: tuple[Tensor, ...]


class Own(tuple[Tensor, Tensor]):
    """Mean and variance of a rank's part; `averaged` is its addend of running statistics that are averages of the
    parts'."""

    averaged: Tensor


class Summed(NamedTuple):
    """What the last step gives to those before it in the place of a gradient.

    Attributes:
        dy: the gradient of the last step's result where `masked` is true, else that of what the norm makes.
        vectors: the gradients of weight and bias, in the parameters' types.
    """

    dy: Tensor
    masked: bool
    sums: Tensor
    vectors: tuple[Tensor, Tensor]


def norm_here(
    norm: Norm, steps: Steps, stands: dict[str, Stand], place: Place, training: bool, taken: set[str]
) -> NormHere:
    """A batch norm on this rank, by kernels where a package has them.

    Args:
        taken: keys of the rows that norms before this one do; this one adds the keys of those that it does.
    """
    plain = NormHere(norm, stands, place, training)
    of = cast(Any, plain.moments.operation).of
    if () not in NORM_KERNELS or not plain.is_quick or len(of.shape) not in CHANNELS_LAST:
        return plain
    return NormByKernels(norm, steps, stands, place, training, taken)


class NormByKernels(NormHere):
    """A batch norm of images or volumes with channels last."""

    def __init__(
        self, norm: Norm, steps: Steps, stands: dict[str, Stand], place: Place, training: bool, taken: set[str]
    ) -> None:
        super().__init__(norm, stands, place, training)
        self.is_alone = False
        found = steps_behind(steps_made(steps, norm.centred), lambda value: _reader(steps, stands, value))
        chain = chain_of(found)
        if chain not in NORM_KERNELS or any(line.key in taken for line, _, _ in found):
            found, chain = [], ()
        self.chain, self.module, self.places = chain, NORM_KERNELS[chain], [k for _, _, k in found]
        self.behind = [line.key for line, _, _ in found]
        taken.update(self.behind)
        self.by_tiles = [("forward", norm.moments)]
        self.reads_result = len(chain) > 1
        self.casts = [operation.casts_to for _, operation, _ in found]

    def steps(self) -> dict[tuple[str, str], Step]:
        found = super().steps()
        if not self.is_joint:
            found["vjp_sum", self.norm.centred] = self._sums_and
            found["vjp_later", self.norm.centred] = self._sums_later
        elif self.training:
            found["forward_sum", f"{self.norm.moments}.dx"] = self._dx
            found["forward_sum_later", f"{self.norm.moments}.dx"] = self._dx_later
        for n, key in enumerate(self.behind):
            last = n == len(self.behind) - 1
            if not last and self.casts[n]:
                found["forward", key], found["vjp", key] = _cast, _cast_back
                continue
            found["forward", key] = self._last if last else self._hand_on
            found["vjp", key] = self._back if last else self._hand_back
        last = self.behind[-1] if self.behind else self.norm.centred
        found["forward_later", last] = self._last_later if self.behind else self._centred_later
        of: Any = self.coefficients.operation
        leaves = self.training and of.weight and of.bias
        return {key: step for key, step in found.items() if leaves or not key[0].endswith("_later")}

    # ---- forward ----

    def _moments(self, x: Tensor, by_tiles: Any = None) -> Any:
        averages = bool(self.norm.averaged)
        own = x.new_empty(4 if averages else 2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        if not x.numel():
            own.zero_()
        elif not ASKED.types:
            operation: Any = self.moments.operation
            into = own[0], own[1], own[2:] if averages else None, operation.of.count
            if by_tiles is None:
                self.module.moments(last_channels(x), *into)
            else:
                self.module.merge(by_tiles.parts, by_tiles.counts, *into)
        if self.is_joint:
            return own.view(-1)
        found = Own((own[0], own[1]))
        found.averaged = own[2:]
        return found

    def _merged(self, parts: Tensor, shares: Tensor) -> Statistics:
        mean, variance = parts.new_empty(2, parts.shape[1] // 2).unbind()
        if not ASKED.types:
            self.module.union(parts, shares, mean, variance)
        return mean, variance

    def _averaged(self, statistics: Any) -> Tensor:
        return statistics.averaged

    def _renew(self, running_mean: Tensor, running_var: Tensor, statistics: Any) -> tuple[None, None]:
        mean, variance = statistics
        self._renewed(running_mean, running_var, mean, variance, self._count_of(mean.dtype))
        return None, None

    def _renew_by_parts(self, running_mean: Tensor, running_var: Tensor, averaged: Tensor) -> tuple[None, None]:
        self._renewed(running_mean, running_var, averaged[0], averaged[1], 0)
        return None, None

    def _renewed(self, running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: int) -> None:
        if not ASKED.types:
            running = running_mean.detach(), running_var.detach()
            self.module.renew(running, mean, variance, self.norm.momentum, count)
            for buffer in running:  # shares the buffer's version counter: so autograd knows of the change
                torch.autograd.graph.increment_version(buffer)

    def _centred(self, x: Tensor, p: Any) -> tuple[Any, Any]:
        kept = self._kept(x, p)
        return (Handed(kept, ()) if self.behind else self._made(kept, (), x.dtype).done()), kept

    def _centred_later(self, x: Tensor, p: Any) -> tuple[Any, Any]:
        kept = self._kept(x, p)
        return self._made(kept, (), x.dtype), kept

    def _kept(self, x: Tensor, p: Any) -> tuple[Any, ...]:
        (mean, variance), w, b = p
        return (last_channels(x), *[None if t is None else t.detach().contiguous() for t in (w, b)], mean, variance)

    def _made(self, kept: Sequence[Any], others: Sequence[Tensor], dtype: torch.dtype) -> Later:
        x, w, b, mean, variance = kept
        y = torch.empty_like(x, dtype=dtype)

        def now() -> None:
            if x.numel() and not ASKED.types:
                self.module.apply(x, mean, variance, w, b, self.eps, others, y)

        of, given = Prologue(False, self.chain), (mean, variance, w, b, *others, y)
        return Later(of, y, x, given, self.eps, now)

    def _hand_on(self, *reads: Any) -> tuple[Any, Any]:
        """What a sum behind the norm hands on: x and its numbers, and the sum's other operand, which is read where y is
        made."""
        k = self.places[0]
        handed, other = reads[k], reads[1 - k]
        return Handed(handed.kept, (other,)), (other.dtype,)

    def _last(self, handed: Handed) -> tuple[Tensor, Any]:
        later, kept = self._last_later(handed)
        return later.done(), kept

    def _last_later(self, handed: Handed) -> tuple[Later, Any]:
        dtype = handed.kept[0].dtype
        for other in handed.others:
            dtype = torch.promote_types(dtype, other.dtype)
        for kind in filter(None, self.casts):
            dtype = getattr(torch, kind)
        later = self._made(handed.kept, [last_channels(t) for t in handed.others], dtype)
        return later, (*handed.kept, later.made if self.reads_result else None)

    # ---- backward ----

    def _summed(self, kept: Sequence[Any], dy: Tensor, y: Tensor | None, keep: bool) -> Summed:
        """The gradient's sums over a rank's part; where a sum of two stands behind the norm, also the masked dy, which
        both get."""
        x, w, b, mean, variance = kept
        dy = last_channels(dy)
        sums = mean.new_empty(3, x.shape[1])
        kinds = [mean.dtype if t is None else t.dtype for t in (w, b)]
        rounds = kinds != [mean.dtype] * 2 and not self.is_joint  # sums that travel keep the wide type
        dw, db = [mean.new_empty(x.shape[1], dtype=k) for k in kinds] if rounds else sums[1:]
        masked = torch.empty_like(dy) if keep else None
        if not x.numel():
            for t in (sums, dw, db):
                t.zero_()
        elif not ASKED.types:
            self.module.sums(x, mean, variance, w, b, self.eps, y, dy, masked, sums, (dw, db) if rounds else None)
        return Summed(dy if masked is None else masked, bool(self.behind) and masked is None, sums, (dw, db))

    def _back(self, kept: Sequence[Any], dy: Tensor, needed: Sequence[bool]) -> tuple[Any, ...]:
        *kept, y = kept
        return (self._summed(kept, dy, y, self.reads_result),)

    def _hand_back(self, kept: Sequence[Any], back: Summed, needed: Sequence[bool]) -> tuple[Any, ...]:
        found: list[Any] = [back, back]
        found[1 - self.places[0]] = back.dy.to(kept[0])
        return tuple(found)

    def _sums_later(self, kept: Sequence[Any], dy: Any, needed: Sequence[bool]) -> tuple[Any, Any]:
        return self._sums(kept, dy, needed, later=True)

    def _sums_and(self, kept: Sequence[Any], dy: Any, before: Tensor | None, needed: Sequence[bool]) -> tuple[Any, Any]:
        return self._sums(kept, dy, needed, before)

    def _sums(
        self, kept: Sequence[Any], dy: Any, needed: Sequence[bool], before: Tensor | None = None, later: bool = False
    ) -> tuple[Any, Any]:
        back = dy if isinstance(dy, Summed) else self._summed(kept, dy, None, False)
        if self.is_joint:
            dx = None if self.training or not needed[0] else self._through(kept, back, back.sums, 1, before)
            return dx, back.sums
        operation: Any = self.moments.operation
        count = kept[0].numel() // max(1, kept[0].shape[1])
        assert self.of_parts or not self.training or count == operation.of.count or not count
        if later and needed[0]:
            return self._through_later(kept, back, back.sums, count), back.vectors
        dx = self._through(kept, back, back.sums, count, before) if needed[0] else None
        return dx, back.vectors

    def _through(self, kept: Sequence[Any], back: Summed, sums: Tensor, total: int, before: Tensor | None) -> Tensor:
        if before is not None and before.dtype != kept[0].dtype:
            return self._through(kept, back, sums, total, None) + before
        return self._through_later(kept, back, sums, total, before).done()

    def _through_later(
        self, kept: Sequence[Any], back: Summed, sums: Tensor, total: int, before: Tensor | None = None
    ) -> Later:
        """
        Args:
            before: another gradient to add; no product's kernel takes one, so the norm's own does.
        """
        x, w, b, mean, variance = kept
        dx, sums = torch.empty_like(x), sums.contiguous()

        def now() -> None:
            if x.numel() and not ASKED.types:
                given = (x, mean, variance, w, b, self.eps, back.dy, back.masked, sums, total, self.training, dx)
                self.module.dx(*given, before=beside(before))

        of = Prologue(True, self.chain if back.masked else ())
        return Later(of, dx, back.dy, (mean, variance, w, b, x, sums, dx, total), self.eps, now)

    def _dx(
        self, dm: Any, statistics: Any, x: Tensor, kept: Any = None, dy: Any = None, before: Tensor | None = None
    ) -> Tensor | None:
        if not self.is_joint or dm is None:
            return before
        back, total = self._of_all(dm, kept, dy)
        return self._through(kept, back, dm, total, before)

    def _dx_later(self, dm: Any, statistics: Any, x: Tensor, kept: Any, dy: Any, before: Tensor | None) -> Any:
        if dm is None or before is not None:
            return self._dx(dm, statistics, x, kept, dy, before)
        back, total = self._of_all(dm, kept, dy)
        return self._through_later(kept, back, dm, total)

    def _of_all(self, dm: Any, kept: Any, dy: Any) -> tuple[Summed, int]:
        """The gradient with its sums over all ranks, and how many elements of each channel these are over."""
        _, total = self._shares(kept[3].dtype)
        return dy if isinstance(dy, Summed) else Summed(last_channels(dy), False, dm, (dm[1], dm[2])), int(total)


def _cast(handed: Handed) -> tuple[Handed, Any]:
    """Hand on what a cast reads: the last step writes y in the type that the cast wants."""
    return handed, ()


def _cast_back(kept: Any, back: Summed, needed: Sequence[bool]) -> tuple[Any, ...]:
    return (back,)


def last_channels(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


def beside(before: Tensor | None) -> Tensor | None:
    """Another gradient with channels last, as kernels of norms read it."""
    return None if before is None else last_channels(before)


def steps_made(steps: Steps, key: str) -> str:
    """The slot that a row's forward step makes."""
    return next(line.makes[0] for line in steps.forward if line.kind == "forward" and line.key == key)


def _reader(steps: Steps, stands: dict[str, Stand], value: str) -> tuple[Line, Operation, Sequence[str], str] | None:
    """The only step that reads a slot, if it is a row's forward step and nothing moves for that row; else None."""
    if value in {slot for slot, _ in steps.outputs.values()}:
        return None
    there = [line for line in (*steps.forward, *steps.backward) if value in line.reads]
    if len(there) != 1 or there[0].kind != "forward" or there[0].key not in stands:
        return None
    (line,) = there
    stand = stands[line.key]
    moves = not stand.is_silent or stand.row.early is not None or stand.row.chunks is not None or line.again
    return None if moves or line.when is not None else (line, stand.operation, line.reads, line.makes[0])
