"""The published times of [SP] Tables I-III and [CF] Table 1 beside what the model says, hits and misses as they are.

    python bench/papers.py cf                      # [CF] Table 1
    python bench/papers.py sp1 sp2 sp3             # [SP] Tables I, II, III
    python bench/papers.py cf sp1 sp2 sp3 --plot docs/studies/model.png
    python bench/papers.py choice                  # stationary-x or -y, layer by layer

Published numbers: tuning/papers. Machine: lassen, as its file has it; nothing is fitted. Every convolution is compiled
under the layout that the papers say, its steps cost what convgen/cost/model.py says, and reductions of dw and halos
are hidden as convgen/cost/overlap.py says. Between convolutions a layer normalises and applies ReLU: 5 passes over y
in memory in forward and 8 in backward ([SP] V-B takes these for free; `--free` does). Grids: samples outermost, a
sample's GPUs next to each other, its rows and columns 1x2, 2x2, 4x2, 4x4. The mesh models' filters are assumed
(tuning/layers), so only their speedups mean anything.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import PICOSECONDS, Model
from convgen.cost.overlap import LayerTasks, NetworkTime, Overlap, Task, beside, layer_tasks, network_time
from convgen.cost.schedule import ScheduleCost, schedule_cost
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.reader import read_csv

TABLES = ("cf", "sp1", "sp2", "sp3")
PASSES = (5, 8)  # over y: BN reads it twice and writes it, ReLU reads and writes; backward: ReLU 3, BN 5
IMAGES, EPOCHS = 1281167, 90
ROWS = {1: {}, 2: {"H": 2}, 4: {"H": 2, "W": 2}, 8: {"H": 4, "W": 2}, 16: {"H": 4, "W": 4}}


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of a table: published and modelled seconds per mini-batch."""

    row: str
    config: str
    published_s: float
    modelled: NetworkTime


@lru_cache(maxsize=4096)
def compiled(conv: Conv, grid: Grid, algorithm: str, machine: Machine, first: bool, free: bool) -> LayerTasks:
    """Tasks of one convolution and of the normalisation and ReLU that follow it."""
    layer = Layer(name="layer", conv=conv, grid=grid, algorithm=algorithm)
    one = compile_layer(layer, machine=machine)
    model = Model(one.space, machine, "float32")
    tasks = layer_tasks(one.schedule, schedule_cost(one.schedule, model), needs_dx=not first)
    if free:
        return tasks
    y = int(one.space.elements(dict(one.schedule.stored)["y"]).max()) * 4
    forward, backward = (round(n * y / machine.memory_bytes_per_s * PICOSECONDS) for n in PASSES)
    return beside(tasks, (Task("bn", "compute", forward),), (Task("dbn", "compute", backward),))


def network(name: str, samples: int) -> list[Layer]:
    layers = read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"N": 1}, algorithm="sample")
    return [replace(layer, conv=replace(layer.conv, batch=samples)) for layer in layers]


def layout(layer: Layer, ways: dict[str, int]) -> tuple[str, dict[str, int]]:
    """The algorithm and a group's axes: rows where there are any to split, else [CF]'s channels and filters."""
    s = layer.conv.spatial[0]
    if "H" in ways:
        return "spatial", ways if s.extent >= ways["H"] else {}
    return "stationary-w", ways


def early(layer: Layer) -> bool:
    """[CF] 6.2: "spatial parallelism for the conv_1 and conv_2 blocks"."""
    return layer.name.startswith(("conv1", "res2"))


def larger_y(conv: Conv) -> bool:
    x, y = conv.channels, conv.filters
    for s in conv.spatial:
        x, y = x * s.extent, y * s.out
    return y > x


def predicted(
    layers: Sequence[Layer], groups: int, ways: int, machine: Machine, how: str, free: bool, overlap: Overlap
) -> NetworkTime:
    """A mini-batch on groups x ways ranks.

    Args:
        how: sample or spatial for all layers alike; x/y or w: spatial for the first blocks, then [CF]'s.
    """
    tasks: list[LayerTasks] = []
    for i, layer in enumerate(layers):
        if how == "w" and not early(layer):
            algorithm, inner = "stationary-w", {"C": 4, "F": 2}
        elif how == "x/y" and not early(layer):
            algorithm, inner = ("stationary-y", {"F": ways}) if larger_y(layer.conv) else ("stationary-x", {"C": ways})
        else:
            algorithm, inner = layout(layer, ROWS[ways] or {"H": 1})
        # Where a group's ranks have no rows to split (1x1 images), each does the same.
        copies = {} if inner or ways == 1 else {"H": ways}
        grid = Grid((("N", groups), *(inner or copies).items()))
        tasks.append(compiled(layer.conv, grid, algorithm, machine, i == 0, free))
    return network_time(tasks, overlap)


