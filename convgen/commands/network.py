"""`convgen network`: look at a network."""

from __future__ import annotations

import json

import click


@click.command("network")
@click.argument("file", metavar="NETWORK")
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), help="Samples, instead of the file's.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
def network_command(file: str, batch: int | None, as_json: bool) -> None:
    """A table of a network's nodes: shapes, weights, size of outputs, flops."""
    from convgen.explain.network import network_json, network_text
    from convgen.spec.network_reader import read_network, with_batch

    network = read_network(file)
    if batch is not None:
        network = with_batch(network, batch)
    click.echo(json.dumps(network_json(network), indent=1) if as_json else network_text(network))
