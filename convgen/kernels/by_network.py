"""Modules of kernels that a network for a GPU has beside those of its convolutions and norms, by their files' names."""

from __future__ import annotations

from convgen.kernels import add, draws
from convgen.program.network import Program

FILES = (add.FILE, draws.FILE)


def network_modules(program: Program) -> dict[str, str]:
    """Of sums of what ranks have sent, where there are several; and of what is drawn, where something is."""
    found: dict[str, str] = {}
    if program.grid.ranks > 1:
        found[add.FILE] = add.sums_module()
    if any(row.bound.operation.draws for row in program.rows):
        found[draws.FILE] = draws.draws_module()
    return found
