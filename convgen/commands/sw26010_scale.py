"""`convgen sw26010 ...` beyond one core group: nodes, supernodes and disks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen.commands import completion
from convgen.commands.inputs import Finite, need
from convgen.commands.outputs import Picture, draw, show
from convgen.errors import InputError

if TYPE_CHECKING:
    from convgen.sw26010.training.layers import Layers

MOST = 2**31 - 1  # bytes
MOST_NODES = 2**16  # its messages take 30 s to emulate
MOST_BATCH = 2**20
MOST_PROCESSES = 2**13  # its readers take a second to emulate


@click.command("allreduce")
@click.option(
    "--nodes", type=click.IntRange(max=MOST_NODES), default=1024, show_default=True, help="p, a power of two."
)
@click.option("--supernode", default=256, show_default=True, help="q, nodes in a supernode.")
@click.option(
    "--bytes",
    "total_bytes",
    type=click.IntRange(max=MOST),
    default=100_000_000,
    show_default=True,
    help="n, of float32 elements.",
)
@click.option("--latency", type=Finite(0), default=1e-6, show_default=True, help="alpha, seconds a message.")
@click.option(
    "--bandwidth",
    type=Finite(1e-300, 1e300),
    default=12e9,
    show_default=True,
    help="1 / beta1, bytes a second inside a supernode.",
)
@click.option(
    "--oversubscription",
    type=Finite(1e-300, 1e300),
    default=4.0,
    show_default=True,
    help="beta2 / beta1; the paper's text has 1/4.",
)
@click.option("--gamma", type=Finite(0), default=0.0, show_default=True, help="Seconds to add a byte.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw the bytes that cross supernodes in each step.")
def allreduce_command(
    nodes: int, supernode: int, total_bytes: int, latency: float, bandwidth: float, oversubscription: float,
    gamma: float, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Recursive halving and doubling on supernodes: adjacent against round-robin numbers, Equations 2-6."""
    from convgen.sw26010.allreduce.cost import Network
    from convgen.sw26010.allreduce.plot import all_reduce_page
    from convgen.sw26010.allreduce.report import all_reduce_json, all_reduce_text

    if bandwidth <= 0:
        raise InputError(f"--bandwidth {bandwidth} would let nothing arrive")
    network = Network(nodes, supernode, latency, 1 / bandwidth, oversubscription / bandwidth, gamma)
    if total_bytes < 4 or total_bytes % 4:
        hint = f"--bytes {max(4, total_bytes // 4 * 4)}"
        raise InputError(f"--bytes {total_bytes} is no number of float32 elements", hint=hint)
    elements = total_bytes // 4
    show(as_json, lambda: all_reduce_json(network, elements), lambda: all_reduce_text(network, elements))
    draw(plot, lambda: all_reduce_page(network, elements))


