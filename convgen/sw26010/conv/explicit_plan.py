"""Explicit GEMM convolution: per image im2col or col2im, and a GEMM, of an image or of several.

| phase | GEMM: m, n, k | A | B | C |
|---|---|---|---|---|
| forward | HW_out, F, K K C | columns of x | w | y |
| backward_filter | K K C, F, HW_out | columns of x, turned round in LDM | dy | dw, added to |
| backward_data | HW_out, K K C, F | dy | w, turned round in LDM | columns of dx |

dw may be the sum of several images in LDM, read and written once for them ([SW] 4.2.1: "B is also introduced for
blocking"); y and dx of different images have nothing in common but w, which the next blocks hide.
Source: [SW] 4.2.1, Figure 4: a CPE gets a row, pads it, and puts K x K lines. Where the columns are x itself, nothing
is moved, as in Caffe and in the public code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from convgen.errors import InputError, Note
from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import Axis, ConvProblem, meeting
from convgen.sw26010.gemm.plan import Dtype, GemmPlan
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, SLOT_BYTES, SW26010
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.kernel_cycles import pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitPlan:
    """A phase of a convolution by explicit GEMM, image by image, or `gemm.images` at a time.

    In float32 the explicit dw is rounded after every product, which adds to it in memory.

    Raises:
        InputError: a row of the padded image and a line of the columns don't fit into LDM together; several images of
            another phase than backward-filter, or more than there are.
    """

    problem: ConvProblem
    phase: Phase
    gemm: GemmPlan

    def __post_init__(self) -> None:
        problem = self.problem
        if self.gemm.images > (problem.n if self.phase == "backward_filter" else 1):
            fact = f"{self.phase} of {problem.n} images by products of {self.gemm.images}"
            raise InputError(fact, hint="backward_filter has one sum for several images; others have one image each")
        needed = SLOT_BYTES * (row_slots(problem.columns) + problem.w_out)  # col2im's, the most of the phases
        if self.moves and needed > SW26010.ldm_bytes:
            most = most_columns(problem.columns)
            raise InputError(
                f"explicit GEMM has a row of {problem.w} columns and its line in LDM: {needed} of "
                f"{SW26010.ldm_bytes} B",
                notes=(Note("layer", f"{problem}, {self.phase}"),),
                hint=f"at most {most:,} columns at this kernel, stride and padding"
                if most
                else "a smaller kernel, dilation or padding",
            )

    @property
    def dtype(self) -> Dtype:
        return self.gemm.dtype

    @property
    def products(self) -> tuple[tuple[GemmPlan, int], ...]:
        """The products of all images, and how many of each: what is left has fewer images."""
        return tuple(
            (replace(self.gemm, images=size), times) for size, times in pieces(self.problem.n, self.gemm.images)
        )

    @property
    def moves(self) -> bool:
        """Whether there is anything to rearrange: a 1 x 1 kernel of stride 1 without padding reads x as it lies."""
        axes = (self.problem.rows, self.problem.columns)
        return not all((a.kernel, a.stride, a.padding) == (1, 1, 0) and a.out == a.extent for a in axes)

    @property
    def move_counts(self) -> Counts:
        """Of im2col or col2im, of one image, by closed form."""
        if not self.moves:
            return Counts()
        count = col2im_counts if self.phase == "backward_data" else im2col_counts
        return count(self.problem, self.dtype)

    @property
    def move_ldm_bytes(self) -> int:
        """LDM of im2col (in slots of memory's size) or col2im in a CPE."""
        if not self.moves:
            return 0
        columns = self.problem.columns
        if self.phase == "backward_data":
            return SLOT_BYTES * (row_slots(columns) + columns.out)
        return self.gemm.itemsize * (columns.span + (columns.out if columns.stride > 1 else 0))

    @property
    def columns_shape(self) -> tuple[int, int]:
        """Of the matrix of columns: [C K K H_out, W_out], which is also [C K K, H_out W_out]."""
        p = self.problem
        return p.c * p.taps * p.h_out, p.w_out


def most_columns(columns: Axis) -> int:
    """Columns of the widest whole image of which a row of dx and a line of the columns fit into LDM together."""
    low, high = 0, SW26010.ldm_bytes // SLOT_BYTES
    reach = columns.dilation * (columns.kernel - 1) + 1

    def fits(extent: int) -> bool:
        out = (extent + 2 * columns.padding - reach) // columns.stride + 1
        wide = Axis(extent, max(out, 1), columns.kernel, columns.stride, columns.padding, columns.dilation)
        return SLOT_BYTES * (row_slots(wide) + wide.out) <= SW26010.ldm_bytes

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def row_slots(columns: Axis) -> int:
    """LDM slots of a row of dx, with the elements that fall beside the image on either side."""
    return max(max(columns.padding, 0) + columns.extent, max(-columns.padding, 0) + columns.span)


def gemm_of(problem: ConvProblem, phase: Phase, dtype: Dtype = "float32") -> GemmPlan:
    """The GEMM of a phase, in the smallest blocks; `search_blocks` finds better ones."""
    pixels, columns, f = problem.h_out * problem.w_out, problem.taps * problem.c, problem.f
    m, n, k = {
        "forward": (pixels, f, columns),
        "backward_filter": (columns, f, pixels),
        "backward_data": (pixels, columns, f),
    }[phase]
    return GemmPlan(
        m=m, n=n, k=k, bm=MESH * LANES, bn=MESH, bk=MESH, dtype=dtype, accumulate=phase == "backward_filter",
        a_transposed=phase == "backward_filter", b_transposed=phase == "backward_data",
    )  # fmt: skip


def im2col_counts(problem: ConvProblem, dtype: Dtype) -> Counts:
    """One image, by closed form: a get for every row of x in y's span, a put for every line of the columns."""
    counts = Counts()
    size = 4 if dtype == "float32" else 8
    (top, bottom), (left, right) = problem.rows.read, problem.columns.read
    rows = problem.c * (bottom - top) if right > left else 0
    counts.add_get((right - left) * size, rows * (right - left) * size, rows)
    lines = problem.c * problem.taps * problem.h_out
    counts.add_put(problem.w_out * size, lines * problem.w_out * size, lines)
    return counts


def col2im_counts(problem: ConvProblem, dtype: Dtype) -> Counts:
    """One image, by closed form: a get for every line of the columns that is not padding, a put for every row of dx."""
    counts = Counts()
    size = 4 if dtype == "float32" else 8
    lines = problem.c * problem.columns.kernel * meeting("backward_data", problem.rows).pairs()
    counts.add_get(problem.w_out * size, lines * problem.w_out * size, lines)
    counts.add_put(problem.w * size, problem.c * problem.h * problem.w * size, problem.c * problem.h)
    counts.vadd = lines * -(-problem.w_out // LANES)
    if dtype == "float32":
        counts.convert = lines * -(-problem.w_out // LANES)
        counts.convert += problem.c * problem.h * -(-row_slots(problem.columns) // LANES)
    return counts


@cache
def col2im_operations(problem: ConvProblem, itemsize: int = 4) -> int:
    """DMA operations of the busiest CPE for one image in the nest of the public code.

    A CPE has neighbouring rows of the padded images of all channels. It takes rows that all taps reach together, as
    many as LDM holds with their lines, and the K - 1 rows on either side one by one; with a stride it takes every row
    alone. Whatever it takes costs a get for each tap that meets rows of dy, and a put.
    """
    rows, taps = problem.rows, meeting("backward_data", problem.rows)
    padded = rows.extent + 2 * max(rows.padding, 0)
    every, more = divmod(problem.c * padded, CPES)
    together = max(1, every + (more > 0))
    while together > 1 and itemsize * together * (problem.w_out + problem.w) >= SW26010.ldm_bytes:
        together //= 2
    busiest = 0
    for cpe in range(CPES):
        at = cpe * every + min(cpe, more)
        end, operations = at + every + (cpe < more), 0
        while at < end:
            channel, row = divmod(at, padded)
            row -= max(rows.padding, 0)
            if not 0 <= row < rows.extent:
                at += 1
                continue
            inside = rows.kernel - 1 <= row <= rows.extent - rows.kernel and (rows.stride, rows.dilation) == (1, 1)
            last = channel * padded + max(rows.padding, 0) + rows.extent - rows.kernel + 1
            at += min(last - at, end - at, together) if inside else 1
            reached = sum(taps.data(row, tap) is not None for tap in range(rows.kernel))
            operations += problem.columns.kernel * reached + 1
        busiest = max(busiest, operations)
    return busiest


def im2col_operations(problem: ConvProblem) -> int:
    """DMA operations of the busiest CPE for one image: a get and K K puts for each of its padded rows."""
    return -(-problem.c * problem.rows.span // CPES) * (1 + problem.taps)
