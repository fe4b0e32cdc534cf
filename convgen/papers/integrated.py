"""[INT] Figs. 4 and 6 to 9: AlexNet on a grid of processes, derived from convgen's own schedules.

Each layer is compiled as `integrated` on (N, F), which is Eq. 5, or on (N, H), the domain part of Eq. 6. Each step of
the schedule has its seconds as a sympy expression (convgen/cost/symbolic.py), with Bruck's all-gather and an all-reduce
of 2 lg p messages as in the equations' terms; alpha, beta and the layer's extents are put in. No equation of [INT] is
typed here. Machine: cori_knl (2 us, 6 GB/s); fully connected layers are 1x1 convolutions of 1x1 images.

The paper measured computing, and gives it in pictures alone. Here it is the modelled step of AlexNet with a process's
samples on one process of cori_knl, over the Pr processes that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.symbolic import Expr, axis_size, formulas, symbol, sympy
from convgen.cost.timeline import simulate
from convgen.network_compiler import compile_network
from convgen.papers.figure import Figure, Series, network_file, said_of
from convgen.program.nodes import Convert
from convgen.resources import data_file
from convgen.spec.build import layer_from_dict
from convgen.spec.network_graph import read_network_graph
from convgen.spec.table import read_csv

BATCH = 2048
IMAGES = 1.2e6  # an epoch's
MACHINE = "cori_knl"
PROCESSES = (8, 16, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer of AlexNet: channels and rows of x and y, kernel, stride, padding, groups."""

    name: str
    channels: int
    rows: int
    filters: int
    out_rows: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1

    @property
    def outputs(self) -> int:
        """d_i: activations of a sample, before pooling."""
        return self.filters * self.out_rows**2


@dataclass(frozen=True, slots=True)
class Reading:
    """How the equations are read where the text leaves it open.

    Attributes:
        word_bytes: bytes of a word; beta is per byte. 1 takes beta = 1/6e9 per word, literally.
        grouped: conv2, 4 and 5 have weights in 2 groups, as in the original and in the 61M of [INT] Table 1.
        dx: how large the summed dx is. output: as the layer's own output, for every layer, as factor 3 of Eqs. 2 and 5
            says; unpooled: as the output of the layer before, without its pooling, and none for the first layer;
            input: as the layer's input, and none for the first layer.
        batch: |B|.
        input_layer: sums start at i = 0: the images as a layer without weights.
        halo: one-sided: floor(k/2) rows of one neighbour at stride 1, as Eqs. 4 and 6 have it; exact: what an
            interior rank of the layer exchanges.
    """

    word_bytes: int = 4
    grouped: bool = True
    dx: Literal["output", "unpooled", "input"] = "output"
    batch: int = BATCH
    input_layer: bool = False
    halo: Literal["one-sided", "exact"] = "one-sided"


READINGS = {
    "as said in docs/studies/papers.md": Reading(),
    "beta per word, literally": Reading(word_bytes=1),
    "words of 8 bytes": Reading(word_bytes=8),
    "weights without groups": Reading(grouped=False),
    "sums from i = 0": Reading(input_layer=True),
    "dx as large as the layer before's y": Reading(dx="unpooled"),
    "dx as large as the layer's x": Reading(dx="input"),
    "exact halos": Reading(halo="exact"),
}


@cache
def alexnet() -> tuple[LayerSizes, ...]:
    convs = read_csv(data_file("tuning", "layers", "alexnet.csv"), grid={"N": 1}, algorithm="sample")
    found: list[LayerSizes] = []
    for layer in convs:
        s, conv = layer.conv.spatial[0], layer.conv
        found.append(
            LayerSizes(
                layer.name, conv.channels, s.extent, conv.filters, s.out, s.kernel, s.stride, s.pad_lo, conv.groups
            )
        )
    full = (("fc6", 9216, 4096), ("fc7", 4096, 4096), ("fc8", 4096, 1000))
    return (*found, *(LayerSizes(name, inputs, 1, outputs, 1) for name, inputs, outputs in full))


NAMES = ("N", "C", "F", "H", "W", "Ho", "Wo", "word", "alpha", "beta", "gamma")


@cache
def derived(size: LayerSizes, letter: str) -> dict[str, Callable[..., float]]:
    """Seconds of each collective of the layer's schedule on a grid (N, letter), by its result: functions of NAMES, Pc,
    Pr."""
    symbols = (*(symbol(name) for name in NAMES), axis_size("N"), axis_size(letter))
    return {result: sympy().lambdify(symbols, e) for result, e in expressions(size, letter).items()}


