"""Axes of a grid that split nothing: which, why, and what would split something. Said once, as a warning."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext

from convgen.algebra.grid import Grid
from convgen.cost.axes import split_shares
from convgen.errors import IdleAxisWarning
from convgen.plan.letters import lay_out
from convgen.plan.parts import Parts
from convgen.program.network import Program
from convgen.spec.text import number_of


def idle_axes(program: Program, parts: Parts, algorithm: str | None) -> dict[str, str]:
    """For each axis that splits nothing, why, and which letters would split something; not for axes that are given.

    Args:
        algorithm: the one that laid the program out, or "plan", or "edited".
    """
    named = {*program.grid.names} if parts.fixed else {axis for row in parts.given for axis in row.axes}
    idle = {axis: one.ranks for axis, one in split_shares(program).items() if one.idle and axis not in named}
    return {axis: _why(program, parts, algorithm, axis, ranks) for axis, ranks in idle.items()}


def idle_lines(program: Program, parts: Parts, algorithm: str | None) -> list[str]:
    """A line for each axis that splits nothing; or one line for all, where the search finds that one rank is best.

    A plan, or a program's text, says its layout itself, and gets no line.
    """
    if algorithm in ("plan", "edited"):
        return []
    found = idle_axes(program, parts, algorithm)
    sizes = {axis: ranks for axis, ranks in program.grid.axes if ranks > 1}
    if found and algorithm == "auto" and found.keys() == sizes.keys():
        alike = number_of(program.grid.ranks, "rank")
        fact = f"{program.name}: algorithm auto finds that one rank is best, so all {alike} compute alike"
        return [f"{fact}; a named algorithm splits"]
    return [
        f"{program.name}: axis {axis} of {number_of(sizes[axis], 'rank')} splits nothing, they compute alike: {why}"
        for axis, why in found.items()
    ]


def warn_of_idle_axes(lines: str, stacklevel: int = 2) -> None:
    """Warn on rank 0; where warnings are errors, on every rank, so that none waits for another.

    Args:
        lines: what `idle_lines` says, a line an axis.
    """
    for line in lines.splitlines():
        with warnings.catch_warnings(record=True) if _rank() else nullcontext():
            warnings.warn(line, IdleAxisWarning, stacklevel=stacklevel + 1)


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    known = dist is not None and dist.is_available() and dist.is_initialized()
    return dist.get_rank() if dist is not None and known else int(os.environ.get("RANK") or 0)


def _why(program: Program, parts: Parts, algorithm: str | None, axis: str, ranks: int) -> str:
    if algorithm == "auto":
        return "the search finds that it does not pay"
    if algorithm in ("plan", "edited"):
        return "no row has it"
    named = "F" if axis in "CF" else axis  # what products call the index of channels that they make
    carries = "C" if axis in "CF" else axis
    extents = parts.extents(carries)
    extents += [s.extent.get(named, 0) for bound in parts.rows for s in bound.operation.signatures]
    most = max(extents, default=0)
    why = f"no dimension of an input carries {axis}, and no row begins it"
    if most >= ranks:
        why = f"no row can split its work along what carries {axis}"
    elif most > 1:
        why = f"the largest extent that carries {axis} or could begin it is {most}"
    others = [a for a in "NCHWD" if a not in program.grid.names and _splits(parts, program.grid, axis, a)]
    return f"{why}; {' or '.join(others)} of {ranks} would split" if others else why


def _splits(parts: Parts, grid: Grid, axis: str, letter: str) -> bool:
    """Whether another letter in the axis's place splits something."""
    other = Grid(tuple((letter if a == axis else a, n) for a, n in grid.axes))
    return not split_shares(lay_out(parts._replace(given=()), other))[letter].idle
