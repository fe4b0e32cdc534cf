"""Convolution in its three phases: sums over the same products, in which two tensors are read and the third is made.

    y[n, f, o] += x[n, c, o*S - P + d*k] * w[f, c, k]

forward sums over c and k, backward-data over f and k, backward-filter over n and o. With groups there are two ways: G,
C and F as nests (C is (G, C/g): blocks are whole groups, or parts of one), or channels as rows that filters read, which
is exact for blocks that cut groups. Source: [CF] Eqs. 1 to 3; docs/design.md, One idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from convgen.algebra.conv import Conv, Phase, Spatial
from convgen.algebra.relations import Ratio, Taps
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.autocast import ASKED
from convgen.operations.rimmed import Rimmed, count_rows, of_parts, to_parts
from convgen.operations.row import (
    At,
    Derived,
    Epilogue,
    EpilogueStep,
    Interval,
    Operation,
    Prologue,
    Work,
    fit,
    own,
    sides_of,
    touched,
    with_sides,
)

READS: Mapping[Phase, str] = {"forward": "xw", "backward_data": "yw", "backward_filter": "yx"}
MAKES: Mapping[Phase, str] = {"forward": "y", "backward_data": "x", "backward_filter": "w"}
CHANNELS = {"x": 1, "w": 0, "y": 1}  # the dimension that is cut into groups


class Channels(NamedTuple):
    """The extents of the indices that aren't spatial, and what the first two dimensions of each tensor are made of."""

    extents: dict[str, int]
    made: dict[str, tuple[Made, Made]]


class LocalConvolution(NamedTuple):
    """A rank's local convolution, whatever the number of samples.

    Attributes:
        channels, filters: those of one group.
        dims: for each dimension the rows of x and of y, kernel, stride, dilation, and zero rows below x's first row as
            seen from y's first one.
        x_parts, y_parts: channels of x (filters of y) lie in so many equal parts; 1 is an ordinary tensor.
    """

    channels: int
    filters: int
    groups: int
    dims: tuple[tuple[int, ...], ...]
    x_parts: int = 1
    y_parts: int = 1

    @property
    def kind(self) -> LocalConvolution:
        """The same without its extents: the key of kernels that take extents as arguments."""
        return self._replace(dims=tuple([(0, 0, *d[2:5], 0) for d in self.dims]))


# Kernels that replace ATen's convolutions, by dtype and local convolution: a GPU's package fills these tables.
KERNELS: dict[tuple[str, LocalConvolution], Callable[..., Any]] = {}
# Those that read a block and boxes around it, by the activation, x or y, that has the boxes, too.
RIMS: dict[tuple[str, LocalConvolution, str], Callable[..., Any]] = {}
# Those of forward convolutions with steps behind them, by the steps and the activation that has boxes, if any, too.
EPILOGUES: dict[tuple[str, LocalConvolution, Epilogue, str], Callable[..., Any]] = {}
# Those of convolutions behind a step whose gradient backward-data's kernel makes.
MASKED: dict[tuple[str, LocalConvolution, Epilogue], Callable[..., Any]] = {}


# Those that take extents as arguments, by dtype, kind, steps, and whether these are a mask.
ANY_EXTENTS: dict[tuple[str, LocalConvolution, Epilogue, bool], Any] = {}


def any_extents(dtype: str, here: LocalConvolution, rim: str = "", steps: Epilogue = (), masks: bool = False) -> Any:
    """The kernel with extents as arguments that is nearest to this local convolution; None where there is none of its
    kind.

    Args:
        rim: the activation that has boxes around it, if any.
    """
    found = ANY_EXTENTS.get((dtype, here.kind, steps, masks)) if ANY_EXTENTS else None
    return None if found is None else found.at(here, rim)


# Those that also make moments of their results, with steps behind the convolution or none.
MOMENTS: dict[tuple[str, LocalConvolution, Epilogue, str], Any] = {}
# Those of products that also do a batch norm's last step on what they read: forward makes moments of its result, too;
# backward-data may be a mask, too.
PROLOGUES: dict[tuple[str, LocalConvolution, Epilogue, Prologue], Any] = {}
# A sum of gradients is like a mask: the step adds another gradient of the same value.
ADD: Epilogue = (EpilogueStep("{x} + {0}", (("element", 1),), "sum"),)


