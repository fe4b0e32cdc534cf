"""What filter gradients would gain by a kernel in Gluon: one warp copies, and two groups of warps only multiply.

    python bench/gluon_filters.py [--networks resnet50 vgg16] [--ranks 1]

By the bound of kernels compiled for sm_90, bfloat16, channels last, samples split over the ranks; nothing is timed.
The kernel was never launched, and Triton's interpreter does not run Gluon (tests/test_bench_gluon_filters.py runs its
text as Python, with threads for warps), so no family makes it. One warp has the copy engine fill a ring of boxes in
shared memory, and each group of four warps multiplies its half of a tile's rows. Matrix instructions read both operands
there, transposed by their descriptors: a group frees a slot while the step behind it is at work, and meets neither the
other group nor the warp that copies. Pieces of a sum are counted as the families add them; its text only stores them.

The first table has the kernel by tile, the most of all its boxes: registers of a thread at its launch, bytes that
spill, matrix instructions and all instructions of a step (of a warp that multiplies, and an eighth of the one's that
copies), and instructions behind waits for all matrix instructions. The second has least microseconds of convolutions by
taps, `others` being those whose taps, strides or channels it doesn't take: `today`, of the kernel that users get, as it
is bounded; `at once`, where its two groups of warps, which meet at barriers in each step, also wait for their matrix
instructions at the same time; `sized`, the same where its family in this kernel's sizes is better; `gluon`, of this
kernel. `saved` is what it saves of each of the three where it is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from options import options
from step_traffic import SM_90
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from convgen.kernels import sharing
from convgen.kernels.bound import GROUP_WARPS, bound_of, resident
from convgen.kernels.choose import choose
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.estimate import data_sheet
from convgen.kernels.facts import Facts, Launch, bound, facts, launches, specialised
from convgen.kernels.families import box, pointer
from convgen.kernels.loops import Loop, matrix_loop
from convgen.kernels.partition import local_problem
from convgen.kernels.problem import Problem
from convgen.resources import data_file
from convgen.spec.reader import read_csv

TILES = ((128, 64), (128, 128), (128, 256), (256, 64))  # rows, of which each group has half, by columns
PIXELS, STAGES, WARPS = 64, 4, 2 * GROUP_WARPS
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name from 3.9 on, and before


@gluon.jit
def copies(
    rows, columns, ring, where, TN: gl.constexpr, TH: gl.constexpr, TW: gl.constexpr, HALF: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: a step's three boxes into a slot of the ring, when both groups have freed it."""
    left, right, ready, free = ring
    first, steps, r, c, row_h, row_w, column_h, column_w, high, wide = where
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(free.index(slot), (step // STAGES + 1) % 2)
        mbarrier.expect(ready.index(slot), TN * TH * TW * (2 * HALF + COLUMNS) * 2)
        n = (first + step) // (high * wide) * TN
        h, w = (first + step) // wide % high * TH, (first + step) % wide * TW
        copy_box(rows, [n, h + row_h, w + row_w, r], ready.index(slot), left.index(2 * slot))
        copy_box(rows, [n, h + row_h, w + row_w, r + HALF], ready.index(slot), left.index(2 * slot + 1))
        copy_box(columns, [n, h + column_h, w + column_w, c], ready.index(slot), right.index(slot))


@gluon.jit
def products(
    ring, own, GROUP: gl.constexpr, PIXELS: gl.constexpr, HALF: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: half of a tile's rows, summed over all steps and stored."""
    left, right, ready, free = ring
    steps, made, r, c, R, C, of_row, of_column = own
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = gl.zeros([HALF, COLUMNS], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES % 2)
        a = left.index(2 * slot + GROUP).reshape([PIXELS, HALF]).permute((1, 0))
        b = right.index(slot).reshape([PIXELS, COLUMNS])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this step's go on; those of the step before are done
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    r += GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    c += gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    to = made + (r * of_row)[:, None] + (c * of_column)[None, :]
    gl.store(to, acc.to(made.dtype.element_ty), mask=(r < R)[:, None] & (c < C)[None, :])


@gluon.jit
def filter_gradient(
    rows, columns, made, R, C, of_row, of_column, of_tap, boxes, piece, high, wide, below_h, below_w,
    TAPS_W: gl.constexpr, TAPS: gl.constexpr, TURNED: gl.constexpr, TN: gl.constexpr, TH: gl.constexpr,
    TW: gl.constexpr, HALF: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """made[piece, f, tap, c] = sum over the piece's boxes of dy[p, f] * x[p + tap, c]; rows are f, or c if TURNED.

    A program makes a tile of one tap and one piece.
    """
    left = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, TN, TH, TW, HALF], rows.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TN, TH, TW, COLUMNS], columns.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    tap, tile, tiles = gl.program_id(0) % TAPS, gl.program_id(0) // TAPS, gl.cdiv(R, 2 * HALF)
    r, c = tile % tiles * (2 * HALF), tile // tiles * COLUMNS
    first = gl.program_id(1) * piece
    steps = gl.maximum(gl.minimum(piece, boxes - first), 0)
    made += gl.program_id(1).to(gl.int64) * R * C * TAPS + tap * of_tap
    h, w = tap // TAPS_W - below_h, tap % TAPS_W - below_w  # x's rows from those of dy
    row_h, row_w, column_h, column_w = 0, 0, h, w
    if TURNED:
        row_h, row_w, column_h, column_w = h, w, 0, 0
    PIXELS: gl.constexpr = TN * TH * TW
    ring = (left, right, ready, free)
    own = (steps, made, r, c, R, C, of_row, of_column)
    where = (first, steps, r, c, row_h, row_w, column_h, column_w, high, wide)
    gl.warp_specialize(
        [
            (products, (ring, own, 0, PIXELS, HALF, COLUMNS, STAGES)),
            (products, (ring, own, 1, PIXELS, HALF, COLUMNS, STAGES)),
            (copies, (rows, columns, ring, where, TN, TH, TW, HALF, COLUMNS, STAGES)),
        ],
        [4, 1],
        [232, 40],  # registers a thread
    )


def loop_of_both(text: str) -> Loop | None:
    """Of the kernel as it is disassembled: a warp's that multiplies, and an eighth of the one's that copies."""
    multiplies = matrix_loop(text)
    copy = matrix_loop(text.replace("HGMMA", "NOP").replace("UTMALDG", "HGMMA"))  # found in the same way
    if multiplies is None or copy is None:
        return None
    counts = multiplies.by_class | {"tensor copy": ceil_div(copy.instructions, WARPS)}
    return replace(multiplies, counts=tuple(counts.items()), narrowest_copy=16)


def with_layouts(launch: Launch) -> Any:
    """What Triton's launcher finds of a launch; of Gluon's descriptors their layout belongs to the type."""
    signature, *rest = specialised(launch)
    for name, value in zip(launch.function.arg_names, launch.args, strict=False):
        if isinstance(value, TensorDescriptor):
            signature[name] = f"{signature[name][:-1]},{value.layout!r}>"
    return signature, *rest


IN_GLUON = {"ASTSource": GluonASTSource, "matrix_loop": loop_of_both, "specialised": with_layouts}


class Size(NamedTuple):
    """Rows of a group of warps, columns, whether rows are channels; samples and rows of a box; pieces."""

    half: int
    columns: int
    turned: bool
    box: tuple[int, int, int]
    split: int = 1

    def config(self, p: Problem) -> Config:
        """As a family has it that makes the same, so that its work is counted alike."""
        f, c = (self.columns, 2 * self.half) if self.turned else (2 * self.half, self.columns)
        pixels = {"BP": PIXELS} if p.is_pointwise else dict(zip(("TN", "TH", "TW"), self.box, strict=True))
        tiles = pixels | {"BF": f, "BC": c}
        return Config("gemm" if p.is_pointwise else "box", tuple(tiles.items()), WARPS, STAGES, self.split)


def sizes(p: Problem) -> Iterator[Size]:
    """Sizes that a problem could have, at most half of a tile outside of it; none where the kernel can't."""
    if p.channels < 64 or box.refusal(p, SM_90) or any(d.kernel > 1 and d.stride * d.dilation > 1 for d in p.dims):
        return
    boxes = [(1, 1, PIXELS)] if p.is_pointwise else [tuple(t.values()) for t in box.tiles(p, PIXELS)[:1]]
    for pixels, (rows, columns), turned in product(boxes, TILES, (False, True)):
        one = Size(rows // 2, columns, turned, pixels)
        f, c = (one.config(p).tile[n] for n in ("BF", "BC"))
        if f < 2 * p.filters and c < 2 * p.channels:
            of = pointer.splits(p, SM_90, f, c, PIXELS) if p.is_pointwise else box.splits(p, SM_90, one.config(p))
            yield from (one._replace(split=split) for split in of)


def launch_of(p: Problem, size: Size, dy: torch.Tensor, x: torch.Tensor, made: torch.Tensor) -> Launch:
    """Of dy [n, h, w, f] and x [n, h, w, c]; `made` is [pieces, f, tap, c], of float32 where there are several."""
    if p.is_pointwise:
        dy, x = (t.reshape(1, 1, -1, t.shape[-1]) for t in (dy, x))
    else:
        x = x[:, :: p.dims[0].stride, :: p.dims[1].stride]
    sides = [(dy, p.taps * p.channels), (x, 1)]
    (rows, of_row), (columns, of_column) = reversed(sides) if size.turned else sides
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    copied = [
        TensorDescriptor(t, [*t.shape], [*t.stride()], [*size.box, n], layout)
        for t, n in ((rows, size.half), (columns, size.columns))
    ]
    R, C = rows.shape[3], columns.shape[3]
    along = [ceil_div(n, tile) for n, tile in zip(dy.shape[:3], size.box, strict=True)]
    piece = ceil_div(prod(along), size.split)
    grid = ceil_div(R, 2 * size.half) * ceil_div(C, size.columns) * p.taps, size.split
    args = (*copied, made, R, C, of_row, of_column, p.channels, prod(along), piece, *along[1:])
    constants = dict(zip(("TN", "TH", "TW"), size.box, strict=True)) | {
        "TAPS": p.taps, "TAPS_W": p.dims[1].kernel, "TURNED": size.turned, "HALF": size.half, "COLUMNS": size.columns,
        "STAGES": STAGES, "num_warps": GROUP_WARPS,
    }  # fmt: skip
    return Launch(filter_gradient, grid, (*args, *(d.below for d in p.dims)), constants)


def compiled(p: Problem, size: Size) -> Facts:
    y_rows, x_rows = ([d.y for d in p.dims], [d.x for d in p.dims])
    dy = torch.empty(p.batch, *y_rows, p.filters, dtype=torch.bfloat16, device="meta")
    x = torch.empty(p.batch, *x_rows, p.channels, dtype=torch.bfloat16, device="meta")
    made = torch.empty(size.split, p.filters, p.taps, p.channels, device="meta")
    with patch.multiple("convgen.kernels.facts", **IN_GLUON):
        return facts(launch_of(p, size, dy, x, made), SM_90, loops=True)


_alike: dict[Any, Facts] = {}  # by tile and box: what else differs is outside of the loops, or a number in them


def least(p: Problem) -> tuple[float, Size] | None:
    """The least microseconds of this kernel, and its size; None where it can't."""
    device, found = data_sheet(SM_90, p.dtype), []
    rates = {"bytes_per_s": device.bytes_per_s, "floor_s": device.floor_s}
    with patch.object(box, "taps_together", lambda *_: 1), patch.object(sharing, "taps_together", lambda *_: 1):
        for size in sizes(p):
            key = size.half, size.columns, size.box
            _alike[key] = _alike.get(key) or compiled(p, size)
            b = bound_of(p, size.config(p), _alike[key].loop, SM_90, **rates, programs=1)
            found += [(b.us, size)] if b else []
    return min(found, default=None)


@cache
def today(p: Problem, config: Config | None = None) -> tuple[float, float] | None:
    """The least microseconds of the kernel that users get, or of its family's in these sizes: as bounded, and where two
    groups of warps that wait for all of their matrix instructions do so at once."""
    kernel = choose((p,), SM_90)
    kernel = replace(kernel, config=config) if config else kernel
    main = next(one for one in launches(kernel, p) if one.name == kernel.name)
    found = facts(main, kernel.target, loops=True)
    b, loop, warps = bound(kernel, p, main, found), found.loop, kernel.config.warps
    if b is None or loop is None:
        return None
    if warps != WARPS or resident(found.registers, found.shared_bytes, warps, SM_90) > 1 or not loop.exposed:
        return b.us, b.us
    cycles, exposed = b.step_cycles, b.step_cycles["issue"] * loop.exposed / loop.instructions
    slower = max(1.0, (cycles["matrix"] + exposed) / max(cycles.values()))
    return b.us, replace(b, times_us={**b.times_us, "loop": b.times_us["loop"] * slower}).us


def row(p: Problem) -> tuple[float, float, float, float] | None:
    """Least microseconds of a convolution as main's columns have them; None where one of both kernels can't."""
    now, found = today(p), least(p)
    if now is None or found is None:
        return None
    us, size = found
    if us >= now[1] or size.config(p).family != choose((p,), SM_90).config.family:
        return *now, now[1], us
    sized = today(p, replace(size.config(p), stages=3))
    return *now, min(now[1], sized[1] if sized else now[1]), us


def main() -> None:
    args = options(__doc__, networks=["resnet50", "vgg16"], ranks=1)
    found: dict[tuple[str, int], list[tuple[float, float, float, float] | None]] = {}
    for name in args.networks:
        for one in read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"N": 1}, algorithm="sample"):
            if p := local_problem(one.conv, "sample", args.ranks, "backward_filter", "bfloat16"):
                found.setdefault((name, p.taps), []).append(row(p))
    print("tile       registers  spill  shared  matrix  instructions  waits")
    for rows, columns in TILES:
        of = [
            (f.registers, f.spill_bytes, f.shared_bytes, f.loop.by_class["matrix"], f.loop.instructions, f.loop.exposed)
            for (half, n, _), f in _alike.items()
            if (2 * half, n) == (rows, columns) and f.loop
        ]
        most = map(max, zip(*of, strict=True))
        print(f"{rows:3} x {columns:3}", *(f"{n:{w}}" for n, w in zip(most, (11, 6, 7, 7, 13, 6), strict=False)))
    print("\nnetwork   taps  kernels  others    today  at once    sized    gluon  saved: today  at once    sized")
    for (name, taps), every in found.items():
        if known := [one for one in every if one]:
            numbers = [sum(one[i] for one in known) for i in range(4)]
            numbers += [sum(max(0.0, one[i] - one[3]) for one in known) for i in range(3)]
            words = "{:9.1f}{:9.1f}{:9.1f}{:9.1f}{:14.1f}{:9.1f}{:9.1f}".format(*numbers)
            print(f"{name:9} {taps:4} {len(known):8} {len(every) - len(known):7}{words}")


if __name__ == "__main__":
    main()
