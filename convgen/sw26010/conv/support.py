"""Which phases the published implicit code handles.

[SW] 4.2.2: at least 64 channels, in and out. Its code's further rules are the multiples of the tiles' vectors and
mesh; together they give every dash of [SW] Table 2. The emulated program itself pads and needs none of them.
"""

from __future__ import annotations

from convgen.program.nodes import Phase
from convgen.sw26010.conv.problem import ConvProblem

FEWEST_CHANNELS = 64


def implicit_refusal(problem: ConvProblem, phase: Phase) -> str | None:
    """Why implicit GEMM can't have this phase; None where it can.

    Forward: N a multiple of 128, C and F of 32, at least 64. Backward: C a multiple of 128 (in the products of
    backward-filter it takes N's place, and N its own), F of 32, at least 64.
    """
    n, c, f = problem.n, problem.c, problem.f
    fewest_c = FEWEST_CHANNELS if phase == "forward" else 128
    multiple_c = 32 if phase == "forward" else 128
    multiple_n = 32 if phase == "backward_filter" else 128
    rules = (
        (n % multiple_n == 0, f"N={n} is no multiple of {multiple_n}"),
        (c >= fewest_c, f"C={c} is below {fewest_c}"),
        (c % multiple_c == 0, f"C={c} is no multiple of {multiple_c}"),
        (f >= FEWEST_CHANNELS, f"F={f} is below {FEWEST_CHANNELS}"),
        (f % 32 == 0, f"F={f} is no multiple of 32"),
    )
    return next((why for holds, why in rules if not holds), None)


def implicit_supported(problem: ConvProblem, phase: Phase) -> bool:
    return implicit_refusal(problem, phase) is None
