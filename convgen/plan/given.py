"""Rows of a network that a file lays out as a layer's file does: how values are stored, and rows' ways and roles.

A layer's layouts are of x, w and y, a network's of values. A layer's roles are by phase, a network's of the row and of
rows that make its operands' gradients. A layer's blocks of grouped channels are whole groups, or parts of one; a
network's are of channels, so where the two differ the row is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from convgen.algebra.blocks import groups_are_plain, size_text
from convgen.algebra.conv import Conv, Phase
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.notation import entry_text
from convgen.algebra.roles import Roles, nest, settle_groups
from convgen.algebra.wants import layout
from convgen.cost.network import bytes_of
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.program.rows import PlacedRow, Stored, index_sets, place, place_gradient, serves, stored_by_name
from convgen.program.shared import could_hold
from convgen.spec.graph import GivenRow
from convgen.spec.placement import check_axis_of_grid

Way = tuple[int, dict[str, Axes]]  # number of a signature, and roles
GRADIENTS: Mapping[str, Phase] = {"x": "backward_data", "w": "backward_filter"}


class Given(NamedTuple):
    """How files lay out some rows.

    Attributes:
        stored: by value, the axes that split each dimension.
        ways: by the row's number and the phase, the ways that are left to choose from.
        refetched: rows whose gradient of w fetches x anew, though forward has moved it.
    """

    stored: Mapping[str, Stored]
    ways: Mapping[tuple[int, str], tuple[Way, ...]]
    refetched: frozenset[int]


def given_rows(rows: Sequence[Bound], given: Iterable[GivenRow], grid: Grid) -> Given:
    """Storage and ways on a grid.

    Args:
        rows: the network's.
        grid: axes of one rank split nothing, and are left out.
    Raises:
        InputError: an axis that the grid lacks, two layouts of one value, or what rows of a network can't do.
    """
    stored: dict[str, Stored] = {}
    ways: dict[tuple[int, str], tuple[Way, ...]] = {}
    refetched: set[int] = set()
    for one in given:
        _check_axes(one, grid)
        own = [i for i, bound in enumerate(rows) if bound.module.partition(".")[0] == one.module]
        (i,) = (i for i in own if rows[i].operation.is_product)
        bound, conv = rows[i], _conv(rows[i].operation)
        values = {"x": bound.reads[:1], "w": bound.reads[1:2], "y": (bound.makes[0], rows[own[-1]].makes[0])}
        for tensor, axes in one.stored:
            bare = tuple(tuple(a for a in some if grid.sizes[a] > 1) for some in axes)
            if conv is None:  # a linear layer, which has no row
                whole = bare[:2]
            else:
                _check_groups(one, conv, grid, tensor, bare)
                whole = (*bare, *((),) * len(conv.spatial)) if tensor == "w" else bare
            for value in values[tensor]:
                if stored.setdefault(value, whole) != whole:
                    _refuse_two(one, tensor, value, stored[value], whole)
        for behind in own[own.index(i) + 1 :]:  # the bias is added where y is, and lies there
            (result,) = rows[behind].operation.signatures[0].results
            there = zip(result.dims, stored.get(rows[behind].makes[0], ()), strict=False)
            for value, operand in zip(rows[behind].reads, rows[behind].operation.signatures[0].inputs, strict=True):
                if len(operand.shape) == 1 and (y := stored.get(rows[behind].makes[0])) is not None:
                    stored.setdefault(value, (y[1],))
            ways[behind, "forward"] = ((0, {m.indices[0]: axes for m, axes in there if axes}),)
        for phase, pairs in one.roles:
            ways[i, phase] = _ways(one, bound.operation, grid, phase, pairs)
        if one.hold_x == "stored":
            refetched.add(i)
    return Given(stored, ways, frozenset(refetched))


def place_given(number: int, placed: PlacedRow, grid: Grid, given: Given) -> PlacedRow:
    """A placed row, placed again by the ways that its file gives.

    A phase that does just what local code's vjp does, from the same blocks, is left to the vjp, which has at hand
    what a row of its own would fetch again.
    """
    if not any(i == number for i, _ in given.ways):
        return placed
    bound = placed.bound
    ((way, roles),) = given.ways.get((number, "forward"), ((placed.way, dict(placed.roles)),))
    names = stored_by_name(bound.operation.signatures[way], placed.reads, placed.makes)
    derived = {placed.signature.inputs[k].name: one for k, one in placed.derived}
    fetches_x = any(c.kind != "slice" for c in place(bound, grid, way, roles, placed.reads, placed.makes).fetch[0])
    for tensor, phase in GRADIENTS.items():
        options = given.ways.get((number, phase), ())
        if not options:
            continue
        derived.pop(tensor, None)
        anew = tensor == "w" and fetches_x and number in given.refetched
        if anew or not any(_is_vjp(bound.operation, tensor, grid, (way, roles), own) for own in options):
            rows = (place_gradient(bound, tensor, grid, *own, names) for own in options)
            derived[tensor] = min(rows, key=lambda row: bytes_of(row, grid))
    row = place(bound, grid, way, roles, placed.reads, placed.makes, derived)
    return row if number in given.refetched else replace(row, holds=bool(could_hold(row)))


def _is_vjp(operation: Operation, tensor: str, grid: Grid, forward: Way, own: Way) -> bool:
    """Whether a gradient's row reads and makes what the vjp of the operation does."""
    signature, one = operation.signatures[forward[0]], operation.gradients[tensor]
    other = one.operation.signatures[own[0]]
    sets, others = index_sets(signature, grid), index_sets(other, grid)
    there = {o.name: layout(sets, o.name, signature.wants(o, forward[1])) for o in signature.inputs}
    for result in signature.results:
        made = layout(sets, result.name, signature.wants(result, forward[1]))
        there[f"d{result.name}"] = replace(made, partial=())
    reads = [layout(others, o.name, other.wants(o, own[1])) for o in other.inputs]
    (wanted,) = (o for o in signature.inputs if o.name == tensor)
    (result,) = other.results
    made = layout(others, result.name, other.wants(result, own[1]))
    found = layout(sets, tensor, signature.gradient(wanted, forward[1]))
    pairs = [(made, found), *((read, there[source]) for read, source in zip(reads, one.reads, strict=True))]
    return all((a.axes, a.windows, a.partial) == (b.axes, b.windows, b.partial) for a, b in pairs)


