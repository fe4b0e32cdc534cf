"""[SW]'s tables and figures by the models of convgen/sw26010; `convgen sw26010` has them with options."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import exp, log

from convgen.papers.figure import Figure, Series, network_file, said_of
from convgen.papers.statements import rows_of
from convgen.spec.network_reader import read_network
from convgen.sw26010.allreduce.cost import Network
from convgen.sw26010.allreduce.latency import latency_rows
from convgen.sw26010.machine.dma_report import dma_rows
from convgen.sw26010.machine.rates import load_rates, taken_rates
from convgen.sw26010.table2.cells import FIT_LAYERS, cells, read_table2
from convgen.sw26010.training.layers import KINDS, Layers
from convgen.sw26010.training.of_graph import layers_of_network
from convgen.sw26010.training.processors import bound_s, read_processors, step_tasks
from convgen.sw26010.training.published import read_scaling, read_table3
from convgen.sw26010.training.report import tree_s
from convgen.sw26010.training.step import layer_times, step_of

FILES = {"alexnet_bn": "swcaffe/alexnet_bn", "vgg16": "vgg16", "vgg19": "swcaffe/vgg19", "resnet50": "resnet50",
         "googlenet": "swcaffe/googlenet"}  # fmt: skip
CPES, SIDE, MESSAGE_BYTES = 64, 8, 32
PCI_BYTES_PER_S = 15.75e9  # 16 lanes of PCI-E 3, by its specification
IMAGE_BYTES = 256 * 256 * 3 * 4  # [SW] 5.2: 192 MB for 256


@cache
def layers_of(name: str) -> Layers:
    return layers_of_network(read_network(network_file(FILES[name])))


def mesh() -> Figure:
    """[SW] Fig. 2: DMA by size; with it, what 3.1 and 6.1 say of buses and products."""
    rows, clock = dma_rows(), taken_rates().group.clock_hz
    ridge = 2 * CPES * 4 * clock / taken_rates().group.dma_bytes_per_s
    found = {
        "sw.3.p2p": CPES * MESSAGE_BYTES * clock,
        "sw.3.broadcast": 2 * SIDE * (SIDE - 1) * MESSAGE_BYTES * clock,
        "sw.6.m": float(int(6 * ridge) + 1),
    }
    numbers = {key: tuple((float(r["bytes"]), float(r[key])) for r in rows if r.get(key))
               for key in rows[0] if key.endswith("bytes_per_s")}  # fmt: skip
    return Figure("sw.fig2", "[SW] Fig. 2, DMA of a core group", "bytes", "B/s",
                  tuple(Series(key, points) for key, points in numbers.items()), found)  # fmt: skip


def messages() -> Figure:
    """[SW] Fig. 6: messages between two nodes."""
    rows = latency_rows(Network(1024, 256, latency_s=1e-6))
    series = tuple(
        Series(said, tuple((float(r["bytes"]), float(r[f"{said}_s"])) for r in rows)) for said in ("inside", "across")
    )
    return Figure("sw.fig6", "[SW] Fig. 6, a message between two nodes", "bytes", "s", series)


def table2() -> Figure:
    """[SW] Table 2: constants fitted to conv1_2 and conv4_1, the other layers held out."""
    taken, constants = taken_rates(), load_rates().fitted()
    found: dict[str, float] = {}
    modelled: dict[tuple[str, str, str], float] = {}
    for cell in cells(taken):
        for name in cell.layers:
            modelled[name, cell.phase, cell.kind] = cell.terms.seconds(constants)
    series: list[Series] = []
    for place, row in enumerate(read_table2(), 1):
        for (phase, kind), published in row.published_s.items():
            found[f"sw.table2.{row.name}.{phase}.{kind}"] = modelled[row.name, phase, kind]
            said = f"{phase} {kind}"
            series.append(
                Series(said, ((float(place), modelled[row.name, phase, kind]),), ((float(place), published),))
            )
        for phase in dict.fromkeys(phase for phase, _ in row.published_s):
            best = min(seconds for (name, p, _), seconds in modelled.items() if (name, p) == (row.name, phase))
            found[f"sw.table2.{row.name}.{phase}.gflops"] = row.problem.flops / best / 1e9
    joined = {name: [s for s in series if s.name == name] for name in dict.fromkeys(s.name for s in series)}
    lines = tuple(
        Series(name, tuple(p for s in mine for p in s.points), tuple(p for s in mine for p in s.published))
        for name, mine in joined.items()
    )
    remark = f"fitted: {' and '.join(FIT_LAYERS)} (convgen sw26010 table2)"
    return Figure("sw.table2", "[SW] Table 2, VGG-16 on one core group", "layer", "s", lines, found, (remark,))


def table3() -> Figure:
    """[SW] Table 3: layers as the public code ran them; a CPU and a K40m reach that share of their data sheets' bound
    which they reach on the other four networks."""
    found: dict[str, float] = {}
    ours = {
        name: step_of(layers_of(name), row.batch, 1, plans="caffe").images_per_s for name, row in read_table3().items()
    }
    published = {r["network"]: r for r in rows_of("sw26010", "table3.csv")}
    lines = {"images_per_s": ours}
    for processor in read_processors():
        if processor.column == "images_per_s":
            continue
        bound = {name: row.batch / bound_s(step_tasks(layers_of(name), row.batch), processor)[0]
                 for name, row in read_table3().items()}  # fmt: skip
        share = {name: log(float(published[name][processor.column]) / rate) for name, rate in bound.items()}
        others = {name: exp(sum(s for n, s in share.items() if n != name) / (len(share) - 1)) for name in share}
        lines[processor.column] = {name: rate * others[name] for name, rate in bound.items()}
    for column, rates in lines.items():
        for name, rate in rates.items():
            found[f"sw.table3.{name}.{column}"] = rate
            if column != "images_per_s":
                found[f"sw.table3.{name}.over_{column}"] = ours[name] / rate
    k40m = read_table3()["alexnet_bn"].batch / float(published["alexnet_bn"]["k40m"])
    found["sw.6.pcie"] = 100 * read_table3()["alexnet_bn"].batch * IMAGE_BYTES / PCI_BYTES_PER_S / k40m
    series = tuple(
        Series(column, tuple((float(i), rate) for i, rate in enumerate(rates.values(), 1)),
               tuple((float(i), float(published[name][column])) for i, name in enumerate(rates, 1)))
        for column, rates in lines.items()
    )  # fmt: skip
    remark = "networks: " + ", ".join(f"{i} {name}" for i, name in enumerate(ours, 1))
    return Figure("sw.table3", "[SW] Table 3, training", "network", "images/s", series, found, (remark,))


def by_layer(name: str) -> Figure:
    """[SW] Figs. 8 and 9: layers of AlexNet and VGG-16 on one node, by the programs of the mesh."""
    network, batch = ("alexnet_bn", 256) if name == "fig8" else ("vgg16", 64)
    times = layer_times(layers_of(network).layers, batch // 4)
    both = (("forward", [t.forward_s for t in times]), ("backward", [t.backward_s for t in times]))
    series = tuple(Series(said, tuple((float(i), s) for i, s in enumerate(of, 1) if s > 0)) for said, of in both)
    kinds = ", ".join(f"{i} {KINDS[type(t.layer)]}" for i, t in enumerate(times, 1))
    return Figure(
        f"sw.{name}",
        f"[SW] {said_of(name)}, layers of {network}",
        "layer",
        "s",
        series,
        {},
        (f"layers: {kinds}",),
    )


def scaling(name: str) -> Figure:
    """[SW] Figs. 10 and 11: the text's speed of one node, and the public code's trees, whose one constant is fitted to
    ResNet-50 at 32."""
    found: dict[str, float] = {}
    series: list[Series] = []
    for point in read_scaling():
        alone = point.batch / read_table3()[point.network].images_per_s
        at = dict(_shares(layers_of(point.network), alone, point.nodes))
        key, share = f"sw.63.{point.network}.{point.batch}", at[point.nodes]
        found[f"{key}.speedup"], found[f"{key}.share"] = point.nodes * (1 - share), 100 * share
        said = f"{point.network}, {point.batch} a node"
        speed = name == "fig10"
        points = tuple((float(p), p * (1 - s) if speed else 100 * s) for p, s in at.items())
        series.append(Series(said, points, ((float(point.nodes), point.speedup if speed else 100 * point.share),)))
    said = "times one node" if name == "fig10" else "percent of a step"
    return Figure(
        f"sw.{name}",
        f"[SW] {said_of(name)}, training on many nodes",
        "nodes",
        said,
        tuple(series),
        found,
    )


def _shares(layers: Layers, alone_s: float, nodes: int) -> Iterator[tuple[int, float]]:
    """Communication's share of a step by the number of nodes: 2, 4, 8, ..."""
    count = 2
    while count <= nodes:
        tree = tree_s(layers, count)
        yield count, tree / (alone_s + tree)
        count *= 2
