"""The published times of [SP] Tables I-III and [CF] Table 1 beside what the model says, hits and misses as they are.

    python bench/papers.py cf --rows 3             # [CF] Table 1
    python bench/papers.py sp1 sp2 sp3             # [SP] Tables I, II, III: the first row of each
    python bench/papers.py cf sp1 sp2 sp3 --rows 9 --brief --plot docs/studies/model.png    # half an hour
    python bench/papers.py choice                  # stationary-x or -y, layer by layer

Published numbers: tuning/papers. Machine: lassen, as its file has it; nothing is fitted. The networks of
examples/networks are whole programs on the papers' grids, and a step is simulated (cost/timeline.py): "plain" with
every collective waited for at once, "overlapped" with what the timeline takes (buckets, halos behind interiors,
chunks). Batch norms have a rank's own statistics. Grids: samples outermost, a sample's GPUs next to each other, its
rows and columns 1x2, 2x2, 4x2, 4x4. [CF]'s ways in channels and filters are those of every layer but the first two
blocks, where rows are split: the layout by price (algorithm auto) on the paper's grid stands for them. The mesh models'
filters are assumed, so only their speedups mean anything.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import ScheduleCost, schedule_cost
from convgen.cost.timeline import simulate
from convgen.network_compiler import compile_network
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.network_graph import read_network_graph
from convgen.spec.reader import read_csv

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "networks"
NETWORKS = {"sp1": ("mesh1k", 1), "sp2": ("mesh2k", 1), "sp3": ("resnet50", 32)}  # and samples that share GPUs
TABLES = ("cf", *NETWORKS)
IMAGES, EPOCHS = 1281167, 90
ROWS = {1: {}, 2: {"H": 2}, 4: {"H": 2, "W": 2}, 8: {"H": 4, "W": 2}, 16: {"H": 4, "W": 4}}
TITLE = {
    "cf": "[CF] Table 1, seconds per mini-batch (minutes of training over steps)",
    "sp1": "[SP] Table I, 1K mesh (filters assumed), seconds per mini-batch",
    "sp2": "[SP] Table II, 2K mesh (filters assumed), seconds per mini-batch",
    "sp3": "[SP] Table III, ResNet-50, 32 samples on 1, 2, 4 GPUs, seconds per mini-batch",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        ways: GPUs of a group, of which there are `groups`; how: the algorithm.
        published_s: seconds per mini-batch.
    """

    network: str
    samples: int
    groups: int
    ways: int
    how: str
    published_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A cell, and modelled seconds: plain, and overlapped, which hides such a share of the time of messages."""

    cell: Cell
    plain_s: float
    overlapped_s: float
    hidden: float

    @property
    def times(self) -> tuple[float, float, float]:
        return self.cell.published_s, self.plain_s, self.overlapped_s


def cells(name: str, rows: int | None = None) -> Iterator[Cell]:
    """A published table, or its first rows."""
    with open(data_file("tuning", "papers", f"{name[:2]}_table{name[2:] or 1}.csv"), encoding="utf-8") as file:
        found = [*islice(csv.DictReader(line for line in file if not line.startswith("#")), rows)]
    for row in found:
        n = int(row["N"])
        if name == "cf":
            groups, ways, steps = n // int(row["samples"]), int(row["ways"]), IMAGES / n * EPOCHS
            for how, ranks, minutes in (("sample", 1, "sample"), (row["algorithm"], ways, "minutes")):
                yield Cell(row["network"], n, groups, ranks, how, float(row[minutes]) * 60 / steps)
            continue
        network, shared = NETWORKS[name]
        for ways, seconds in row.items():
            if ways != "N" and seconds:
                yield Cell(network, n, n // shared, int(ways), "spatial", float(seconds))


def entries(name: str, machine: Machine, rows: int | None = None, all_reduce: str | None = None) -> Iterator[Entry]:
    """[CF] 5 uses rings only; [SP] V-A has "different algorithms (e.g., ring or butterfly)", taken as
    Rabenseifner's."""
    chosen = all_reduce or ("ring" if name == "cf" else "rabenseifner")
    machine = replace(machine, collectives=replace(machine.collectives, all_reduce=chosen))
    for cell in cells(name, rows):
        graph = replace(
            read_network_graph(data_file("examples", "networks", f"{cell.network}.yaml")), batch=cell.samples
        )
        words = cell.how.split()
        grid = Grid((("N", cell.groups), *(ROWS[cell.ways] if "w" not in words else {"H": 2, "W": 4}).items()))
        algorithm = "auto" if {"x/y", "w"} & set(words) else None
        compiled = compile_network(graph, grid, algorithm, machine=machine, statistics="local")
        plain, found = (simulate(p, machine, "float32", alike=True) for p in (compiled.plain, compiled.program))
        yield Entry(cell, plain.end_s, found.end_s, found.hidden)