class HeldGroups(NamedTuple):
    """The groups that a rank's operands hold: the channels that they make, and which of these, [lo, hi), are its
    block."""

    groups: int
    channels: int
    lo: int
    hi: int


@dataclass(frozen=True)
class HowConvolved:
    """A rank's part as a convolution of ATen: rows `have` are fitted to rows `read`, then rows `made` to rows `want`.

    Attributes:
        channels: which of the channels that it makes are the rank's block: [lo, hi) of so many.
        settings: ATen's strides, padding, dilations, transposed, output padding and groups.
    """

    have: Sequence[Interval]
    read: Sequence[Interval]
    made: Sequence[Interval]
    want: Sequence[Interval]
    channels: HeldGroups
    settings: tuple[Any, ...]

    @cached_property
    def around_x(self) -> tuple[list[int], list[int]]:
        """The rows that are put on x's sides, and those that are put on its gradient's."""
        return sides_of(self.have, self.read), sides_of(self.read, self.have)

    @cached_property
    def around_y(self) -> tuple[list[int], list[int]]:
        """The rows that are put on the sides of the result, and on its gradient's."""
        return sides_of(self.made, self.want), sides_of(self.want, self.made)

    @cached_property
    def is_whole(self) -> bool:
        """Whether ATen's convolution makes just the part, so that nothing is cut off or put around it."""
        here = self.channels
        rows = zip(self.made, self.want, strict=True)
        return (here.lo, here.hi) == (0, here.channels) and all(lo <= a and b <= hi for (lo, hi), (a, b) in rows)

    def of(self, x: Any, w: Any, bias: Any = None) -> Any:
        """The rank's part of the result."""
        here, y = self.channels, torch.convolution(x, w, bias, *self.settings)
        return with_sides(y if here.hi - here.lo == y.shape[1] else y[:, here.lo : here.hi], self.around_y[0])


def other_phases(phase: Phase, row: Callable[[Phase], Operation]) -> Mapping[str, Derived]:
    """The gradients of a phase's operands: each is the phase that makes it, as a row of its own."""
    found: dict[str, Derived] = {}
    for other, makes in MAKES.items():
        if other != phase:
            reads = tuple(f"d{t}" if t == MAKES[phase] else t for t in READS[other])
            found[makes] = Derived(row(other), reads)
    return found


