# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (triton and parts of torch have no types)
"""Operands of a local problem on a device, with NaN around them, and its result in float64."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from convgen.errors import InputError
from convgen.kernels.problem import Problem
from convgen.kernels.torch_types import TORCH_DTYPES

# The largest error allowed over the largest |result|: for float32 that of a sum's order, else that of rounding once.
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "tfloat32": 2.0**-9, "bfloat16": 2.0**-7, "float16": 2.0**-9}
GUARD = 64  # elements of NaN before and behind an operand; a multiple of 16 bytes


class Wrong(RuntimeError):
    """A kernel's result, or what it did to memory or the process, is wrong."""


def shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """The logical shapes of x, w and y: N C rows, F C taps, N F rows; parts are side by side."""
    channels, filters = p.channels * p.x_parts, p.filters * p.y_parts
    return {
        "x": (p.batch, p.groups * channels, *(d.x for d in p.dims)),
        "w": (p.groups * filters, channels, *(d.kernel for d in p.dims)),
        "dy": (p.batch, p.groups * filters, *(d.y for d in p.dims)),
    }


def result_of(p: Problem) -> tuple[str, int]:
    """The operand in whose shape the result is, and its number of parts."""
    return {"forward": ("dy", p.y_parts), "backward_data": ("x", p.x_parts), "backward_filter": ("w", 1)}[p.phase]


