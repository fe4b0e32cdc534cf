"""A network's plan as a file: the grid, how every value is stored, and the roles of every row.

    network_plan: resnet18
    format: 1
    graph: resnet18.yaml            # beside it
    dtype: bfloat16                 # where it is not the graph's own
    reduce_dtype: bfloat16          # in which parameters' gradients travel, where it is not their own
    autocast: bfloat16              # of the torch.autocast that it is for, where it is for one
    statistics: spatial             # of batch norms, where they are not global
    again: [layer1, layer2.0]       # blocks that backward computes again, where there are some
    grid: {a: 4, b: 2}
    values: {x: "[a * b *]", ...}   # those that are not copies on every rank
    rows:
    - {makes: conv1, way: 0, roles: "N=a H=b", gradients: {x: {way: 0, roles: "N=a H=b"}}}

People may write or change one by hand: compile checks that the network has these rows and values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.notation import entries_of, entry_text, is_one_each, roles_of, roles_text
from convgen.errors import InputError
from convgen.spec.fields import check_keys, text_of
from convgen.spec.formats import FORMAT, KEY, without_format
from convgen.spec.graph_edit import check_autocast, check_floats, check_reduce_dtype
from convgen.spec.graph_parts import check_statistics
from convgen.spec.placement import build_grid
from convgen.spec.source import KeyPath, Source, locate
from convgen.spec.text import LONGEST, as_list, beginning, one_line, shown
from convgen.spec.yaml import read_yaml

KEYS = (
    "network_plan",
    KEY,
    "graph",
    "machine",
    "milliseconds",
    "dtype",
    "reduce_dtype",
    "autocast",
    "statistics",
    "again",
    "grid",
    "values",
    "rows",
)
_CHECKED = {
    "statistics": ("global", check_statistics), "reduce_dtype": ("", check_reduce_dtype),
    "autocast": ("", check_autocast),
}  # fmt: skip
Roles = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row's signature number and roles, and those of the rows that make its operands' gradients."""

    makes: str
    way: int
    roles: Roles
    gradients: tuple[tuple[str, int, Roles], ...] = ()


@dataclass(frozen=True)
class PlanFile:
    """A plan as it stands in a file."""

    name: str
    graph: str
    grid: Grid
    values: Mapping[str, tuple[Axes, ...]]
    rows: tuple[RowPlan, ...]
    machine: str = ""
    milliseconds: float = 0.0
    statistics: str = "global"
    again: tuple[str, ...] = ()
    dtype: str = ""
    reduce_dtype: str = ""
    autocast: str = ""
    source: Source = field(default_factory=Source, compare=False)


def is_plan_file(path: str | Path) -> bool:
    """Whether a file's first key is that of a network's plan."""
    first = next((line for line in beginning(path).splitlines() if line.strip() and not line.startswith("#")), "")
    return first.startswith("network_plan:")


