"""`convgen import`: a network from PyTorch."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from convgen.commands.completion import files
from convgen.commands.factory import made_by
from convgen.commands.inputs import need
from convgen.commands.outputs import OutputFile
from convgen.commands.progress import progress
from convgen.errors import InputError, Note
from convgen.files import check_file, keep_input, write_file
from convgen.spec.graph import DTYPES
from convgen.spec.names import did_you_mean
from convgen.spec.network_reader import is_network_file
from convgen.spec.source import locate
from convgen.spec.text import number_of, one_line, shown

if TYPE_CHECKING:
    import torch

    from convgen.spec.graph import Graph

_INPUT = re.compile(r"(?:(?![TDHW]=)([^\W\d]\w*)=)?((?:[TDHW]=)?[0-9]+(?:,(?:[TDHW]=)?[0-9]+)*)(?::(\w+))?")


def factory_options(command: Any) -> Any:
    """The options of a factory: its arguments, and its network's inputs."""
    for option in (
        click.option(
            "--eval", "evaluation", is_flag=True, help="In evaluation; by default training, and both where it can."
        ),
        click.option(
            "--args", "arguments", metavar="JSON", help="The factory's: an object by name, or a list by place."
        ),
        click.option(
            "--input", "inputs", multiple=True, metavar="[NAME=]SHAPE[:DTYPE]",
            help="Of an argument of forward, e.g. 8,3,64,64 or t=8:int64. The first extent counts samples; a letter, "
            "T, D, H or W, says that an extent is known at run time only: z=1,4,H=12,W=10.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command("import")
@click.argument("factory", metavar="MODULE:FACTORY|FILE.py:FACTORY|NETWORK", shell_complete=files)
@factory_options
@click.option(
    "--strict", is_flag=True, help="Refuse operators that no row describes, which every rank would run whole."
)
@click.option("-o", "--output", type=OutputFile((".yaml", ".yml")), required=True, metavar="FILE", help="YAML.")
def import_command(
    factory: str, inputs: tuple[str, ...], arguments: str | None, evaluation: bool, strict: bool, output: Path
) -> None:
    """Import a network: the nn.Module that FACTORY gives, a class or function of a Python module or file; or a
    network that a YAML file describes node by node."""
    need("torch", "convgen import traces modules of PyTorch's, and needs it")
    from convgen.explain.graph import graph_text
    from convgen.spec.graph_file import constants_path, write_graph
    from convgen.spec.graph_names import check_names
    from convgen.spec.safetensors import tensors_bytes

    beside = constants_path(output)
    check_file(beside, "-o")
    tensors: dict[str, torch.Tensor] = {}
    if is_network_file(factory):
        graph = _written(factory, inputs or arguments or evaluation)
        keep_input(output, factory, "-o")
    elif ":" not in factory and Path(factory).is_file() and Path(factory).suffix in (".yaml", ".yml", ".csv"):
        fact = f"{factory} has no nodes, as a network that is written by hand"
        raise InputError(fact, hint=f"convgen compile {factory}: layers, graphs and plans are taken as they are")
    else:
        graph, tensors = traced(factory, inputs, arguments, evaluation=evaluation)
    check_names(graph)
    if strict:
        _refuse_whole(graph)
    with progress(f"describing {graph.name}"):
        listing = graph_text(graph)  # it refuses wrong inputs before anything is written
    write_file(output, write_graph(graph), "-o")
    click.echo(listing)
    click.echo(f"wrote {output}")
    if tensors:
        write_file(beside, tensors_bytes(tensors), "-o")
        click.echo(f"wrote {beside}")


def traced(
    factory: str, inputs: Sequence[str], arguments: str | None, *, evaluation: bool
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The network that a factory gives, and the tensors that are its constants.

    Args:
        inputs, arguments: those of --input and --args.
    Raises:
        InputError: there is no such factory, it or its module can't take these, or its network can't be traced.
    """
    from convgen.spec.exported import graph_of

    shapes = [_input(text) for text in inputs]
    positional, named = _arguments(arguments)
    if not shapes:
        raise InputError("--input is missing: the shape of what forward takes", hint="--input 8,3,64,64")
    name = Path(factory).name  # a file is named without its folder, so that the same input gives the same bytes
    # What a person's own code prints goes to stderr, as it is no result of ours.
    with redirect_stdout(sys.stderr), progress(f"importing {name}", prints=True) as tell:

        def remark(text: str) -> None:
            tell("")
            click.echo(text, err=True)

        module = made_by(factory, positional, named)
        tell(f"tracing {name}")
        return graph_of(
            module,
            _examples(shapes),
            name=factory.rpartition(":")[2].rpartition(".")[2],
            source=f"{name} {arguments}" if arguments else name,
            training=not evaluation,
            remark=remark,
            opened=_opened(shapes, module),
        )


def _written(file: str, others: object) -> Graph:
    """The graph of a network written by hand."""
    from convgen.spec.network_graph import read_network_graph

    if others:
        fact = f"{file} says its input, and is of training and evaluation"
        raise InputError(f"--input, --args, --eval: {fact}", hint="without them")
    graph = read_network_graph(file)
    if graph.given:
        fact = f"{graph.name} says how rows are laid out, and a graph's file has no word for that"
        error = InputError(fact, graph.given[0].path, hint=f"convgen compile {file}, or plan, takes it as it is")
        raise locate(error, graph.source_file)
    return graph


def _refuse_whole(graph: Graph) -> None:
    """Refuse operators that run whole. Raises InputError: no row describes an operator."""
    from convgen.explain.program import whole_calls

    found = whole_calls(graph)
    if found:
        notes = tuple(Note("whole", f"{w.op} in {w.module or 'the module'}: {w.bytes:,} bytes") for w in found[:8])
        fact = f"{graph.name} has {number_of(len(found), 'operator')} that no row describes (--strict)"
        raise InputError(fact, notes=notes, hint="without --strict every rank gathers the operands, and computes alike")


class _Given(NamedTuple):
    name: str
    shape: list[int]
    dtype: str
    opened: dict[str, int]  # by letter, the number of its dimension


def _input(text: str) -> _Given:
    found = _INPUT.fullmatch(text.replace(" ", ""))
    if found is None:
        raise InputError(f"--input {shown(text)} is no shape", hint="--input 8,3,64,64, t=8:int64, or z=1,4,H=12,W=10")
    entries = [one.rpartition("=") for one in found[2].split(",")]
    shape, dtype = [int(n[:20]) for _, _, n in entries], found[3] or "float32"
    opened = {letter: d for d, (letter, _, _) in enumerate(entries) if letter}
    if dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES, f"one of {', '.join(DTYPES)}")
        raise InputError(f"--input {text}: dtype can't be {shown(dtype)}", hint=hint)
    if 0 in shape:
        raise InputError(f"--input {text} is empty", hint="extents of 1 or more")
    if len(opened) < sum(bool(letter) for letter, _, _ in entries):
        raise InputError(f"--input {text} has a letter twice", hint="a letter for each open extent")
    return _Given(found[1] or "", shape, dtype, opened)


def _opened(inputs: list[_Given], module: torch.nn.Module) -> dict[str, dict[str, int]]:
    """The open extents by the arguments' names."""
    names = list(inspect.signature(module.forward).parameters)
    each = zip(inputs, names, strict=False)
    return {one.name or name: one.opened for one, name in each if one.opened}


def _examples(inputs: list[_Given]) -> list[torch.Tensor] | dict[str, torch.Tensor]:
    import torch

    try:
        made = [torch.zeros(shape, dtype=getattr(torch, dtype)) for _, shape, dtype, _ in inputs]
    except (RuntimeError, TypeError) as error:  # an extent is too large for memory, or for torch's integers
        fact = f"--input: no such tensor can be made: {one_line(str(error))}"
        raise InputError(fact, hint="the shape of a batch, as forward takes it") from None
    names = [one.name for one in inputs if one.name]
    if not names:
        return made
    if len(names) < len(made) or len(set(names)) < len(names):
        raise InputError("--input: some have a name and some have none, or the same", hint="--input x=8,3 --input t=8")
    return dict(zip(names, made, strict=True))


def _arguments(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    if text is None:
        return [], {}
    try:
        data: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--args is no JSON: {error}", hint="--args '{\"num_classes\": 10}'") from None
    if isinstance(data, list):
        return cast("list[Any]", data), {}
    if isinstance(data, dict):
        return [], cast("dict[str, Any]", data)
    raise InputError(f"--args can't be {shown(data)}", hint="--args '{\"num_classes\": 10}', or a list")
