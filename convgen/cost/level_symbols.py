"""alpha and beta of a schedule's conversions as symbols of the level that each goes over, for formulas by level.

| symbol | is |
|---|---|
| alpha_L, beta_L | s per message and per byte that one rank sends over level L; by k where k ranks do it for a ring |
| beta_L_shared | s per byte over the links that a unit of the level below shares; it comes with how many messages do |

A ring's alpha is the mean of its hops', its beta that of its slowest level.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.cost.links import Line, Links, pairs, ring_hops, ring_line
from convgen.cost.machine import Level
from convgen.cost.symbolic import Expr, Link, LinkOf, one_link, symbol, sympy
from convgen.program.nodes import Convert


def level_links(grid: Grid, levels: tuple[Level, ...]) -> LinkOf:
    """For `formulas`: the links of every conversion, where collectives are rings.

    None for an exchange or an all-to-all whose group lies on several levels or shares links: which of its messages
    crosses what
    depends on the rank, and Model adds them up instead.
    """

    def link(step: Convert) -> Link | None:
        if step.kind == "slice":
            return one_link(step)
        if step.kind in ("exchange", "all_to_all") and not _on_one_level(grid, levels, step.over):
            return None
        hops = ring_hops(grid, levels, step.over)
        alpha = sum(
            sympy().nsimplify(share, rational=True) * symbol(f"alpha_{levels[i].name}") for i, share in hops.items()
        )
        return (alpha, beta_symbol(ring_line(grid, levels, step.over), levels))

    return link


def beta_symbol(line: Line, levels: tuple[Level, ...]) -> Expr:
    """beta of a line; where links are shared, the messages times beta_L_shared."""
    (level,) = (one for one in levels if one.name == line.level)
    senders = 1 / (line.beta * level.bytes_per_s)
    if abs(senders - round(senders)) < 1e-9 * senders:
        return symbol(f"beta_{level.name}") / round(senders)
    for sharing in levels:  # the level itself, or one further in that its messages leave through
        messages = line.beta * (sharing.shared_bytes_per_s or 0)
        if messages and abs(messages - round(messages)) < 1e-9 * messages:
            return round(messages) * symbol(f"beta_{sharing.name}_shared")
    return sympy().Float(line.beta)


def level_values(levels: tuple[Level, ...]) -> Mapping[Expr, float]:
    """The numbers of all symbols of these levels."""
    values: dict[Expr, float] = {}
    for level in levels:
        values[symbol(f"alpha_{level.name}")] = level.latency_s
        values[symbol(f"beta_{level.name}")] = 1 / level.bytes_per_s
        if level.shared_bytes_per_s is not None:
            values[symbol(f"beta_{level.name}_shared")] = 1 / level.shared_bytes_per_s
    return values


def _on_one_level(grid: Grid, levels: tuple[Level, ...], over: Axes) -> bool:
    crossed: list[int] = np.unique(Links(grid, levels).level(*pairs(grid.groups(over)))).tolist()
    return len(crossed) == 1 and all(level.shared_bytes_per_s is None for level in levels[: crossed[0] + 1])
