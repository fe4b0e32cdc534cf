"""`convgen simulate`: a step of training in time, on a machine that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from convgen.commands import completion
from convgen.commands.inputs import autocast_option, reduce_dtype_option
from convgen.commands.networks import are_graphs, compile_graphs
from convgen.commands.one_row import NOTE, compile_one_rows
from convgen.commands.outputs import OutputFile, Picture
from convgen.errors import InputError
from convgen.files import write_file


@click.command("simulate")
@click.argument("file", shell_complete=completion.files)
@click.option(
    "--machine", required=True, shell_complete=completion.machines, help="A name in tuning/machines, or a YAML file."
)
@click.option("--grid", shell_complete=completion.grids, help="Axes and ranks, e.g. N=2,H=2; a plan says its own.")
@click.option(
    "--algorithm", shell_complete=completion.algorithms,
    help="A named algorithm, or auto; by default that of the grid's letters.",
)  # fmt: skip
@click.option("--dtype", help="Of the network, its own by default.")
@click.option(
    "--target",
    shell_complete=completion.targets,
    help="What the program is for; sw26010 packs all gradients ([SW] 5.1).",
)
@reduce_dtype_option
@autocast_option
@click.option("--schedule", metavar="FILE", help="A network's program as compile prints it, or edited.")
@click.option(
    "--links",
    type=click.Choice(("shared", "each")),
    default="shared",
    show_default=True,
    help="Whether collectives that travel at the same time share a rank's link, or have one each.",
)
@click.option("--trace", "trace_file", type=OutputFile(), metavar="FILE", help="Trace events, for ui.perfetto.dev.")
@click.option("--plot", type=Picture(), metavar="FILE", help="The same as a picture (png, svg, pdf).")
@click.option("--measured", metavar="TRACE", help="A step that torch.profiler recorded, laid beside the simulated one.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def simulate_command(
    file: str,
    machine: str,
    target: str | None,
    links: str,
    trace_file: Path | None,
    plot: Path | None,
    measured: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A network's step of training in time: what is hidden, the critical path, where the time goes.

    A layer's file is a network of one row, as `compile --overlap` makes it; its step has the input's gradient, too.
    """
    from convgen.cost.machines import load_machine
    from convgen.cost.timeline import simulate
    from convgen.explain.measured import measured_text, read_measured
    from convgen.explain.timeline import timeline_json, timeline_text, trace

    recorded = None if measured is None else read_measured(Path(measured))
    if recorded is not None and as_json:
        raise InputError("--measured is compared in the text, not in JSON", hint="without --json")
    chosen = load_machine(machine)
    modelled = machine if options["schedule"] is None else None  # a schedule's text already says what travels meanwhile
    of_inputs = not are_graphs([file])
    if of_inputs:
        several = compile_one_rows([file], target=target, machine=modelled, **options)
        if len(several) != 1:
            raise InputError(
                f"{file} has {len(several)} layers: one is simulated at a time", hint="a file of one layer"
            )
        one = several[0]
    else:
        (one,) = compile_graphs([file], target=target, machine=modelled, **options)
    program, dtype = one.compiled.program, one.compiled.dtype
    share: Any = links
    found = simulate(program, chosen, dtype, links=share, of_inputs=of_inputs)
    plain = simulate(one.compiled.plain, chosen, dtype, links=share, of_inputs=of_inputs)
    title = f"{program.name} on {program.grid}, {chosen.name}, {one.compiled.types}: a step of training"
    title += f", {NOTE}" * of_inputs
    page = None
    if plot is not None:
        from convgen.explain.timeline_plot import draw_timeline

        page = draw_timeline(title, found)
    if trace_file is not None:
        write_file(trace_file, trace(program.name, found), "--trace")
    click.echo(json.dumps(timeline_json(found, plain), indent=1) if as_json else timeline_text(title, found, plain))
    if recorded is not None:
        click.echo(f"\n{measured_text(found, recorded)}")
    if page is not None and plot is not None:
        page.save(plot)
    for path in (trace_file, plot):
        if path is not None:
            click.echo(str(path), err=True)
