"""`convgen plan`: lay a network out."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from convgen.commands import completion
from convgen.commands.correct import machine_file
from convgen.commands.import_ import factory_options
from convgen.commands.inputs import STATISTICS, Finite, autocast_option, need, parse_grid, reduce_dtype_option
from convgen.commands.outputs import OutputFile, Picture
from convgen.commands.plan_ranks import (
    Counts,
    Ranks,
    is_factory,
    is_given,
    is_layer_file,
    refuse_one_plans,
    show_layer,
    show_network,
)  # fmt: skip
from convgen.commands.progress import progress
from convgen.errors import InputError, Note
from convgen.files import keep_input, write_file
from convgen.spec.graph_reader import is_graph_file
from convgen.spec.network_reader import is_network_file

if TYPE_CHECKING:
    from convgen.algebra.grid import Grid
    from convgen.cost.machine import Machine
    from convgen.explain.planned import Planned
    from convgen.network_compiler import CompiledNetwork
    from convgen.plan.parts import Keep
    from convgen.plan.setting import Setting
    from convgen.program.network import Program
    from convgen.spec.graph import Graph
    from convgen.spec.network import Network
    from convgen.spec.target import Target

GIB = 1 << 30
TRIED_S = 5.0  # of --try, a layout


class PlanFile(OutputFile):
    """A file name that `convgen compile` reads as a plan, not as a table."""

    def check_name(self, path: Path, option: str) -> None:
        if path.suffix.lower() == ".csv":
            fact = f"{option}: {path} would be read as a table of layers, and a plan is YAML"
            raise InputError(fact, hint=f"{option} {path.with_suffix('.yaml')}")


@click.command("plan")
@click.argument("file", metavar="NETWORK|MODULE:FACTORY|FILE.py:FACTORY|LAYER", shell_complete=completion.files)
@factory_options
@click.option(
    "--machine", required=True, shell_complete=completion.machines, help="A name in tuning/machines, or a YAML file."
)
@click.option(
    "--ranks", required=True, type=Ranks(),
    help="How many; or several, e.g. 1,2,4,8: the best plan of each beside samples split alone, and what to type next.",
)  # fmt: skip
@click.option("--grid", help="Only this grid, e.g. data=4,chan=2; by default grids are searched.")
@click.option("--dtype", help="Of the network, its own by default.")
@reduce_dtype_option
@autocast_option
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), help="Samples of the whole step, instead of the file's.")
@click.option(
    "--memory",
    type=Finite(0, 2**32, min_open=True),
    help="GiB that a rank may take.  [default: what the machine's have]",
)
@click.option(
    "--target", shell_complete=completion.targets,
    help="Of the layers of a network by hand, and of --measured.  [default: the machine's name, or cpu]",
)  # fmt: skip
@click.option(
    "--keep", type=click.Choice(("every", "needed")),
    help="What stays for backward: the output of every layer, and an error signal of its size (the default of networks "
    "by hand); or what backward reads (of networks from PyTorch).",
)  # fmt: skip
@click.option(
    "--statistics", "--batch-norm", type=click.Choice(STATISTICS),
    help="Of batch norms: over the whole batch (the default of networks from PyTorch), a sample's ranks, or a rank's "
    "block (of networks by hand).",
)  # fmt: skip
@click.option("--optimizer-states", type=click.IntRange(0, 8), default=1, show_default=True, help="Values a weight.")
@click.option("--regather", is_flag=True, help="x may be gathered again in backward rather than held.")
@click.option("--recompute", is_flag=True, help="Backward may compute blocks of the source's modules again.")
@click.option("--hide-dw", is_flag=True, help="Reductions of parameters' gradients take no time, as if all overlapped.")
@click.option(
    "-o", "--output", type=PlanFile(), metavar="FILE", help="Write the plan as YAML, which `convgen compile` takes."
)
@click.option(
    "--overlapped/--in-order", default=True, show_default=True,
    help="The shortest step with what travels meanwhile, or with everything one after the other.",
)  # fmt: skip
@click.option(
    "--layouts", type=click.IntRange(0, 10**7), default=0, show_default=True, metavar="N",
    help="Look at so many more layouts near the plan found, at a millisecond or a few each.",
)  # fmt: skip
@click.option(
    "--try", "tried", type=click.IntRange(1, 64), metavar="K",
    help="Under a launcher: run the K best distinct layouts in turn, and say which is fastest, and how sure that is.",
)  # fmt: skip
@click.option(
    "--seconds", type=Finite(0, 3600, min_open=True), help=f"Of --try, about, a layout.  [default: {TRIED_S:g}]"
)
@click.option(
    "--correct", is_flag=True, help="With --try: steps of which the machine's file is off are written into it."
)
@click.option(
    "--groups", type=click.IntRange(2, 2**31 - 1), metavar="G",
    help="What if convolutions whose channels and filters divide by G had G groups? ([CF] 8)",
)  # fmt: skip
@click.option("--measured", is_flag=True, help="Local kernels as convgen tune measured them on this device.")
@click.option("--explain", metavar="LAYER", help="Print every step of one layer instead of the table.")
@click.option(
    "--plot", type=Picture(), metavar="FILE",
    help="Draw strong and weak scaling up to these ranks; of several, seconds and memory (png, svg, pdf).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
def plan_command(
    file: str,
    ranks: Counts,
    grid: str | None,
    output: Path | None,
    explain: str | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose the layout of every layer of a network for the least modelled seconds.

    With several numbers of ranks: whether it helps, and on which grid, beside samples split alone; of a layer, too.
    """
    if explain is not None and as_json:
        raise InputError("--explain and --json don't go together", hint="--json alone: it has every step of every node")
    if output is not None:
        keep_input(output, file, "-o")
    shown = {**options, "ranks": ranks, "grid": grid, "output": output, "explain": explain, "plot": plot}
    shown["as_json"] = as_json
    by_factory = is_factory(file)
    if options["correct"] and options["tried"] is None:
        raise InputError("--correct: nothing is measured without --try", hint="--try 3 --correct, under a launcher")
    if (each := options["seconds"]) is not None and options["tried"] is None:
        raise InputError("--seconds: nothing runs without --try", hint=f"--try 3 --seconds {each:g}, under a launcher")
    if options["hide_dw"] and options["overlapped"] and is_given("overlapped"):
        fact = "--overlapped: with --hide-dw sums of parameters' gradients take no time, and all else is in order"
        raise InputError(fact, hint="one of the two")
    from convgen.cost.machines import load_machine

    if not by_factory and (options["inputs"] or options["arguments"] or options["evaluation"]):
        fact = f"--input, --args and --eval are of a factory, and {file} is a file, which says them"
        raise InputError(fact, hint="without them, or FILE.py:FACTORY")
    if len(ranks) > 1:
        refuse_one_plans(file, shown)
    if not by_factory and not is_graph_file(file) and not is_network_file(file) and is_layer_file(file):
        refuse_one_plans(file, shown)
        show_layer(file, load_machine(options["machine"]), shown)
        return
    (count, *others) = ranks
    asked = _grid(grid, count)
    need("torch", "a network's operators are ATen's, which needs torch")
    if by_factory:
        if output is not None:
            raise InputError(f"-o: a plan stands beside its network's file, and {file} is none", hint="convgen import")
        network, graph = None, _of_factory(file, options)
    else:
        network, graph = _read(file, options["batch"], options["dtype"])
    setting, target = _setting(network, graph, options)
    if options["groups"] is not None and output is not None:
        fact = f"-o: with --groups the plan is of another network, whose weights {file} doesn't have"
        raise InputError(fact, hint=f"without -o; or groups of {options['groups']} in the network itself")
    if options["tried"] is not None and not others:
        _try(file, network, graph, setting, shown)
        return
    if others:
        show_network(file, network, graph, setting, shown, _asked())
        return

    from convgen.explain.planned import Planned, WhatIf, planned_json, planned_text
    from convgen.explain.planned_row import check_module, explained_layers
    from convgen.network_compiler import plan_graph
    from convgen.spec.graph_grouped import grouped
    from convgen.spec.source import locate

    if explain is not None:
        check_module(graph, explain)
    what_if = None
    try:
        with progress(f"planning {count} ranks") as tell:

            def told(working: int) -> None:
                tell(f"planning {count} ranks" + f": {working} doing different work" * (working != count))

            compiled, found = plan_graph(graph, count, setting, asked, told)
            if options["groups"] is not None:
                graph, modules = grouped(graph, options["groups"])
                what_if = WhatIf(options["groups"], modules, found.step_s)
                compiled, found = plan_graph(graph, count, setting, asked, told)
    except InputError as error:
        if network is not None:
            error.notes = tuple(_with_line(note, network) for note in error.notes)
        raise locate(error, network.source if network is not None else graph.source_file) from None
    plan = Planned(compiled, found, setting, {} if network is None else _nodes(network, graph), what_if)
    if explain is not None:
        click.echo(explained_layers(plan, explain))
    else:
        click.echo(json.dumps(planned_json(plan), indent=1) if as_json else planned_text(plan))
    if output is not None:
        write_file(output, _plan_file(plan, network, target, file, output), "-o")
        click.echo(str(output), err=True)
    if plot is not None:
        from convgen.explain.planned_scaling import plot_scaling

        with progress() as tell:
            plot_scaling(graph, setting, count, plot, tell)
        click.echo(str(plot), err=True)


