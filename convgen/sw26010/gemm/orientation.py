"""Both ways to lay a GEMM on the mesh: vectors along M, or along N.

C = A B of row-major matrices is C^T = B^T A^T of column-major ones: M and N change places. What differs is the padding
(M to 32, N to 8), the lines that DMA moves, and how often each bus sends: A once for 4 columns, B once for 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from convgen.errors import InputError
from convgen.sw26010.gemm.cost import gemm_seconds, search_blocks
from convgen.sw26010.gemm.plan import Dtype, GemmPlan
from convgen.sw26010.machine.rates import Rates


@dataclass(frozen=True, slots=True)
class Oriented:
    """The plan that was asked for, and both orientations' seconds by the model; None where the blocks don't fit."""

    plan: GemmPlan
    vectors: str
    along_m_s: float | None
    along_n_s: float | None

    @property
    def json(self) -> dict[str, Any]:
        return {"vectors": self.vectors, "seconds_along_m": self.along_m_s, "seconds_along_n": self.along_n_s}

    @property
    def text(self) -> str:
        def ms(seconds: float | None) -> str:
            return "these blocks don't fit" if seconds is None else f"{seconds * 1e3:.3f} ms"

        taken = "column-major matrices" if self.vectors == "m" else "row-major matrices: this is C^T = B^T A^T"
        both = f"along M {ms(self.along_m_s)}, along N {ms(self.along_n_s)}"
        return f"along {self.vectors.upper()}, {taken}; {both}"


def oriented(
    m: int, n: int, k: int, dtype: Dtype, blocks: tuple[int, int, int] | None, vectors: str, rates: Rates
) -> Oriented:
    """The plan with vectors along M (`m`), along N (`n`), or the faster (`best`; M of equals).

    Args:
        blocks: bm, bn, bk of M, N, K; searched by default.
    Raises:
        InputError: the blocks that are asked for don't fit.
    """
    along_m, along_n = _plan(m, n, k, dtype, blocks, rates), _plan(n, m, k, dtype, _turned(blocks), rates)
    seconds = [None if isinstance(p, InputError) else gemm_seconds(p, rates) for p in (along_m, along_n)]
    if vectors == "best":
        vectors = "n" if seconds[1] is not None and (seconds[0] is None or seconds[1] < seconds[0]) else "m"
    chosen = along_m if vectors == "m" else along_n
    if isinstance(chosen, InputError):
        raise chosen
    return Oriented(chosen, vectors, seconds[0], seconds[1])


def _turned(blocks: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    return None if blocks is None else (blocks[1], blocks[0], blocks[2])


def _plan(
    m: int, n: int, k: int, dtype: Dtype, blocks: tuple[int, int, int] | None, rates: Rates
) -> GemmPlan | InputError:
    if blocks is None:
        return search_blocks(GemmPlan(m=m, n=n, k=k, bm=32, bn=8, bk=8, dtype=dtype), rates, 32)
    try:
        plan = GemmPlan(m=m, n=n, k=k, bm=blocks[0], bn=blocks[1], bk=blocks[2], dtype=dtype)
        plan.check_ldm()
    except InputError as error:
        return error
    return plan