@click.command("io")
@click.option(
    "--processes", default="1,4,16,64,256,1024", show_default=True, metavar="N,...", help="That read at once."
)
@click.option("--batch", type=click.IntRange(1, 2**20), default=256, show_default=True, help="Images of a read.")
@click.option("--arrays", type=click.IntRange(1, 4096), default=32, show_default=True, help="Disk arrays.")
@click.option("--stripe", type=click.IntRange(1, 2**20), default=256, show_default=True, help="MiB of a stripe.")
@click.option(
    "--array-bandwidth", type=Finite(1.0, 1e15), default=2.5e9, show_default=True,
    help="Bytes a second of an array; assumed, [SW] gives none.",
)  # fmt: skip
@click.option("--link", type=Finite(1.0, 1e15), default=12e9, show_default=True, help="Bytes a second of a process.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of where they start.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw bandwidth against processes.")
def io_command(
    processes: str, batch: int, arrays: int, stripe: int, array_bandwidth: float, link: float, seed: int,
    as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Processes that read mini-batches at once: one disk array against stripes over many ([SW] 5.2)."""
    from convgen.sw26010.storage.plot import io_page
    from convgen.sw26010.storage.reading import Disks
    from convgen.sw26010.storage.report import Question, io_json, io_text
    from convgen.sw26010.storage.striping import MIB, Striping

    counts = numbers("--processes", processes, MOST_PROCESSES)
    question = Question(Striping(arrays, stripe * MIB), Disks(array_bandwidth, link), batch, seed)
    show(as_json, lambda: io_json(question, counts), lambda: io_text(question, counts))
    draw(plot, lambda: io_page(question, counts))


@click.command("network")
@click.argument("files", nargs=-1, required=True, metavar="NETWORK...")
@click.option("--batch", metavar="N,...", help="Samples of a node.  [default: the paper's, or the file's]")
@click.option("--nodes", type=click.IntRange(1, MOST_PROCESSES), default=1, show_default=True, help="A power of two.")
@click.option(
    "--plans", type=click.Choice(["model", "explicit", "caffe"]), default="model", show_default=True,
    help="Of convolutions: the faster by the model, or explicit alone; caffe: all layers as in the public profiles.",
)  # fmt: skip
@click.option("--layers", is_flag=True, help="And every layer.")
@click.option(
    "--grid", shell_complete=completion.grids,
    help="Of nodes and core groups, e.g. M=2,N=4: a step of the compiled network instead, row by row.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option(
    "--plot",
    type=Picture(),
    metavar="FILE",
    help="Draw speedups and shares of communication up to --nodes; with --grid the first network's step by row.",
)
def network_command(
    files: tuple[str, ...], batch: str | None, nodes: int, plans: Any, layers: bool, grid: str | None, as_json: bool,
    plot: Path | None,
) -> None:  # fmt: skip
    """A training step of whole networks on nodes of four core groups, beside [SW] Table 3 and 6.3.

    NETWORK is a network file, or a graph that `convgen import` wrote.
    """
    from convgen.sw26010.training.plot import scaling_page
    from convgen.sw26010.training.report import network_json, network_text

    if grid is not None:
        if batch is not None or nodes != 1 or plans != "model" or layers:
            fact = "--grid says nodes, and compiles the file's own samples by the model, every layer"
            raise InputError(fact, hint="--grid M=2,N=4 alone, or with --json, --plot")
        _compiled_steps(files, grid, as_json, plot)
        return
    batches = [] if batch is None else numbers("--batch", batch, MOST_BATCH)
    networks = [_layers_of(file, batches) for file in files]
    given = networks, batches, nodes, plans
    show(as_json, lambda: network_json(*given, layers=layers), lambda: network_text(*given, layers=layers))
    draw(plot, lambda: scaling_page(*given))


def _compiled_steps(files: Sequence[str], grid: str, as_json: bool, plot: Path | None) -> None:
    from convgen.commands.networks import compile_graphs, echo_kernels
    from convgen.sw26010.training.compiled import compiled_step
    from convgen.sw26010.training.compiled_plot import step_page

    found = compile_graphs(files, grid=grid, algorithm=None, dtype=None, target="sw26010")
    echo_kernels(found, as_json)
    one = found[0].compiled
    draw(plot, lambda: step_page(compiled_step(one.program, one.graph.modes, one.graph.batch)))


@click.command("table3")
@click.argument("files", nargs=-1, required=True, metavar="NETWORK...")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def table3_command(files: tuple[str, ...], as_json: bool) -> None:
    """[SW] Table 3: what the data sheets of its three processors allow, beside its numbers.

    NETWORK is a network file of alexnet_bn, vgg16, vgg19, resnet50 or googlenet.
    """
    from convgen.sw26010.training.processors import table3_rows, table3_text

    networks = [_layers_of(file, []) for file in files]
    show(as_json, lambda: {"rows": table3_rows(networks)}, lambda: table3_text(networks))


@click.command("profile")
@click.argument("files", nargs=-1, required=True, metavar="NETWORK...")
@click.option("--convolutions", is_flag=True, help="And every shape of convolution.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw the first network's milliseconds by kind of layer.")
def profile_command(files: tuple[str, ...], convolutions: bool, as_json: bool, plot: Path | None) -> None:
    """Public profiles of swCaffe's layers beside the mesh's programs, and beside Caffe's own layers as counted.

    NETWORK is a network file of alexnet_bn, vgg16, googlenet or resnet50.
    """
    from convgen.sw26010.training.profile_report import compare, profile_json, profile_page, profile_text

    compared = [compare(file) for file in files]
    how = {"convolutions": convolutions}
    show(as_json, lambda: profile_json(compared, **how), lambda: profile_text(compared, **how))
    draw(plot, lambda: profile_page(compared[0]))


@click.command("packing")
@click.argument("files", nargs=-1, required=True, metavar="NETWORK...")
@click.option("--batch", metavar="N,...", help="Samples of a node.  [default: the paper's, or the file's]")
@click.option("--nodes", default="1024", show_default=True, metavar="P,...", help="Powers of two.")
@click.option("--latency", type=Finite(0), default=1e-6, show_default=True, help="alpha, seconds a message.")
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
@click.option("--plot", type=Picture(), metavar="FILE", help="Draw milliseconds against the size of packs.")
def packing_command(
    files: tuple[str, ...], batch: str | None, nodes: str, latency: float, as_json: bool, plot: Path | None
) -> None:
    """One all-reduce of all gradients against one a layer, and packs between ([SW] 5.1)."""
    from convgen.sw26010.training.packing_report import packing_json, packing_page, packing_text, paper_batch

    batches = [] if batch is None else numbers("--batch", batch, MOST_BATCH)
    counts = numbers("--nodes", nodes, MOST_NODES)
    networks = [_layers_of(file, batches) for file in files]
    given, batch_drawn = (networks, batches, counts, latency), (batches or [paper_batch(networks[0])])[0]
    show(as_json, lambda: packing_json(*given), lambda: packing_text(*given))
    draw(plot, lambda: packing_page(networks[0], batch_drawn, counts[-1], latency))


def _layers_of(file: str, batches: list[int]) -> Layers:
    from convgen.spec.graph_reader import is_graph_file, read_graph
    from convgen.spec.network_reader import read_network
    from convgen.sw26010.training.of_graph import layers_of_graph, layers_of_network

    need("torch", "a network's operators are ATen's, which needs torch")
    if is_graph_file(file):
        graph = read_graph(file)
        return layers_of_graph(graph, batches[0] if batches and graph.is_dynamic else graph.batch)
    return layers_of_network(read_network(file))


def numbers(option: str, text: str, most: int) -> list[int]:
    """The whole numbers from 1 in a text with commas. Raises InputError: the text is something else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 20 and 1 <= int(part) <= most for part in parts):
        raise InputError(f"{option} {text}: whole numbers from 1 to {most}, between commas", hint=f"{option} 1,16,256")
    return [int(part) for part in parts]