def _conv(operation: Operation) -> Conv | None:
    """A convolution's index space; None for a linear layer."""
    return None if operation.convolves is None else operation.convolves[1]


def _ways(
    one: GivenRow, operation: Operation, grid: Grid, phase: str, pairs: Sequence[tuple[str, str]]
) -> tuple[Way, ...]:
    """Signatures of a phase's operation, and roles under which local code takes its blocks."""
    conv, tensor = _conv(operation), next((t for t, p in GRADIENTS.items() if p == phase), "y")
    bare = [(axis, role) for axis, role in pairs if grid.sizes[axis] > 1]
    if conv is None:
        return ((0, _of_linear(one, operation, phase, nest(bare))),)
    try:
        roles = dict(settle_groups(conv, grid, phase, nest(bare)).nests)
    except InputError as error:
        error.path = (*one.path, *error.path)
        raise
    sides: tuple[int, ...] = (0,)
    if phase != "forward":
        operation = operation.gradients[tensor].operation
    if phase == "backward_filter":
        sides = (0, 1) if one.rows is None else (("output", "input").index(one.rows),)
    if serves(operation.signatures[0], roles, grid):
        return tuple((side, roles) for side in sides)
    # Groups are cut: a rank has a block of the channels that are made, and reads the groups that these belong to.
    count = len(operation.signatures) // 2
    signature = operation.signatures[count]
    (index,) = (i for i in ("C", "F") if i in signature.extent)
    axes = (*roles.get("G", ()), *roles.get(index, ()))
    cut = {i: a for i, a in roles.items() if i in "NDHW"} | {index: axes}
    is_all = sum(map(len, cut.values())) == sum(map(len, roles.values()))
    if is_all and groups_are_plain(signature.extent[index], conv.groups, _sizes(grid, axes)):
        return tuple((count + side, cut) for side in sides)
    said = " ".join(f"{i}={entry_text(a)}" for i, a in roles.items())
    fact = f"{phase} by {said} splits {conv.groups} groups as no row of a network does"
    hint = "as many groups on each rank; within a group channels that are made, not those that are summed over"
    raise InputError(fact, (*one.path, "roles", phase), hint=hint)


def _of_linear(one: GivenRow, operation: Operation, phase: str, roles: Roles) -> dict[str, Axes]:
    """A linear layer's roles, by its own indices. Raises InputError: a role that it has not."""
    names = {role: index for index, role in operation.as_convolution.items()}
    for role, axes in roles.nests:
        if role not in names:
            fact = f"a linear layer has no role {role}, which {phase} gives {entry_text(axes)}"
            raise InputError(fact, (*one.path, "roles", phase, axes[0]), hint=f"{', '.join(names)} or none")
    return {names[role]: axes for role, axes in roles.nests}


def _check_axes(one: GivenRow, grid: Grid) -> None:
    """Raises InputError: an axis that the grid lacks, or has with other shares."""
    stored = (
        (a, ("distribution", tensor, d)) for tensor, axes in one.stored for d, some in enumerate(axes) for a in some
    )
    for axis, path in (*stored, *((a, ("roles", phase, a)) for phase, pairs in one.roles for a, _ in pairs)):
        check_axis_of_grid(axis, grid, (*one.path, *path), ".".join(map(str, path[:2])))
    for axis, size in one.sizes:
        if grid.sizes[axis] != size:
            own, grids = size_text(size), size_text(grid.sizes[axis])
            fact = f"sizes of blocks over axis '{axis}' are as {own}, and the grid has it as {grids}"
            raise InputError(fact, (*one.path, "distribution"), hint=f"--grid {axis}={own}")


def _sizes(grid: Grid, axes: Axes) -> tuple[int, ...]:
    return tuple(grid.sizes[a] for a in axes)


def _check_groups(one: GivenRow, conv: Conv, grid: Grid, tensor: str, axes: Sequence[Axes]) -> None:
    """Raises InputError: a layer's blocks, which are of whole groups, are not the network's, which know no groups."""
    for d, (dim, some) in enumerate(zip(conv.dims(tensor), axes, strict=True)):  # type: ignore[arg-type]
        if dim.groups > 1 and not groups_are_plain(dim.extent, dim.groups, _sizes(grid, some)):
            fact = (
                f"{tensor}'s {dim.extent} channels in {dim.groups} groups over {','.join(some)} are cut "
                "unevenly, and a network's blocks know no groups"
            )
            hint = "as many groups on each rank, or another dimension"
            raise InputError(fact, (*one.path, "distribution", tensor, d), hint=hint)


def _refuse_two(one: GivenRow, tensor: str, value: str, first: Stored, second: Stored) -> None:
    texts = ("[" + ", ".join(map(entry_text, stored)) + "]" for stored in (first, second))
    fact = f"{tensor} is stored as {{}} and as {{}}".format(*texts)
    hint = f"one layout of {value}, which both rows have; conversions follow from their roles"
    raise InputError(fact, (*one.path, "distribution", tensor), hint=hint)
