"""How a layer is laid out: grid, algorithm letters, distribution, roles (docs/design.md, One idea).

This checks structure only; the algebra says whether a layout has types (groups, empty blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.blocks import Uneven, axis_size, block, size_text
from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.spec.form import DistributionForm, Entry, RolesForm
from convgen.spec.layer import ROLE_NAMES, Axes, Distribution
from convgen.spec.names import check_axis, did_you_mean
from convgen.spec.source import KeyPath
from convgen.spec.text import number_of, shown

MAX_RANKS = 65536
MAX_AXES = 16


def build_size(axis: str, given: object, path: KeyPath = ()) -> int:
    """The size of an axis, as somebody has written it: a number of ranks, or a share for each rank.

    Raises:
        InputError: it is neither, or no share is above 0.
    """
    if type(given) is int or isinstance(given, Uneven):
        if 1 <= given < 2**31:
            return given
    elif isinstance(given, (list, tuple)):
        shares = cast("Sequence[Any]", given)
        if shares and all(type(w) is int and w >= 0 for w in shares) and 0 < sum(shares) < 2**31:
            return axis_size(shares)
    fact = f"axis {shown(axis)} can't have {shown(cast('Any', given))} ranks"
    raise InputError(fact, path, hint="a number of ranks, 2, or a share for each, [3, 5]: integers, not all 0")


def build_grid(axes: Mapping[str, int | Sequence[int]]) -> Grid:
    """The grid of processors, axes in the order written.

    Args:
        axes: by name, the number of ranks, or a share for each, in which proportion the axis splits dimensions.

    Raises:
        InputError: no axes, too many axes or ranks, a name that no axis may have, or something that is no size.
    """
    if not axes:
        raise InputError("grid has no axes", ("grid",), hint="grid: {N: 2}; {N: 1} is one rank")
    if len(axes) > MAX_AXES:
        fact = f"grid has {len(axes)} axes, more than {MAX_AXES}"
        raise InputError(fact, ("grid",), hint="leave out axes of one rank")
    for name in axes:
        check_axis(name, ("grid", name))
    sizes = {name: build_size(name, given, ("grid", name)) for name, given in axes.items()}
    ranks = prod(sizes.values())
    if ranks > MAX_RANKS:
        said = "".join(f"{size:d}*" for size in sizes.values())[:-1] + " = " if len(sizes) > 1 else ""
        fact = f"grid has {said}{ranks} ranks, more than {MAX_RANKS}"
        raise InputError(fact, ("grid",), hint=f"a grid of up to {MAX_RANKS} ranks")
    return Grid(tuple(sizes.items()))


def algorithm_letters(algorithm: str, letters: Sequence[str]) -> Axes:
    """Axis names that a named algorithm gives a role, on a layer with these spatial letters; G comes last."""
    row = ALGORITHMS[algorithm].letters
    return (*(a for a in row if a not in "DHW" or a in letters), "G")


def check_letters(algorithm: str, grid: Grid, conv: Conv) -> None:
    """Refuse axes for which a named algorithm has no role, also those of one rank; auto takes any names."""
    if algorithm == "auto":
        return
    allowed = algorithm_letters(algorithm, conv.letters)
    for name in grid.names:
        if name not in allowed:
            others = [a for a in ALGORITHMS if name in algorithm_letters(a, conv.letters)]
            fact = f"algorithm {algorithm} on {conv.name} has no role for an axis named '{name}'"
            hint = f"axes {', '.join(allowed)}; or algorithm {', '.join([*others, 'auto'])}"
            raise InputError(fact, ("grid", name), hint=hint)


def build_distribution(form: DistributionForm, grid: Grid, conv: Conv) -> Distribution:
    """By dimension of x, w and y, its axes, outermost first.

    Raises:
        InputError: an entry too many or too few, an axis that the grid lacks, or an axis that stands twice.
    """
    return Distribution(
        x=_tensor("x", form.x, grid, conv),
        w=_tensor("w", form.w, grid, conv),
        y=_tensor("y", form.y, grid, conv),
    )


def with_sizes(form: DistributionForm, grid: Grid, conv: Conv) -> Grid:
    """The grid, with shares for axes whose sizes of blocks a distribution says.

    Along N they are proportions, as the number of samples may change at run time; so are they within the blocks of
    another axis.

    Raises:
        InputError: more or fewer sizes than the axis has ranks, or sizes of another extent; or an axis would split in
            two proportions.
    """
    known: dict[str, tuple[int, str]] = {a: (size, "grid") for a, size in grid.axes if isinstance(size, Uneven)}
    for tensor in ("x", "w", "y"):
        entries: list[Entry] = getattr(form, tensor)
        for i, (entry, dim) in enumerate(zip(entries, conv.dims(tensor), strict=False)):
            path = ("distribution", tensor, i)
            for place, one in enumerate(entry if isinstance(entry, list) else [entry]):
                for axis, sizes in one.items() if isinstance(one, dict) else ():
                    check_axis_of_grid(axis, grid, path, f"distribution.{tensor}")
                    ranks = int(grid.sizes[axis])
                    if len(sizes) != ranks:
                        fact = f"{number_of(len(sizes), 'size')} of blocks over axis '{axis}' of {ranks} ranks"
                        raise InputError(fact, path, hint="a size a rank")
                    given = build_size(axis, sizes, path)
                    size, where = known.setdefault(axis, (given, f"distribution.{tensor}"))
                    blocks = [hi - lo for lo, hi in (block(0, dim.extent, size, k) for k in range(ranks))]
                    weighs = dim.name == "N" or place > 0
                    if given != size if weighs else sizes != blocks:
                        fact = f"blocks of {sizes} over axis '{axis}', of {dim.name} with {dim.extent} elements"
                        if sum(sizes) == dim.extent or weighs:
                            fact += f", and {where} splits over it as {size_text(size)}"
                        hint = f"{blocks}: an axis splits all that it splits in one proportion"
                        raise InputError(fact, path, hint=hint)
    return Grid(tuple([(axis, known.get(axis, (size,))[0]) for axis, size in grid.axes]))


def _axes(entry: Entry) -> Axes:
    several = entry if isinstance(entry, list) else [] if entry in (None, "*", "none") else [entry]
    return tuple([name for one in several for name in (one if isinstance(one, dict) else [str(one)])])


def _tensor(tensor: str, entries: Sequence[Entry], grid: Grid, conv: Conv) -> tuple[Axes, ...]:
    path: KeyPath = ("distribution", tensor)
    names = [d.name for d in conv.dims(tensor)]
    if len(entries) != len(names):
        fact = f"distribution.{tensor} has {len(entries)} entries, {tensor} has {len(names)} dimensions to split"
        example = ", ".join(['"*"'] * len(names))
        raise InputError(fact, path, hint=f"an entry each for {', '.join(names)}, e.g. {tensor}: [{example}]")
    seen: set[str] = set()
    result: list[Axes] = []
    for i, entry in enumerate(entries):
        axes = _axes(entry)
        for axis in axes:
            check_axis_of_grid(axis, grid, (*path, i), f"distribution.{tensor}", '; "*" for no axis')
            if axis in seen:
                fact = f"axis '{axis}' stands twice in distribution.{tensor}"
                raise InputError(fact, (*path, i), hint="an axis splits one dimension of a tensor, once")
            seen.add(axis)
        result.append(axes)
    return tuple(result)


def build_roles(form: RolesForm, grid: Grid, conv: Conv) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """By phase given, its axis -> role pairs in the order written.

    Raises:
        InputError: an axis that the grid lacks, or a role that the layer lacks.
    """
    known = tuple(r for r in ROLE_NAMES if r not in ("D", "H", "W") or r in conv.letters)
    result: list[tuple[str, tuple[tuple[str, str], ...]]] = []
    for phase in PHASES:
        roles: dict[str, str | None] | None = getattr(form, phase)
        if roles is None:
            continue
        for axis, role in roles.items():
            path = ("roles", phase, axis)
            check_axis_of_grid(axis, grid, path, f"roles.{phase}")
            if role is not None and role not in known:
                fact = f"{conv.name} has no role {shown(role)}, given to axis '{axis}' in {phase}"
                raise InputError(fact, path, hint=f"one of {', '.join(known)}")
        result.append((phase, tuple((axis, role or "none") for axis, role in roles.items())))
    return tuple(result)


def check_axis_of_grid(axis: str, grid: Grid, path: KeyPath, place: str, more: str = "") -> None:
    """Raises InputError: the grid lacks an axis. `more`: what else may stand there."""
    if axis not in grid.sizes:
        fact = f"axis {shown(axis)} of {place} is not in the grid"
        raise InputError(
            fact, path, hint=did_you_mean(axis, grid.names, f"the grid's axes are {', '.join(grid.names)}{more}")
        )
