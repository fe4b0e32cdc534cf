"""Interpolation: nearest, linear, bicubic, as ATen's operators have it to the last row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from convgen.late import torch
from convgen.operations.linear_maps import LinearMap, of_unit_vectors


@dataclass(frozen=True)
class Upsample(LinearMap):
    """Interpolation of x[N, C, rows...] to `size` rows.

    Attributes:
        mode: nearest, nearest-exact, linear or bicubic, along every dimension of rows; the last two also with `-aa`,
            which averages what it shrinks. (Of one column, or to one, ATen's own are wrong there.)
        scales: rows out for a row in, where the source says so; else the quotient of the extents.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    mode: Literal["nearest", "nearest-exact", "linear", "bicubic", "linear-aa", "bicubic-aa"] = "nearest"
    align_corners: bool = False
    scales: tuple[float, ...] | None = None

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.size, 2))

    def matrix(self, d: int) -> Any:
        aten, corners = torch.ops.aten, self.align_corners
        n, rows, scale = self.shape[d], [self.size[d - 2]], self.scales[d - 2] if self.scales else None
        match self.mode:
            case "nearest":
                return of_unit_vectors(lambda x: aten.upsample_nearest1d(x, rows, scale), n)
            case "nearest-exact":
                return of_unit_vectors(lambda x: aten._upsample_nearest_exact1d(x, rows, scale), n)
            case "linear":
                return of_unit_vectors(lambda x: aten.upsample_linear1d(x, rows, corners, scale), n)
            case "bicubic":  # of two dimensions only: one column beside the rows
                flat = aten.upsample_bicubic2d
                return of_unit_vectors(lambda x: flat(x[..., None], [*rows, 1], corners, scale, None)[..., 0], n)
            case "linear-aa" | "bicubic-aa":  # two columns: with one ATen takes rows for channels that come last
                wide = aten._upsample_bicubic2d_aa if self.mode == "bicubic-aa" else aten._upsample_bilinear2d_aa
                return of_unit_vectors(
                    lambda x: wide(x[..., None].repeat(1, 1, 1, 2), [*rows, 2], corners, scale, None)[..., 0], n
                )

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's operator of as many dimensions as there are."""
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
