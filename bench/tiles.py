"""What a GPU's convolutions reach by a rank's extents: the constants of machine files, and what they say of a layer.

    python bench/tiles.py                         # fit them to the bounds of compiled kernels, each network held out
    python bench/tiles.py --layer res4b_branch2b  # of a layer of ResNet-50, over samples of a rank, as machines have it

Fitted are `reading` and `adding` of `tiles` in tuning/machines (convgen/cost/tiles.py), by least squares of logarithms
of seconds, to bench/landscapes/bounds_sm_90.jsonl.gz: launches of kernels that nobody has tuned, channels last. Each
network is told by constants that are fitted to all others. A launch counts that its products bound, by the kernel or by
the model, not memory or the floor of a launch, which prices have in any case.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from kernel_bounds import GRIDS, PHASES, WAYS
from options import options
from rows import rows_of

from convgen.compiler import compile_layer
from convgen.cost.local import convolution_elements, convolution_flops, layers_shape
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.tiles import Tiles
from convgen.kernels.rates import FLOAT32_PRODUCTS
from convgen.program.nodes import is_convolution
from convgen.resources import data_file
from convgen.spec.layer import DTYPE_BYTES, Layer
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target
from convgen.spec.text import aligned

BOUNDS = Path(__file__).parent / "landscapes" / "bounds_sm_90.jsonl.gz"
START = {"reading": 64.0, "adding": 64.0}
DTYPES = ("bfloat16", "tfloat32", "float32")


@dataclass(frozen=True)
class Launch:
    """A kernel's launch on the rank with most to do.

    Attributes:
        shape: as machines ask it. rate: of the type's products, over bfloat16's. whole_s: of its products at the peak.
        least_s: of its memory, or a launch. bound_s: of the kernel as it was compiled, these included.
    """

    network: str
    dtype: str
    phase: str
    shape: tuple[float, ...]
    rate: float
    whole_s: float
    least_s: float
    bound_s: float

    def seconds(self, tiles: Tiles) -> float:
        return max(self.whole_s / tiles.share(self.phase, self.shape, self.rate), self.least_s)

    def counts(self, tiles: Tiles) -> bool:
        return max(self.bound_s, self.seconds(tiles)) > 1.01 * self.least_s


@cache
def steps_of(network: str, split: str) -> dict[tuple[str, str], tuple[str, tuple[float, ...], int, int]]:
    """By layer and phase: phase and shape as machines ask them, flops and elements of the rank with most."""
    target, found = read_target("cuda:sm_90").known(), {}
    for read in read_csv(data_file("tuning", "layers", f"{network}.csv"), grid={split: WAYS}, algorithm=GRIDS[split]):
        layer: Layer = replace(read, memory_format="channels_last", target=target)
        conv = layer.conv
        if {"C": conv.channels, "F": conv.filters, "N": conv.batch, "H": conv.spatial[0].out}[split] < WAYS:
            continue
        made = compile_layer(layer)
        types = made.schedule.types()
        for phase, step in made.schedule.steps():
            if is_convolution(step):
                operands = (types[step.inputs[0]], types[step.inputs[1]], step.type)
                flops = int(convolution_flops(made.space, operands).max())
                elements = int(convolution_elements(made.space, operands).max())
                found[layer.name, phase] = (*layers_shape(made.space, operands, flops), flops, elements)
    return found


def launches() -> Iterator[Launch]:
    """Those of the landscape, channels last; layers alike once."""
    machine, seen = load_machine("cuda"), set[Any]()
    peaks = dict(machine.peak_flops)
    peaks["float32"] = peaks["tfloat32"] / FLOAT32_PRODUCTS  # by as many products of TF32
    for row in rows_of(BOUNDS):
        if "share" not in row or row["format"] != "channels_last":
            continue
        phase, shape, flops, elements = steps_of(row["network"], row["split"])[row["layer"], row["phase"]]
        least = max(elements * DTYPE_BYTES[row["dtype"]] / machine.memory_bytes_per_s, machine.launch_s)
        bound, peak = 1e-6 * (row["us"] - row["around_us"]), peaks[row["dtype"]]
        of, rate = row["network"].partition("_v")[0], peak / max(peaks.values())
        one = Launch(of, row["dtype"], phase, shape, rate, flops / peak, least, bound)
        if one not in seen:
            seen.add(one)
            yield one


def fit(known: Sequence[Launch], processors: int) -> Tiles:
    """The constants that are nearest to what kernels take at least."""
    optimize: Any = import_module("scipy.optimize")  # it ships no types

    def tiles(logs: Sequence[float]) -> Tiles:
        return Tiles(processors=processors, **dict(zip(START, map(math.exp, logs), strict=True)))

    def off(logs: Sequence[float]) -> float:
        made = tiles(logs)
        return sum(abs(math.log(one.seconds(made) / one.bound_s)) for one in known)

    best = optimize.minimize(off, [math.log(n) for n in START.values()], method="Nelder-Mead", options={"xatol": 0.01})
    return tiles(best.x)


def fitted() -> None:
    """Prints the constants, and how far each network is off by the others'."""
    processors, of = read_target("cuda:sm_90").processors, defaultdict[str, list[Launch]](list)
    for one in launches():
        of[one.network].append(one)
    lines, every = [("held out", "launches", "count", "median", "a tenth over", "reading", "adding")], list[float]()
    for network, mine in of.items():
        tiles = fit([one for other, some in of.items() if other != network for one in some], processors)
        off = [abs(math.log(one.seconds(tiles) / one.bound_s)) for one in mine if one.counts(tiles)]
        every += off
        lines.append((network, str(len(mine)), *said(off), f"{tiles.reading:.1f}", f"{tiles.adding:.1f}"))
    tiles = fit([one for some in of.values() for one in some], processors)
    count = sum(map(len, of.values()))
    lines.append(("all, each by the others", str(count), *said(every), f"{tiles.reading:.1f}", f"{tiles.adding:.1f}"))
    flat = [one for some in of.values() for one in some if one.counts(tiles)]
    scale = median(math.log(one.bound_s / one.whole_s) for one in flat)
    off = [abs(math.log(max(one.whole_s * math.exp(scale), one.least_s) / one.bound_s)) for one in flat]
    lines.append(("one number instead", str(count), *said(off), "", ""))
    print("\n".join(aligned(lines, range(1, 7))))


