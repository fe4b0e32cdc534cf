"""`convgen network`: look at a network."""

from __future__ import annotations

import json

import click

from convgen.commands import completion
from convgen.errors import InputError


@click.command("network")
@click.argument("file", metavar="NETWORK", shell_complete=completion.files)
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), help="Samples, instead of the file's.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
def network_command(file: str, batch: int | None, as_json: bool) -> None:
    """A table of a network's nodes: shapes, weights, size of outputs, flops; of an imported one, its operators."""
    from convgen.explain.network import network_json, network_text
    from convgen.spec.graph_reader import is_graph_file
    from convgen.spec.network_reader import read_network, with_batch

    if is_graph_file(file):
        _list_graph(file, batch, as_json)
        return
    network = read_network(file)
    if batch is not None:
        network = with_batch(network, batch)
    click.echo(json.dumps(network_json(network), indent=1) if as_json else network_text(network))


def _list_graph(file: str, batch: int | None, as_json: bool) -> None:
    from convgen.explain.graph import graph_json, graph_text
    from convgen.spec.graph_file import read_graph
    from convgen.spec.source import locate

    graph = read_graph(file)
    if batch is not None:
        if not graph.is_dynamic and batch != graph.batch:
            raise InputError(f"--batch: {graph.name} is for {graph.batch} samples", hint="import it for another number")
        graph = graph.at(batch)
    try:
        told = json.dumps(graph_json(graph), indent=1) if as_json else graph_text(graph)
    except InputError as error:
        raise locate(error, graph.source_file) from None
    click.echo(told)
