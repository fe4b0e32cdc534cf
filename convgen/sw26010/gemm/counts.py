"""What a GEMM counts, by closed form.

Resident, without edges, with ml, nl, kl = m/8, n/8, k/8: putr = 64 (ml/4) ceil(nl/4) kl, putc = 64 nl ceil(ml/16) kl,
each message received 7 times, vmad = 64*8 (ml/4) nl kl, DMA 8(mk + kn + mn) B in and 8 mn B out.
"""

from __future__ import annotations

from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.core_group import CPES, LANES, MESH
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.kernel_cycles import pieces
from convgen.sw26010.machine.memory import block_bytes
from convgen.sw26010.machine.mesh import step_counts
from convgen.sw26010.machine.transfers import shuffles


def gemm_counts(plan: GemmPlan) -> Counts:
    """Events of a run of the plan, on either level of emulation."""
    ml, nl, kl = plan.tile
    cm, cn, ck = plan.blocks
    counts = Counts()
    counts.add(step_counts(ml, nl, kl), MESH * cm * cn * ck)
    a, b, c = ((plan.k, kl), (plan.m, ml)), ((plan.n, nl), (plan.k, kl)), ((plan.n, nl), (plan.m, ml))
    a, b = a[:: -1 if plan.a_transposed else 1], b[:: -1 if plan.b_transposed else 1]
    for (rows, columns), times in ((a, cn * plan.images), (b, cm * plan.images)):
        get, ops = tiles_bytes(rows, columns, plan.itemsize)
        for block, size in get.items():
            counts.add_get(block, times * size, 0)
        counts.get_ops += times * ops
    put, ops = tiles_bytes(*c, plan.itemsize)
    for block, size in put.items():
        counts.add_put(block, size, 0)
        if plan.accumulate:
            counts.add_get(block, size, 0)
    counts.put_ops += ops
    counts.get_ops += ops if plan.accumulate else 0
    if plan.dtype == "float32":
        loads = cm * cn * ck * (-(-kl * ml // LANES) + -(-nl * kl // LANES))
        stores = cm * cn * -(-nl * ml // LANES)
        counts.convert = CPES * (loads + stores * (2 if plan.accumulate else 1))
    for turned, rows, columns in ((plan.a_transposed, ml, kl), (plan.b_transposed, kl, nl)):
        counts.shuffle += CPES * cm * cn * ck * shuffles(rows, columns) if turned else 0
    return counts


def tiles_bytes(
    rows: tuple[int, int], columns: tuple[int, int], itemsize: int, pitch: int | None = None
) -> tuple[dict[int, int], int]:
    """Bytes by block size, and operations, to move a whole matrix once by tiles.

    Args:
        rows, columns: (extent of the matrix, extent of a tile).
        pitch: from a row to the next, in elements; by default rows follow each other.
    """
    sizes: dict[int, int] = {}
    ops = 0
    for height, down in pieces(*rows):
        for width, across in pieces(*columns):
            block = block_bytes(height, width, pitch or columns[0], itemsize)
            sizes[block] = sizes.get(block, 0) + down * across * height * width * itemsize
            ops += down * across
    return sizes, ops