def said(off: Sequence[float]) -> tuple[str, str, str]:
    ranked = sorted(off)
    return str(len(off)), f"{math.expm1(median(ranked)):.0%}", f"{math.expm1(ranked[len(ranked) * 9 // 10]):.0%}"


def shares(name: str, machines: Sequence[str], dtype: str) -> None:
    """Prints what a layer reaches of the peak on one rank by its samples: convolving, and with memory and a launch."""
    read = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"N": 1}, algorithm="sample", dtype=dtype)
    (layer,) = (one for one in read if one.name == name)
    lines = [("machine", "samples", *(f"{p}" for p in PHASES), *(f"{p}, of a step" for p in PHASES))]
    for machine in map(load_machine, machines):
        for samples in (1, 2, 4, 8, 16, 32, 64, 128):
            one = replace(layer, conv=replace(layer.conv, batch=samples), target=read_target("cuda:sm_90"))
            made = compile_layer(one, machine=machine)
            types, model, peak = (
                made.schedule.types(),
                Model(made.space, machine, dtype),
                dict(machine.peak_flops)[dtype],
            )
            reached: list[float] = []
            taken: list[float] = []
            for _, step in made.schedule.steps():
                if is_convolution(step):
                    operands = (types[step.inputs[0]], types[step.inputs[1]], step.type)
                    cost = model.convolution(operands)
                    asked = layers_shape(made.space, operands, cost.flops)
                    reached.append(machine.convolution_flops_per_s(dtype, *asked) / peak)
                    taken.append(cost.flops / cost.seconds / peak)
            lines.append((machine.name, str(samples), *(f"{n:.1%}" for n in (*reached, *taken))))
    print("\n".join(aligned(lines, range(1, 8))))


def main() -> int:
    asked = options(
        __doc__, layer=("", "of ResNet-50"), machines=(["cuda", "lassen"], "which"), dtype=("bfloat16", "of elements")
    )
    if asked.layer:
        shares(asked.layer, asked.machines, asked.dtype)
    else:
        fitted()
    return 0


if __name__ == "__main__":
    sys.exit(main())
