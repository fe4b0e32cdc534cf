"""A plan of a network written by hand as layer files: each convolution and linear layer as it would be one alone.

Other layers have no module of their own; what they read and how their output is stored stands under `others`, where
they redistribute anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from convgen.algebra.blocks import groups_are_plain
from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.errors import InputError
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, Stored
from convgen.spec.build import layer_from_dict
from convgen.spec.formats import FORMAT, KEY
from convgen.spec.layer import Layer
from convgen.spec.network import Network, Node
from convgen.spec.network_graph import node_of
from convgen.spec.target import Target
from convgen.spec.text import one_line
from convgen.spec.write import convolution_data, entries

PHASES = {"backward_data": "x", "backward_filter": "w"}


def planned_layers(network: Network, program: Program, target: Target) -> list[Layer]:
    """Convolutions and linear layers as the compiler takes them.

    Raises:
        InputError: as of `layers_data`.
    """
    return [layer_from_dict(data) for data in layers_data(network, program, target)]


def layers_data(network: Network, program: Program, target: Target) -> Iterator[dict[str, Any]]:
    """The keys of each layer's file.

    Raises:
        InputError: blocks of channels that cut groups, which a layer of its own has not.
    """
    rows: dict[str, list[PlacedRow]] = {}
    for row in program.rows:
        if (node := node_of(network, row.bound.module)) is not None:
            rows.setdefault(node.name, []).append(row)
    for name, own in rows.items():
        node = network.node[name]
        if node.conv is not None and any(row.bound.operation.is_product for row in own):
            yield _data(network, node, node.conv, own, program, target)


def plan_text(
    network: Network,
    program: Program,
    target: Target,
    head: Sequence[str],
    memory_bytes: int,
    others: Iterable[tuple[str, str, Mapping[str, Stored], Stored | None]],
) -> str:
    """The file's text.

    Args:
        head: lines of its comment.
        others: of layers without a module that redistribute: name, kind, and how what they read and make is stored.
    """
    lines = [
        *(f"# {one_line(line, 1000)}" for line in head),
        f"plan: {_flow(network.name)}",
        f"{KEY}: {FORMAT}",
        f"memory_bytes: {memory_bytes}",
    ]
    lines.append("layers:")
    for data in layers_data(network, program, target):
        lines += _block(data)
    said: list[str] = []
    for name, kind, read, stored in others:
        reads = ", ".join(f"{_flow(n)}: {_flow(entries(s))}" for n, s in read.items())
        made = "" if stored is None else f", stored: {_flow(entries(stored))}"
        said.append(f"  - {{name: {_flow(name)}, kind: {kind}, reads: {{{reads}}}{made}}}")
    return "\n".join([*lines, "others:" if said else "others: []", *said]) + "\n"


def _data(
    network: Network, node: Node, conv: Conv, rows: Sequence[PlacedRow], program: Program, target: Target
) -> dict[str, Any]:
    """`rows`: of the node; what pads x may stand before the product, what adds the bias behind it."""
    (row,) = (row for row in rows if row.bound.operation.is_product)
    read = rows[0].bound.reads[0], row.bound.reads[1], rows[-1].bound.makes[0]
    x, w, y = (program.values[v].stored for v in read)
    one = len(conv.shape("x")) - len(x)  # a linear layer is a convolution of one row
    layouts = {"x": (*x, *((),) * one), "w": w[:2], "y": (*y, *((),) * one)}
    _check_groups(node, conv, program.grid, layouts)
    roles = {"forward": _roles(row, conv)}
    names = [o.name for o in row.signature.inputs]
    own = {names[k]: placed for k, placed in row.derived}
    roles |= {phase: _roles(own.get(tensor, row), conv) for phase, tensor in PHASES.items()}
    data = convolution_data(node.name, conv) | {
        "dtype": network.dtype,
        "target": target.text,
        "grid": program.grid.plain,
        "distribution": {tensor: entries(axes) for tensor, axes in layouts.items()},
        "roles": {phase: found for phase, found in roles.items() if found is not None},
    }
    plain: dict[str, Any] = {"stride": 1, "padding": [0, 0], "dilation": 1}
    for key, value in plain.items():
        if all(v == value for v in data[key]):
            del data[key]
    plain = {"groups": 1, "bias": False, "dtype": "float32", "target": "cpu", "roles": {}}
    for key, value in plain.items():
        if data[key] == value:
            del data[key]
    if "w" in own and any(c.kind != "slice" for c in row.fetch[0]):
        data["options"] = {"hold_x": "stored"}
    return data


def _roles(row: PlacedRow, conv: Conv) -> dict[str, str] | None:
    """Roles by axis; None where channels cut groups, which a layer's roles can't say: the layer is searched then."""
    operation = row.bound.operation
    if operation.convolves is not None and conv.groups > 1 and "G" not in row.signature.extent:
        return None
    names = operation.as_convolution
    return {a: names.get(index, index) for index, axes in row.roles for a in axes}


def _check_groups(node: Node, conv: Conv, grid: Grid, layouts: Mapping[str, tuple[Axes, ...]]) -> None:
    """Raises InputError: blocks of a network's channels are not whole groups or parts of one, as a layer's are."""
    if conv.groups == 1:
        return
    for tensor, extent in (("x", conv.channels), ("y", conv.filters)):
        axes = layouts[tensor][1]
        if not groups_are_plain(extent, conv.groups, tuple(grid.sizes[a] for a in axes)):
            fact = (
                f"{node.name}: blocks of {extent} channels over {','.join(axes)} cut its {conv.groups} groups unevenly"
            )
            raise InputError(fact, hint="another --grid, or the network's package: convgen import FILE, then plan")


def _block(data: Mapping[str, Any]) -> list[str]:
    """A layer as a list entry, a key a line, values in one line each."""
    lines: list[str] = []
    for key, value in data.items():
        if key in ("distribution", "roles"):
            lines.append(f"    {key}:")
            lines += [f"      {name}: {_flow(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"    {key}: {_flow(value)}")
    lines[0] = "  - " + lines[0].lstrip()
    return lines


def _flow(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            items: dict[str, Any] = dict(value)  # type: ignore[arg-type]
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in items.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_flow(v) for v in list(value)) + "]"  # type: ignore[arg-type]
        case str() if value == "*" or value.lower() in ("true", "false", "null"):  # no text in YAML without quotes
            return f'"{value}"'
        case _:
            return str(value)