def expressions(size: LayerSizes, letter: str) -> dict[str, Expr]:
    """Seconds of each collective of the layer's schedule, by its result, as sympy expressions."""
    machine = load_machine(MACHINE)
    layer = layer_from_dict(
        {
            "name": size.name, "layer": "conv2d", "input": [BATCH, size.channels, size.rows, size.rows],
            "out_channels": size.filters, "kernel_size": size.kernel, "stride": size.stride, "padding": size.padding,
            "grid": {"N": 2, letter: 4}, "algorithm": "integrated",
        }
    )  # fmt: skip
    schedule = compile_layer(layer, machine=machine).schedule
    table = formulas(schedule, layer.conv, symbol("word"), collectives=machine.collectives)
    found: dict[str, Expr] = {}
    for _, step in schedule.steps():
        if isinstance(step, Convert) and step.kind != "slice":
            seconds = table[step.result].seconds
            assert seconds is not None, "every collective here has a formula"
            found[step.result] = seconds
    return found


def put(found: Callable[..., float], size: LayerSizes, pr: int, pc: int, reading: Reading) -> float:
    """A collective's seconds for a layer's extents on Pr x Pc processes."""
    level = load_machine(MACHINE).levels[0]
    rows, out = size.rows, size.out_rows
    extents = (reading.batch, size.channels, size.filters, rows, rows, out, out)
    return float(found(*extents, reading.word_bytes, level.latency_s, 1 / level.bytes_per_s, 0, pc, pr))


def model_part(size: LayerSizes, before: LayerSizes | None, pr: int, pc: int, reading: Reading) -> float:
    """Eq. 5's first sum: y gathered and dx summed over Pr."""
    if pr == 1:
        return 0.0
    found = derived(size, "F")
    gather = put(found["y"], size, pr, pc, reading)
    if reading.dx != "output" and before is None:
        return gather
    of = {"output": replace(size, channels=size.filters, rows=size.out_rows), "input": size}
    if before is not None:
        of["unpooled"] = replace(size, channels=before.filters, rows=before.out_rows)
    return gather + put(found["dx"], of[reading.dx], pr, pc, reading)


