"""Single layers: [CF] Figs. 3 to 6, [SP] Figs. 2 and 3.

[CF] 6.1 times kernels without their launches, so its machine is Lassen by data sheets, with nothing fitted. [SP] VI-A
times calls, so its machine is the one fitted to its Tables I to III (fit.py), where a call takes time of its own. But
halos take what their messages do: by the fitted cost of halos in whole programs no layer would gain on 8 or 16 GPUs.
[CF] has its two layers in pictures alone; res3b_branch2b and res5b_branch2b of ResNet-50, both 3x3, stand for them.
Halos are hidden as in [SP] IV-A: x's beside the forward convolution, dy's beside the filters' gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.cost.links import collective_seconds
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.papers.figure import Figure, Series, said_of
from convgen.papers.steps import ROWS
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.reader import read_csv

CONV_3, CONV_5 = ("resnet50", "res3b_branch2b"), ("resnet50", "res5b_branch2b")
LARGE = 1024  # GPUs of [CF] Fig. 6 at most
WAYS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a layer: convolutions by phase, what moves in forward and backward, and the gradients' sum."""

    forward: float
    data: float
    filters: float
    moved_forward: float
    moved_backward: float
    summed: float

    @property
    def local(self) -> float:
        return self.forward + self.data + self.filters

    @property
    def hidden_halos(self) -> tuple[float, float]:
        """Seconds of forward and of backward with halos beside convolutions, without the gradients' sum."""
        return max(self.forward, self.moved_forward), self.data + max(self.filters, self.moved_backward)

    @property
    def plain(self) -> tuple[float, float]:
        """Seconds of forward and of backward, one thing after the other, with the gradients' sum."""
        return self.forward + self.moved_forward, self.data + self.filters + self.moved_backward + self.summed


@cache
def layer_of(which: tuple[str, str]) -> Layer:
    """A layer of a network's list."""
    network, name = which
    found = read_csv(data_file("tuning", "layers", f"{network}.csv"), grid={"N": 1}, algorithm="sample")
    return next(one for one in found if one.name == name)


@cache
def times(which: tuple[str, str], batch: int, grid: Grid, algorithm: str, *, calls: bool = False) -> Times:
    """A layer's seconds with so many samples on a grid.

    Args:
        calls: whether calls take time, as on the machine fitted to [SP]'s tables; halos take what their messages do.
    """
    one, machine = layer_of(which), replace(load_machine("lassen_lbann" if calls else "lassen"), misfits=())
    layer = replace(one, conv=replace(one.conv, batch=batch), grid=grid, algorithm=algorithm)
    compiled = compile_layer(layer, machine=machine)
    steps = schedule_cost(compiled.schedule, Model(compiled.space, machine, "float32")).steps
    conv = {s.phase: s.cost.seconds for s in steps if s.kind.startswith("conv_")}
    moved = {phase: sum(s.cost.seconds for s in steps if s.phase == phase and not s.kind.startswith("conv_"))
             for phase in conv}  # fmt: skip
    return Times(conv["forward"], conv["backward_data"], conv["backward_filter"], moved["forward"],
                 moved["backward_data"], moved["backward_filter"])  # fmt: skip


def _channels(samples: int, ways: int) -> tuple[Grid, str]:
    return Grid((("N", samples), ("C", ways))), "stationary-x"


def local_scaling() -> Figure:
    """[CF] Fig. 3: local convolution as samples or channels are cut."""
    series: list[Series] = []
    for name, which in (("conv_3", CONV_3), ("conv_5", CONV_5)):
        for n in (1, 2, 32):
            cut = [(w, times(which, n, *_channels(1, w))) for w in WAYS]
            series.append(Series(f"{name}, N={n}, channels cut, forward", tuple((w, t.forward * 1e3) for w, t in cut)))
            back = tuple((w, (t.data + t.filters) * 1e3) for w, t in cut)
            series.append(Series(f"{name}, N={n}, channels cut, backward", back))
        cut = [(w, times(which, 32, *_channels(w, 1))) for w in (*WAYS, 16, 32)]
        series.append(Series(f"{name}, N=32, samples cut, forward", tuple((w, t.forward * 1e3) for w, t in cut)))
    return Figure("cf.fig3", "[CF] Fig. 3, local convolutions of two layers of ResNet-50", "GPUs", "ms", tuple(series))


def sum_s(ranks: int, segments: int) -> float:
    """Seconds of the sum of conv_3's gradients over so many GPUs in segments; neighbours are in different segments."""
    machine, conv = load_machine("lassen"), layer_of(CONV_3).conv
    size, p = conv.filters * conv.channels * conv.taps * 4 / segments, ranks // segments
    grid = Grid((("N", p), ("C", segments)))
    sent = 2 * (p - 1) / p * size
    return collective_seconds(grid, machine.levels, "all_reduce", ("N",), sent, machine.add_s_per_byte, "ring")[0]


def segmented() -> Figure:
    """[CF] Fig. 4: the sum of a conv_3 layer's gradients in segments; eight are 4.5 times as fast, in the text 4."""
    series = [
        Series(f"{s} segment{'s' * (s > 1)}", tuple((float(p), sum_s(p, s) * 1e3) for p in _powers(4, LARGE) if p > s))
        for s in WAYS
    ]
    whole = sum_s(LARGE, 1)
    found = {"cf.fig4.eight": whole / sum_s(LARGE, 8), "cf.fig4.large": 100 * (1 - sum_s(LARGE, 2) / whole)}
    gains = ", ".join(f"{sum_s(p, 1) / sum_s(p, 8):.1f} at {p}" for p in (16, 64, 256, LARGE))
    remark = f"eight segments are faster by {gains} GPUs; the text has 4 and blames one core for both adapters"
    return Figure("cf.fig4", "[CF] Fig. 4, sum of a conv_3 layer's gradients by rings", "GPUs", "ms", tuple(series),
                  found, (remark,))  # fmt: skip