@dataclass(frozen=True)
class Convolution(Operation):
    """One phase of a convolution of x[N, C, ...] with w[F, C/g, ...] to y[N, F, ...]."""

    phase: Phase
    conv: Conv

    @property
    def name(self) -> str:
        return f"conv_{self.phase}"

    @property
    def convolves(self) -> tuple[Phase, Conv]:
        return self.phase, self.conv

    @property
    def takes_steps(self) -> bool:
        return self.phase == "forward"

    def convolutions(self, way: int, at: At) -> Iterator[tuple[Convolution, int, At]]:
        yield self, way, at

    @cached_property
    def taps(self) -> tuple[Taps, ...]:
        return tuple(Taps(s.kernel, s.stride, s.pad_lo, s.dilation) for s in self.conv.spatial)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        c, channels = self.conv, self.conv.channels // self.conv.groups
        return {
            "x": (c.batch, c.channels, *(s.extent for s in c.spatial)),
            "w": (c.filters, channels, *(s.kernel for s in c.spatial)),
            "y": (c.batch, c.filters, *(s.out for s in c.spatial)),
        }

    # ---------------------------------------------------------------- signatures
    @property
    def is_product(self) -> bool:
        return True

    @property
    def joins(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """The signatures: groups as nests, then cut. For dw each comes with y's rows as blocks, then with x's, as in
        dx."""
        made = MAKES[self.phase]
        sides = ("y", "x") if made == "w" else (made,)
        channels = (self._nests,) if self.conv.groups == 1 else (self._nests, self._cut)
        return tuple(self._signature(side, named) for named in channels for side in sides)

    def _signature(self, blocks: str, channels: Channels) -> Signature:
        """`blocks`: the activation whose rows are blocks; the other's are windows."""
        letters = self.conv.letters
        reads = self.taps if blocks == "y" else tuple(t.inverse for t in self.taps)
        windows = tuple(Made((i,), r) for i, r in zip(letters, reads, strict=True))
        rows = {"x": windows, "y": windows, "w": (WHOLE,) * len(letters)} | {blocks: own(*letters)}
        tensors = {t: Operand(t, self.shapes[t], (*channels.made[t], *rows[t])) for t in "xwy"}
        return Signature(
            (*channels.extents.items(), *zip(letters, self.shapes[blocks][2:], strict=True)),
            tuple(tensors[t] for t in READS[self.phase]),
            (tensors[MAKES[self.phase]],),
        )

    @property
    def _nests(self) -> Channels:
        g, n = self.conv.groups, Made(("N",))
        extents = {"N": self.conv.batch, "C": self.conv.channels // g, "F": self.conv.filters // g}
        c, f = Made(("G", "C")), Made(("G", "F"))
        return Channels(extents | {"G": g}, {"x": (n, c), "y": (n, f), "w": (f, Made(("C",)))})

    @property
    def _cut(self) -> Channels:
        """The channels of groups that are cut: the result's channels, or w's filters, are the index; a block of it
        reads whole groups of the others."""
        makes, n = MAKES[self.phase], Made(("N",))
        index, size = ("C", self._channels) if makes == "x" else ("F", self._filters)
        blocks = {"x": "x", "y": "y", "w": "wy"}[makes]
        groups = {"x": self._channels, "y": self._filters, "w": self._filters}
        made = {t: Made((index,), None if t in blocks else Ratio(1, size, per)) for t, per in groups.items()}
        extents = {"N": self.conv.batch, index: size * self.conv.groups}
        return Channels(extents, {"x": (n, made["x"]), "y": (n, made["y"]), "w": (made["w"], WHOLE)})

    @property
    def _channels(self) -> int:
        """The number of channels of a group."""
        return self.conv.channels // self.conv.groups

    @property
    def _filters(self) -> int:
        """The number of filters of a group."""
        return self.conv.filters // self.conv.groups

    def spare(self, way: int) -> tuple[tuple[int, ...], ...]:
        """The rows of x behind the last window, fewer than a stride, which no window reads."""
        none, rows = (0,) * (2 + len(self.taps)), (0, 0, *(t.stride - 1 for t in self.taps))
        if self.phase == "forward":
            return rows, none
        return (none, rows) if self.phase == "backward_filter" and way % 2 == 0 else ()

    # ---------------------------------------------------------------- local code
    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        kernel = self._kernel(way, at, operands[:2])
        if kernel is not None:  # which has no bias: a third operand is there where `adds_bias` says so alone
            return (kernel(self.phase, *operands),)
        if self.phase == "backward_filter":
            return (self._backward_filter(way, at, *self._tensors(at, operands)),)
        (x, w), bias = self._tensors(at, operands[:2]), operands[2:]
        how = self._how(at, x)
        return (self._in_parts(at, how.of(with_sides(x, how.around_x[0]), w, *bias)),)

    def _kernel(self, way: int, at: At, operands: Sequence[Any]) -> Any:
        """The kernel that computes the phase in the place of ATen; None without one."""
        here = self.convolved(way, at) if (KERNELS or RIMS or ANY_EXTENTS) and not ASKED.types else None
        if here is None:
            return None
        dtype = str(operands[0].dtype)
        for tensor, operand in zip(READS[self.phase], operands, strict=True):
            if isinstance(operand, Rimmed):
                return RIMS.get((dtype, here, tensor)) or any_extents(dtype, here, tensor)
        return KERNELS.get((dtype, here)) or any_extents(dtype, here)

    gives_anew = True
    any_order_by_aten = True

    @property
    def may_have_moments(self) -> bool:
        return self.phase == "forward"

    def moments_kernel(self, way: int, at: At, operands: Sequence[Any]) -> Any:
        here = self.convolved(way, at) if MOMENTS and not ASKED.types else None
        if here is None or not all(t.numel() for t in operands):
            return None
        return MOMENTS.get((str(operands[0].dtype), here, (), "x" if isinstance(operands[0], Rimmed) else ""))

    def kept_of(self, kernel: Any, made: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(operands)

    def behind_norm(self, way: int, at: At, of: Prologue, operand: Any, w: Any, before: Any = None) -> Any:
        here = self.convolved(way, at) if PROLOGUES and not ASKED.types and self.phase == "forward" else None
        if here is None or not operand.numel() or not w.numel() or operand.dtype != w.dtype:
            return None
        if before is not None and before.dtype != w.dtype:
            return None
        return PROLOGUES.get((str(w.dtype), here, () if before is None else ADD, of))

    def may_add(self, is_vjp: bool) -> bool:
        return self.phase == ("forward" if is_vjp else "backward_data")

    def added(self, way: int, at: At, is_vjp: bool, given: Sequence[Any], before: Any) -> Any:
        _, w, dy = given if is_vjp else (None, *given[::-1])
        here = self.convolved(way, at) if (MASKED or ANY_EXTENTS) and not ASKED.types else None
        if here is None or isinstance(dy, Rimmed) or not dy.dtype == w.dtype == before.dtype or dy.dim() == 1:
            return None
        if here.x_parts > 1 or not (dy.numel() and w.numel()):
            return None
        dtype = str(dy.dtype)
        kernel: Any = MASKED.get((dtype, here, ADD)) or any_extents(dtype, here, steps=ADD, masks=True)
        return None if kernel is None else kernel.back(dy, w, before)

    @property
    def leaves_results(self) -> bool:
        return True

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return self.phase == "forward" or (self.phase == "backward_data" and self._kernel(way, at, operands) is None)

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, w, *bias = operands
        if (kernel := self._kernel(way, at, operands[:2])) is not None:
            return (kernel.made(self.phase, x, w),), (x, w)
        x, w = self._tensors(at, operands[:2])
        how = self._how(at, x)
        x = with_sides(x, how.around_x[0])
        return (self._in_parts(at, how.of(x, w, *bias)),), (x, w)

    @property
    def bias_along(self) -> int | None:
        return None if self.phase == "backward_filter" else 1

    def adds_bias(self, way: int, at: At, *operands: Any) -> bool:
        """Whether ATen can add the bias: not where a package's kernel convolves, where channels are cut, or where rows
        that no product reaches are put around."""
        plain = self.bias_along is not None and self._kernel(way, at, operands) is None
        return plain and self._how(at, self._tensors(at, operands)[0]).is_whole

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (x, w), (dy,), makes = kept, dys, MAKES[self.phase]
        if (kernel := self._kernel(way, at, kept)) is not None:
            dx = kernel.made("backward_data", dy, w) if wanted[0] else None
            return dx, kernel.made("backward_filter", dy, x) if wanted[1] else None
        if dy.dim() == 1:
            made = (x.shape[0], at.extent("C" if makes == "x" else "F"), *map(at.extent, self.conv.letters))
            dy = of_parts(dy, at.parts[makes], made)
        how = self._how(at, x)
        here, dy = how.channels, with_sides(dy, how.around_y[1])
        if (here.lo, here.hi) != (0, here.channels):
            sizes = [dy.shape[0], here.channels, *dy.shape[2:]]
            dy = torch.ops.aten.slice_backward(dy, sizes, 1, here.lo, here.hi, 1)
        asked = [bool(wanted[0]), bool(wanted[1]), False]
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *how.settings, asked)
        return with_sides(dx, how.around_x[1]) if wanted[0] else None, dw if wanted[1] else None

    def _tensors(self, at: At, operands: Sequence[Any]) -> list[Any]:
        """Operands as ATen takes them."""
        found: list[Any] = []
        for name, tensor, inside in zip(READS[self.phase], operands, at.inside, strict=True):
            if isinstance(tensor, Rimmed):
                tensor = tensor.whole()
            elif tensor.dim() == 1:
                tensor = of_parts(tensor, at.parts[name], [count_rows(rows) for rows in inside])
            found.append(tensor)
        return found

    def _in_parts(self, at: At, made: Any) -> Any:
        """ATen's result in the form in which it travels."""
        count = at.parts.get(MAKES[self.phase], 1)
        return made if count == 1 else to_parts(made, count)

    def convolved(self, way: int, at: At) -> LocalConvolution | None:
        """The rank's local convolution, of the rows that exist; None where its block cuts groups."""
        held = dict(zip(READS[self.phase], at.inside, strict=True))
        here = self._groups(at, "C", self._channels) if "x" not in held else self._groups(at, "F", self._filters)
        if (here.lo, here.hi) != (0, here.channels) or not here.channels:
            return None
        # One activation's rows are blocks; the other's are those that are read and exist.
        blocks = MAKES[self.phase] if "w" in held else "yx"[way % 2]
        read = held["x" if blocks == "y" else "y"]
        xs, ys = (read[2:], self._rows(at)) if blocks == "y" else (self._rows(at), read[2:])
        totals = {t: count_rows(rows[CHANNELS[t]]) for t, rows in held.items()}
        filters = totals.get("y", totals.get("w", 0))
        channels = totals["x"] // here.groups if "x" in totals else count_rows(held["w"][1])
        dims = tuple(
            [
                (count_rows(x), count_rows(y), t.kernel, t.stride, t.dilation, x[0] - y[0] * t.stride + t.pad)
                for t, x, y in zip(self.taps, xs, ys, strict=True)
            ]
        )
        parts = (at.parts.get("x", 1), at.parts.get("y", 1))
        return LocalConvolution(channels, filters // here.groups, here.groups, dims, *parts)

    def _how(self, at: At, like: Any) -> HowConvolved:
        """The convolution of ATen for a phase that makes an activation, worked out once for a place.

        Args:
            like: a tensor of its type.
        """
        if (known := at.known.get((self, like.dtype))) is None:
            known = at.known[self, like.dtype] = self._how_there(at, like.dtype)
        return known

    def _how_there(self, at: At, dtype: Any) -> HowConvolved:
        if self.phase == "backward_data":
            here, made = self._groups(at, "C", self._channels), self._read_by(at)
            settings = self._settings(here.groups, transposed=True)
            return HowConvolved(at.inside[0], at.windows[0], made, self._rows(at), here, settings)
        here = self._groups(at, "F", self._filters)
        padding = self._padding(at, dtype)
        inside = [(lo - p, hi + p) for (lo, hi), p in zip(at.inside[0][2:], padding, strict=True)]
        wished = [w if p == 0 else i for w, i, p in zip(at.windows[0][2:], inside, padding, strict=True)]
        for d, (t, i, p) in enumerate(zip(self.taps, self.conv.letters, padding, strict=True)):
            if p == 0 and at.extent(i) == 1:  # its stride becomes 1 below, so spare rows would make more rows
                wished[d] = (wished[d][0], wished[d][0] + t.reach + 1)
        strides = [
            1 if p == 0 and at.extent(i) == 1 else t.stride
            for t, i, p in zip(self.taps, self.conv.letters, padding, strict=True)
        ]
        return HowConvolved(inside, wished, (), (), here, self._settings(here.groups, padding, strides))

    def _padding(self, at: At, dtype: Any) -> list[int]:
        """The zero rows that ATen adds by itself, equally on both sides, where that makes just the rows that are here;
        else 0.

        oneDNN, which has no float64, is wrong without a word where a window is about as long as x, or y has one row
        (templates/runtime/local.py lists what was seen): there padding is made by hand, and a single row has a stride
        of 1.
        """
        exact = dtype == torch.float64
        found: list[int] = []
        for t, i, (lo, _), (first, last) in zip(
            self.taps, self.conv.letters, at.windows[0][2:], at.inside[0][2:], strict=True
        ):
            p, n = first - lo, last - first
            rows = (n + 2 * p - t.reach - 1) // t.stride + 1
            small = not exact and (rows == 1 or n < t.reach + 1 + t.stride)
            found.append(p if p > 0 and rows == at.extent(i) and not small else 0)
        return found

    def _backward_filter(self, way: int, at: At, dy: Any, x: Any) -> Any:
        if way % 2 == 0:
            x = at.wished(1, x)
        else:  # x's rows are the block: other rows that dy's read are other ranks', and zeros here
            dy = at.wished(0, dy)
            x = fit(x, self._rows(at), self._read_by(at))
        here = self._groups(at, "F", self._filters)
        rows = [(0, n) for n in dy.shape[2:]]
        dy = fit(dy, [(here.lo, here.hi), *rows], [(0, here.channels), *rows])
        w = dy.new_empty([here.channels, x.shape[1] // here.groups, *self.shapes["w"][2:]])
        settings = (*self._settings(here.groups), [False, True, False])
        return torch.ops.aten.convolution_backward(dy, x, w, None, *settings)[1][here.lo : here.hi]

    def _rows(self, at: At) -> list[Interval]:
        return [at.blocks[i] for i in self.conv.letters]

    def _read_by(self, at: At) -> list[Interval]:
        """All rows of x that the rows of y here read, whichever rank has them."""
        return [t.window(*rows) for t, rows in zip(self.taps, at.windows[0][2:], strict=True)]

    def _settings(
        self,
        groups: int,
        padding: list[int] | None = None,
        strides: list[int] | None = None,
        *,
        transposed: bool = False,
    ) -> tuple[Any, ...]:
        """ATen's settings; without padding where operands are padded already."""
        zeros, dilations = [0] * len(self.taps), [t.dilation for t in self.taps]
        return strides or [t.stride for t in self.taps], padding or zeros, dilations, transposed, zeros, groups

    def _groups(self, at: At, index: str, size: int) -> HeldGroups:
        """The groups that a rank holds; `index` is the result's channels or w's filters, `size` of them in a group."""
        if "G" in at.blocks:
            channels = at.extent("G") * at.extent(index)
            return HeldGroups(at.extent("G"), channels, 0, channels)
        lo, hi = at.blocks[index]
        first, end = lo // size, -(-hi // size)
        return HeldGroups(end - first, (end - first) * size, lo - first * size, hi - first * size)

    # ---------------------------------------------------------------- what it is, what it takes
    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The sum as written, with a tensor for each dimension that is 1 where output row o reads row h by tap k."""
        names = {"x": "ngchij", "w": "gfcklm", "y": "ngfopq"}
        (one, first), (other, second) = (
            (names[t][: 3 + len(self.taps)], operand.unflatten(CHANNELS[t], (self.conv.groups, -1)))
            for t, operand in zip(READS[self.phase], operands, strict=True)
        )
        reads = [_hits(t, s, first.dtype) for t, s in zip(self.taps, self.conv.spatial, strict=True)]
        of_rows = ["".join(names[t][3 + d] for t in "yxw") for d in range(len(self.taps))]
        made = MAKES[self.phase]
        subscripts = f"{','.join([one, *of_rows, other])}->{names[made][: 3 + len(self.taps)]}"
        result = torch.einsum(subscripts, first, *reads, second)
        return (result.flatten(CHANNELS[made], CHANNELS[made] + 1),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return other_phases(self.phase, lambda phase: replace(self, phase=phase))

    def work(self, way: int, at: At) -> Work:
        """The work: two flops for each product, of every tap of every row of y that is read or made here; padding
        counts."""
        signature, letters = self.signatures[way], self.conv.letters
        makes = MAKES[self.phase]
        rows_of_x = makes == "x" or (makes == "w" and way % 2 == 1)  # x's rows are blocks, y's read them
        rows = [count_rows(r) for r in at.inside[0][2:]] if rows_of_x else [at.extent(i) for i in letters]
        products = prod(at.extent(i) for i, _ in signature.extents if i not in letters) * prod(rows) * self.conv.taps
        if self.conv.groups > 1 and "G" not in signature.extent:
            products *= self._channels if "F" in signature.extent else self._filters
        return Work(2 * products, touched(at, signature))


def _hits(t: Taps, s: Spatial, dtype: Any) -> Any:
    """A tensor [o, h, k] that is 1 where output row o reads row h by tap k."""
    hits = [(o, h, k) for o in range(s.out) for k, h in enumerate(t.row(o)) if 0 <= h < s.extent]
    found = torch.zeros(s.out, s.extent, s.kernel, dtype=dtype)
    found[tuple(torch.tensor(hits, dtype=torch.int64).reshape(-1, 3).T)] = 1
    return found