def speedups(found: Iterable[Entry]) -> Iterator[tuple[Entry, list[float]]]:
    """With each entry the speedups over the first of its row: published, plain and overlapped."""
    first: dict[tuple[str, int], Entry] = {}
    for e in found:
        base = first.setdefault((e.cell.network, e.cell.samples), e)
        yield e, [b / s for b, s in zip(base.times, e.times, strict=True)]


def print_table(found: Iterable[Entry]) -> list[Entry]:
    heads = ("published", "plain", "overlapped", "hidden", "speedup", "plain", "overlapped")
    print(f"  {'':18}{'GPUs a group':20}" + "".join(f"{h:>11}" for h in heads))
    seen: list[Entry] = []
    for e, by in speedups(found):
        seen.append(e)
        line = f"  {f'{e.cell.network} N={e.cell.samples}':18}{f'{e.cell.ways} {e.cell.how}':20}"
        line += "".join(f"{s:11.4f}" for s in e.times) + f"{e.hidden:11.1%}"
        print(line + "".join(f"{one:11.2f}" for one in by), flush=True)
    return seen


def print_brief(found: Iterable[Entry]) -> list[Entry]:
    """A line for each number of GPUs a group has: means over the rows, and the range of what each speedup is off."""
    heads = ("rows", 6), ("published", 11), ("plain", 10), ("overlapped", 12), ("speedup", 9), ("plain off", 16)
    print(f"  {'GPUs a group':20}" + "".join(f"{head:>{width}}" for head, width in (*heads, ("overlapped off", 16))))
    rows = [*speedups(found)]
    for config in dict.fromkeys((e.cell.ways, e.cell.how) for e, _ in rows):
        of = [row for row in rows if (row[0].cell.ways, row[0].cell.how) == config]
        times = [sum(t) / len(of) for t in zip(*(e.times for e, _ in of), strict=True)]
        line = f"  {f'{config[0]} {config[1]}':20}{len(of):>6}{times[0]:11.4f}{times[1]:10.4f}{times[2]:12.4f}"
        if any(by[0] != 1 for _, by in of):
            line += f"{sum(by[0] for _, by in of) / len(of):9.2f}"
            for k in (1, 2):
                off = sorted(by[k] / by[0] - 1 for _, by in of)
                line += f"{f'{off[0]:+.0%} to {off[-1]:+.0%}':>16}"
        print(line)
    return [e for e, _ in rows]