def _powers(low: int, high: int) -> list[int]:
    return [2**i for i in range(low.bit_length() - 1, high.bit_length()) if low <= 2**i <= high]


def strong() -> Figure:
    """[CF] Fig. 5: a layer with all its communication, few and many samples."""
    series: list[Series] = []
    for name, which in (("conv_3", CONV_3), ("conv_5", CONV_5)):
        for n in (1, 2, 32):
            for w in WAYS:
                ranks = [p for p in _powers(w, 128) if p // w <= n]
                points = tuple((float(p), sum(times(which, n, *_channels(p // w, w)).plain) * 1e3) for p in ranks)
                series.append(Series(f"{name}, N={n}, {w} ways of channels", points))
    eight = times(CONV_3, 1, *_channels(1, 8))
    found = {"cf.fig5.overhead": sum(eight.plain) / eight.local}
    return Figure("cf.fig5", "[CF] Fig. 5, strong scaling of two layers of ResNet-50", "GPUs",
                  "ms forward and backward", tuple(series), found)  # fmt: skip


def weak() -> Figure:
    """[CF] Fig. 6: 32 samples a group of GPUs."""
    series: list[Series] = []
    for w in WAYS:
        at = [(p, times(CONV_5, 32 * p // w, *_channels(p // w, w)).plain) for p in _powers(max(w, 4), LARGE)]
        series.append(Series(f"{w} ways of channels, forward", tuple((float(p), t[0] * 1e3) for p, t in at)))
        series.append(Series(f"{w} ways of channels, backward", tuple((float(p), t[1] * 1e3) for p, t in at)))
    return Figure(
        "cf.fig6", "[CF] Fig. 6, weak scaling of a conv_5 layer, 32 samples a group", "GPUs", "ms", tuple(series)
    )


def spatial(name: str, layers: Sequence[tuple[tuple[str, str], str]], batches: Sequence[int]) -> Figure:
    """[SP] Figs. 2 and 3: a layer by rows and columns, halos hidden, without the gradients' sum."""
    series: list[Series] = []
    found: dict[str, float] = {}
    gains = {"conv1": ("sp.fig2.conv1", 8), "conv1_1": ("sp.fig3.conv1_1", 16), "conv6_1": ("sp.fig3.conv6_1", 16)}
    for which, said in layers:
        for n in batches:
            at = {
                w: times(which, n, Grid((("N", 1), *axes.items())), "spatial", calls=True).hidden_halos
                for w, axes in ROWS.items()
            }
            series.append(Series(f"{said}, N={n}, forward", tuple((float(w), t[0] * 1e3) for w, t in at.items())))
            series.append(Series(f"{said}, N={n}, backward", tuple((float(w), t[1] * 1e3) for w, t in at.items())))
            if n == 1 and which[1] in gains:
                statement, ways = gains[which[1]]
                found[statement] = sum(at[1]) / sum(at[ways])
    return Figure(f"sp.{name}", f"[SP] {said_of(name)}, layers by rows and columns", "GPUs a sample", "ms",
                  tuple(series), found)  # fmt: skip


# ---------------------------------------------------------------- [CF] 4: stationary-x or stationary-y
def early(layer: Layer) -> bool:
    """[CF] 6.2: "spatial parallelism for the conv_1 and conv_2 blocks"."""
    return layer.name.startswith(("conv1", "res2"))


def choice_text() -> str:
    """Which of stationary-x and -y sends fewer words, layer by layer, four ways."""
    lines = ["4 ways, samples as in the layer files; words sent in forward and backward-data"]
    heads = ("layers", 8), ("-x less", 9), ("-y less", 9), ("alike", 7)
    late_heads = ("conv3..5: all -x", 18), ("all -y", 11), ("the better", 12), ("saved", 7)
    lines.append(f"  {'network':14}" + "".join(f"{head:>{width}}" for head, width in (*heads, *late_heads)))
    for name in ("resnet50", "resnet50_v15", "wrn50_2", "wrn50_4"):
        layers = read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"N": 1}, algorithm="sample")
        words = [
            [_sent(layer, algorithm, letter) for algorithm, letter in (("stationary-x", "C"), ("stationary-y", "F"))]
            for layer in layers
        ]
        counts = [sum(x < y for x, y in words), sum(x > y for x, y in words), sum(x == y for x, y in words)]
        cells = "".join(f"{n:>{width}}" for n, (_, width) in zip((len(layers), *counts), heads, strict=True))
        late = [w for layer, w in zip(layers, words, strict=True) if not early(layer)]
        x, y, better = (sum(of) for of in zip(*((w[0], w[1], min(w)) for w in late), strict=True))
        lines.append(f"  {name:14}{cells}{x:18.4g}{y:11.4g}{better:12.4g}{1 - better / x:7.0%}")
    return "\n".join(lines)


def _sent(layer: Layer, algorithm: str, letter: str) -> int:
    machine = load_machine("lassen")
    one = compile_layer(replace(layer, grid=Grid(((letter, 4),)), algorithm=algorithm), machine=machine)
    cost = schedule_cost(one.schedule, Model(one.space, machine, "float32"))
    return cost.total("forward", "backward_data").sent_bytes // 4