def batch_part(size: LayerSizes, letter: str, pr: int, pc: int, reading: Reading) -> float:
    """Eq. 5's second sum, and Eq. 6's last: dw summed over all that see other samples or rows."""
    if pc * (pr if letter == "H" else 1) == 1:
        return 0.0
    weights = replace(size, channels=size.channels // size.groups) if reading.grouped else size
    return put(derived(size, letter)["dw"], weights, pr, pc, reading)


def halo_part(size: LayerSizes, pr: int, pc: int, reading: Reading) -> float:
    """Eq. 6's third and fourth sums: rows of x in forward and of dy in backward."""
    if pr == 1 or size.kernel == 1:
        return 0.0
    if reading.halo == "exact":
        found = derived(size, "H")
        return sum(put(found[v], size, pr, pc, reading) for v in ("x_halo", "dy_halo") if v in found)
    # The same layer at stride 1, padded by floor(k/2), has halos of floor(k/2) rows of both neighbours: half counts.
    twin = derived(replace(size, stride=1, padding=size.kernel // 2), "H")
    return sum(put(twin[v], size, pr, pc, reading) for v in ("x_halo", "dy_halo")) / 2


def layers(reading: Reading) -> Iterator[tuple[LayerSizes, LayerSizes | None]]:
    """Each layer with the one before it."""
    before: LayerSizes | None = None
    for size in alexnet():
        yield size, before
        before = size


def image_part(pr: int, pc: int, reading: Reading) -> float:
    """The images as layer 0: 3 times its d_0 words, no weights."""
    image = LayerSizes("images", 3, 227, 3, 227)
    no_words = replace(reading, word_bytes=0)
    return model_part(image, None, pr, pc, reading) + batch_part(image, "F", pr, pc, no_words)


def seconds(pr: int, pc: int, domain: frozenset[str], reading: Reading) -> float:
    """Seconds of an iteration's communication; layers of `domain` split rows over Pr, and the others filters."""
    total = image_part(pr, pc, reading) if reading.input_layer else 0.0
    for size, before in layers(reading):
        if size.name in domain:
            total += halo_part(size, pr, pc, reading) + batch_part(size, "H", pr, pc, reading)
        else:
            total += model_part(size, before, pr, pc, reading) + batch_part(size, "F", pr, pc, reading)
    return total


def grids(processes: int) -> Iterator[tuple[int, int]]:
    pr = 1
    while pr <= processes:
        yield pr, processes // pr
        pr *= 2


CONVS = frozenset(f"conv{i}" for i in range(1, 6))


def best(processes: int, domain: frozenset[str], reading: Reading) -> tuple[float, int, int]:
    return min((seconds(pr, pc, domain, reading), pr, pc) for pr, pc in grids(processes))


def best_domain(pr: int, pc: int, reading: Reading) -> frozenset[str]:
    """The convolutions that cost less by rows than by filters: layers don't depend on each other."""
    return frozenset(
        size.name
        for size, before in layers(reading)
        if size.name in CONVS
        and halo_part(size, pr, pc, reading) + batch_part(size, "H", pr, pc, reading)
        <= model_part(size, before, pr, pc, reading) + batch_part(size, "F", pr, pc, reading)
    )


@cache
def computing_s(samples: int) -> float:
    """Modelled seconds of a step of AlexNet on one process."""
    graph, machine = replace(read_network_graph(network_file("alexnet")), batch=samples), load_machine(MACHINE)
    program = compile_network(graph, Grid((("N", 1),)), None, machine=machine).program
    return simulate(program, machine, "float32", alike=True).end_s


def epoch_s(pr: int, pc: int, domain: frozenset[str], reading: Reading) -> float:
    """Seconds of an epoch: what moves, and a process's samples computed by the Pr that share them."""
    each = computing_s(max(1, reading.batch // pc)) / pr
    return IMAGES / reading.batch * (seconds(pr, pc, domain, reading) + each)


def batches() -> Figure:
    """[INT] Fig. 4: an epoch on one process, by mini-batch."""
    at = {b: computing_s(b) * IMAGES / b for b in (2**i for i in range(12))}
    remark = "a roofline never gets slower with more samples; what [INT] measured does above 256"
    return Figure("int.fig4", "[INT] Fig. 4, an epoch of AlexNet on one KNL", "samples of a mini-batch", "s",
                  (Series("cori_knl", tuple((float(b), t) for b, t in at.items())),),
                  {"int.fig4.best": float(min(at, key=lambda b: at[b]))}, (remark,))  # fmt: skip


def scaling(name: str) -> Figure:
    """[INT] Figs. 6 to 9: epochs over the rows of the grid; 8 and 9 with 4 samples a process, which is assumed."""
    domain = CONVS if name in ("fig7", "fig9") else frozenset[str]()
    weak = name in ("fig8", "fig9")
    series: list[Series] = []
    found: dict[str, float] = {}
    remarks = ["assumed: 4 samples a process, as the figure alone says how many"] if weak else list[str]()
    for p in PROCESSES:
        reading = Reading(batch=4 * p if weak else BATCH)
        at = {pr: epoch_s(pr, pc, domain, reading) for pr, pc in grids(p) if pc <= reading.batch}
        series.append(Series(f"{p} processes, {reading.batch} samples", tuple((float(r), t) for r, t in at.items())))
        least = min(at, key=lambda r: at[r])
        told = f"{p} processes: {least}x{p // least} is the best grid, {at[1] / at[least]:.2f} times samples alone"
        moved = min((seconds(pr, pc, domain, reading), pr, pc) for pr, pc in grids(p) if pc <= reading.batch)
        remarks.append(f"{told}; by what moves alone {moved[1]}x{moved[2]}, {moved[0] * 1e3:.3f} ms a step")
        if name == "fig6" and p in (8, 512):
            found[f"int.fig6.best{p}"] = float(least)
    if name == "fig6":
        full = {s.name: s for s in alexnet()}["fc7"]
        by_filters, by_samples = model_part(full, None, 512, 1, Reading()), batch_part(full, "F", 1, 512, Reading())
        found["int.4.ratio"] = by_filters / by_samples
    equation = "6, convolutions by rows" if domain else "5"
    title = f"[INT] {said_of(name)}, an epoch of AlexNet by Eq. {equation}"
    return Figure(f"int.{name}", title, "rows of the grid, Pr", "s", tuple(series), found, tuple(remarks))


def readings_text() -> str:
    """The best grids of 512 processes by each reading of the text, and which convolutions are better by rows."""
    lines = ["ms at P=512       Eq. 5 best      pure batch  Eq. 6 best      reading"]
    for name, reading in READINGS.items():
        t5, pr5, pc5 = best(512, frozenset(), reading)
        t6, pr6, pc6 = best(512, CONVS, reading)
        batch = seconds(1, 512, frozenset(), reading)
        five, six = f"{t5 * 1e3:7.3f} {pr5}x{pc5}", f"{t6 * 1e3:7.3f} {pr6}x{pc6}"
        lines.append(f"{'':18}{five:15} {batch * 1e3:9.3f}   {six:15} {name}")
    for processes in PROCESSES:
        _, pr, pc = best(processes, CONVS, Reading())
        chosen = best_domain(pr, pc, Reading())
        lines.append(f"P={processes:<4} best grid {pr}x{pc}: by rows {', '.join(sorted(chosen))}")
    return "\n".join(lines)
