"""`convgen plan --ranks 1,2,4,8`: do more ranks help, and on which grid? And what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen.commands.outputs import show
from convgen.commands.progress import progress
from convgen.errors import InputError

if TYPE_CHECKING:
    from convgen.cost.machine import Machine
    from convgen.explain.planned_ranks import Help
    from convgen.plan.setting import Setting
    from convgen.spec.graph import Graph
    from convgen.spec.network import Network

    RanksType = click.ParamType["Counts"]
else:
    RanksType = click.ParamType

ONE_PLAN = {"output": "-o", "explain": "--explain", "grid": "--grid", "tried": "--try", "groups": "--groups"}
NETWORKS_ONLY = {
    "batch": "--batch", "dtype": "--dtype", "reduce_dtype": "--reduce-dtype", "autocast": "--autocast",
    "keep": "--keep", "statistics": "--statistics", "regather": "--regather", "recompute": "--recompute",
    "hide_dw": "--hide-dw", "layouts": "--layouts", "measured": "--measured", "target": "--target",
    "optimizer_states": "--optimizer-states", "overlapped": "--overlapped or --in-order",
}  # fmt: skip


class Counts(tuple[int, ...]):
    """Numbers of ranks, each once, ascending; they print as they were given."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Ranks(RanksType):
    """A number of ranks, or several with commas between."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Counts:
        one: Any = click.IntRange(1)
        return Counts(sorted({one.convert(part.strip(), param, ctx) for part in str(value).split(",")}))


def is_factory(file: str) -> bool:
    """Whether a text names a factory, MODULE:FACTORY or FILE.py:FACTORY, and no file."""
    return ":" in file and not Path(file).exists()


def is_layer_file(file: str) -> bool:
    """Whether it is a file of a layer, or a table of layers."""
    from convgen.spec.yaml import read_yaml

    return Path(file).suffix.lower() == ".csv" or "layer" in read_yaml(file).data


def is_given(name: str) -> bool:
    """Whether the command line says an option, be it its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def refuse_one_plans(file: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a single plan. Raises InputError: one is given with several numbers of ranks, or for a
    layer."""
    for name, flag in ONE_PLAN.items():
        if options[name] is not None:
            fact = f"{flag} is of one plan of a network, and --ranks {options['ranks']} of {file} is a table"
            raise InputError(fact, hint="--ranks with one number, of a network")


def show_network(
    file: str, network: Network | None, graph: Graph, setting: Setting, options: Mapping[str, Any], asked: str
) -> None:
    """
    Args:
        asked: the command's options, without those that say what is shown.
    """
    from convgen.explain.planned_ranks import network_help
    from convgen.spec.source import locate

    with progress() as tell:
        try:
            found = network_help(graph, setting, options["ranks"], tell)
        except InputError as error:
            raise locate(error, network.source if network is not None else graph.source_file) from None
    best = found.fastest
    lines = list[str]()
    if best is not None and best.grid is not None:
        lines = _network_lines(file, network, graph.name, best.ranks, best.grid.ranks, options, asked)
    _show(found, lines, options)


def show_layer(file: str, machine: Machine, options: Mapping[str, Any]) -> None:
    """Show the plans of a file's one layer. Raises InputError: the file has several, or an option is for networks."""
    from convgen.explain.planned_ranks import layer_help
    from convgen.spec.reader import read_layers
    from convgen.spec.source import locate

    for name, flag in NETWORKS_ONLY.items():
        if is_given(name):
            raise InputError(f"{flag} is of a network's plan; {file} is a layer's file", hint=f"without {flag}")
    if Path(file).suffix.lower() == ".csv":
        raise InputError(f"{file} is a table of layers, which are planned one at a time", hint="a YAML file of one")
    layers = read_layers(file)
    if len(layers) != 1:
        raise InputError(f"{file} has {len(layers)} layers, which are planned one at a time", hint="a file of one")
    memory = options["memory"] * (1 << 30) if options["memory"] is not None else machine.memory_bytes
    with progress() as tell:
        try:
            found = layer_help(layers[0], machine, options["ranks"], int(memory) if memory else None, tell)
        except InputError as error:
            raise locate(error, layers[0].source) from None
    best, lines = found.fastest, list[str]()
    if best is not None and best.grid is not None:
        grid = ", ".join(f"{axis}: {n}" for axis, n in best.grid.axes)
        lines = [
            f"in {file}: grid: {{{grid}}} and algorithm: auto, without distribution and roles",
            shlex.join(["convgen", "compile", file, "--machine", options["machine"], "-o", "build"]),
            f"torchrun --nproc-per-node {best.ranks} SCRIPT.py   # docs/torch.md; examples/train.py is one",
        ]
    _show(found, lines, options)


def _show(found: Help, lines: list[str], options: Mapping[str, Any]) -> None:
    from convgen.explain.planned_ranks import help_json, help_text, plot_help

    show(options["as_json"], lambda: help_json(found, lines), lambda: help_text(found, lines))
    if options["plot"] is not None:
        plot_help(found, options["plot"])
        click.echo(str(options["plot"]), err=True)


def _network_lines(
    file: str, network: Network | None, name: str, ranks: int, working: int, options: Mapping[str, Any], asked: str
) -> list[str]:
    """The commands from the network to a training script on the ranks that work, by the plan in the table."""
    lines, graph = list[str](), file
    if is_factory(file):
        graph = f"{name}.yaml"
        words = ["convgen", "import", file]
        words += [word for text in options["inputs"] for word in ("--input", text)]
        words += ["--args", options["arguments"]] if options["arguments"] is not None else []
        words += ["--eval"] * bool(options["evaluation"]) + ["-o", graph]
        lines.append(shlex.join(words))
    elif network is not None:
        graph = f"{name}_graph.yaml"
        lines.append(f"convgen import {shlex.quote(file)} -o {graph}")
        for key, flag, usual in (("keep", "--keep", "every"), ("statistics", "--statistics", "local")):
            asked += f" {flag} {usual}" * (options[key] is None)
    plan = f"{name}_{ranks}.yaml"
    return [
        *lines,
        f"convgen plan {shlex.quote(graph)} --ranks {ranks}{asked} -o {plan}",
        f"convgen compile {plan} -o build",
        f"torchrun --nproc-per-node {working} -m convgen bench {plan}   # its step on your ranks: docs/bench.md",
        f"torchrun --nproc-per-node {working} SCRIPT.py   # imports build/{name}: docs/networks.md",
    ]
