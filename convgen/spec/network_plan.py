"""A network's plan as a file: the grid, how every value is stored, and the roles of every row.

    network_plan: resnet18
    graph: resnet18.yaml            # beside it
    statistics: spatial             # of batch norms, where they are not global
    again: [layer1, layer2.0]       # blocks that backward computes again, where there are some
    grid: {a: 4, b: 2}
    values: {x: "[a * b *]", ...}   # those that are not copies on every rank
    rows:
    - {makes: conv1, way: 0, roles: "N=a H=b", gradients: {x: {way: 0, roles: "N=a H=b"}}}

People may write or change one by hand: compile checks that the network has these rows and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.notation import entries_of, entry_text, is_one_each, roles_of, roles_text
from convgen.errors import InputError
from convgen.spec.graph_parts import check_statistics
from convgen.spec.source import Source, locate
from convgen.spec.yaml import read_yaml

KEYS = ("network_plan", "graph", "machine", "milliseconds", "statistics", "again", "grid", "values", "rows")
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
    source: Source = field(default_factory=Source, compare=False)


def is_plan_file(path: str | Path) -> bool:
    """Whether a file's first key says that it is a network's plan."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip() and not line.startswith("#")), "")
    except (OSError, UnicodeDecodeError):
        return False
    return first.startswith("network_plan:")


def write_plan(plan: PlanFile, head: Sequence[str] = ()) -> str:
    """The file's text; `head`: comments above it."""
    lines = [*(f"# {h}" for h in head), f"network_plan: {plan.name}", f'graph: "{plan.graph}"']
    if plan.machine:
        lines += [f"machine: {plan.machine}", f"milliseconds: {plan.milliseconds:.6g}"]
    if plan.statistics != "global":
        lines.append(f"statistics: {plan.statistics}")
    if plan.again:
        lines.append("again: [" + ", ".join(f'"{path}"' for path in plan.again) + "]")
    lines.append("grid: {" + ", ".join(f"{a}: {n}" for a, n in plan.grid.axes) + "}")
    lines.append("values:")
    lines += [f'  "{n}": "{entries(s)}"' for n, s in plan.values.items() if any(s)]
    lines.append("rows:")
    for row in plan.rows:
        text = f'- {{makes: "{row.makes}", way: {row.way}, roles: "{roles_text(row.roles)}"'
        if row.gradients:
            inner = (f'{n}: {{way: {w}, roles: "{roles_text(r)}"}}' for n, w, r in row.gradients)
            text += f", gradients: {{{', '.join(inner)}}}"
        lines.append(text + "}")
    return "\n".join(lines) + "\n"


def entries(stored: Sequence[Axes]) -> str:
    return "[" + " ".join(map(entry_text, stored)) + "]"


def read_plan(path: str | Path) -> PlanFile:
    """The plan in a file.

    Raises:
        InputError: it can't be read; says file and line.
    """
    document = read_yaml(path, times=32)
    try:
        return _plan(document.data, document.source)
    except InputError as error:
        raise locate(error, document.source) from None


def _plan(data: Mapping[str, Any], source: Source) -> PlanFile:
    for key in data:
        if key not in KEYS:
            raise InputError(f"unknown key {key}", (key,), hint=f"keys of a network's plan are {', '.join(KEYS)}")
    for key in ("network_plan", "graph", "grid", "rows"):
        if key not in data:
            raise InputError(f"{key} is missing", hint=f"keys of a network's plan are {', '.join(KEYS)}")
    sizes: Any = data["grid"]
    if not isinstance(sizes, Mapping) or not all(isinstance(n, int) and n > 0 for n in sizes.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise InputError("grid wants axes and ranks", ("grid",), hint="grid: {a: 4, b: 2}")
    grid = Grid(tuple((str(a), int(n)) for a, n in sizes.items()))  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
    given: Any = data.get("values") or {}
    values = {str(n): _stored(text, grid, ("values", n)) for n, text in given.items()}
    rows = tuple(_row(row, grid, ("rows", i)) for i, row in enumerate(data["rows"]))
    statistics = str(data.get("statistics", "global"))
    try:
        check_statistics(statistics)
    except InputError as error:
        raise InputError(error.fact, ("statistics",), hint=error.hint) from None
    return PlanFile(
        str(data["network_plan"]), str(data["graph"]), grid, values, rows,
        str(data.get("machine", "")), float(data.get("milliseconds", 0.0)), statistics, _again(data), source,
    )  # fmt: skip


def _again(data: Mapping[str, Any]) -> tuple[str, ...]:
    given: Any = data.get("again") or []
    if not isinstance(given, list):
        raise InputError("again wants a list of blocks", ("again",), hint="again: [layer1, layer2.0]")
    return tuple(str(path) for path in given)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _stored(text: Any, grid: Grid, path: tuple[Any, ...]) -> tuple[Axes, ...]:
    inside = str(text).strip().removeprefix("[").removesuffix("]")
    found = entries_of(inside)
    if found is None:
        raise InputError(f"cannot read {text}", path, hint="an entry a dimension: [a * (b,c) *]")
    if not is_one_each(found, grid.names):
        raise InputError(f"{text}: an axis splits one dimension, axes are {', '.join(grid.names)}", path)
    return found


def _row(data: Any, grid: Grid, path: tuple[Any, ...]) -> RowPlan:
    if not isinstance(data, Mapping) or "makes" not in data:
        raise InputError("a row wants makes, way and roles", path, hint='{makes: conv1, way: 0, roles: "N=a"}')
    row: Mapping[str, Any] = data  # pyright: ignore[reportUnknownVariableType]
    gradients: Mapping[str, Any] = row.get("gradients") or {}
    return RowPlan(
        str(row["makes"]),
        int(row.get("way", 0)),
        _roles(row.get("roles", ""), grid, (*path, "roles")),
        tuple(
            (str(n), int(g.get("way", 0)), _roles(g.get("roles", ""), grid, (*path, "gradients", n)))
            for n, g in gradients.items()
        ),
    )


def _roles(text: Any, grid: Grid, path: tuple[Any, ...]) -> Roles:
    found = roles_of(str(text))
    if found is None:
        raise InputError(f"cannot read roles {text}", path, hint="each index once: N=a H=(b,c)")
    if not is_one_each([axes for _, axes in found], grid.names):
        raise InputError(f"roles {text}: an axis has one role, axes are {', '.join(grid.names)}", path)
    return found
