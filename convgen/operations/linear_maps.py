"""Linear maps along dimensions: average and adaptive pooling, interpolation.

ATen can't be told at which row of the whole a part begins. The matrix that its own operator makes of unit vectors can
be cut anywhere: its rows are the relation, and its nonzeros the local code where nothing better is. Two ways: rows of
the result as blocks, that read; or rows of the operand as blocks, whose addends are the whole result's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from convgen.algebra.relations import Ratio, Relation, Table, Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.late import torch
from convgen.operations.row import At, Derived, Operation, Work, made_here, numbered, own, touched


def of_unit_vectors(operator: Callable[[Any], Any], extent: int) -> Any:
    """The matrix [rows out, rows in] of a map of the rows of (N, C, rows), in float64."""
    return operator(torch.eye(extent, dtype=torch.float64)[None])[0].T


def table(matrix: Any) -> Table:
    """For each row of a matrix the hull of its nonzeros."""
    read = (matrix != 0).int()
    first, last = read.argmax(1), matrix.shape[1] - read.flip(1).argmax(1)
    some = read.any(1)
    return Table(tuple(zip((first * some).tolist(), (last * some).tolist(), strict=True)))


class LinearMap(Operation):
    """y is x with a matrix along some of its dimensions."""

    shape: tuple[int, ...]  # of x

    @abstractmethod
    def matrix(self, d: int) -> Any:
        """Of a dimension that `maps` names: [rows of y, rows of x]."""

    @property
    @abstractmethod
    def maps(self) -> Mapping[int, int]:
        """Dimensions that are mapped, each with its extent in y."""

    @cached_property
    def matrices(self) -> Mapping[int, Any]:
        return {d: self.matrix(d) for d in self.maps}

    def relation(self, d: int) -> Relation:
        """Rows of x that a row of y reads along a dimension."""
        return table(self.matrices[d])

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        out = tuple(self.maps.get(d, n) for d, n in enumerate(self.shape))
        reads = tuple(Made((i,), self.relation(d) if d in self.maps else None) for d, i in enumerate(names))
        summed = own(*(None if d in self.maps else i for d, i in enumerate(names)))
        x, y = Operand("x", self.shape, reads), Operand("y", out, own(*names))
        rows, whole = Operand("x", self.shape, own(*names)), Operand("y", out, summed)
        return (
            Signature(tuple(zip(names, out, strict=True)), (x,), (y,)),
            Signature(tuple(zip(names, self.shape, strict=True)), (rows,), (whole,)),
        )

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (y,) = operands
        for d, matrix in self.matrices.items():
            block = slice(*at.blocks[f"d{d}"])
            here = matrix[block, slice(*at.inside[0][d])] if way == 0 else matrix[:, block]
            y = torch.movedim(torch.movedim(y, d, -1) @ here.T.to(y), -1, d)
        return (y,)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(Adjoint(self), ("dy",))}

    def work(self, way: int, at: At) -> Work:
        """Two flops a nonzero, as if rows were mapped one dimension after the other."""
        signature = self.signatures[way]
        made = prod(made_here(at, signature.results[0]))
        reads = {d: self.relation(d) for d in self.maps}
        taps = sum(max(len(reads[d].row(o)) for o in range(n)) for d, n in self.maps.items())
        return Work(2 * made * taps, touched(at, signature))


@dataclass(frozen=True)
class Adjoint(LinearMap):
    """The map read from the other side: its gradient, with roles of its own."""

    of: LinearMap

    @cached_property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.signatures[0].results[0].shape

    @property
    def maps(self) -> Mapping[int, int]:
        return {d: self.of.shape[d] for d in self.of.maps}

    def matrix(self, d: int) -> Any:
        return self.of.matrices[d].T

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x = torch.zeros(self.of.shape, dtype=operands[0].dtype, requires_grad=True)
        with torch.enable_grad():
            (y,) = self.of.reference(x)
        return torch.autograd.grad(y, x, operands[0], create_graph=operands[0].requires_grad)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(self.of, ("dy",))}


@dataclass(frozen=True)
class Upsample(LinearMap):
    """Interpolation of x[N, C, rows...] to `size` rows.

    Attributes:
        mode: nearest, nearest-exact, linear or bicubic, along every dimension of rows.
        scales: rows out for a row in, where the source says so; else the quotient of the extents.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    mode: Literal["nearest", "nearest-exact", "linear", "bicubic"] = "nearest"
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

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's operator of as many dimensions as there are."""
        linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(self.size)]
        mode = linear if self.mode == "linear" else self.mode
        name = f"upsample_{mode.replace('nearest-exact', 'nearest_exact')}{len(self.size)}d"
        aten = getattr(torch.ops.aten, f"_{name}" if "exact" in mode else name)
        corners = () if "nearest" in mode else (self.align_corners,)
        scales = self.scales or (None,) * len(self.size)
        return (aten(operands[0], list(self.size), *corners, *scales),)


