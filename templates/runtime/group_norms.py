# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Steps of group and instance norms of images and volumes on a GPU. Their kernels also scale, shift and activate what
they normalise. What moves between ranks is as the rows say: moments, and the gradients of moments.

    step              here
    moments           mean and variance of each sample's groups, in one pass over x, or from the
                      moments by tiles that the convolution before has made
    merge             mean and variance of all ranks' parts
    normalise         where rows stand behind it: x and its mean and variance, handed on; so do those rows but the last
    the last row      y, in one pass over x
    its vjp           sums for each channel and each group, in one pass over x and dy
    normalise's vjp   dx, in one pass over x and dy; where moments are of several ranks the groups' sums alone
    moments' dx       there dx
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.operations.autocast import ASKED
from convgen.operations.batch_norm import NORM_KERNELS
from convgen.operations.group_norms import Behind, is_by_group, rows_behind

from .conversions import named
from .listing import Line, Steps
from .mesh import Place
from .norm_kernels import beside, last_channels
from .norms import NormAtOnce, Step, is_whole, left
from .rows import Stand
from .travel import RowHere


class Given(NamedTuple):
    """What a norm gives to the rows behind it in the place of y: x, its mean and variance, and the vectors of the rows
    so far."""

    x: Tensor
    numbers: tuple[Tensor, Tensor]
    vectors: tuple[Tensor, ...]


class BackThrough(NamedTuple):
    """What the last row gives to those before it in the place of a gradient.

    Attributes:
        dy: the last row's.
        groups: sums by group, [3, samples, groups], laid out as the gradients of [count, mean, M2] travel; a count has
            none.
        vectors: gradients of the vectors.
    """

    kept: Any
    dy: Tensor
    groups: Tensor
    vectors: tuple[Tensor, ...]