def _nodes(network: Network, graph: Graph) -> dict[str, tuple[str, str]]:
    """Names and kinds of a network's nodes, by the modules of its graph."""
    from convgen.spec.network_graph import node_of

    of = {call.module: node_of(network, call.module) for call in graph.calls}
    return {module: (node.name, node.kind) for module, node in of.items() if node is not None}


def _with_line(note: Note, network: Network) -> Note:
    """A note on a layer with its place in the file."""
    from convgen.spec.network_graph import node_of

    node = node_of(network, note.text.split(" ", 1)[0])
    return note if node is None else replace(note, path=node.path)


def _of_factory(file: str, options: dict[str, Any]) -> Graph:
    """The graph of the network that a factory gives."""
    from convgen.commands.import_ import traced
    from convgen.spec.graph_edit import with_dtype
    from convgen.spec.graph_names import check_names

    graph, _ = traced(file, options["inputs"], options["arguments"], evaluation=options["evaluation"])
    check_names(graph)
    if (batch := options["batch"]) is not None:
        graph = _with_batch(graph, batch, file)
    return graph if options["dtype"] is None else with_dtype(graph, options["dtype"])


def _with_batch(graph: Graph, batch: int, file: str) -> Graph:
    if not graph.is_dynamic and batch != graph.batch:
        fact = f"--batch: {file} is of {graph.batch} samples, and no other number"
        raise InputError(fact, hint="import it again")
    return replace(graph, batch=batch)


