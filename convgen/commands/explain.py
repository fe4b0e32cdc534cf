"""`convgen explain`: the algorithm of a layer or a network in words, numbers and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from convgen.commands import completion
from convgen.commands.inputs import compile_files, layer_options, overlap_option, schedule_options
from convgen.commands.networks import are_graphs, compile_one, explain_network
from convgen.commands.outputs import Picture
from convgen.errors import InputError


@click.command("explain")
@click.argument("file", shell_complete=completion.files)
@click.option(
    "--plot",
    type=Picture(),
    metavar="FILE",
    help="Draw who owns and needs what, and the steps as lanes; of a network every module, what it holds and moves "
    "(png, svg, pdf).",
)
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--row", metavar="NAME", help="Of a network: every step of this row, with elements, bytes and formula.")
@overlap_option
@schedule_options
@layer_options
def explain_command(
    file: str, plot: Path | None, as_json: bool, row: str | None, overlap: bool, **options: Any
) -> None:
    """Roles, schedule, and per step its elements, bytes, seconds and formula."""
    if are_graphs([file]) or overlap:
        one = compile_one(file, overlap=overlap, **options)
        if row is not None:
            if as_json or plot is not None:
                flag = "--json" if as_json else "--plot"
                raise InputError(f"{flag} is of the whole network, and --row {row} of one row", hint="one of the two")
            from convgen.explain.row import row_text

            click.echo(row_text(one.compiled, row))
            return
        explain_network(one, plot, as_json)
        return
    if row is not None:
        raise InputError(f"--row is of networks, {file} is a layer", hint="without --row; or --overlap, as a network")
    from convgen.explain.text import cost_json, explain_text

    all_compiled = compile_files([file], **options)
    if plot is not None:
        from convgen.explain.plot import check_plot

        if len(all_compiled) != 1:
            fact = f"--plot draws one layer, {file} has {len(all_compiled)}"
            raise InputError(fact, hint="a YAML file of one layer")
        check_plot(all_compiled[0])
    if as_json:
        click.echo(json.dumps([cost_json(c) for c in all_compiled], indent=1))
    else:
        click.echo("\n".join(explain_text(c) for c in all_compiled))
    if plot is not None:
        from convgen.explain.plot import plot as draw

        draw(all_compiled[0], plot)
        click.echo(str(plot), err=True)