class GroupNorm:
    """A norm by group on this rank.

    Attributes:
        joint: whether its moments are of several ranks.
    """

    def __init__(self, moments: Stand, y: Stand, behind: Behind, place: Place, joint: bool) -> None:
        operation: Any = y.operation
        self.of, self.eps, self.moments, self.y, self.joint = operation.of, operation.eps, moments, y, joint
        self.here = RowHere(moments, place, 0)  # type: ignore[arg-type]
        self.behind = behind
        self.letters = "".join(letters for _, letters in behind.vectors)
        self.module = NORM_KERNELS[behind.chain]

    def steps(self) -> dict[tuple[str, str], Step]:
        """The steps that this norm does, by kind and key."""
        rows: list[str] = [line.key for line, _ in self.behind.vectors]
        found: dict[tuple[str, str], Step] = {
            ("forward", self.moments.label): self._moments,
            ("forward", self.y.label): self._normalise,
            ("vjp", self.y.label): self._back,
            ("forward", f"{self.moments.label}.dx"): self._dx,
        }
        if self.joint:
            found["store", self.moments.label] = self._merge
            found["forward_sum", f"{self.moments.label}.dx"] = self._dx
        else:
            found["vjp_sum", self.y.label] = self._back_sum
        if self.behind.activation is not None:
            rows.append(self.behind.activation[0].key)
        counts = [len(letters) for _, letters in self.behind.vectors] + [0]
        for n, key in enumerate(rows):
            is_last = n == len(rows) - 1
            first = sum(counts[:n])
            found["forward", key] = self._last if is_last else self._hand_on
            found["vjp", key] = self._vectors(first, counts[n], is_last)
        return found

    # ---- forward ----

    def _moments(self, x: Tensor, by_tiles: Any = None) -> Any:
        shape = (2, x.shape[0], x.shape[1] // self.of.size)
        own = x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))
        if not x.numel():
            own.zero_()
        elif by_tiles is not None and by_tiles.by_sample and not ASKED.types:
            self.module.merge_groups(by_tiles.parts, by_tiles.counts, own[0], own[1], self.of.size)
        elif not ASKED.types:
            self.module.moments_of_groups(last_channels(x), own[0], own[1], self.of.size)
        return own if self.joint else tuple(own.unbind())

    def _merge(self, own: Tensor) -> tuple[Tensor, Tensor]:
        ((there,), here) = self.moments.store[0], self.here
        with named(there.step, "all_gather", there.over, here):
            group = here.group(there.over)
            parts = here.place.transport.all_gather(own.view(-1), [own.numel()] * len(group.ranks), group)
        mean, variance = torch.empty_like(own).unbind()
        if own.numel() and not ASKED.types:
            shares, _ = self._shares(own.dtype)
            self.module.union(parts.view(len(shares), -1), shares, mean.view(-1), variance.view(-1))
        return mean, variance

    def _shares(self, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Each rank's share of a group's elements, and how many elements the group has."""
        return self.moments.shares(self.here.members(self.moments.store[0][0].over), dtype)

    def _normalise(self, x: Tensor, numbers: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        given = Given(x, numbers, ())
        return (given, ()) if self.behind.vectors or self.behind.activation else self._made(given)

    def _hand_on(self, given: Given, *vectors: Tensor) -> tuple[Given, Any]:
        return given._replace(vectors=(*given.vectors, *vectors)), ()

    def _last(self, given: Given, *vectors: Tensor) -> tuple[Tensor, Any]:
        return self._made(self._hand_on(given, *vectors)[0])

    def _made(self, given: Given) -> tuple[Tensor, Any]:
        x, (mean, variance), vectors = given
        kind = x.dtype
        for v in vectors if self.y.low is None else ():
            kind = torch.promote_types(kind, v.dtype)
        if self.y.autocast:
            kind = self.y.taken((x.new_empty(0), None))[0].dtype
        x = last_channels(x)
        kept = (x, mean, variance, *(v.detach().contiguous() for v in vectors))
        y = torch.empty_like(x, dtype=kind)
        if x.numel() and not ASKED.types:
            self.module.apply(x, mean, variance, *self._named(kept), self.eps, (), y, self.of.size)
        return y, kept

    def _named(self, kept: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
        vectors = dict(zip(self.letters, kept[3:], strict=True))
        return vectors.get("w"), vectors.get("b")

    # ---- backward ----

    def _summed(self, kept: Sequence[Any], dy: Tensor) -> BackThrough:
        x, mean, variance, *vectors = kept
        dy = last_channels(dy)
        by_channel, groups = mean.new_zeros(x.shape[0], 2, x.shape[1]), mean.new_zeros(3, *mean.shape)
        if x.numel() and not ASKED.types:
            given = (x, mean, variance, *self._named(kept), self.eps, None, dy, None, by_channel)
            self.module.sums(*given, group=self.of.size, of_groups=groups[1:])
        dw, db = by_channel.sum(0)
        found = {"w": dw, "b": db}
        gradients = (found[letter].to(v.dtype) for letter, v in zip(self.letters, vectors, strict=True))
        return BackThrough(kept, dy, groups, tuple(gradients))

    def _vectors(self, first: int, count: int, is_last: bool) -> Callable[..., tuple[Any, ...]]:
        """The vjp of a row behind the norm: what it hands to the rows before it, and the gradients of its own
        vectors."""

        def vjp(kept: Any, dy: Any, needed: Sequence[bool]) -> tuple[Any, ...]:
            back = self._summed(kept, dy) if is_last else dy
            return back, *back.vectors[first : first + count]

        return vjp

    def _back_sum(self, kept: Any, dy: Any, before: Tensor | None, needed: Sequence[bool]) -> tuple[Any, Any]:
        return self._back(kept, dy, needed, before)

    def _back(self, kept: Any, dy: Any, needed: Sequence[bool], before: Tensor | None = None) -> tuple[Any, Any]:
        back = dy if isinstance(dy, BackThrough) else self._summed(kept, dy)
        if self.joint:
            return None, back.groups
        x, mean = back.kept[:2]
        count = x.numel() // max(1, mean.numel())
        return (self._through(back, back.groups, count, before) if needed[0] else None), None

    def _through(self, back: BackThrough, groups: Tensor, total: int, before: Tensor | None) -> Tensor:
        x, mean, variance = back.kept[:3]
        dx = torch.empty_like(x)
        if before is not None and before.dtype != dx.dtype:
            return self._through(back, groups, total, None) + before
        if x.numel() and not ASKED.types:
            given = (x, mean, variance, *self._named(back.kept), self.eps, back.dy, bool(self.behind.chain))
            self.module.dx(*given, groups[1:].contiguous(), total, False, dx, self.of.size, beside(before))
        return dx

    def _dx(
        self, dm: Any, numbers: Any, x: Tensor, kept: Any = None, dy: Any = None, before: Tensor | None = None
    ) -> Tensor | None:
        """The gradient of x, through y and through moments of several ranks."""
        if not self.joint or dm is None:
            return before
        back = dy if isinstance(dy, BackThrough) else BackThrough(kept, last_channels(dy), dm, ())
        _, total = self._shares(dm.dtype) if dm.numel() else (None, 1)
        return self._through(back, dm, int(total), before)


def norms_at_once(
    steps: Steps, stands: dict[str, Stand], place: Place
) -> tuple[dict[tuple[str, str], Step], dict[str, str], set[tuple[str, str]]]:
    """The steps of layer, group and instance norms, with scale and shift behind them, that kernels or one call of ATen
    do.

    Returns:
        Steps by kind and key, forward and backward. For norms whose moments are of several ranks, the label of the row
        of moments and that of the row that normalises. And by kind and key the steps that take moments by tiles.
    """
    found: dict[tuple[str, str], Step] = {}
    joints: dict[str, str] = {}
    by_tiles: set[tuple[str, str]] = set()
    makers = {line.makes[0]: line for line in steps.forward if line.kind in ("forward", "store")}
    readers: dict[str, list[Line]] = {}
    for line in steps.forward:
        for name in line.reads:
            readers.setdefault(name, []).append(line)
    outputs = {slot for slot, _ in steps.outputs.values()}
    for line in steps.forward:
        maker = makers.get(line.reads[1]) if line.kind == "forward" and len(line.reads) == 2 else None
        if maker is None or readers[line.reads[1]] != [line]:
            continue
        if maker.kind == "store" and readers[maker.reads[0]] == [maker]:
            maker = makers.get(maker.reads[0], maker)
        if maker.kind != "forward" or maker.reads != line.reads[:1]:
            continue
        moments, y = stands.get(maker.key), stands.get(line.key)
        if moments is None or y is None:
            continue
        if (by_kernels := group_norm_here(moments, y, line.makes[0], readers, outputs, stands, place)) is not None:
            found |= by_kernels.steps()
            joints |= {moments.label: y.label} if by_kernels.joint else {}
            by_tiles.add(("forward", moments.label))
        elif is_whole(moments, y, place):
            found["forward", maker.key] = found["forward", f"{maker.key}.dx"] = left  # to y's steps
            norm = NormAtOnce(cast(Any, moments.operation).of, cast(Any, y.operation).eps, y)
            lines = [line]
            while len(there := readers.get(lines[-1].makes[0], [])) == 1 and lines[-1].makes[0] not in outputs:
                if not norm.takes(stands.get(there[0].key), there[0], lines[-1].makes[0]):
                    break
                lines.append(there[0])
            for one in lines:
                last = one is lines[-1]
                found["forward", one.key] = norm.compute if last else norm.hand_on
                found["vjp", one.key] = norm.back if last else norm.hand_back
    return found, joints, by_tiles


def group_norm_here(
    moments: Stand, y: Stand, made: str, readers: dict[str, list[Line]], outputs: set[str],
    stands: dict[str, Stand], place: Place,
) -> GroupNorm | None:  # fmt: skip
    """The norm by a package's kernels, where nothing moves but moments and what a gradient makes of them.

    Args:
        made: the slot of what is normalised.
        readers: for each slot, the steps that read it.
        outputs: the slots of the network's outputs.
    """
    if () not in NORM_KERNELS or not is_by_group(moments.operation, y.operation):
        return None
    joint = bool(moments.store[0])
    if not _moves_nothing_else(moments, y, joint) or not _has_whole_groups(moments, y, place):
        return None

    def reader(slot: str) -> Any:
        there = readers.get(slot, [])
        if slot in outputs or len(there) != 1 or there[0].kind != "forward" or there[0].when is not None:
            return None
        (line,) = there
        stand = stands.get(line.key)
        if stand is None or stand.row.early is not None or stand.row.chunks is not None:
            return None
        moves = (stand.fetch[0], stand.back[0], *stand.store, *stand.given)
        return None if any(moves) or stand.autocast else (line, stand.operation, line.reads, line.makes[0])

    behind = rows_behind(cast(Any, y.operation).of, made, reader)
    if behind.chain not in NORM_KERNELS:
        behind.activation = None
    return GroupNorm(moments, y, behind, place, joint)


def _moves_nothing_else(moments: Stand, y: Stand, joint: bool) -> bool:
    derived = moments.derived.get(0)
    if derived is None or not derived.is_silent:
        return False
    if any(r.row.early is not None or r.row.chunks is not None for r in (moments, derived, y)):
        return False
    if not joint:
        return moments.is_silent and y.is_silent
    if len(moments.store[0]) != 1 or len(y.back[1]) != 1:
        return False
    others = (*moments.fetch, *moments.given, *moments.back, *y.fetch, *y.store, *y.given, y.back[0])
    (there,), (back,) = moments.store[0], y.back[1]
    return not any(others) and there.kind == "merge" and back.kind == "all_reduce" and there.over == back.over


def _has_whole_groups(moments: Stand, y: Stand, place: Place) -> bool:
    """Whether every rank normalises exactly the elements that it takes moments of, in whole groups; all ranks agree."""
    if moments.row.way != 0 or moments.row.roles != y.row.roles:
        return False
    size = cast(Any, moments.operation).of.size
    for p in range(len(place.ranks)) if moments.row.roles.get("d1") else (place.me,):
        (box, other), (lo, hi) = (s.at_rank(p).inside[0] for s in (moments, y)), moments.at_rank(p).inside[0][1]
        if box != other or lo % size or hi % size:
            return False
    return True
