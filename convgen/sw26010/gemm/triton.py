"""The mesh's blocking as a Triton kernel, so that the mode runs on GPUs and in Triton's interpreter."""

from __future__ import annotations

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.printing import print_program

LEAST = 16  # rows and columns of an operand of tl.dot


def triton_gemm(plan: GemmPlan) -> str:
    """Source of a module with the kernel `cpe` and the function `gemm(A, B, C)`. Needs torch and Triton to run.

    Computes in double, as the mesh does, whatever memory holds; equal to it but for the order of sums in a tile.

    Raises:
        InputError: a plan of several images.
    """
    return print_program("gemm_triton", triton_context(plan))


def triton_context(plan: GemmPlan) -> dict[str, object]:
    """Everything that templates/sw26010/gemm_triton.py.jinja names, and nothing else."""
    if plan.images > 1:
        raise InputError(f"a sum of {plan.images} products has no Triton kernel", hint="one image")
    ml, nl, kl = plan.tile
    a, b = ("M, K" if plan.a_transposed else "K, M"), ("K, N" if plan.b_transposed else "N, K")
    return {
        "header": (
            f"Printed by convgen {__version__} (sw26010 gemm --emit triton).",
            f"gemm      M={plan.m} N={plan.n} K={plan.k} {plan.dtype}",
        ),
        "layouts": f"A [{a}], B [{b}], C [N, M]",
        "m": plan.m, "n": plan.n, "k": plan.k,
        "bm": plan.bm, "bn": plan.bn, "bk": plan.bk,
        "ml": ml, "nl": nl, "kl": kl,
        "mp": power_of_two(ml), "np": power_of_two(nl), "kp": power_of_two(kl),
        "dtype": plan.dtype,
        "accumulate": plan.accumulate,
        "a_shape": f"({a})", "b_shape": f"({b})",
        "a_at": "A + m[None, :] * K + k[:, None]" if plan.a_transposed else "A + k[:, None] * M + m[None, :]",
        "b_at": "B + k[None, :] * N + n[:, None]" if plan.b_transposed else "B + n[:, None] * K + k[None, :]",
    }  # fmt: skip


def power_of_two(extent: int) -> int:
    """The next power of two, at least 16."""
    return max(LEAST, 1 << (extent - 1).bit_length())
