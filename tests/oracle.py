"""What layouts, collectives and convolutions mean, written out: numpy over all ranks at once, nothing fast.

None of the code under test is used but its data (Conv, Grid, Layout, steps). A value is an array
[ranks, *shape of the whole tensor], NaN where a rank holds nothing. Data are small integers, so sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.blocks import Uneven
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.program.nodes import Compute, Convert, Schedule, Step

Values = NDArray[np.float64]


def split(items: list[int], parts: int) -> list[list[int]]:
    """The block rule: the first len(items) % parts parts get one more; of shares whoever is owed most is next."""
    if isinstance(parts, Uneven):
        owed = [Fraction(len(items) * w, sum(parts.shares)) for w in parts.shares]
        counts = [floor(share) for share in owed]
        while sum(counts) < len(items):
            counts[max(range(parts), key=lambda i: (owed[i] - counts[i], -i))] += 1
    else:
        counts = [len(items) // parts + (1 if i < len(items) % parts else 0) for i in range(parts)]
    return [items[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(parts)]


def block(extent: int, groups: int, sizes: Sequence[int], index: Sequence[int]) -> list[int]:
    """Elements of a dimension of `groups` groups at these coordinates: whole groups first, then inside of one."""
    unit = extent // groups
    mine, inside, most = list(range(groups)), list(range(unit)), groups
    for size, i in zip(sizes, index, strict=True):
        if most > 1:
            mine, most = split(mine, size)[i], max(map(len, split(list(range(most)), size)))
        else:
            inside = split(inside, size)[i]
    return [g * unit + e for g in mine for e in inside]


def rows_read(s: Spatial, outputs: Iterable[int]) -> set[int]:
    """Input rows under some tap of these output rows, padding included."""
    return {o * s.stride - s.pad_lo + s.dilation * k for o in outputs for k in range(s.kernel)}


def rows_spanned(s: Spatial, outputs: Iterable[int]) -> list[int]:
    """Input rows from the first to the last that these output rows read."""
    read = rows_read(s, outputs)
    return list(range(min(read), max(read) + 1)) if read else []


def rows_reaching(s: Spatial, inputs: Sequence[int]) -> list[int]:
    """Output rows, of the tensor or not, of which some of these input rows lies between first and last tap."""
    if not inputs:
        return []
    lo = floor((min(inputs) - s.reach) / s.stride) - 2
    hi = ceil((max(inputs) + s.pad_lo) / s.stride) + 2 + s.pad_lo
    spans = {o: rows_spanned(s, [o]) for o in range(lo, hi + 1)}
    return [o for o, span in spans.items() if span[0] <= max(inputs) and span[-1] >= min(inputs)]


def one_padding(s: Spatial, x_rows: tuple[int, int], y_rows: tuple[int, int]) -> int | None:
    """Padding with which a local convolution of these x rows has just these y rows; None if it would have others.

    ATen pads both sides alike: rows(y) = floor((rows(x) + 2 padding - d(K-1) - 1) / S) + 1.
    """
    padding = x_rows[0] - (y_rows[0] * s.stride - s.pad_lo)
    room = x_rows[1] - x_rows[0] + 2 * padding - s.reach - 1
    fits = padding >= 0 and room >= 0 and room // s.stride + 1 == y_rows[1] - y_rows[0]
    return padding if fits else None


def frame_rows(s: Spatial, inputs: Sequence[int]) -> tuple[int, int]:
    """The rows of `rows_reaching`, and as few around them as let one padding serve both sides."""
    reaching = rows_reaching(s, inputs)
    start = -((s.reach - inputs[0] - s.pad_lo) // s.stride)
    lo, hi = (min(reaching), max(reaching) + 1) if reaching else (start, start)
    for more in range(60):
        for below in range(more + 1):
            rows = lo - below, hi + more - below
            if rows[1] > rows[0] and one_padding(s, (inputs[0], inputs[-1] + 1), rows) is not None:
                return rows
    raise AssertionError(f"no frame for {inputs} of {s}")


class Oracle:
    """One convolution on one grid."""

    def __init__(self, conv: Conv, grid: Grid) -> None:
        self.conv, self.grid = conv, grid
        sizes = [range(n) for _, n in grid.axes]
        self.at = [dict(zip(grid.names, c, strict=True)) for c in product(*sizes)]
        self.ranks = range(len(self.at))
        self._masks: dict[Layout, NDArray[np.bool_]] = {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.conv
        outs = (len(range(0, s.extent + s.pad_lo + s.pad_hi - s.reach, s.stride)) for s in c.spatial)
        return {
            "x": (c.batch, c.channels, *(s.extent for s in c.spatial)),
            "w": (c.filters, c.channels // c.groups, *(s.kernel for s in c.spatial)),
            "y": (c.batch, c.filters, *outs),
            "bias": (c.filters,),
        }

    def groups(self, axes: Iterable[str]) -> list[list[int]]:
        """Ranks in sets that differ only along `axes`."""
        moving, sets = set(axes), dict[tuple[int, ...], list[int]]()
        for r in self.ranks:
            sets.setdefault(tuple(i for a, i in self.at[r].items() if a not in moving), []).append(r)
        return list(sets.values())

    def block(self, tensor: str, d: int, axes: Sequence[str], rank: int) -> list[int]:
        grouped = {"x": 1, "y": 1, "w": 0, "bias": 0}[tensor] == d
        sizes = [self.grid.sizes[a] for a in axes]
        index = [self.at[rank][a] for a in axes]
        return block(self.shapes[tensor][d], self.conv.groups if grouped else 1, sizes, index)

    def indices(self, layout: Layout, rank: int) -> list[list[int]]:
        """Per dimension, the elements that a rank holds of a value of this type."""
        found: list[list[int]] = []
        for d, axes in enumerate(layout.axes):
            if layout.windows[d] is None:
                found.append(self.block(layout.tensor, d, axes, rank))
                continue
            other = {"x": "y", "y": "x"}[layout.tensor]
            rule = rows_spanned if layout.tensor == "x" else rows_reaching
            rows = rule(self.conv.spatial[d - 2], self.block(other, d, axes, rank))
            found.append([i for i in rows if 0 <= i < self.shapes[layout.tensor][d]])
        return found + [list(range(n)) for n in self.shapes[layout.tensor][len(layout.axes) :]]

    def mask(self, layout: Layout) -> NDArray[np.bool_]:
        """[ranks, *shape]: who holds what."""
        key = Layout(layout.tensor, layout.axes, layout.windows)
        if key not in self._masks:
            mask = np.zeros((len(self.at), *self.shapes[layout.tensor]), dtype=bool)
            for r in self.ranks:
                mask[(r, *np.ix_(*self.indices(layout, r)))] = True
            self._masks[key] = mask
        return self._masks[key]

    # -- values

    def place(self, whole: Values, layout: Layout, rng: np.random.Generator | None = None) -> Values:
        """A value of this type; a partial one as random addends."""
        mask = self.mask(layout)
        value = np.where(mask, whole[None], np.nan)
        if layout.partial and rng is not None:
            for group in self.groups(layout.partial):
                addends = rng.integers(-9, 9, size=(len(group) - 1, *whole.shape)).astype(float)
                value[group[1:]] = np.where(mask[group[1:]], addends, np.nan)
                value[group[0]] = np.where(mask[group[0]], whole - addends.sum(axis=0), np.nan)
        return value

    def assert_is(self, value: Values, layout: Layout, whole: Values) -> None:
        """Each rank holds what the type says and nothing else, and the addends add up to the whole tensor's part."""
        mask = self.mask(layout)
        assert (np.isnan(value) == ~mask).all()
        for group in self.groups(layout.partial):
            total = value[group].sum(axis=0)
            for r in group:
                assert (mask[r] == mask[group[0]]).all()
                np.testing.assert_array_equal(total[mask[r]], whole[mask[r]])

    # -- collectives, by their definitions

    def convert(self, kind: str, over: Sequence[str], src: Layout, dst: Layout, value: Values) -> Values:
        """What each rank holds after a collective."""
        own, need = self.mask(src), self.mask(dst)
        result = np.full_like(value, np.nan)
        if kind == "slice":
            assert not over and not (need & ~own).any()
            return np.where(need, value, np.nan)
        assert over and set(over) <= set(self.grid.names)
        for group in self.groups(over):
            if kind in ("all_reduce", "reduce_scatter"):
                assert (own[group] == own[group[0]]).all()
                total = value[group].sum(axis=0)
                for r in group:
                    result[r] = np.where(need[r], total, np.nan)
                if kind == "all_reduce":
                    assert (need[group] == own[group]).all()
                else:  # each element to one rank
                    assert (need[group].sum(axis=0) == own[group[0]]).all()
                continue
            assert not src.partial and not dst.partial
            if kind == "all_gather":  # everything that the group has, to everyone
                for r in group:
                    assert (need[r] == own[group].any(axis=0)).all()
            elif kind == "all_to_all":  # everything that the group has, to one rank each
                assert (need[group].sum(axis=0) == own[group].sum(axis=0)).all()
            for r in group:
                for owner in group:
                    if self.is_owner(src, owner, r):
                        taken = need[r] & own[owner]
                        assert np.isnan(result[r][taken]).all(), "an element has two owners"
                        result[r][taken] = value[owner][taken]
        return result

    def is_owner(self, src: Layout, owner: int, receiver: int) -> bool:
        """Of the ranks that hold copies, the one beside the receiver: it differs along axes of blocks only."""
        blocks = {a for axes, window in zip(src.axes, src.windows, strict=True) if window is None for a in axes}
        return all(self.at[owner][a] == self.at[receiver][a] for a in self.grid.names if a not in blocks)

    def moves(self, src: Layout, dst: Layout) -> NDArray[np.int64]:
        """Elements that rank i sends rank j: those that j needs and does not own, each from one owner."""
        own, need = self.mask(src), self.mask(dst)
        count = np.zeros((len(self.at), len(self.at)), dtype=np.int64)
        for j in self.ranks:
            for i in self.ranks:
                if i != j and self.is_owner(src, i, j):
                    count[i, j] = (own[i] & need[j] & ~own[j]).sum()
        return count

    # -- local convolution, in each rank's own frame

    def frame(self, layout: Layout, rank: int) -> list[tuple[int, int]] | None:
        """Half-open interval per dimension of a rank's piece, zero rows included; None for an empty one."""
        found: list[tuple[int, int]] = []
        for d, axes in enumerate(layout.axes):
            if layout.windows[d] is None:
                rows = self.block(layout.tensor, d, axes, rank)
            else:
                s = self.conv.spatial[d - 2]
                other = self.block({"x": "y", "y": "x"}[layout.tensor], d, axes, rank)
                if layout.tensor == "x" or not other:
                    rows = rows_spanned(s, other)
                else:
                    rows = list(range(*frame_rows(s, other)))
            if not rows:
                return None
            assert rows == list(range(rows[0], rows[-1] + 1))
            found.append((rows[0], rows[-1] + 1))
        return found + [(0, n) for n in self.shapes[layout.tensor][len(layout.axes) :]]

    def local(self, value: Values, layout: Layout, rank: int) -> Values | None:
        """A rank's piece as it stands in its memory: the frame, zero where the tensor ends or nothing is needed."""
        box = self.frame(layout, rank)
        if box is None:
            return None
        shape = self.shapes[layout.tensor]
        piece = np.zeros([hi - lo for lo, hi in box])
        inside = [(max(lo, 0), min(hi, n)) for (lo, hi), n in zip(box, shape, strict=True)]
        if any(hi <= lo for lo, hi in inside):
            return piece
        part = value[rank][tuple(slice(lo, hi) for lo, hi in inside)].copy()
        held = self.mask(layout)[rank][tuple(slice(lo, hi) for lo, hi in inside)]
        assert not np.isnan(part[held]).any()
        part[~held] = 0.0
        target = tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(inside, box, strict=True))
        piece[target] = part
        return piece

    def convolve(self, step: Compute, types: dict[str, Layout], values: dict[str, Values]) -> Values:
        """Every rank convolves its own pieces, padding both sides alike."""
        t = {layout.tensor: layout for layout in (*(types[v] for v in step.inputs), step.type)}
        of = {types[v].tensor: values[v] for v in step.inputs}
        out = step.type.tensor
        mask = self.mask(step.type)
        result = np.where(mask, 0.0, np.nan)
        for r in self.ranks:
            boxes = {name: self.frame(t[name], r) for name in ("x", "w", "y")}
            x_box, y_box, w_box = boxes["x"], boxes["y"], boxes["w"]
            if x_box is None or y_box is None or w_box is None:
                continue
            paddings: list[int] = []
            for i, s in enumerate(self.conv.spatial):
                padding = one_padding(s, x_box[2 + i], y_box[2 + i])
                assert padding is not None, f"rank {r}: {s} from {x_box[2 + i]} to {y_box[2 + i]}"
                paddings.append(padding)
            pieces = {
                name: np.zeros([hi - lo for lo, hi in box]) if name == out else self.local(of[name], t[name], r)
                for name, box in (("x", x_box), ("w", w_box), ("y", y_box))
            }
            accumulate(self.conv, out, pieces, paddings)
            result[r][mask[r]] = pieces[out].ravel()
            if "bias" in step.inputs:
                bias = self.local(values["bias"], types["bias"], r)
                piece = pieces[out] + bias.reshape(1, -1, *[1] * len(self.conv.spatial))
                result[r][mask[r]] = piece.ravel()
        if "bias" in step.inputs:  # ranks without channels have zeros plus bias as well
            for r in self.ranks:
                if self.frame(t["x"], r) is None or self.frame(t["w"], r) is None:
                    whole = np.broadcast_to(column(values["bias"][r], self.conv), self.shapes["y"])
                    result[r][mask[r]] = whole[mask[r]]
        return result

    # -- a whole schedule

    def run(self, schedule: Schedule, data: dict[str, Values], truth: dict[str, Values]) -> None:
        """Execute every step and compare every value that it makes with the whole tensor."""
        types = schedule.types()
        stored = dict(schedule.stored)
        values = {name: self.place(data[name], types[name]) for name in data if name in types}
        whole = dict(data)
        assert set(values) >= set(stored) - {"y"}
        for _, step in schedule.steps():
            values[step.result] = self.step(step, types, values)
            whole[step.result] = self._whole(step, whole, truth)
            self.assert_is(values[step.result], step.type, whole[step.result])
        for name in ("y", "dx", "dw", *(["db"] if "bias" in stored else [])):
            np.testing.assert_array_equal(whole[name], truth[name])

    def step(self, step: Step, types: dict[str, Layout], values: dict[str, Values]) -> Values:
        match step:
            case Compute(operation="add_bias"):
                whole = np.stack([column(values["bias"][r], self.conv) for r in self.ranks])
                return values[step.inputs[0]] + whole
            case Compute(operation="sum_bias"):
                other = tuple(d for d in range(1, len(self.conv.spatial) + 3) if d != 2)
                held = self.mask(step.type)
                return np.where(held, np.nansum(values[step.inputs[0]], axis=other), np.nan)
            case Compute():
                return self.convolve(step, types, values)
            case Convert():
                return self.convert(step.kind, step.over, types[step.source], step.type, values[step.source])

    def _whole(self, step: Step, whole: dict[str, Values], truth: dict[str, Values]) -> Values:
        """The whole tensor of which a step's result is a part."""
        match step:
            case Compute(operation="add_bias"):
                return whole[step.inputs[0]] + column(whole["bias"], self.conv)
            case Compute(operation="sum_bias"):
                return truth["db"]
            case Compute():
                name = {"forward": "y", "backward_data": "dx", "backward_filter": "dw"}[step.phase]
                return truth["y" if "bias" in step.inputs else "y without bias" if name == "y" else name]
            case Convert():
                return whole[step.source]


