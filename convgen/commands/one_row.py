"""A layer file as a network of one row: what moves for it travels while it computes.

Modules of one layer wait where their schedule says. `compile --overlap` writes the package of that network instead, and
`simulate` shows its step, in which the input's gradient is made, too.

| the layer says | the row has |
|---|---|
| a distribution | the layouts and roles that the layer's module has: as given, what is missing as `choose` has it |
| a named algorithm | what letters say; with an axis G, which networks have not, what the layer's module has |
| `algorithm: auto` | what the search for networks finds, or what the layer's module has: the shorter step |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from convgen.commands.compiled_file import CompiledFile
from convgen.commands.inputs import check_only_of_networks, need, read_files, read_schedule
from convgen.commands.networks import check_meanwhile, named_passes
from convgen.errors import InputError
from convgen.spec.source import locate

if TYPE_CHECKING:
    from convgen.algebra.grid import Grid
    from convgen.algebra.roles import Roles
    from convgen.cost.machine import Machine
    from convgen.network_compiler import CompiledNetwork
    from convgen.passes.contract import After
    from convgen.plan.choose import Objective
    from convgen.spec.graph import GivenRow, Graph
    from convgen.spec.layer import Layer

NOTE = "as a network of one row: convgen compile --overlap writes it"


def compile_one_rows(
    files: Sequence[str],
    *,
    grid: str | None,
    algorithm: str | None,
    dtype: str | None,
    memory_format: str | None = None,
    target: str | None = None,
    machine: str | None = None,
    objective: Objective = "seconds",
    statistics: str | None = None,
    reduce_dtype: str | None = None,
    autocast: str | None = None,
    recompute: str | None = None,
    schedule: str | None = None,
    passes: Sequence[str] = (),
    command: str = "",
    after: Sequence[After] = (),
) -> list[CompiledFile]:
    """Every layer of the files.

    Args:
        grid, algorithm, dtype, memory_format: for a CSV of layers.
        target: instead of the layers' own.
        machine: the machine for which what travels meanwhile is chosen and layouts are priced; by default the layer's
            own, or one node of the target's kind.
        objective: by which roles are chosen that a layer with a distribution leaves open.
        schedule: the file of the network's text, for one layer.
        passes: passes that decide what travels meanwhile, such as "start-halos", instead of a timeline.
        command: the command that the package's header gives; options are added.
        after: is told each stage when it is done.
    """
    check_only_of_networks(files[0], statistics, recompute, reduce_dtype, autocast)
    check_meanwhile(schedule, machine, passes)
    need("torch", "a network's operators are ATen's, which needs torch")
    from convgen.cost.machines import default_machine, load_machine
    from convgen.network_compiler import compile_network, compile_text
    from convgen.passes.contract import tell
    from convgen.plan.program.edited import read_text
    from convgen.spec.build import check_options, check_stride
    from convgen.spec.network_graph import layer_graph
    from convgen.spec.target import read_target

    said = {"target": target, "machine": machine, "objective": objective, "schedule": schedule and Path(schedule).name}
    command += "".join(f" --{k} {v}" for k, v in said.items() if v and (k, v) != ("objective", "seconds"))
    command += "".join(f" --pass '{text}'" for text in passes)
    chain = named_passes(passes)
    found: list[CompiledFile] = []
    made_for = None if target is None else read_target(target).known()
    chosen = None if machine is None else load_machine(machine)
    layers = read_files(files, grid, algorithm, dtype, memory_format)
    if schedule is not None and len(layers) != 1:
        raise InputError(f"--schedule is of one layer, here are {len(layers)}", hint="a YAML file of one layer")
    tell(after, "read", None)
    for layer in layers:
        if made_for is not None:
            layer = layer.made_for(made_for)
        try:
            check_options(layer)
            check_stride(layer)
            graph, on = layer_graph(layer), chosen or default_machine(layer)
            if schedule is not None:
                text = read_text(read_schedule(schedule), schedule)
                made = compile_text(graph, text, command=command, target=layer.target)
            else:
                grouped = "G" in layer.grid.names and layer.algorithm not in (None, "auto")
                placed = layer.distribution is not None or grouped
                compiled = partial(
                    compile_network, grid=layer.grid, machine=on, command=command, of_inputs=True,
                    target=layer.target.known(), passes=chain,
                )  # fmt: skip
                if placed or (layer.algorithm in (None, "auto") and _as_module(layer, on, objective, graph, compiled)):
                    graph = replace(graph, given=(_given(layer, on, objective),))
                made = compiled(graph, algorithm=None if graph.given else layer.algorithm, after=after)
        except InputError as error:
            raise locate(error, layer.source) from None
        found.append(CompiledFile(str(Path(files[0])), made, {}))
    names = [one.compiled.graph.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{names.count(name)} layers are named {name}", hint="another name for one")
    return found


def _as_module(
    layer: Layer, machine: Machine, objective: Objective, graph: Graph, compiled: Callable[..., CompiledNetwork]
) -> bool:
    """Whether the layouts and roles of the layer's module make a shorter step than those that the search for networks
    finds; False if a network can't have them."""
    from convgen.cost.timeline import simulate

    given = replace(graph, given=(_given(layer, machine, objective),))
    try:
        two = compiled(graph, algorithm="auto"), compiled(given, algorithm=None)
    except InputError:
        return False
    by_search, by_module = (simulate(c.program, machine, c.dtype, of_inputs=True, alike=True).end_s for c in two)
    return by_module < by_search


def _given(layer: Layer, machine: Machine, objective: Objective) -> GivenRow:
    """The row with the layouts and roles of the layer's module."""
    from convgen.algebra.space import Space
    from convgen.plan.choose import choose
    from convgen.spec.graph import GivenRow
    from convgen.spec.network_graph import ROW

    space = Space(layer.conv, layer.grid, virtual_padding=layer.target.pads_virtually)
    choice = choose(layer, space, machine, objective)
    return GivenRow(
        module=ROW,
        stored=tuple((tensor, layout.axes) for tensor, layout in choice.stored.items()),
        roles=tuple((phase, _pairs(roles, layer.grid)) for phase, roles in choice.roles.items()),
        rows=choice.roles["backward_filter"].rows,
        hold_x=layer.options.hold_x,
    )


def _pairs(roles: Roles, grid: Grid) -> tuple[tuple[str, str], ...]:
    """Every axis of the grid with its role or "none", in an order that keeps nests."""
    found = {axis: role for role, axes in roles.nests for axis in axes}
    return (*found.items(), *((a, "none") for a in grid.names if a not in found))