def logical(flat: Tensor, shape: tuple[int, ...], last: bool, parts: int = 1) -> Tensor:
    """A view of flat elements as parts, N, C, rows. `shape` is the whole's, without parts."""
    n, c, *rows = shape
    if last:
        return flat.view(parts, n, *rows, c // parts).movedim(-1, 2)
    return flat.view(parts, n, c // parts, *rows)


def side_by_side(whole: Tensor, parts: int) -> Tensor:
    """A view of an ordinary tensor in the dimensions that `logical` gives."""
    return whole.unflatten(1, (parts, whole.shape[1] // parts)).movedim(1, 0)


def above(p: Problem) -> list[int]:
    """How many zero rows are above x's last row, in each dimension."""
    return [(d.y - 1) * d.stride + d.dilation * (d.kernel - 1) + 1 - d.below - d.x for d in p.dims]


def sides(p: Problem) -> list[int]:
    """The paddings of both sides as torch.nn.functional.pad takes them."""
    return [n for d, hi in reversed(list(zip(p.dims, above(p), strict=True))) for n in (d.below, hi)]


class Operands:
    """x, w, dy and bias of a problem in both memory formats with NaN around them, and the result in float64.

    Attributes:
        reference: y, dx or dw by ATen in float64, with explicit padding and without cuDNN.
    """

    def __init__(self, p: Problem, device: str, seed: int = 0) -> None:
        self.problem, self.device, self.shapes = p, device, shapes(p)
        generator = torch.Generator(device).manual_seed(seed)
        sizes = self.shapes | {"bias": (p.groups * p.filters * p.y_parts,)}
        self.given = {
            n: torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[p.dtype])
            for n, shape in sizes.items()
        }
        self.reference = self._reference()
        self.scale = float(self.reference.abs().max()) if self.reference.numel() else 1.0
        self.scale = self.scale or 1.0
        self._flat: dict[tuple[str, bool], Tensor] = {}

    def _reference(self) -> Tensor:
        p = self.problem
        x, w, dy = (self.given[n].double() for n in ("x", "w", "dy"))
        x.requires_grad_(p.phase == "backward_data")
        w.requires_grad_(p.phase == "backward_filter")
        wide = [max(n, 0) for n in sides(p)]
        cut = torch.nn.functional.pad(torch.nn.functional.pad(x, wide), [min(n, 0) for n in sides(p)])
        convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(p.dims) - 1]
        strides, dilations = tuple(d.stride for d in p.dims), tuple(d.dilation for d in p.dims)
        bias = self.given["bias"].double() if p.bias else None
        with torch.backends.cudnn.flags(enabled=False):
            y = convolve(cut, w, bias, stride=strides, dilation=dilations, groups=p.groups)
            if p.phase == "forward":
                return y
            return torch.autograd.grad(y, x if p.phase == "backward_data" else w, dy)[0]

    def parts(self, name: str) -> int:
        """The number of parts in which an operand lies."""
        return {"x": self.problem.x_parts, "dy": self.problem.y_parts}.get(name, 1)

    def flat(self, name: str, last: bool) -> Tensor:
        """An operand's elements in memory order; made once for each memory format."""
        if (name, last) not in self._flat:
            given = self.given[name]
            flat = self.poisoned(given.numel())[GUARD:-GUARD]
            if name == "bias":
                flat.copy_(given)
            else:
                logical(flat, self.shapes[name], last, self.parts(name)).copy_(side_by_side(given, self.parts(name)))
            self._flat[name, last] = flat
        return self._flat[name, last]

    def poisoned(self, elements: int) -> Tensor:
        """A tensor of NaN: so many elements, and guards around them."""
        return torch.full((elements + 2 * GUARD,), math.nan, dtype=TORCH_DTYPES[self.problem.dtype], device=self.device)

    @cached_property
    def whole(self) -> Tensor:
        """The memory to which results are written, guards included."""
        return self.poisoned(math.prod(self.shapes[result_of(self.problem)[0]]))

    @property
    def out(self) -> Tensor:
        return self.whole[GUARD:-GUARD]

    def written(self, last: bool) -> Tensor:
        """The result that lies in `out`, in the dimensions of `logical`."""
        name, parts = result_of(self.problem)
        return logical(self.out, self.shapes[name], last, parts)

    def error(self, result: Tensor) -> float:
        """The largest error over the largest |result|, of an ordinary tensor or of parts; NaN if the result has one."""
        wanted = self.reference
        if result.dim() > wanted.dim():
            wanted = side_by_side(wanted, result.shape[0])
        if result.shape != wanted.shape:
            raise Wrong(f"a result of shape {tuple(result.shape)} instead of {tuple(wanted.shape)}")
        return float((result.double() - wanted).abs().max()) / self.scale if wanted.numel() else 0.0

    def check_error(self, result: Tensor) -> float:
        """The error of the result. Raises Wrong: it is more than rounding explains."""
        error, most = self.error(result), TOLERANCE[self.problem.dtype]
        if not error <= most:
            raise Wrong(f"error {error:.2e} of the largest |result|, at most {most:.1e}")
        return error

    def check_guards(self) -> None:
        """Check the guards. Raises Wrong: something was written before or behind the result."""
        if not (self.whole[:GUARD].isnan().all() and self.whole[-GUARD:].isnan().all()):
            raise Wrong("written outside of the result")

    @cached_property
    def rim(self) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """The activation with a halo as a rank has it: its own block, the boxes around it one behind the other, the
        place of each box in the window, and the block's place. The halo has half a kernel's rows.

        Raises:
            InputError: no neighbours give this number of boxes.
        """
        p = self.problem
        name = "dy" if p.phase == "backward_data" else "x"
        value = self.given[name]
        regions = halo_regions(p, tuple(value.shape[2:]))

        def piece(region: tuple[tuple[int, int], ...]) -> Tensor:
            some = value[(slice(None), slice(None), *(slice(lo, hi) for lo, hi in region))]
            return (some.movedim(1, -1) if p.channels_last else some).reshape(-1)

        own, *boxes = regions
        pieces = [piece(r) for r in boxes]
        starts = [sum(t.numel() for t in pieces[:i]) for i in range(len(pieces))]
        lines = [
            [start, *(lo for lo, _ in r), *(hi - lo for lo, hi in r)] for start, r in zip(starts, boxes, strict=True)
        ]
        table = torch.tensor(lines, dtype=torch.int64).reshape(len(boxes), 1 + 2 * len(p.dims)).to(self.device)
        flat = torch.cat(pieces) if pieces else value.new_empty(0)
        return piece(own), flat, table, tuple(v for lo, hi in own for v in (lo, hi - lo))


def halo_regions(p: Problem, rows: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The rank's own rows in a window, and the boxes around them that neighbours on some sides give.

    Raises:
        InputError: no neighbours give this number of boxes.
    """
    cuts: list[list[list[tuple[int, int]]]] = []  # for each dimension, the ways to cut it, own rows first
    for n, d in zip(rows, p.dims, strict=True):
        halo = max(1, d.dilation * (d.kernel - 1) // 2)
        ways = [[(0, n)]]
        if n > halo:
            ways.append([(halo, n), (0, halo)])
        if n > 2 * halo:
            ways.append([(halo, n - halo), (0, halo), (n - halo, n)])
        cuts.append(ways)
    for chosen in product(*cuts):
        if math.prod(len(way) for way in chosen) == (p.rim or 0) + 1:
            return list(product(*chosen))
    raise InputError(f"a halo in {p.rim} boxes of {rows} rows has no operands here", hint="it keeps its default kernel")
