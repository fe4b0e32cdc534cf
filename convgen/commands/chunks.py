"""`convgen chunks`: what of a file each rank reads, and which of its chunks straddle."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import click

from convgen.commands import completion
from convgen.commands.inputs import need
from convgen.commands.networks import are_graphs, compile_graphs
from convgen.commands.one_row import compile_one_rows
from convgen.commands.outputs import show
from convgen.errors import InputError


@click.command("chunks")
@click.argument("array", metavar="FILE[::NAME]", shell_complete=completion.files)
@click.argument("file", metavar="NETWORK", shell_complete=completion.files)
@click.option("--grid", shell_complete=completion.grids, help="Axes and ranks, e.g. N=2,H=2; a plan says its own.")
@click.option(
    "--algorithm", shell_complete=completion.algorithms,
    help="A named algorithm, or auto; by default that of the grid's letters.",
)  # fmt: skip
@click.option("--machine", shell_complete=completion.machines, help="What `--algorithm auto` models.")
@click.option("--schedule", metavar="FILE", help="A network's program as compile prints it, or edited.")
@click.option("--value", metavar="NAME", help="Which input or output the array is; the only input by default.")
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), help="Samples of a batch, instead of the network's.")
@click.option("--halo", is_flag=True, help="Read with the rows around a block that its readers want.")
@click.option(
    "--dims", metavar="D,...", help="The array's dimensions in the file's order, as of convgen.data.open: new,2,1,0."
)
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def chunks_command(
    array: str, file: str, value: str | None, batch: int | None, halo: bool, dims: str | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Of an array in a file, each rank's region, the chunks that it reads of it, and which lie in several blocks.

    The array is of samples, of which the first batch is looked at, or is one sample. A NETWORK may be a layer's file.
    """
    need("torch", "a network's operators are ATen's, which needs torch")
    from convgen.data import open as opened
    from convgen.data.chunks import straddling
    from convgen.explain.chunks import chunks_json, chunks_text
    from convgen.verify.regions import regions_of

    path, found, name = array.rpartition("::")
    path, name = (path, name) if found and "://" not in name else (array, None)  # a URL of fsspec's may have its own ::
    data = opened(path, name, dims=_dims(dims))
    shape, chunks = data.shape, data.chunks
    how: dict[str, Any] = {"target": None, "dtype": None, **options}
    several = compile_graphs([file], **how) if are_graphs([file]) else compile_one_rows([file], **how)
    if len(several) != 1:
        raise InputError(
            f"{file} has {len(several)} layers, and this command takes one at a time", hint="a file of one layer"
        )
    compiled = several[0].compiled
    inputs = [v.name for v in compiled.graph.inputs]
    if value is None and len(inputs) != 1:
        raise InputError(f"{file} has {len(inputs)} inputs", hint=f"--value, one of {', '.join(inputs)}")
    pattern, count, blocks = regions_of(compiled, value or inputs[0], batch)
    of_one = len(shape) == len(pattern) - 1
    if [*shape][0 if of_one else 1 :] != [*pattern[1:]]:
        fact = f"{data} has shape {list(shape)}, and {value or inputs[0]} is {list(pattern)}"
        raise InputError(fact, hint="an array of samples, or of one; --dims, where its dimensions are others")
    if of_one or shape[0] < count:
        _, count, blocks = regions_of(compiled, value or inputs[0], 1 if of_one else shape[0])
    reads = regions_of(compiled, value or inputs[0], count, halo=True)[2] if halo else blocks
    if of_one:  # ranks that don't hold this sample read nothing
        none = (slice(0, 0),) * len(shape)
        blocks, reads = ([r[1:] if r[0].stop > r[0].start else none for r in those] for those in (blocks, reads))
    looked = straddling(shape if of_one else (count, *shape[1:]), chunks, data.dtype.itemsize, reads, blocks)
    if not of_one and count < shape[0]:  # the next batch's beginning is a border, too
        looked = replace(looked, serving=(gcd(looked.serving[0], count), *looked.serving[1:]))
    what = f"{data.dtype}{list(shape)}" + (f" in chunks of {list(chunks)}" if chunks else "")
    batches = "a sample" if of_one else f"a batch of {count}"
    title = f"{data}: {what}; {value or inputs[0]} of {compiled.graph.name} on {compiled.program.grid}, {batches}"
    show(as_json, lambda: chunks_json(title, looked), lambda: chunks_text(title, looked))


def _dims(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    try:
        return tuple(None if part.strip() == "new" else int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--dims {text}", hint="dimensions of the file, and new, e.g. new,2,1,0") from None