def _read(file: str, batch: int | None, dtype: str | None) -> tuple[Network | None, Graph]:
    """A network written by hand, if it is one, and its graph."""
    from convgen.spec.graph_edit import with_dtype

    if is_graph_file(file):
        from convgen.spec.graph_file import read_graph

        graph = read_graph(file)
        if batch is not None:
            graph = _with_batch(graph, batch, file)
        return None, graph if dtype is None else with_dtype(graph, dtype)
    from convgen.spec.network_graph import network_graph
    from convgen.spec.network_reader import read_network, with_batch

    network = read_network(file)
    if batch is not None:
        network = with_batch(network, batch)
    graph = replace(network_graph(network, source=Path(file).name), source_file=network.source)
    return (network, graph) if dtype is None else (replace(network, dtype=dtype), with_dtype(graph, dtype))


def _setting(network: Network | None, graph: Graph, options: dict[str, Any]) -> tuple[Setting, Target]:
    """What the plan is to be, from the options, and the target of the layers' modules."""
    from convgen.cost.machines import load_machine
    from convgen.plan.parts import Room
    from convgen.plan.setting import Setting
    from convgen.spec.target import KINDS, read_target

    machine, target = load_machine(options["machine"]), options["target"]
    by_hand = network is not None
    if target is not None and not by_hand and not options["measured"]:
        fact = f"--target is of layers' modules; {graph.name} is from PyTorch, and its plan is of a machine"
        raise InputError(fact, hint=f"--machine here; convgen compile of the plan's file takes --target {target}")
    if options["measured"] and target is None and machine.name not in KINDS:
        raise InputError(
            f"--measured: of which device? Machine {machine.name} is of {machine.device or 'some device'}",
            hint="--target cpu, or --target cuda:sm_90, whose kernels convgen tune has measured",
        )
    if by_hand and options["recompute"]:
        fact = f"--recompute: blocks are modules inside of others, and {graph.name}, written by hand, has none"
        raise InputError(fact, hint="--regather, --keep needed, or a network from PyTorch (convgen import)")
    made_for = read_target(target or (machine.name if machine.name in KINDS else "cpu"))
    dtype = network.dtype if network is not None else None
    if options["measured"]:
        machine = _measured(machine, made_for, dtype or options["dtype"] or "float32")
    memory = options["memory"]
    return Setting(
        machine=replace(machine, hides_gradients=options["hide_dw"]),
        room=Room(
            None if memory is None else round(memory * GIB),
            options["optimizer_states"],
            cast("Keep", options["keep"] or ("every" if by_hand else "needed")),
            options["regather"],
        ),
        statistics=options["statistics"] or ("local" if by_hand else "global"),
        recompute=options["recompute"],
        by_step=options["overlapped"] and not options["hide_dw"],
        layouts=options["layouts"],
        dtype=dtype,
        reduce_dtype=options["reduce_dtype"] or "",
        autocast=options["autocast"] or "",
    ), made_for


