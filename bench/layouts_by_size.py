"""Which layout `convgen.serve` takes at shapes drawn at random, beside the price of a package for each shape alone.

    PYTHONPATH=/path/to/diffusers:... python bench/layouts_by_size.py [--shapes 12] [--machine cpu]

AutoencoderTiny in a reduced configuration, over four ranks. A line a shape: of each layout the modelled milliseconds of
the one package for any shape, by which it is chosen, and of a package that was compiled for this shape alone. `lost` is
what the choice takes more than the best of the latter.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from random import Random

from open_extents import case_of

from convgen.algebra.grid import Grid
from convgen.by_sizes import SCHEDULE, LayoutPrices, call_picoseconds, least
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.network_compiler import compile_network
from convgen.spec.target import CPU
from convgen.spec.text import parse_grid

LAYOUTS = ("H=4", "W=4", "H=2,W=2", "W=1")
SIDES = (8, 24, 60, 100, 256, 700, 1500)


def main(shapes: int, machine_name: str) -> None:
    graph, machine, draw = case_of("tiny").graph, load_machine(machine_name), Random(0)
    grids = {name: Grid(tuple(parse_grid(name).items())) for name in LAYOUTS}
    texts = {
        name: compile_network(graph, grid, machine=machine).package().files[SCHEDULE] for name, grid in grids.items()
    }
    prices, worst = LayoutPrices.read(graph, texts, CPU, machine, whole=True), 0.0
    for _ in range(shapes):
        sizes = {"N": 1, "H": draw.choice(SIDES), "W": draw.choice(SIDES)}
        times = prices.picoseconds(sizes)
        chosen = least(LAYOUTS, times, times, None)[0]
        alone: dict[str, int] = {}
        for name, grid in grids.items():
            one = compile_network(graph.at(sizes), grid, machine=machine)
            alone[name] = call_picoseconds(one.program, machine, one.dtype, whole=True)
        lost = alone[chosen] / min(alone.values()) - 1
        worst = max(worst, lost)
        each = ", ".join(
            f"{n} {times[n] / PICOSECONDS * 1e3:.3f} ({alone[n] / PICOSECONDS * 1e3:.3f})" for n in LAYOUTS
        )
        print(f"{sizes['H']:4} x {sizes['W']:4}: {chosen:8} {each}; lost {lost:.1%}", flush=True)
    print(f"{shapes} shapes, in milliseconds; at the most {worst:.1%} lost")


def _ms(picoseconds: int) -> str:
    return f"{picoseconds / PICOSECONDS * 1e3:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", type=int, default=12)
    parser.add_argument("--machine", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.exit(main(options.shapes, options.machine))
