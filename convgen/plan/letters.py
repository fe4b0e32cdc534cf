"""A network laid out by the letters of a grid: a named algorithm for every row.

Letters travel with dimensions, as the axes that split a value. A row's index takes the axes of the dimensions that are
made of it. An axis has one role in a row: where several indices would do, the one that keeps more ranks at work takes
it, then the one that sends fewer bytes. A result is stored as its row makes it. What a sum leaves partial is split
along an index that only parameters have (a convolution's filters): so channels stay split from layer to layer.

A letter that no input carries begins inside: C and F where a product makes channels that its parameters alone have,
D, H and W where a convolution makes rows (of a latent vector, say). Such a row reads copies, and each rank makes its
part.

Source: docs/design.md, Networks; the algorithms are [CF] 3.1 to 3.4's and [INT]'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature
from convgen.cost.network import bytes_of
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.plan.given import given_rows, place_given
from convgen.plan.parts import Parts, Tensor
from convgen.program.network import Program, Value
from convgen.program.rows import PlacedRow, Stored, index_of, kept, place, serves, stored_by_name

NODES = "M"  # machines, nodes: M splits samples as N does, and N is then the ranks of a node
OF = {"N": "N" + NODES}
ROLES_AT_MOST = 256  # combinations of one row that are looked at


def lay_out(parts: Parts, grid: Grid, algorithm: str | None = None) -> Program:
    """The program of a network whose rows follow the letters of a grid.

    Args:
        algorithm: a name in ALGORITHMS; by default the one that has the grid's letters.
    Raises:
        InputError: no algorithm, or not this one, has a letter of the grid; or a row is given what no row can be.
    """
    name, tensors, rows, updates, outputs, fixed, *_ = parts
    rule = _rule(grid, algorithm, {*grid.names} if fixed else {a for one in parts.given for a in one.axes})
    bare = grid.bare
    given = given_rows(rows, parts.given, grid)
    by_name = {t.name: t for t in tensors}
    bared = {n: tuple(tuple(a for a in axes if a in bare.names) for axes in s) for n, s in fixed.items()}
    fixed = {**bared, **given.stored}
    inputs = {t.name: fixed.get(t.name) or rule.of_input(t, bare) for t in tensors if t.kind == "input"}
    rule = replace(rule, begins=_nowhere(inputs.values(), bare, rule))
    known: dict[str, Stored] = {**given.stored, **inputs}
    reached = set(inputs)  # values that depend on an input
    placed: list[PlacedRow] = []
    buffer_of = {value: buffer for buffer, value in reversed(updates)}
    for i, bound in enumerate(rows):
        reads = tuple(known.get(v) for v in bound.reads)
        flows = tuple(v in reached for v in bound.reads) if rule.begins else ()
        reached |= {v for v in bound.makes if any(flows)}
        row, stored, made = _placed(bound.operation, reads, bare, rule, flows)
        known |= {v: s for v, s in zip(bound.reads, stored, strict=True) if v not in known}
        held = tuple(
            given.stored.get(v) or known.get(buffer_of.get(v, ""), s) for v, s in zip(bound.makes, made, strict=True)
        )
        if held != made:  # as is given, or as the buffer whose new value it is
            row, made = _with_gradients(row.bound, bare, row.way, dict(row.roles), stored, held), held
        placed.append(place_given(i, replace(row, bound=bound), bare, given))
        known |= {v: s for v, s in zip(bound.makes, made, strict=True) if v}
        known |= {b: known[v] for b, v in updates if v in bound.makes and b not in known}
    for t in tensors:
        known.setdefault(t.name, ((),) * len(t.shape))
    values = {n: Value(n, t.shape, t.dtype, known[n], t.kind) for n, t in by_name.items()}  # type: ignore[arg-type]
    return Program(
        name=name,
        grid=grid,
        values=values,
        rows=tuple(placed),
        updates=tuple(updates),
        outputs=tuple(outputs),
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """What an algorithm does with letters.

    Attributes:
        letters: those of inputs' dimensions that axes may split.
        made: axes that split the channels that a sum makes, not those that it sums over, where no other axis does.
        copied: axes of `made` that no activation is split along.
        begins: axes that no input carries, which rows may begin.
    """

    letters: str
    made: Axes = ()
    copied: Axes = ()
    begins: Axes = ()

    def of_input(self, tensor: Tensor, grid: Grid) -> Stored:
        stored: list[Axes] = []
        for letter, extent in zip(tensor.letters, tensor.shape, strict=True):
            axes = [a for a in grid.names if a in self.letters + NODES and extent > 1]
            channels = [a for a in "CF" if a in axes and a not in self.copied]
            stored.append(tuple(channels) if letter == "C" else tuple(a for a in axes if a in OF.get(letter, letter)))
        return tuple(stored)


def _rule(grid: Grid, algorithm: str | None, given: Collection[str] = ()) -> Rule:
    """`given`: axes that given rows name, which may have any name."""
    letters = [a for a, n in grid.axes if n > 1 and a not in given]
    for a in letters:
        if a not in "NCFDHW" + NODES:
            fact = f"axis {a} of {grid} is no letter that a network's dimensions carry"
            raise InputError(fact, ("grid", a), hint="axes N, C, F, D, H or W; or M, whose nodes split samples, too")
    if algorithm is None:
        names = {(False, False): "spatial", (True, False): "stationary-x", (False, True): "stationary-y"}
        algorithm = names.get(("C" in letters, "F" in letters), "stationary-w")
    chosen = ALGORITHMS[algorithm]
    for a in letters:
        if a not in chosen.letters + NODES:
            fact = f"algorithm {algorithm} has no axis {a}; the grid is {grid}"
            raise InputError(fact, ("grid", a), hint=f"axes of {', '.join(chosen.letters)}, or another algorithm")
    if {*chosen.x_channels} != {*chosen.y_filters}:
        fact = f"algorithm {algorithm} splits y's filters otherwise than x's channels; a layer's y is the next one's x"
        raise InputError(fact, hint="another algorithm; this one is of single layers")
    return Rule(chosen.letters, ("F",), tuple(a for a in chosen.w_filters if a not in chosen.y_filters))


def _nowhere(inputs: Iterable[Stored], grid: Grid, rule: Rule) -> Axes:
    """Axes that split no input and that a row may begin: not those of samples, which no row makes, nor copied ones,
    which every product has anyway."""
    carried = {a for stored in inputs for axes in stored for a in axes}
    return tuple(a for a in grid.names if a not in OF["N"] and a in rule.letters and a not in carried | {*rule.copied})


@lru_cache(maxsize=4096)
def _placed(
    operation: Operation, reads: tuple[Stored | None, ...], grid: Grid, rule: Rule, flows: tuple[bool, ...] = ()
) -> tuple[PlacedRow, tuple[Stored, ...], tuple[Stored, ...]]:
    """A row placed by its best way and roles, and how its operands and its results are stored.

    Args:
        reads: how operands are stored; None for what this row decides (a parameter).
        flows: whether operands depend on an input; none where no letter begins inside.
    """
    nothing = Bound(operation, ("",) * len(reads), ("",) * len(operation.signatures[0].results))
    found: list[tuple[tuple[int, int, int], PlacedRow, tuple[Stored, ...], tuple[Stored, ...]]] = []
    for way, signature in enumerate(operation.signatures):
        if signature.reduction == "max":
            continue  # no step follows the place of a maximum from rank to rank
        for roles in _roles(signature, reads, grid, rule, flows):
            operands = tuple(
                kept(o, signature, roles) if axes is None else axes
                for o, axes in zip(signature.inputs, reads, strict=True)
            )
            results = tuple(_made(r, signature, roles, rule) for r in signature.results)
            row = _with_gradients(nothing, grid, way, roles, operands, results)
            busy = prod(grid.sizes[a] for axes in roles.values() for a in axes)
            found.append(((-busy, bytes_of(row, grid), way), row, operands, results))
    _, row, operands, results = min(found, key=lambda one: one[0])
    return row, operands, results


def _roles(
    signature: Signature, reads: Sequence[Stored | None], grid: Grid, rule: Rule, flows: Sequence[bool] = ()
) -> Iterator[dict[str, Axes]]:
    """Each axis with one of the indices whose dimensions it splits; or with none, where no index can have it."""
    options: dict[str, list[str]] = {}
    order: dict[str, list[str]] = {}
    fresh = _fresh(signature, reads)
    for operand, axes in zip(signature.inputs, reads, strict=True):
        for made, split in zip(operand.dims, axes or ((),) * len(operand.dims), strict=True):
            index = index_of(made, signature)
            for place_, axis in enumerate(split):
                goal = index
                if index in signature.summed and fresh and operand.gradient:
                    alone = len(split) == 1 and axis in rule.made
                    goal = fresh if alone or place_ == 1 else index
                if goal:
                    options.setdefault(axis, [])
                    if goal not in options[axis]:
                        options[axis].append(goal)
                    order.setdefault(goal, []).append(axis)
    if fresh:
        for axis in rule.copied:
            if axis in grid.names and axis not in options:
                options[axis] = [fresh]
                order.setdefault(fresh, []).append(axis)
    for axis, index in _begun(signature, grid, rule, flows, order):
        if axis not in options:
            options[axis] = [index]
            order.setdefault(index, []).append(axis)
    axes = [a for a in grid.names if a in options]
    seen = False
    for chosen in list(product(*(options[a] for a in axes)))[:ROLES_AT_MOST]:
        roles: dict[str, Axes] = {}
        for index, _ in signature.extents:
            mine = [a for a, i in zip(axes, chosen, strict=True) if i == index]
            if mine:
                roles[index] = tuple(dict.fromkeys(a for a in order[index] if a in mine))
        if serves(signature, roles, grid):
            seen = True
            yield roles
    if not seen:
        yield {}


def _fresh(signature: Signature, reads: Sequence[Stored | None]) -> str | None:
    """The index of a sum's result that only parameters have, such as filters."""
    if signature.reduction != "sum" or not signature.summed or len(signature.results) != 1:
        return None
    given = {
        i
        for o, axes in zip(signature.inputs, reads, strict=True)
        if axes is not None
        for made in o.dims
        for i in made.indices
    }
    (result,) = signature.results
    alone = [f for made in result.dims if (f := index_of(made, signature)) and f not in given]
    return alone[0] if len(alone) == 1 else None


