"""Implicit GEMM convolution: roles of the tensors, blocks, LDM, and what it counts.

In layout (R, C, N, B) a pixel is a matrix of channels x samples. For every output row and tap the mesh multiplies a
matrix of the filter with a matrix of the data, and adds to one of the output:

| phase | data [rows, cols, ni, bb] | filter [taps, taps, no, ni] | out [rows, cols, no, bb] |
|---|---|---|---|
| forward | x: C x N | w: F x C | y: F x N |
| backward_data | dy: F x N | w turned: C x F | dx: C x N |
| backward_filter | x turned: N x C | dy: F x N | dw: F x C |

Source: [SW] 4.2.2 and the loop nest of its public code (feifeibear/SWCaffe, swDNN), which does not overlap transfers
with computation, fetches the filter's matrix again for every product, and reads one column of data too many for every
block of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import InputError, Note
from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import ConvProblem, Meeting, meeting
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.mesh import step_counts

# LDM that the published code leaves to tiles, by phase.
TILES_LDM_BYTES: dict[Phase, int] = {"forward": 60 * 1024, "backward_data": 55 * 1024, "backward_filter": 55 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitPlan:
    """A phase of a convolution by implicit GEMM.

    Args:
        bb, ni, no: the tensors' extents (see the table above).
        block_bb, block_ni, block_no: how much of each is in LDM at once.
        columns: columns of the output whose tiles stay in LDM together (the paper's blocking on image width).
        one_more: read the superfluous column of the published nest.
    """

    problem: ConvProblem
    phase: Phase
    dtype: Dtype
    bb: int
    ni: int
    no: int
    block_bb: int
    block_ni: int
    block_no: int
    columns: int
    one_more: bool = True

    @property
    def rows_meet(self) -> Meeting:
        return meeting(self.phase, self.problem.rows)

    @property
    def columns_meet(self) -> Meeting:
        return meeting(self.phase, self.problem.columns)

    @property
    def tile(self) -> tuple[int, int, int]:
        """(ml, nl, kl) of one CPE: samples, filters, channels in the forward phase."""
        return self.block_bb // MESH, self.block_no // MESH, self.block_ni // MESH

    @property
    def ldm_bytes(self) -> int:
        ml, nl, kl = self.tile
        return SLOT_BYTES * (ml * kl + kl * nl + self.columns * ml * nl)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.rows_meet.outs, self.columns_meet.outs, self.no, self.bb

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks of (bb, ni, no)."""
        return -(-self.bb // self.block_bb), -(-self.ni // self.block_ni), -(-self.no // self.block_no)


@dataclass(frozen=True, slots=True)
class ImplicitTrips:
    """How often the nest's statements run: products, tiles of data read, tiles of the output written."""

    gemms: int
    data_tiles: int
    out_tiles: int


def implicit_plan(
    problem: ConvProblem, phase: Phase, dtype: Dtype = "float32", *, one_more: bool = True
) -> ImplicitPlan:
    """The plan of the published code; where its tiles don't fit, channels and samples are cut as well.

    Raises:
        InputError: no block of 32 x 32 channels and samples fits (never with 64 KB).
    """
    n, c, f = problem.n, problem.c, problem.f
    bb, ni, no = {"forward": (n, c, f), "backward_data": (n, f, c), "backward_filter": (c, n, f)}[phase]
    slots = CPES * TILES_LDM_BYTES[phase] // SLOT_BYTES
    blocks = [round_up(bb, MESH * LANES), round_up(ni, MESH), round_up(no, MESH)]
    while blocks[0] * blocks[1] + blocks[1] * blocks[2] + blocks[0] * blocks[2] > slots:
        largest = blocks.index(max(blocks))
        if blocks[largest] <= 32:
            raise InputError("no tiles fit into LDM", notes=(Note("layer", f"{problem}, {phase}"),))
        blocks[largest] = round_up(blocks[largest] // 2, 32)
    outs = meeting(phase, problem.columns).outs
    columns = (slots - blocks[0] * blocks[1] - blocks[1] * blocks[2]) // (blocks[0] * blocks[2])
    return ImplicitPlan(
        problem=problem, phase=phase, dtype=dtype, bb=bb, ni=ni, no=no,
        block_bb=blocks[0], block_ni=blocks[1], block_no=blocks[2],
        columns=min(columns, outs), one_more=one_more,
    )  # fmt: skip


def implicit_trips(plan: ImplicitPlan) -> ImplicitTrips:
    """(3R - 2)^2 products for K = 3, P = 1 without blocks of channels or samples."""
    rows, columns = plan.rows_meet, plan.columns_meet
    over_bb, over_ni, over_no = plan.blocks
    read = sum(
        len(columns.needed(start, min(plan.columns, columns.outs - start), one_more=plan.one_more))
        for start in range(0, columns.outs, plan.columns)
    )
    both = over_bb * over_no
    return ImplicitTrips(
        gemms=rows.pairs() * columns.pairs() * both * over_ni,
        data_tiles=rows.pairs() * read * both * over_ni,
        out_tiles=rows.outs * columns.outs * both,
    )


def implicit_counts(plan: ImplicitPlan) -> Counts:
    """Events of a run, by closed form."""
    trips = implicit_trips(plan)
    ml, nl, kl = plan.tile
    over_bb, over_ni, over_no = plan.blocks
    itemsize = 4 if plan.dtype == "float32" else 8
    bb, ni, no = (plan.bb, ml), (plan.ni, kl), (plan.no, nl)
    counts = Counts()
    counts.add(step_counts(ml, nl, kl), MESH * trips.gemms)
    data, data_ops = tiles_bytes(ni, bb, itemsize)
    weights, weights_ops = tiles_bytes(no, ni, itemsize)
    out, out_ops = tiles_bytes(no, bb, itemsize)
    # A whole matrix of data is moved once for every block of `no`, one of the filter for every block of `bb`.
    for sizes, ops, times in (
        (data, data_ops, trips.data_tiles // (over_bb * over_ni)),
        (weights, weights_ops, trips.gemms // (over_no * over_ni)),
    ):
        for block, size in sizes.items():
            counts.add_get(block, times * size, 0)
        counts.get_ops += times * ops
    times = trips.out_tiles // (over_bb * over_no)
    for block, size in out.items():
        counts.add_put(block, times * size, 0)
    counts.put_ops += times * out_ops
    if plan.dtype == "float32":
        lanes = (
            trips.data_tiles * -(-kl * ml // LANES)
            + trips.gemms * -(-nl * kl // LANES)
            + trips.out_tiles * -(-nl * ml // LANES)
        )
        counts.convert = CPES * lanes
    return counts


def valid_flops(plan: ImplicitPlan) -> int:
    """2 bb ni no for every product of matrices; taps in the padding are not multiplied."""
    return 2 * plan.rows_meet.pairs() * plan.columns_meet.pairs() * plan.bb * plan.ni * plan.no
