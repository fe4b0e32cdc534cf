"""Checks of what a schedule says of itself: its head is the layer's, and its steps do what the head says.

Modules are made of the steps alone; people, prices and pictures read the head.
"""

from __future__ import annotations

from collections.abc import Iterator

from convgen.algebra.conv import PHASES
from convgen.algebra.roles import Roles
from convgen.operations.layer import ROWS_OF_X, way_of
from convgen.program.nodes import is_convolution, reads
from convgen.program.verify.facts import Computed, Facts, Fault, listed


def check_every_tensor_is_stored(f: Facts) -> Iterator[Fault]:
    """The layer's tensors are stored: x, w and y, and the bias if there is one."""
    has = ["x", "w", "y", *(["bias"] if f.space.conv.bias else [])]
    if (found := [layout.tensor for _, layout in f.schedule.stored]) != has or [*f.stored] != has:
        yield None, f"stored are {', '.join(found)}, the layer has {', '.join(has)}"


def check_roles_are_as_computed(f: Facts) -> Iterator[Fault]:
    """Each phase states its roles, and its convolution splits each index over the axes of these roles.

    Rows without a window may be more than a block of the other activation reads.
    """
    if (phases := tuple(phase for phase, _ in f.schedule.roles)) != PHASES:
        yield None, f"roles are said of {', '.join(phases) or 'no phase'}, the phases are {', '.join(PHASES)}"
    said = dict(f.schedule.roles)
    for one in f.computed:
        if is_convolution(one.step) and one.step.phase in said:
            for text in _other_roles(f, one, said[one.step.phase]):
                yield one.step, f"roles {one.step.phase}: {said[one.step.phase]}: {text}"


def _other_roles(f: Facts, one: Computed, roles: Roles) -> Iterator[str]:
    """How a convolution's roles differ from these."""
    names, known = [index for index, _ in roles.nests], one.signature.extent
    yield from (f"{i} is no index of it, which has {', '.join(known)}" for i in names if i not in known)
    yield from (f"{i} stands {names.count(i)} times" for i in known if names.count(i) > 1)
    if way_of(roles) != one.step.way:
        yield f"the blocks of rows are {'x' if one.step.way == ROWS_OF_X else 'y'}'s"
    axes = dict(roles.nests)
    for operand, layout in one.all:
        for d, (made, found) in enumerate(zip(operand.dims, layout.axes, strict=False)):
            wanted = tuple(a for index in made.indices for a in axes.get(index, ()))
            if found != wanted and (made.relation is None or layout.windows[d] is not None):
                yield f"{f.space.dims(layout.tensor)[d].name} of {layout} would be over {listed(wanted)}"


def check_held_x_is_as_said(f: Facts) -> Iterator[Fault]:
    """Where x is held as it is stored, backward reads nothing that forward has made of x."""
    if f.schedule.hold_x == "gathered":
        return
    made = {step.result for step in f.schedule.forward if step.type.tensor == "x"}
    for phase, step in f.steps:
        for value in reads(step):
            if phase != "forward" and value in made:
                yield step, f"%{value} of forward would be held, and x is said to be held as it is stored"