def _measured(machine: Machine, target: Target, dtype: str) -> Machine:
    from convgen.tune.timed import as_measured, timed

    return as_measured(machine, timed(target, dtype))


def _plan_file(plan: Planned, network: Network | None, target: Target, file: str, output: Path) -> str:
    """The text of a plan's file: a hand-written network's layers, as in layer files, or a graph's layout."""
    machine, took = plan.setting.machine.name, f"{plan.found.seconds * 1e3:.3f} ms a step"
    if network is not None:
        from convgen.plan.program.layer_files import plan_text

        head = (_command(file), f"{took} of {network.batch} samples, modelled; machine {machine}")
        rest = [one for one in plan.layers if one.product is None and one.redistributes]
        others = [(plan.name(one), plan.kind(one), one.reads, one.stored) for one in rest]
        return plan_text(network, plan.program, target, head, plan.found.memory_bytes, others)
    return _graph_plan(plan.compiled.plain, plan.found.seconds, file, output)


def _graph_plan(program: Program, seconds: float, file: str, output: Path) -> str:
    """The text of a graph's layout, to be stored beside the graph's file."""
    from convgen.plan.program.written import plan_of
    from convgen.spec.network_plan import write_plan

    def beside(name: str) -> str:
        return Path(os.path.relpath(Path(name).absolute(), output.absolute().parent)).as_posix()

    params = click.get_current_context().params
    given = str(params["machine"])
    priced_by = given
    if given.endswith((".yaml", ".yml")) or "/" in given:  # a file's name becomes relative to the plan's
        priced_by = beside(given)
    laid_out = plan_of(program, beside(file), priced_by, seconds)
    return write_plan(replace(laid_out, dtype=params["dtype"] or ""), (_command(Path(file).name),))


def _try(file: str, network: Network | None, graph: Graph, setting: Setting, shown: dict[str, Any]) -> None:
    """Run the layouts of --try; the fastest is the plan that -o writes."""
    from convgen.commands.plan_try import try_plans
    from convgen.spec.graph_file import read_constants
    from convgen.spec.source import locate

    output: Path | None = shown["output"]
    correct = machine_file(shown["machine"]) if shown["correct"] else None
    for name, flag in (("explain", "--explain"), ("plot", "--plot"), ("grid", "--grid"), ("groups", "--groups")):
        if shown[name] is not None:
            raise InputError(f"{flag} is of one modelled plan, and --try runs several", hint=f"without {flag}")
    if output is not None and network is not None:
        fact = f"-o: what --try runs are packages of the whole network, and {file}, by hand, is planned as its layers"
        raise InputError(fact, hint="convgen import of it, and that file")
    tensors = read_constants(file, graph) if network is None and not is_factory(file) else {}

    def write(compiled: CompiledNetwork, seconds: float) -> None:
        assert output is not None
        write_file(output, _graph_plan(compiled.plain, seconds, file, output), "-o")
        click.echo(str(output), err=True)

    try:
        try_plans(
            graph, tensors, shown["ranks"][0], setting, shown["tried"], shown["seconds"] or TRIED_S,
            as_json=shown["as_json"], write=None if output is None else write, correct=correct,
        )  # fmt: skip
    except InputError as error:
        raise locate(error, graph.source_file) from None


# Options that say what is done with a plan, not which plan it is.
SHOWN = ("output", "explain", "plot", "as_json", "tried", "seconds", "correct")


def _command(file: str) -> str:
    """The command that was given, without the options on where results go."""
    return f"convgen plan {shlex.quote(file)}{_asked(SHOWN)}"


def _asked(without: Sequence[str] = (*SHOWN, "ranks", "inputs", "arguments", "evaluation")) -> str:
    """The options as they were given, without some."""
    context, words = click.get_current_context(), ""
    for option in context.command.params:
        name = option.name or ""
        if isinstance(option, click.Option) and is_given(name) and name not in without:
            value = context.params[name]
            flag = (option.opts if value or not option.is_flag else option.secondary_opts)[0]
            words += f" {flag}" if option.is_flag else f" {flag} {shlex.quote(str(value))}"
    return words


def _grid(text: str | None, ranks: int) -> Grid | None:
    """The grid of --grid, checked against --ranks."""
    if text is None:
        return None
    from convgen.spec.placement import build_grid

    grid = build_grid(parse_grid(text, "data=4,chan=2"))
    if grid.ranks != ranks:
        raise InputError(f"--grid {text} has {grid.ranks} ranks, --ranks says {ranks}", hint=f"--ranks {grid.ranks}")
    return grid
