"""The other modules of kernels of a network for a GPU, beside those of its convolutions and norms, by file name."""

from __future__ import annotations

from convgen.kernels import add, draws
from convgen.program.network import Program

FILES = (add.FILE, draws.FILE)


def network_modules(program: Program) -> dict[str, str]:
    """The modules of ordered sums, if there are several ranks, and of random draws, if the network draws."""
    found: dict[str, str] = {}
    if program.grid.ranks > 1:
        found[add.FILE] = add.sums_module()
    if any(row.bound.operation.draws for row in program.rows):
        found[draws.FILE] = draws.draws_module()
    return found
