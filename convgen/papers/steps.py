"""Steps of whole networks: [SP] Tables I to III and Fig. 4, [CF] Table 1 and Figs. 7 and 8.

Networks of examples/networks are compiled on the papers' grids, and a step is simulated (cost/timeline.py) with what
travels while ranks compute. Batch norms have a rank's own statistics. Grids have samples outermost, and a sample's GPUs
next to each other. [CF] splits channels and filters of every layer but those of the first two blocks, where it splits
rows; the layout by price on its grid stands for this. The machine is lassen_lbann, whose constants are fitted to the
first rows of [SP] Tables I to III (fit.py), and to nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.timeline import simulate
from convgen.network_compiler import compile_network
from convgen.papers.figure import Figure, Series, network_file
from convgen.papers.statements import EPOCHS, IMAGES, rows_of
from convgen.program.network import Program
from convgen.spec.network_graph import read_network_graph

SP_TABLES = {1: ("mesh1k", 1), 2: ("mesh2k", 1), 3: ("resnet50", 32)}  # network, samples that share GPUs
ROWS = {1: dict[str, int](), 2: {"H": 2}, 4: {"H": 2, "W": 2}, 8: {"H": 4, "W": 2}, 16: {"H": 4, "W": 4}}
CHANNELS = {1: dict[str, int](), 2: {"H": 2}, 4: {"H": 2, "W": 2}, 8: {"H": 2, "W": 4}}
# No text has the filters of the mesh models; the files assume some. These factors multiply the work, so that the first
# rows of Tables I and II are met (fit.py).
ASSUMED = {"mesh1k": 2.27, "mesh2k": 1.036}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: a step of `samples` on `groups` of `ways` GPUs; `auto`: layouts by price, not by rows."""

    network: str
    samples: int
    groups: int
    ways: int
    auto: bool
    published_s: float

    @property
    def grid(self) -> Grid:
        return Grid((("N", self.groups), *(CHANNELS if self.auto else ROWS)[self.ways].items()))


def machine_of(paper: str, network: str, machine: Machine | None = None) -> Machine:
    """The machine with a paper's all-reduce: [CF] 5 uses rings only; for [SP] V-A's "different algorithms (e.g., ring
    or butterfly)" Rabenseifner's is taken."""
    one = machine or load_machine("lassen_lbann")
    chosen = "ring" if paper == "CF" else "rabenseifner"
    collectives = replace(one.collectives, all_reduce=chosen)
    return replace(one, collectives=collectives, efficiency=one.efficiency / ASSUMED.get(network, 1.0))


def compiled(cell: Cell, machine: Machine) -> Program:
    """The step's program, with what travels while ranks compute."""
    graph = replace(read_network_graph(network_file(cell.network)), batch=cell.samples)
    algorithm = "auto" if cell.auto and cell.ways > 1 else None
    return compile_network(graph, cell.grid, algorithm, machine=machine, statistics="local").program


def step_s(program: Program, machine: Machine) -> float:
    return simulate(program, machine, "float32", alike=True).end_s


@lru_cache(maxsize=512)
def seconds(paper: str, cell: Cell) -> float:
    """Modelled seconds of a step."""
    machine = machine_of(paper, cell.network)
    return step_s(compiled(cell, machine), machine)