@dataclass(frozen=True)
class AdaptiveAveragePool(LinearMap):
    """Row o of `out` is the mean of the rows [floor(o*H/out), ceil((o+1)*H/out)) of x[N, C, rows...]."""

    shape: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.out, 2))

    def relation(self, d: int) -> Relation:
        return Ratio(self.shape[d], self.out[d - 2])

    def matrix(self, d: int) -> Any:
        return of_unit_vectors(lambda x: torch.adaptive_avg_pool1d(x, [self.out[d - 2]]), self.shape[d])

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        pool = torch.nn.functional
        pools = (pool.adaptive_avg_pool1d, pool.adaptive_avg_pool2d, pool.adaptive_avg_pool3d)
        return (pools[len(self.out) - 1](operands[0], self.out),)


@dataclass(frozen=True)
class AveragePool(LinearMap):
    """The mean of each window of x[N, C, rows...], divided by what the *whole* has of it.

    Attributes:
        taps: without dilation.
        out: rows made; with ceil_mode the last window may leave the padding.
        count_include_pad: padding counts, and what lies behind it doesn't.
        divisor: instead of any count, in two and three dimensions.
    """

    shape: tuple[int, ...]
    taps: tuple[Taps, ...]
    out: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    @property
    def maps(self) -> Mapping[int, int]:
        return dict(enumerate(self.out, 2))

    def relation(self, d: int) -> Relation:
        return self.taps[d - 2]

    def counts(self, d: int) -> tuple[int, ...]:
        """What row o's window divides by along a dimension."""
        t, n, found = self.taps[d - 2], self.shape[d], list[int]()
        for o in range(self.out[d - 2]):
            lo, hi = t.window(o, o + 1)
            hi = min(hi, n + t.pad)
            found.append(hi - lo if self.count_include_pad else min(hi, n) - max(lo, 0))
        return tuple(found)

    def matrix(self, d: int) -> Any:
        t = self.taps[d - 2]
        matrix = torch.zeros(self.out[d - 2], self.shape[d], dtype=torch.float64)
        for o, count in enumerate(self.counts(d)):
            lo, hi = t.window(o, o + 1)
            matrix[o, max(lo, 0) : max(hi, 0)] = 1 / (count if self.divisor is None else t.kernel)
        if self.divisor is not None and d == 2:
            matrix *= prod(u.kernel for u in self.taps) / self.divisor
        return matrix

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        """ATen's own over windows filled with zeros, its divisors exchanged for those of the whole."""
        if way == 1:
            return super().local(way, at, *operands)
        pool = torch.nn.functional
        pools = (pool.avg_pool1d, pool.avg_pool2d, pool.avg_pool3d)
        kernel, stride = [t.kernel for t in self.taps], [t.stride for t in self.taps]
        y = pools[len(self.out) - 1](at.wished(0, operands[0]), kernel, stride)
        if self.divisor is not None:
            return (y * (prod(kernel) / self.divisor),)
        for d, t in enumerate(self.taps, 2):
            counts = torch.tensor(self.counts(d)[slice(*at.blocks[f"d{d}"])], dtype=y.dtype, device=y.device)
            y = y * (t.kernel / counts).view(-1, *[1] * (y.dim() - 1 - d))
        return (y,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """ATen's own, of the whole."""
        kernel, stride, padding = ([getattr(t, side) for t in self.taps] for side in ("kernel", "stride", "pad"))
        settings = (kernel, stride, padding, self.ceil_mode, self.count_include_pad)
        pool = torch.nn.functional
        if len(self.out) == 1:
            return (pool.avg_pool1d(operands[0], *settings),)
        return ((pool.avg_pool2d, pool.avg_pool3d)[len(self.out) - 2](operands[0], *settings, self.divisor),)
