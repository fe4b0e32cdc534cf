"""`convgen calibrate`: run on every rank by a launcher; rank 0 prints and writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from convgen.commands.inputs import Finite, need
from convgen.commands.launched import refused_once
from convgen.errors import InputError

LAUNCH = "torchrun --nproc-per-node=2 -m convgen.cli calibrate -o machine.yaml"


@click.command("calibrate")
@click.option("-o", "--output", required=True, metavar="FILE", help="The machine file that is written (.yaml).")
@click.option("--name", help="The machine's name in the file.  [default: the file's]")
@click.option(
    "--seconds", type=Finite(min=1), default=30.0, show_default=True,
    help="Of measuring, about; sizes stop growing when time runs short.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), help="cuda: HIP's too.  [default: cuda where torch sees a GPU]"
)
@click.option(
    "--quantile", type=click.FloatRange(0, 1), default=0.5, show_default=True,
    help="Of repeats, what counts; 0: the fastest, what nothing else delays.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Everything measured as JSON.")
def calibrate_command(
    output: str, name: str | None, seconds: float, device: str | None, quantile: float, as_json: bool
) -> None:
    """Measure the links and the ranks of the machine it runs on, and write them as a machine file.

    Every rank runs it:

      torchrun --nproc-per-node=2 -m convgen.cli calibrate -o machine.yaml
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 2:
        raise InputError(
            "convgen calibrate measures between ranks, and this is one process alone",
            hint=f"{LAUNCH}: as many ranks a node as training has",
        )
    need("torch", "calibrating runs torch.distributed")
    import torch

    from convgen.calibrate.report import report_json, report_text
    from convgen.calibrate.run import calibrate
    from convgen.calibrate.team import joined
    from convgen.calibrate.write import write_machine

    path = Path(output)
    with refused_once(), joined(device or ("cuda" if torch.cuda.is_available() else "cpu"), quantile) as team:
        first = team.rank == 0
        found = calibrate(
            team, name or path.stem, path, seconds, lambda line: click.echo(line, err=True) if first else None
        )
    if first:
        write_machine(found, path)
        click.echo(json.dumps(report_json(found, output), indent=1) if as_json else report_text(found))
        click.echo(output, err=True)