# ---------------------------------------------------------------- [SP] Tables I to III, Fig. 4
def sp_cells(table: int, rows: int | None = None) -> Iterator[Cell]:
    """The cells of a table, or of its first rows."""
    network, shared = SP_TABLES[table]
    for row in rows_of("papers", f"sp_table{table}.csv")[:rows]:
        n = int(row["N"])
        for ways, published in row.items():
            if ways != "N" and published:
                yield Cell(network, n, n // shared, int(ways), False, float(published))


def sp_table(table: int, rows: int | None = None) -> Figure:
    """[SP] Tables I, II, III; of the meshes also Fig. 4."""
    cells = list(sp_cells(table, rows))
    by_ways = _series(cells, "GPUs a sample" if table < 3 else "GPUs for 32 samples")
    found: dict[str, float] = {}
    for cell in cells:
        name, first = f"sp.table{table}.{cell.samples}", next(c for c in cells if c.samples == cell.samples)
        found[f"{name}.{cell.ways}"] = seconds("SP", cell)
        if cell.ways != first.ways:
            found[f"{name}.{cell.ways}.speedup"] = seconds("SP", first) / seconds("SP", cell)
    # What the text says of all rows is modelled by those to which nothing is fitted, where there are any.
    held = [c for c in cells if c.samples != cells[0].samples] or cells
    at = {(c.samples, c.ways): seconds("SP", c) for c in held}
    if table < 3:
        gains = [at[n, 4] / at[n, 8] for n, ways in at if ways == 8]
        found[f"sp.vib1.mesh{table}k"] = sum(gains) / len(gains)
    else:
        twos = [at[n, 1] / at[n, 2] for n, ways in at if ways == 2]
        found["sp.vib2.two"] = sum(twos) / len(twos)
        found["sp.vib2.four"] = max(at[n, 1] / at[n, 4] for n, ways in at if ways == 4)
    said = {1: "I, 1K mesh (filters assumed)", 2: "II, 2K mesh (filters assumed)", 3: "III, ResNet-50"}
    remark = f"constants are fitted to the row of {cells[0].samples} samples and its like in the other tables"
    title = f"[SP] Table {said[table]}"
    return Figure(f"sp.table{table}", title, "samples of a mini-batch", "s a step", by_ways, found, (remark,))


def _series(cells: Iterable[Cell], said: str, paper: str = "SP") -> tuple[Series, ...]:
    cells = list(cells)
    found: list[Series] = []
    for ways in dict.fromkeys(c.ways for c in cells):
        mine = [c for c in cells if c.ways == ways]
        modelled = tuple((float(c.samples), seconds(paper, c)) for c in mine)
        found.append(Series(f"{ways} {said}", modelled, tuple((float(c.samples), c.published_s) for c in mine)))
    return tuple(found)


# ---------------------------------------------------------------- [CF] Table 1, Figs. 7 and 8
def cf_cells() -> Iterator[Cell]:
    """Cells of [CF] Table 1 in pairs: samples alone, then the fastest algorithm."""
    for row in rows_of("papers", "cf_table1.csv"):
        n, samples = int(row["N"]), int(row["samples"])
        steps = IMAGES / n * EPOCHS
        for ways, minutes in ((1, "sample"), (int(row["ways"]), "minutes")):
            yield Cell(row["network"], n, n // samples, ways, ways > 1, float(row[minutes]) * 60 / steps)


def cf_table(rows: int | None = None) -> Figure:
    """[CF] Table 1: minutes of 90 epochs."""
    found: dict[str, float] = {}
    series: list[Series] = []
    cells = list(cf_cells())[: None if rows is None else 2 * rows]
    for alone, ours in zip(cells[::2], cells[1::2], strict=True):
        name, minutes = f"cf.table1.{alone.network}", IMAGES / alone.samples * EPOCHS / 60
        found[f"{name}.sample"], found[f"{name}.ways"] = seconds("CF", alone) * minutes, seconds("CF", ours) * minutes
        found[f"{name}.speedup"] = seconds("CF", alone) / seconds("CF", ours)
        both = (alone, ours)
        series.append(
            Series(
                f"{alone.network}, {alone.samples} samples",
                tuple((float(c.ways), seconds("CF", c) * minutes) for c in both),
                tuple((float(c.ways), c.published_s * minutes) for c in both),
            )
        )
    return Figure("cf.table1", "[CF] Table 1, minutes of 90 epochs of ImageNet", "GPUs of a group", "min",
                  tuple(series), found)  # fmt: skip


def cf_scaling(name: str, networks: dict[str, tuple[int, tuple[int, ...]]], rows: int | None = None) -> Figure:
    """[CF] Figs. 7 and 8: weak scaling, samples alone and several ways.

    Args:
        networks: by name, the samples of a group, and its ways.
        rows: how many mini-batches, from the smallest on.
    """
    series: list[Series] = []
    found: dict[str, float] = {}
    for network, (samples, ways) in networks.items():
        groups = (4, 32, 256)[:rows]
        at = {(w, g): Cell(network, g * samples, g, w, w > 1, 0.0) for w in (1, *ways) for g in groups}
        for w in (1, *ways):
            points = tuple((float(at[w, g].samples), seconds("CF", at[w, g])) for g in groups)
            series.append(Series(f"{network}, {w} GPUs a group", points))
        gains = [seconds("CF", at[1, g]) / seconds("CF", at[ways[-1], g]) for g in groups]
        found |= {
            "resnet50": {"cf.fig7.xy": max(gains)}, "wrn50_2": {"cf.fig8.wrn50_2": max(gains)},
            "wrn50_4": {"cf.fig8.wrn50_4.least": min(gains)},
        }[network]  # fmt: skip
    remark = "layouts by price on the paper's grids; the text's numbers are the gains alone"
    return Figure(name, f"[CF] Fig. {name.removeprefix('cf.fig')}, whole networks", "samples of a mini-batch",
                  "s a step", tuple(series), found, (remark,))  # fmt: skip
