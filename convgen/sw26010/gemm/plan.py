"""How a GEMM is cut: blocks for the mesh's LDM, tiles for one CPE.

C[M, N] += A[M, K] B[K, N] ([SW] 4.1). Vectors run along M, so M's tile is a multiple of 4 lanes and all matrices are
column-major in memory: numpy arrays A[K, M], B[N, K], C[N, M] here, transposed operands A[M, K], B[K, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convgen.errors import InputError, Note
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, SLOT_BYTES, SW26010, CoreGroup
from convgen.sw26010.machine.memory import DTYPES

Dtype = Literal["float32", "float64"]


def round_up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """A GEMM and its blocks.

    Args:
        m, n, k: the problem, each at least 1.
        bm, bn, bk: a block; bm a multiple of 32 (8 CPEs, 4 lanes), bn and bk of 8. What of the last block lies
            beyond the matrices is zeros in LDM: computed, neither read nor written.
        dtype: of memory. Computation and messages are in double; a float32 C is rounded once, at the end.
        accumulate: C is read first.
        double_buffer: the next blocks of A and B arrive while these are multiplied.
        a_transposed, b_transposed: memory has the operand's transpose; its tiles are transposed in LDM.
        images: C is the sum of so many products, whose A and B lie one behind the other; it is read and written once.
    Raises:
        InputError: a size that is none, a block that is no multiple, or a dtype that memory can't hold.
    """

    m: int
    n: int
    k: int
    bm: int
    bn: int
    bk: int
    dtype: Dtype = "float64"
    accumulate: bool = True
    double_buffer: bool = True
    a_transposed: bool = False
    b_transposed: bool = False
    images: int = 1

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.images) < 1:
            times = "" if self.images == 1 else f", {self.images} times"
            raise InputError(f"a GEMM of {self.m} x {self.n} x {self.k}{times} has nothing to multiply")
        if self.dtype not in DTYPES:
            raise InputError(f"the mesh computes float32 and float64, not {self.dtype}")
        for name, block, multiple in (("bm", self.bm, 32), ("bn", self.bn, 8), ("bk", self.bk, 8)):
            if block < multiple or block % multiple:
                hint = "BM a multiple of 32, BN and BK of 8, or none given: they are searched"
                raise InputError(f"block {name}={block} is no multiple of {multiple}", hint=hint)

    @property
    def tile(self) -> tuple[int, int, int]:
        """(ml, nl, kl) of one CPE."""
        return self.bm // MESH, self.bn // MESH, self.bk // MESH

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along M, N, and K of all images."""
        return -(-self.m // self.bm), -(-self.n // self.bn), self.images * -(-self.k // self.bk)

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 8

    @property
    def ldm_bytes(self) -> int:
        """LDM of one CPE: C once; A and B twice when double buffered or turned round."""
        ml, nl, kl = self.tile
        a = 2 if self.double_buffer or self.a_transposed else 1
        b = 2 if self.double_buffer or self.b_transposed else 1
        return SLOT_BYTES * (a * ml * kl + b * kl * nl + ml * nl)

    @property
    def useful_flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.images

    @property
    def issued_flops(self) -> int:
        """Useful flops and those on the padding of the last blocks."""
        cm, cn, ck = self.blocks
        return 2 * cm * cn * ck * self.bm * self.bn * self.bk

    def check_ldm(self, group: CoreGroup = SW26010) -> None:
        """Raises InputError: the buffers need more than the LDM."""
        if self.ldm_bytes > group.ldm_bytes:
            raise InputError(
                f"blocks {self.bm} x {self.bn} x {self.bk} need {self.ldm_bytes} B in each of the {CPES} LDMs of "
                f"{group.ldm_bytes} B",
                notes=(Note("gemm", f"M={self.m} N={self.n} K={self.k} {self.dtype}"),),
                hint="smaller blocks, or none given: they are searched",
            )


def resident(m: int, n: int, k: int, dtype: Dtype = "float64", *, accumulate: bool = True) -> GemmPlan:
    """The GEMM of [SW] 4.1 without blocking: everything in LDM at once, read once. May not fit."""
    bm, bn, bk = round_up(m, MESH * LANES), round_up(n, MESH), round_up(k, MESH)
    return GemmPlan(m=m, n=n, k=k, bm=bm, bn=bn, bk=bk, dtype=dtype, accumulate=accumulate, double_buffer=False)
