"""Interpolation: nearest, linear, bicubic, as ATen's operators have it to the last row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, Literal

from convgen.algebra.relations import Ratio, Relation, Table
from convgen.late import torch
from convgen.operations.linear_maps import LinearMap, hulls, of_unit_vectors
from convgen.operations.row import At, on_device


def _nearest(dims: int, suffix: str = "") -> Callable[..., Any]:
    return getattr(torch.ops.aten, f"upsample_nearest{dims}d{suffix}")


@dataclass(frozen=True)
class Upsample(LinearMap):
    """Interpolation of x[N, C, rows...] to `size` rows.

    Attributes:
        mode: nearest, nearest-exact, linear or bicubic, along every dimension of rows; the last two also with `-aa`,
            which averages what it shrinks. (Of one column, or to one, ATen's own are wrong there.)
        scales: how many rows of y a row of x makes, where the source says so; else the quotient of the extents.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    mode: Literal["nearest", "nearest-exact", "linear", "bicubic", "linear-aa", "bicubic-aa"] = "nearest"
    align_corners: bool = False
    scales: tuple[float, ...] | None = None

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.size, 2))

    @cached_property
    def reads(self) -> Mapping[int, Relation]:
        """The relation of each dimension; in closed form where the nearest row is repeated a whole number of times."""
        found: dict[int, Relation] = {}
        for d, size in self.maps.items():
            if not self.shape[d]:
                raise ValueError("an extent of 0 can't be interpolated, by torch neither")
            n, times, operator = self.shape[d], size // self.shape[d], self.operator(d)
            if not self.mode.startswith("nearest"):
                shrinks = max(n / size, 1 / self.scales[d - 2] if self.scales else 1, 1)
                found[d] = hulls(operator, n, ceil((4 if "bicubic" in self.mode else 2) * shrinks) + 2)
                continue
            rows: list[int] = operator(torch.arange(n, dtype=torch.float64)[None, None])[0, 0].long().tolist()
            is_whole = rows == [o // times for o in range(n * times)] if times else False
            found[d] = Ratio(1, times) if is_whole else Table(tuple((r, r + 1) for r in rows))
        return found

    def relation(self, d: int) -> Relation:
        return self.reads[d]

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """The nearest row is picked: a product with the matrix would make NaNs of every row of an infinite one."""
        if way or not self.mode.startswith("nearest"):
            return super().local(way, at, *operands)
        (y,) = operands
        if (scales := self._doubled([at.blocks[f"d{d}"] for d in self.maps], at.inside[0], y)) is not None:
            size = [n * int(scale) for n, scale in zip(y.shape[2:], scales, strict=True)]
            return (_nearest(len(size))(y, size, *scales),)
        for d in self.maps:
            key = d, *at.blocks[f"d{d}"], at.inside[0][d][0], y.device
            if key not in self._parts:
                rows = tuple([self.reads[d].row(o)[0] - key[3] for o in range(*key[1:3])])
                self._parts[key] = on_device(rows, torch.int64, y.device)
            y = y.index_select(d, self._parts[key])
        return (y,)

    def back_at_once(self, dy: Any, blocks: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]]) -> Any:
        if not self.mode.startswith("nearest") or (scales := self._doubled(blocks, read, dy)) is None:
            return None
        size = [*dy.shape[:2], *(hi - lo for lo, hi in read[2:])]
        return _nearest(len(scales), "_backward")(dy, list(dy.shape[2:]), size, *scales)

    def _doubled(
        self, blocks: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]], like: Any
    ) -> list[float] | None:
        """The factor of each dimension, if ATen's operator is right on these parts as it is on the whole: if the factor
        is a power of two, whose quotients are exact, and the parts are whole rows; else None."""
        if not like.is_floating_point() or not like.numel():
            return None
        scales: list[float] = []
        for (d, relation), block in zip(self.reads.items(), blocks, strict=True):
            times = relation.b if isinstance(relation, Ratio) else 0
            whole = tuple(n * times for n in read[d])
            if times < 1 or times & (times - 1) or whole != tuple(block):
                return None
            scales.append(float(times))
        return scales

    def matrix(self, d: int) -> Any:
        return of_unit_vectors(self.operator(d), self.shape[d])

    def operator(self, d: int) -> Callable[[Any], Any]:
        """ATen's operator along one dimension, on (N, C, rows)."""
        aten, corners = torch.ops.aten, self.align_corners
        rows, scale = [self.size[d - 2]], self.scales[d - 2] if self.scales else None
        match self.mode:
            case "nearest":
                return lambda x: aten.upsample_nearest1d(x, rows, scale)
            case "nearest-exact":
                return lambda x: aten._upsample_nearest_exact1d(x, rows, scale)
            case "linear":
                return lambda x: aten.upsample_linear1d(x, rows, corners, scale)
            case "bicubic":  # ATen has it for two dimensions only: one column beside the rows
                flat = aten.upsample_bicubic2d
                return lambda x: flat(x[..., None], [*rows, 1], corners, scale, None)[..., 0]
            case "linear-aa" | "bicubic-aa":  # two columns: with one ATen takes rows for channels that come last
                wide = aten._upsample_bicubic2d_aa if self.mode == "bicubic-aa" else aten._upsample_bilinear2d_aa
                return lambda x: wide(x[..., None].repeat(1, 1, 1, 2), [*rows, 2], corners, scale, None)[..., 0]

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's operator over all dimensions of rows at once."""
        if self.mode.endswith("-aa"):
            aa = (
                torch.ops.aten._upsample_bicubic2d_aa
                if "bicubic" in self.mode
                else torch.ops.aten._upsample_bilinear2d_aa
            )
            return (aa(operands[0], list(self.size), self.align_corners, *(self.scales or (None, None))),)
        linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(self.size)]
        mode = linear if self.mode == "linear" else self.mode
        name = f"upsample_{mode.replace('nearest-exact', 'nearest_exact')}{len(self.size)}d"
        aten = getattr(torch.ops.aten, f"_{name}" if "exact" in mode else name)
        corners = () if "nearest" in mode else (self.align_corners,)
        scales = self.scales or (None,) * len(self.size)
        return (aten(operands[0], list(self.size), *corners, *scales),)
