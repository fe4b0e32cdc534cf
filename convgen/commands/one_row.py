"""A layer file as a network of one row: what moves for it travels while it computes.

Modules of one layer wait where their schedule says. `compile --overlap` writes the package of that network instead, and
`simulate` shows its step, in which the input's gradient is made, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convgen.commands.compiled_file import CompiledFile
from convgen.commands.inputs import need, read_files, read_schedule
from convgen.errors import InputError
from convgen.spec.source import locate

if TYPE_CHECKING:
    from convgen.cost.machine import Machine
    from convgen.passes.contract import After

NOTE = "as a network of one row: convgen compile --overlap writes it"


def compile_one_rows(
    files: list[str],
    grid: str | None,
    algorithm: str | None,
    dtype: str | None,
    machine: Machine | None,
    command: str,
    schedule: str | None = None,
    after: Sequence[After] = (),
) -> list[CompiledFile]:
    """Every layer of the files.

    Args:
        grid, algorithm, dtype: for a CSV of layers.
        machine: for which it is chosen what travels meanwhile, and which `auto` models.
        schedule: file of the network's text, for one layer.
        after: told each stage when it is done.
    """
    need("torch", "a network's operators are ATen's, which needs torch")
    from convgen.network_compiler import compile_network, compile_text
    from convgen.plan.program.edited import read_text
    from convgen.spec.network_graph import layer_graph

    found: list[CompiledFile] = []
    layers = read_files(files, grid, algorithm, dtype, None)
    if schedule is not None and len(layers) != 1:
        raise InputError(f"--schedule is of one layer, here are {len(layers)}", hint="a YAML file of one layer")
    for layer in layers:
        try:
            graph = layer_graph(layer)
            if schedule is not None:
                made = compile_text(graph, read_text(read_schedule(schedule), schedule), command=command)
            else:
                made = compile_network(
                    graph, layer.grid, layer.algorithm, machine=machine, command=command, of_inputs=True, after=after,
                )  # fmt: skip
        except InputError as error:
            raise locate(error, layer.source) from None
        found.append(CompiledFile(str(Path(files[0])), made, {}))
    names = [one.compiled.graph.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{names.count(name)} layers are named {name}", hint="another name for one")
    return found