def write_plan(plan: PlanFile, head: Sequence[str] = ()) -> str:
    """The text of a plan's file; `head`: comments above it."""
    lines = [*(f"# {one_line(h, 2000)}" for h in head), f"network_plan: {plan.name}", f"{KEY}: {FORMAT}"]
    lines.append(f"graph: {_quoted(plan.graph)}")
    if plan.machine:
        lines += [f"machine: {_quoted(plan.machine)}", f"milliseconds: {plan.milliseconds:.6g}"]
    types = {"dtype": plan.dtype, "reduce_dtype": plan.reduce_dtype, "autocast": plan.autocast}
    lines += [f"{key}: {kind}" for key, kind in types.items() if kind]
    if plan.statistics != "global":
        lines.append(f"statistics: {plan.statistics}")
    if plan.again:
        lines.append("again: [" + ", ".join(map(_quoted, plan.again)) + "]")
    lines.append("grid: {" + ", ".join(f"{a}: {n}" for a, n in plan.grid.plain.items()) + "}")
    lines.append("values:")
    lines += [f'  {_quoted(n)}: "{entries(s)}"' for n, s in plan.values.items() if any(s)]
    lines.append("rows:")
    for row in plan.rows:
        text = f'- {{makes: {_quoted(row.makes)}, way: {row.way}, roles: "{roles_text(row.roles)}"'
        if row.gradients:
            inner = (f'{n}: {{way: {w}, roles: "{roles_text(r)}"}}' for n, w, r in row.gradients)
            text += f", gradients: {{{', '.join(inner)}}}"
        lines.append(text + "}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


def entries(stored: Sequence[Axes]) -> str:
    return "[" + " ".join(map(entry_text, stored)) + "]"


def read_plan(path: str | Path) -> PlanFile:
    """The plan in a file.

    Raises:
        InputError: the file can't be read; says file and line.
    """
    document = read_yaml(path, LONGEST)
    try:
        return _plan(document.data, document.source)
    except InputError as error:
        raise locate(error, document.source) from None


def _plan(data: Mapping[str, Any], source: Source) -> PlanFile:
    check_keys(data, (), KEYS, ("network_plan", "graph", "grid", "rows"))
    data = without_format(dict(data))
    sizes = _mapping(data["grid"], ("grid",), "grid: {a: 4, b: 2}")
    grid = build_grid(sizes)
    given = _mapping(data.get("values"), ("values",), 'values: {x: "[a * *]"}')
    values = {n: _stored(text, grid, ("values", n)) for n, text in given.items()}
    listed = as_list(data["rows"])
    if not listed:
        raise InputError(f"rows can't be {shown(data['rows'])}", ("rows",), hint="a row a line, as convgen plan -o")
    rows = tuple(_row(row, grid, ("rows", i)) for i, row in enumerate(listed))
    if dtype := text_of(data.get("dtype", ""), ("dtype",)):
        check_floats(dtype)
    said = {key: text_of(data.get(key, default), (key,)) for key, (default, _) in _CHECKED.items()}
    for key, (_, check) in _CHECKED.items():
        try:
            check(said[key])
        except InputError as error:
            raise InputError(error.fact, (key,), hint=error.hint) from None
    took = data.get("milliseconds", 0.0)
    if isinstance(took, bool) or not isinstance(took, (int, float)) or not 0 <= took < float("inf"):
        raise InputError(f"milliseconds can't be {shown(took)}", ("milliseconds",), hint="a number, 0 or more")
    return PlanFile(
        text_of(data["network_plan"], ("network_plan",)), text_of(data["graph"], ("graph",)), grid, values, rows,
        text_of(data.get("machine", ""), ("machine",)), float(took), said["statistics"], _again(data), dtype,
        said["reduce_dtype"], said["autocast"], source,
    )  # fmt: skip


def _mapping(value: object, path: KeyPath, hint: str) -> dict[str, Any]:
    if value is None and path != ("grid",):
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{path[-1]} can't be {shown(value)}", path, hint=hint)
    return cast("dict[str, Any]", value)


def _again(data: Mapping[str, Any]) -> tuple[str, ...]:
    given = data.get("again")
    paths = [] if given is None else as_list(given)
    if paths is None:
        raise InputError("again wants a list of blocks", ("again",), hint="again: [layer1, layer2.0]")
    return tuple(text_of(path, ("again", i)) for i, path in enumerate(paths))


def _stored(text: object, grid: Grid, path: KeyPath) -> tuple[Axes, ...]:
    said = text_of(text, path).strip()
    found = entries_of(said[1:-1]) if said[:1] + said[-1:] == "[]" else None
    if found is None:
        raise InputError(f"cannot read {shown(text)}", path, hint="an entry a dimension: [a * (b,c) *]")
    if not is_one_each(found, grid.names):
        fact = f"{shown(text)}: an axis splits one dimension, axes are {', '.join(grid.names)}"
        raise InputError(fact, path, hint="each of these once, or not: the others hold copies")
    return found


def _row(data: object, grid: Grid, path: KeyPath) -> RowPlan:
    row = _mapping(data or 0, path, '{makes: conv1, way: 0, roles: "N=a"}')
    check_keys(row, path, ("makes", "way", "roles", "gradients"), ("makes",))
    way, roles = _way(row, grid, path)
    hint = 'gradients: {x: {way: 0, roles: "N=a"}}'
    gradients = _mapping(row.get("gradients"), (*path, "gradients"), hint)
    found: list[tuple[str, int, Roles]] = []
    for name, one in gradients.items():
        inner = (*path, "gradients", name)
        said = _mapping(one or 0, inner, hint)
        check_keys(said, inner, ("way", "roles"), ())
        found.append((name, *_way(said, grid, inner)))
    return RowPlan(text_of(row["makes"], (*path, "makes")), way, roles, tuple(found))


def _way(row: Mapping[str, Any], grid: Grid, path: KeyPath) -> tuple[int, Roles]:
    """The number of a signature, and roles."""
    way = row.get("way", 0)
    if type(way) is not int or way < 0:
        raise InputError(f"way can't be {shown(way)}", (*path, "way"), hint="a signature's number, from 0")
    return way, _roles(text_of(row.get("roles", ""), (*path, "roles")), grid, (*path, "roles"))


def _roles(text: str, grid: Grid, path: KeyPath) -> Roles:
    found = roles_of(text)
    if found is None:
        raise InputError(f"cannot read roles {shown(text)}", path, hint="each index once: N=a H=(b,c)")
    if not is_one_each([axes for _, axes in found], grid.names):
        raise InputError(f"roles {shown(text)}: an axis has one role, axes are {', '.join(grid.names)}", path)
    return found
