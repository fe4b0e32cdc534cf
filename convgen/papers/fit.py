"""Constants of Lassen under LBANN that its data sheets don't have, fitted to the first rows of [SP] Tables I to III.

Five constants are fitted to twelve cells: the share of the peak that convolutions reach, at most 1; the seconds that an
operation takes besides (kernels, framework), so that small blocks reach less; how many times as long as their messages
exchanges of halos between nodes take; and for each of the two mesh models, whose filters no text has, its work over
that of the assumed filters. The fit is by least squares of logarithms of times (scipy); all else in the papers is held
out. tuning/machines/lassen_lbann.yaml and steps.ASSUMED have the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Misfit
from convgen.cost.machines import load_machine
from convgen.papers.steps import SP_TABLES, Cell, compiled, machine_of, sp_cells, step_s

# The fit starts from data sheets and round numbers.
START = {"efficiency": 0.6, "launch_s": 6e-5, "halos": 10.0, "mesh1k": 1.0, "mesh2k": 1.0}
INSIDE, BETWEEN = 4, 8  # ranks of a sample's group: on one node, and at least on several


@dataclass(frozen=True, slots=True)
class Fitted:
    """The constants, and modelled over published seconds of each cell."""

    constants: Mapping[str, float]
    cells: tuple[tuple[Cell, float], ...]

    @property
    def spread(self) -> float:
        """Root mean square of the ratios' logarithms."""
        return math.sqrt(sum(math.log(ratio) ** 2 for _, ratio in self.cells) / len(self.cells))


def with_constants(machine: Machine, constants: Mapping[str, float]) -> Machine:
    """The machine with these constants."""
    over = {INSIDE: 1.0, BETWEEN: constants["halos"]}
    misfits = tuple(Misfit(kind="exchange", ranks=p, bytes=(1.0,), over_model=(f,)) for p, f in over.items())
    return replace(
        machine, efficiency=constants["efficiency"], launch_s=constants["launch_s"], network_launch_s=None,
        misfits=misfits,
    )  # fmt: skip


def fit(given: Sequence[Cell] = (), most: int = 12) -> Fitted:
    """The constants that fit the first rows best.

    Args:
        given: cells; those of the first rows by default.
        most: the most evaluations of all cells, besides those for derivatives.
    """
    cells = list(given) or [cell for table in SP_TABLES for cell in sp_cells(table, 1)]
    base = load_machine("lassen_lbann")
    programs = [compiled(cell, machine_of("SP", cell.network, base)) for cell in cells]

    def ratios(logs: Any) -> list[float]:
        constants = dict(zip(START, map(math.exp, logs), strict=True))
        machine = with_constants(base, constants)
        found: list[float] = []
        for cell, program in zip(cells, programs, strict=True):
            own = replace(machine, efficiency=machine.efficiency / constants.get(cell.network, 1.0))
            collectives = replace(own.collectives, all_reduce="rabenseifner")
            found.append(step_s(program, replace(own, collectives=collectives)) / cell.published_s)
        return found

    def residuals(logs: Any) -> list[float]:
        return [math.log(r) for r in ratios(logs)]

    optimize: Any = import_module("scipy.optimize")  # it ships no types
    best = optimize.least_squares(
        residuals,
        [math.log(n) for n in START.values()],
        bounds=([-math.inf] * len(START), [0.0, *[math.inf] * (len(START) - 1)]),
        diff_step=0.02,
        max_nfev=most,
    )
    constants = dict(zip(START, (math.exp(n) for n in best.x), strict=True))
    return Fitted(constants, tuple(zip(cells, ratios(best.x), strict=True)))


def fit_text(found: Fitted) -> str:
    """The constants and each cell's ratio, as text."""
    lines = ["fitted to the first rows of [SP] Tables I to III, 12 cells of 98"]
    lines += [f"  {name:12} {value:.4g}" for name, value in found.constants.items()]
    lines += [
        f"  {c.network:10} {c.samples:4} samples {c.ways:3} ways  {ratio:.2f} of the text" for c, ratio in found.cells
    ]
    return "\n".join([*lines, f"  spread {found.spread:.1%}"])