def column(bias: Values, conv: Conv) -> Values:
    """bias as [1, F, 1, ...], to add it to y."""
    return bias.reshape(1, -1, *[1] * len(conv.spatial))


def accumulate(conv: Conv, out: str, pieces: dict[str, Values | None], paddings: Sequence[int]) -> None:
    """y, x or w += what the other two make of it, tap by tap and row by row, group by group."""
    x, w, y = pieces["x"], pieces["w"], pieces["y"]
    assert x is not None and w is not None and y is not None
    groups = max(1, x.shape[1] // (conv.channels // conv.groups))
    cs, fs = x.shape[1] // groups, y.shape[1] // groups
    assert x.shape[0] == y.shape[0] and w.shape[:2] == (y.shape[1], cs)
    for tap in product(*(range(s.kernel) for s in conv.spatial)):
        pairs = [
            [(o, o * s.stride - p + s.dilation * k) for o in range(y.shape[2 + i])]
            for i, (s, p, k) in enumerate(zip(conv.spatial, paddings, tap, strict=True))
        ]
        inside = [[(o, r) for o, r in pair if 0 <= r < x.shape[2 + i]] for i, pair in enumerate(pairs)]
        if not all(inside):
            continue
        outs, ins = ([[p[side] for p in pair] for pair in inside] for side in (0, 1))
        for g in range(groups):
            c, f = range(g * cs, (g + 1) * cs), range(g * fs, (g + 1) * fs)
            at_x, at_y = np.ix_(range(x.shape[0]), c, *ins), np.ix_(range(y.shape[0]), f, *outs)
            at_w = (slice(f.start, f.stop), slice(None), *tap)
            if out == "y":
                y[at_y] += np.einsum("nc...,fc->nf...", x[at_x], w[at_w])
            elif out == "x":
                x[at_x] += np.einsum("nf...,fc->nc...", y[at_y], w[at_w])
            else:
                w[at_w] += np.einsum("ncr,nfr->fc", *(a.reshape(*a.shape[:2], -1) for a in (x[at_x], y[at_y])))


def direct(conv: Conv, x: Values, w: Values, dy: Values) -> tuple[Values, Values, Values]:
    """The whole convolution by its definition, element by element of y: y, dx and dw."""
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    per_c, per_f = conv.channels // conv.groups, conv.filters // conv.groups
    for o in product(*(range(n) for n in dy.shape[2:])):
        for tap in product(*(range(s.kernel) for s in conv.spatial)):
            row = [a * s.stride - s.pad_lo + s.dilation * k for a, s, k in zip(o, conv.spatial, tap, strict=True)]
            if any(not 0 <= i < s.extent for i, s in zip(row, conv.spatial, strict=True)):
                continue
            for g in range(conv.groups):
                c, f = slice(g * per_c, (g + 1) * per_c), slice(g * per_f, (g + 1) * per_f)
                to_x, to_w, to_y = (slice(None), c, *row), (f, slice(None), *tap), (slice(None), f, *o)
                y[to_y] += x[to_x] @ w[to_w].T
                dx[to_x] += dy[to_y] @ w[to_w]
                dw[to_w] += dy[to_y].T @ x[to_x]
    return y, dx, dw


def random_tensors(oracle: Oracle, seed: int) -> tuple[dict[str, Values], dict[str, Values]]:
    """Small whole tensors x, w, bias, dy, and what a single device makes of them."""
    rng, shapes = np.random.default_rng(seed), oracle.shapes
    data = {
        name: rng.integers(-4, 5, size=shapes[{"dy": "y"}.get(name, name)]).astype(float)
        for name in ("x", "w", "bias", "dy")
    }
    y, dx, dw = direct(oracle.conv, data["x"], data["w"], data["dy"])
    other = tuple(d for d in range(len(shapes["y"])) if d != 1)
    truth = {"y without bias": y, "dx": dx, "dw": dw, "db": data["dy"].sum(axis=other)}
    truth["y"] = y + column(data["bias"], oracle.conv) if oracle.conv.bias else y
    return data, truth