def rows_of(name: str) -> Iterator[dict[str, str]]:
    """A published table, comments left out."""
    with open(data_file("tuning", "papers", f"{name}.csv"), encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def sp_table(number: int, machine: Machine, free: bool, overlap: Overlap) -> list[Entry]:
    name, samples = {1: ("mesh1k_assumed", 1), 2: ("mesh2k_assumed", 1), 3: ("resnet50", 32)}[number]
    entries: list[Entry] = []
    for row in rows_of(f"sp_table{number}"):
        batch = int(row["N"])
        layers = network(name, batch)
        for ways, seconds in row.items():
            if ways != "N" and seconds:
                found = predicted(layers, batch // samples, int(ways), machine, "spatial", free, overlap)
                entries.append(Entry(f"N={batch}", ways, float(seconds), found))
    return entries


def cf_table(machine: Machine, free: bool, overlap: Overlap) -> list[Entry]:
    entries: list[Entry] = []
    for row in rows_of("cf_table1"):
        batch, samples, ways = int(row["N"]), int(row["samples"]), int(row["ways"])
        layers = network(row["network"], batch)
        steps = IMAGES / batch * EPOCHS
        for how, minutes in ((1, "sample"), (ways, "minutes")):
            algorithm = "sample" if how == 1 else "w" if "w" in row["algorithm"].split() else "x/y"
            found = predicted(
                layers, batch // samples, how, machine, "spatial" if how == 1 else algorithm, free, overlap
            )
            label = "1" if how == 1 else f"{ways} {row['algorithm']}"
            entries.append(Entry(f"{row['network']} N={batch}", label, float(row[minutes]) * 60 / steps, found))
    return entries


def table(name: str, machine: Machine, free: bool, overlap: Overlap, all_reduce: str | None) -> list[Entry]:
    """[CF] 5 uses rings only; [SP] V-A has "different algorithms (e.g., ring or butterfly)", taken as
    Rabenseifner's."""
    chosen = all_reduce or ("ring" if name == "cf" else "rabenseifner")
    machine = replace(machine, collectives=replace(machine.collectives, all_reduce=chosen))
    return cf_table(machine, free, overlap) if name == "cf" else sp_table(int(name[2:]), machine, free, overlap)


TITLE = {
    "cf": "[CF] Table 1, seconds per mini-batch (minutes of training over steps)",
    "sp1": "[SP] Table I, 1K mesh (filters assumed), seconds per mini-batch",
    "sp2": "[SP] Table II, 2K mesh (filters assumed), seconds per mini-batch",
    "sp3": "[SP] Table III, ResNet-50, 32 samples on 1, 2, 4 GPUs, seconds per mini-batch",
}


def speedups(entries: Sequence[Entry]) -> list[tuple[Entry, float, float]]:
    """With each entry the published and the modelled speedup over the first of its row."""
    first: dict[str, Entry] = {}
    found: list[tuple[Entry, float, float]] = []
    for e in entries:
        base = first.setdefault(e.row, e)
        found.append((e, base.published_s / e.published_s, base.modelled.seconds / e.modelled.seconds))
    return found


def print_table(name: str, entries: Sequence[Entry]) -> None:
    print(TITLE[name])
    heads = ("published", 10), ("modelled", 10), ("ratio", 7), ("speedup", 9), ("modelled", 10), ("off", 7)
    print(f"  {'':18}{'GPUs a group':20}" + "".join(f"{head:>{width}}" for head, width in heads))
    errors: list[float] = []
    for e, published, modelled in speedups(entries):
        line = f"  {e.row:18}{e.config:20}{e.published_s:10.4f}{e.modelled.seconds:10.4f}"
        line += f"{e.modelled.seconds / e.published_s:7.2f}"
        if published != 1:
            errors.append(modelled / published - 1)
            line += f"{published:9.2f}{modelled:10.2f}{errors[-1]:+7.0%}"
        print(line)
    mean = sum(abs(e) for e in errors) / len(errors)
    print(f"  speedups: {len(errors)}, off by {mean:.0%} on average, {min(errors):+.0%} to {max(errors):+.0%}")


def print_brief(name: str, entries: Sequence[Entry]) -> None:
    """A line for each number of GPUs a group has: means over the rows, and the range of what is off."""
    print(TITLE[name])
    heads = ("rows", 6), ("published", 11), ("modelled", 10), ("speedup", 9), ("modelled", 10), ("off", 15)
    print(f"  {'GPUs a group':20}" + "".join(f"{head:>{width}}" for head, width in heads))
    rows = speedups(entries)
    for config in dict.fromkeys(e.config for e, *_ in rows):
        of = [row for row in rows if row[0].config == config]
        times = [sum(t) / len(of) for t in zip(*((e.published_s, e.modelled.seconds) for e, *_ in of), strict=True)]
        line = f"  {config:20}{len(of):>6}{times[0]:11.4f}{times[1]:10.4f}"
        if any(p != 1 for _, p, _ in of):
            off = sorted(m / p - 1 for _, p, m in of)
            means = [sum(values) / len(of) for values in zip(*(row[1:] for row in of), strict=True)]
            line += f"{means[0]:9.2f}{means[1]:10.2f}{f'{off[0]:+.0%} to {off[-1]:+.0%}':>15}"
        print(line)


def plot(tables: dict[str, list[Entry]], others: dict[str, list[Entry]], path: Path) -> None:
    """Published speedups against modelled ones, a panel a table; hollow marks are the other variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(tables), figsize=(3.7 * len(tables), 4.1), squeeze=False)
    for axis, (name, entries) in zip(axes[0], tables.items(), strict=True):
        seen: list[float] = [1.0]
        for variant, hollow in ((entries, False), (others[name], True)):
            points = [(e, p, m) for e, p, m in speedups(variant) if p != 1]
            for i, config in enumerate(dict.fromkeys(e.config for e, _, _ in points)):
                of = [(p, m) for e, p, m in points if e.config == config]
                seen += [value for pair in of for value in pair]
                label = (
                    None if hollow else f"{config} GPUs" if config.isdecimal() else config.replace(" ", " GPUs, ", 1)
                )
                face = {"facecolors": "none"} if hollow else {"alpha": 0.8}
                axis.scatter(
                    *zip(*of, strict=True), s=28, edgecolors=f"C{i}", color=None if hollow else f"C{i}",
                    marker="os^D"[i], label=label, zorder=2, **face,
                )  # fmt: skip
        limits = min(seen) * 0.85, max(seen) * 1.2
        axis.plot(limits, limits, color="0.6", linewidth=1, zorder=1)
        axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="published speedup", aspect="equal")
        ticks = [t for t in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if limits[0] < t < limits[1]]
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
            one.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            one.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_title(", ".join(TITLE[name].split(", ")[: 1 if name == "cf" else 2]), fontsize=9)
        variants = ("all-reduce by rings", "by the best") if name == "cf" else ("hidden", "nothing hidden")
        title = f"filled: {variants[0]}\nhollow: {variants[1]}"
        corner = "upper left" if name == "cf" else "lower right"
        axis.legend(fontsize=7, loc=corner, title=title, title_fontsize=7, framealpha=0.9)
        axis.grid(color="0.92")
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("modelled speedup")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


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
    return cost.sent_bytes("forward", "backward_data") // 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["cf", "choice"], help="cf, sp1, sp2, sp3, choice")
    parser.add_argument("--free", action="store_true", help="normalisation and ReLU take no time")
    parser.add_argument("--machine", default="lassen")
    parser.add_argument("--all-reduce", help="ring, rabenseifner, best, ... for every table")
    parser.add_argument("--exposed", action="store_true", help="reductions of dw and halos are hidden behind nothing")
    parser.add_argument("--brief", action="store_true", help="a line for each number of GPUs, not for each row")
    parser.add_argument("--plot", metavar="FILE", help="published against modelled speedups")
    words = parser.parse_args()
    if wrong := [t for t in words.tables if t not in (*TABLES, "choice")]:
        parser.error(f"no table {', '.join(wrong)}: cf, sp1, sp2, sp3, choice")
    machine, done = load_machine(words.machine), dict[str, list[Entry]]()
    overlap = Overlap("nothing", halos=False) if words.exposed else Overlap()
    for name in words.tables:
        if name == "choice":
            print_choice()
        else:
            done[name] = table(name, machine, words.free, overlap, words.all_reduce)
            (print_brief if words.brief else print_table)(name, done[name])
    if words.plot and done:
        bare = Overlap("nothing", halos=False)
        others = {
            name: table(name, machine, words.free, *((overlap, "best") if name == "cf" else (bare, words.all_reduce)))
            for name in done
        }
        plot(done, others, Path(words.plot))


if __name__ == "__main__":
    main()