def _begun(
    signature: Signature, grid: Grid, rule: Rule, flows: Sequence[bool], order: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Pairs of an axis that no input carries and an index that a product begins with it, of which every rank gets some.

    C and F: of a result's dimensions the one that parameters alone have. D, H, W: the convolution's index of that name.

    Args:
        order: by index, the axes that it has.
    """
    if not rule.begins or signature.reduction != "sum" or not signature.summed or not any(flows) or all(flows):
        return
    (result, *others), extent = signature.results, signature.extent
    given = {i for o, flow in zip(signature.inputs, flows, strict=True) if flow for i in o.indices}
    alone = [i for made in result.dims if (i := index_of(made, signature)) and i not in given]
    if others or len(alone) != 1:
        return
    for axis in rule.begins:
        index = alone[0] if axis in "CF" else axis
        parts = grid.sizes[axis] * prod(grid.sizes[a] for a in order.get(index, ()))
        if parts <= extent.get(index, 0):
            yield axis, index


def _made(result: Operand, signature: Signature, roles: Mapping[str, Axes], rule: Rule) -> Stored:
    """A result is stored as it is made; what is partial is split along the index that only parameters have."""
    wants = signature.wants(result, roles)
    stored = [p.axes for p in wants.pieces]
    read = {i for o in signature.inputs[:1] for made in o.dims for i in made.indices}
    for d, made in enumerate(result.dims):
        index = index_of(made, signature)
        if index and index not in read and result.shape[d] > 1 and signature.reduction == "sum":
            own = tuple(a for a in stored[d] if a not in rule.copied)
            stored[d] = own + tuple(a for a in wants.partial if a in _channel_axes(signature, roles))
            break
    return tuple(stored)


def _channel_axes(signature: Signature, roles: Mapping[str, Axes]) -> Axes:
    """Axes of summed indices that both of a product's operands have: channels, not samples or rows."""
    both = [i for i in signature.summed if all(i in o.indices for o in signature.inputs)]
    return tuple(a for i in both for a in roles.get(i, ()))


def _with_gradients(
    bound: Bound, grid: Grid, way: int, roles: Mapping[str, Axes], reads: Sequence[Stored], makes: Sequence[Stored]
) -> PlacedRow:
    """A row with the cheaper gradient of each operand: the vjp's, or a row of its own."""
    row = place(bound, grid, way, roles, reads, makes)
    if not bound.operation.gradients:
        return row
    signature = row.signature
    names = stored_by_name(signature, reads, makes)
    derived: dict[str, PlacedRow] = {}
    numbers = {o.name: k for k, o in enumerate(signature.inputs)}
    for name, one in bound.operation.gradients.items():
        stored = tuple(names[r] for r in one.reads)
        best = _gradient(one.operation, one.reads, name, stored, names[name], grid)
        own = row.back[numbers[name]]
        asked = place(bound, grid, way, roles, reads, makes, {name: best})
        if signature.reduction != "sum" or own is None or bytes_of(asked, grid) < bytes_of(row, grid):
            derived[name] = best
    return place(bound, grid, way, roles, reads, makes, derived) if derived else row


@lru_cache(maxsize=4096)
def _gradient(
    operation: Operation, reads: tuple[str, ...], makes: str, stored: tuple[Stored, ...], to: Stored, grid: Grid
) -> PlacedRow:
    """A gradient's row with the roles that keep most ranks at work, then send least."""
    found: list[tuple[tuple[int, int, int], PlacedRow]] = []
    for way, signature in enumerate(operation.signatures):
        for roles in _roles(signature, stored, grid, Rule("")):
            row = place(Bound(operation, reads, (makes,)), grid, way, roles, stored, (to,))
            row = replace(row, back=(None,) * len(reads))
            busy = prod(grid.sizes[a] for axes in roles.values() for a in axes)
            found.append(((-busy, bytes_of(row, grid), way), row))
    return min(found, key=lambda one: one[0])[1]
