"""Drop collectives over one rank.

    schedule s on grid(N=2, C=2, F=1)
      %x_gathered = all_gather %x over=F : x[N, C, *, *]     --->   (nothing: %x is x[N, C, *, *])

Needs:  a naive schedule (runs first).
Sound:  an axis with one rank splits nothing, copies nothing and sums nothing. A schedule is a function of its
        stored types and roles, so the axes are taken out of those and it is lowered again.
Leaves: the grid itself: the mesh still has its axes of size 1.
"""

from __future__ import annotations

from dataclasses import replace

from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.schedule.build import lower
from convgen.schedule.nodes import Schedule


def drop_single_rank(schedule: Schedule, space: Space) -> Schedule:
    """The schedule without the axes that have one rank."""
    single = frozenset(name for name, size in schedule.grid.axes if size == 1)
    used = {a for _, layout in schedule.stored for a in layout.used}
    used |= {a for _, roles in schedule.roles for _, axes in roles.nests for a in axes}
    if not single & used:
        return schedule
    stored = {name: layout.without(single) for name, layout in schedule.stored}
    roles = {phase: without(r, single) for phase, r in schedule.roles}
    lowered = lower(schedule.name, space, stored, roles, bias="bias" in stored)
    return replace(lowered, hold_x=schedule.hold_x)


def without(roles: Roles, dropped: frozenset[str]) -> Roles:
    """The same roles where the dropped axes have one rank each."""
    nests = ((role, tuple(a for a in axes if a not in dropped)) for role, axes in roles.nests)
    return Roles(tuple((role, axes) for role, axes in nests if axes), roles.rows)
