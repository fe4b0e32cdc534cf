"""`convgen plan`: lay a network out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convgen.commands.inputs import Finite, parse_grid, statistics_option
from convgen.commands.outputs import OutputFile, Picture, telling
from convgen.errors import InputError
from convgen.files import keep_input, write_file
from convgen.plan.network.collection import without_collection
from convgen.spec.graph_reader import is_graph_file

if TYPE_CHECKING:
    from convgen.algebra.grid import Grid


class PlanFile(OutputFile):
    """A name that `convgen compile` reads as a plan, not as a table."""

    def check_name(self, path: Path, option: str) -> None:
        if path.suffix.lower() == ".csv":
            fact = f"{option}: {path} would be read as a table of layers, and a plan is YAML"
            raise InputError(fact, hint=f"{option} {path.with_suffix('.yaml')}")


@click.command("plan")
@click.argument("file", metavar="NETWORK")
@click.option("--machine", required=True, help="A name in tuning/machines, or a YAML file.")
@click.option("--ranks", required=True, type=click.IntRange(1), help="How many.")
@click.option("--grid", help="Only this grid, e.g. data=4,chan=2; by default grids are searched.")
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), help="Samples of the whole step, instead of the file's.")
@click.option(
    "--memory",
    type=Finite(0, 2**32, min_open=True),
    help="GiB that a rank may take.  [default: what the machine's have]",
)
@click.option("--target", help="Of the layers in plan.yaml.  [default: the machine's name if it is one, else cpu]")
@click.option(
    "--keep", type=click.Choice(("every", "needed")), default="every", show_default=True,
    help="What stays for backward: every output, and an error signal of its size; or what backward reads.",
)  # fmt: skip
@statistics_option
@click.option(
    "--batch-norm", type=click.Choice(("local", "global")), default="local", show_default=True,
    help="Statistics over each rank's own block, or over the whole batch.",
)  # fmt: skip
@click.option("--optimizer-states", type=click.IntRange(0, 8), default=1, show_default=True, help="Values a weight.")
@click.option("--regather", is_flag=True, help="x may be gathered again in backward rather than held.")
@click.option(
    "--recompute",
    is_flag=True,
    help="Backward may compute again: blocks of a PyTorch network; normalisation, ReLU and dropout of one by hand.",
)
@click.option("--hide-dw", is_flag=True, help="Reductions of parameters' gradients take no time, as if all overlapped.")
@click.option(
    "-o", "--output", type=PlanFile(), metavar="FILE", help="Write the plan as YAML, which `convgen compile` takes."
)
@click.option("--overlapped", is_flag=True, help="Of a graph: the shortest step with what travels meanwhile.")
@click.option("--measured", is_flag=True, help="Local kernels as convgen tune measured them on this device.")
@click.option("--explain", metavar="LAYER", help="Print every step of one layer instead of the table.")
@click.option(
    "--plot", type=Picture(), metavar="FILE", help="Draw strong and weak scaling up to these ranks (png, svg, pdf)."
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON.")
@without_collection()
def plan_command(
    file: str,
    machine: str,
    ranks: int,
    grid: str | None,
    batch: int | None,
    memory: float | None,
    target: str | None,
    keep: str,
    statistics: str | None,
    batch_norm: str,
    optimizer_states: int,
    regather: bool,
    recompute: bool,
    hide_dw: bool,
    overlapped: bool,
    measured: bool,
    output: Path | None,
    explain: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Choose the layout of every layer of a network for the least modelled seconds."""
    from convgen.cost.machines import TARGETS, load_machine
    from convgen.plan.network.counted import plan_counted
    from convgen.plan.network.planner import GIB
    from convgen.plan.network.report import check_node, explain_text, plan_json, plan_text
    from convgen.plan.network.sample import sample_parallelism
    from convgen.plan.network.setting import Setting
    from convgen.spec.network_reader import read_network, with_batch
    from convgen.spec.source import locate
    from convgen.spec.target import read_target

    if explain is not None and as_json:
        raise InputError("--explain and --json don't go together", hint="--json alone: it has every step of every node")
    if is_graph_file(file):
        from convgen.commands.plan_graph import plan_graph_file

        given = {"target": target, "regather": regather, "hide_dw": hide_dw, "measured": measured}
        given |= {name: _is_given(name) for name in ("keep", "batch_norm")}
        asked = _grid(grid, ranks)
        plan_graph_file(
            file,
            machine,
            ranks,
            asked,
            batch,
            memory,
            statistics or "global",
            recompute,
            output,
            as_json,
            explain,
            plot,
            overlapped,
            optimizer_states,
            given,
        )
        return
    if overlapped:
        raise InputError(f"--overlapped is of graphs; {file} is written by hand", hint="--hide-dw; convgen import")
    if statistics is not None:
        fact = f"--statistics is of networks from PyTorch; {file} is written by hand"
        raise InputError(fact, hint="--batch-norm local or global")
    if output is not None:
        keep_input(output, file, "-o")
    network = read_network(file)
    if batch is not None:
        network = with_batch(network, batch)
    if explain is not None:
        check_node(network, explain)
    asked = _grid(grid, ranks)
    chosen = load_machine(machine)
    if measured and target is None and chosen.name not in TARGETS:
        raise InputError(
            f"--measured: of which device? Machine {chosen.name} is of {chosen.device or 'some device'}",
            hint="--target cpu, or --target cuda:sm_90, whose kernels convgen tune has measured",
        )
    made_for = read_target(target or (chosen.name if chosen.name in TARGETS else "cpu"))
    known = None
    if measured:
        from convgen.tune.timed import as_measured, timed

        known = timed(made_for, network.dtype)
        chosen = as_measured(chosen, known)
    setting = Setting(
        machine=chosen,
        target=made_for,
        statistics="global" if batch_norm == "global" else "local",
        keep="needed" if keep == "needed" else "every",
        optimizer_states=optimizer_states,
        regather=regather,
        recompute=recompute,
        hide_dw=hide_dw,
        measured=known,
        measured_on=known.memory.device.name if known is not None and known.memory.device is not None else "",
    )
    budget = round(memory * GIB) if memory is not None else None
    try:
        with telling(ranks) as told:
            found = plan_counted(network, setting, ranks, grid=asked, budget_bytes=budget, told=told)
    except InputError as error:
        raise locate(error, network.source) from None
    if explain is not None:
        click.echo(explain_text(found, explain))
    else:
        sample = sample_parallelism(network, setting, ranks)
        click.echo(json.dumps(plan_json(found, sample), indent=1) if as_json else plan_text(found, sample))
    if output is not None:
        from convgen.plan.network.write import plan_yaml

        write_file(output, plan_yaml(found, _command(file)), "-o")
        click.echo(str(output), err=True)
    if plot is not None:
        from convgen.plan.network.plot import plot_scaling

        plot_scaling(network, setting, ranks, budget, plot)
        click.echo(str(plot), err=True)


def _is_given(name: str) -> bool:
    """Whether an option with a default stands in the command."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _command(file: str) -> str:
    """What was asked for, without where the results go."""
    context = click.get_current_context()
    words = ["convgen plan", file]
    for option in context.command.params:
        name = option.name or ""
        if (
            _is_given(name)
            and isinstance(option, click.Option)
            and name not in ("output", "explain", "plot", "as_json")
        ):
            words += [option.opts[0]] if option.is_flag else [option.opts[0], f"{context.params[name]}"]
    return " ".join(words)


def _grid(text: str | None, ranks: int) -> Grid | None:
    """The grid of --grid, checked against --ranks."""
    if text is None:
        return None
    from convgen.spec.placement import build_grid

    grid = build_grid(parse_grid(text, "data=4,chan=2"))
    if grid.ranks != ranks:
        raise InputError(f"--grid {text} has {grid.ranks} ranks, --ranks says {ranks}", hint=f"--ranks {grid.ranks}")
    return grid