def plot(tables: dict[str, list[Entry]], path: Path) -> None:
    """Published speedups against modelled ones, a panel a table; hollow marks are those with nothing hidden."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(3.7 * len(tables), 4.1), squeeze=False)
    for axis, (name, found) in zip(axes[0], tables.items(), strict=True):
        seen: list[float] = [1.0]
        points = [(f"{e.cell.ways} GPUs" + f", {e.cell.how}" * (name == "cf"), by) for e, by in speedups(found)]
        points = [(label, by) for label, by in points if by[0] != 1]
        for i, label in enumerate(dict.fromkeys(label for label, _ in points)):
            published, plain, overlapped = zip(*(by for said, by in points if said == label), strict=True)
            seen += [*published, *plain, *overlapped]
            how = {"s": 28, "edgecolors": f"C{i}", "marker": "os^D"[i], "zorder": 2}
            axis.scatter(published, overlapped, color=f"C{i}", alpha=0.8, label=label, **how)
            axis.scatter(published, plain, facecolors="none", **how)
        limits = min(seen) * 0.85, max(seen) * 1.2
        axis.plot(limits, limits, color="0.6", linewidth=1, zorder=1)
        axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="published speedup", aspect="equal")
        ticks = [t for t in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if limits[0] < t < limits[1]]
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
            one.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            one.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_title(", ".join(TITLE[name].split(", ")[: 1 if name == "cf" else 2]), fontsize=9)
        title = "filled: overlapped\nhollow: nothing hidden"
        axis.legend(fontsize=7, loc="upper left", title=title, title_fontsize=7, framealpha=0.9)
        axis.grid(color="0.92")
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("modelled speedup")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def early(layer: Layer) -> bool:
    """[CF] 6.2: "spatial parallelism for the conv_1 and conv_2 blocks"."""
    return layer.name.startswith(("conv1", "res2"))


def print_choice() -> None:
    """Which of stationary-x and -y sends fewer words, layer by layer, four ways."""
    machine = load_machine("lassen")
    print("4 ways, samples as in the layer files; words sent in forward and backward-data")
    heads = ("layers", 8), ("-x less", 9), ("-y less", 9), ("alike", 7)
    late_heads = ("conv3..5: all -x", 18), ("all -y", 11), ("the better", 12), ("saved", 7)
    print(f"  {'network':14}" + "".join(f"{head:>{width}}" for head, width in (*heads, *late_heads)))
    for name in ("resnet50", "resnet50_v15", "wrn50_2", "wrn50_4"):
        layers = read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"N": 1}, algorithm="sample")
        words = [
            [
                sent(layer, algorithm, letter, machine)
                for algorithm, letter in (("stationary-x", "C"), ("stationary-y", "F"))
            ]
            for layer in layers
        ]
        counts = [sum(x < y for x, y in words), sum(x > y for x, y in words), sum(x == y for x, y in words)]
        cells = "".join(f"{n:>{width}}" for n, (_, width) in zip((len(layers), *counts), heads, strict=True))
        late = [w for layer, w in zip(layers, words, strict=True) if not early(layer)]
        x, y, better = (sum(of) for of in zip(*((w[0], w[1], min(w)) for w in late), strict=True))
        print(f"  {name:14}{cells}{x:18.4g}{y:11.4g}{better:12.4g}{1 - better / x:7.0%}")


def sent(layer: Layer, algorithm: str, letter: str, machine: Machine) -> int:
    one = compile_layer(replace(layer, grid=Grid(((letter, 4),)), algorithm=algorithm), machine=machine)
    cost: ScheduleCost = schedule_cost(one.schedule, Model(one.space, machine, "float32"))
    return cost.total("forward", "backward_data").sent_bytes // 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["sp1", "sp2", "sp3", "choice"], help="cf, sp1, sp2, sp3, choice")
    parser.add_argument("--rows", type=int, default=1, help="of each table; more samples are more ranks")
    parser.add_argument("--machine", default="lassen")
    parser.add_argument("--all-reduce", help="ring, rabenseifner, best, ... for every table")
    parser.add_argument("--brief", action="store_true", help="a line for each number of GPUs, not for each row")
    parser.add_argument("--plot", metavar="FILE", help="published against modelled speedups")
    words = parser.parse_args()
    if wrong := [t for t in words.tables if t not in (*TABLES, "choice")]:
        parser.error(f"no table {', '.join(wrong)}: cf, sp1, sp2, sp3, choice")
    machine, done = load_machine(words.machine), dict[str, list[Entry]]()
    for name in words.tables:
        if name == "choice":
            print_choice()
            continue
        print(TITLE[name])
        found = entries(name, machine, words.rows, words.all_reduce)
        done[name] = (print_brief if words.brief else print_table)(found)
    if words.plot and done:
        plot(done, Path(words.plot))


if __name__ == "__main__":
    main()
