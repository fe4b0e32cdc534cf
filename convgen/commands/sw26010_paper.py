"""`convgen sw26010 table2|dma|latency`: what [SW] measured, and what the models say."""

from __future__ import annotations

import json
from pathlib import Path

import click

from convgen.commands.inputs import Finite
from convgen.commands.outputs import OutputFile, Picture, draw, show
from convgen.errors import InputError
from convgen.files import write_file


@click.command("table2")
@click.option("--fit", "layers", default="conv1_2,conv4_1", show_default=True, help="Layers to fit the constants to.")
@click.option("--choices", is_flag=True, help="What every choice of two fitted layers gives, instead.")
@click.option("--causes", is_flag=True, help="What each cause in the model is worth, instead.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option(
    "--plot", type=Picture(), metavar="FILE", help="Draw predicted against published times, and the roofline."
)
@click.option(
    "--write",
    type=OutputFile((".json",)),
    metavar="FILE",
    help="Write a rates file with these constants (tuning/sw26010/rates.json).",
)
def table2_command(
    layers: str, choices: bool, causes: bool, as_json: bool, plot: Path | None, write: Path | None
) -> None:
    """Table 2 of swCaffe: constants fitted on two layers, the others predicted."""
    from convgen.sw26010.machine.rates import FITTED, rates_json, taken_rates
    from convgen.sw26010.table2.causes import causes_json, causes_text
    from convgen.sw26010.table2.cells import cells, read_table2, score_of
    from convgen.sw26010.table2.fit import determines, fit, leave_one_layer_out
    from convgen.sw26010.table2.plot import table2_page
    from convgen.sw26010.table2.report import choices_json, choices_text, table2_json, table2_text

    taken = taken_rates()
    if choices or causes:
        if plot is not None or write is not None:
            raise InputError("--choices and --causes print a table alone", hint="without --plot and --write")
        if as_json:
            found = {"choices": choices_json(taken)} if choices else {}
            click.echo(json.dumps({**found, "causes": causes_json(taken)} if causes else found, indent=1))
        else:
            click.echo("\n\n".join([choices_text(taken)] * choices + [causes_text(taken)] * causes))
        return
    chosen = [name.strip() for name in layers.split(",")]
    known = [row.name for row in read_table2()]
    for name in chosen:
        if name not in known:
            raise InputError(f"--fit {name}: no layer of Table 2", hint=f"of {', '.join(known)}")
    everything = cells(taken)
    fitted = [cell for cell in everything if set(cell.layers) & set(chosen)]
    if not determines(fitted):
        fact = f"--fit {layers}: no cells of these layers say what all of {', '.join(FITTED)} are"
        raise InputError(fact, hint="--fit conv1_2,conv4_1")
    constants = fit(fitted)
    left_out = score_of(leave_one_layer_out(everything))
    given = taken, constants, chosen, left_out
    show(as_json, lambda: table2_json(*given), lambda: table2_text(*given))
    draw(plot, lambda: table2_page(taken, constants, chosen))
    if write is not None:
        write_file(write, rates_json(constants, chosen), "--write")
        click.echo(str(write), err=True)


@click.command("dma")
@click.option("--emit", type=click.Choice(["continuous", "strided"]), help="Print the program that moves 256 B blocks.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw bandwidth against size.")
def dma_command(emit: str | None, as_json: bool, plot: Path | None) -> None:
    """DMA bandwidth of a core group by size ([SW] Figure 2)."""
    from convgen.sw26010.machine.dma import Moves, moves_program
    from convgen.sw26010.machine.dma_report import dma_page, dma_rows, dma_text

    if emit is not None:
        click.echo(moves_program(Moves(256, emit == "strided")), nl=False)
        return
    rows = dma_rows()
    show(as_json, lambda: {"rows": rows}, lambda: dma_text(rows))
    draw(plot, lambda: dma_page(rows))
    if not all(row["run_equal"] for row in rows):
        raise SystemExit(1)


@click.command("latency")
@click.option("--latency", type=Finite(0), default=1e-6, show_default=True, help="alpha, seconds a message.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw bandwidth and latency against size.")
def latency_command(latency: float, as_json: bool, plot: Path | None) -> None:
    """Messages between two nodes by size ([SW] Figure 6)."""
    from convgen.sw26010.allreduce.cost import Network
    from convgen.sw26010.allreduce.latency import latency_page, latency_rows, latency_text

    network = Network(1024, 256, latency_s=latency)
    rows = latency_rows(network)
    show(as_json, lambda: {"rows": rows}, lambda: latency_text(network))
    draw(plot, lambda: latency_page(network))
    if not all(row["run_equal"] for row in rows):
        raise SystemExit(1)
