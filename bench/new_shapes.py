"""What a shape costs that a network has not seen, what it costs again, and the memory of many shapes.

    PYTHONPATH=/path/to/diffusers:... OMP_NUM_THREADS=1 python bench/new_shapes.py [--shapes 20] [--calls 40]
    PYTHONPATH=/path/to/diffusers:... OMP_NUM_THREADS=1 python bench/new_shapes.py --many 1000

Seconds are processor time of one rank, on its own in a process: collectives make zeros of the right shapes, so nothing
is waited for. The network is AutoencoderKL, encoder and decoder, of its usual depth with few channels, on H=2,W=2, of
which this is the second rank. By default: the first call of each shape less its second, and second calls beside those
of a package that was compiled for the shape alone, one after the other in turn. --many calls AutoencoderTiny at so many
shapes and prints the process's resident memory each hundred.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any

import torch
from open_extents import FAMILIES, KL3, Case, case_of
from zoo.makers import diffusers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from echo import Echo
from free_networks import imported
from networks_on_ranks import draw_parameters

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.exported import exported
from convgen.spec.graph import Graph

GRID = Grid((("H", 2), ("W", 2)))
DEEP: dict[str, Any] = KL3 | {
    "block_out_channels": (4, 4, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}


def deep() -> Case:
    torch.manual_seed(0)
    there_and_back = lambda m, x: m.decode(m.encode(x).latent_dist.mode()).sample  # noqa: E731
    module, shape = diffusers("AutoencoderKL", (1, 3, 96, 80), there_and_back, **DEEP)()
    module.eval()
    draw_parameters(module)
    found = exported(module, (torch.randn(shape),), name="deep", training=False, opened={"x": {"H": 2, "W": 3}})
    return Case(module, found.graph, shape, found.tensors)


class OneRank:
    """A package's network on the second rank of four."""

    def __init__(self, graph: Graph) -> None:
        package = compile_network(graph, GRID).package()
        self.net = imported(package.files, Path(tempfile.mkdtemp(prefix="new_shapes_")))
        self.mesh = self.net.init_mesh("cpu", transport=Echo(1, GRID.ranks))
        self.model = self.net.Network(self.mesh, parameters="blocks").eval()
        self.dtype = self.net.NET.types["x"]
        rows = self.model._steps.rows.values()
        self.rows = len(rows) + sum(len(row.derived) for row in rows)

    def seconds(self, shape: tuple[int, ...]) -> float:
        """Of a call at a shape."""
        sizes = {k: n for k, n in zip("HW", shape[-2:], strict=True) if k in self.net.NET.letters}
        block = self.net.scatter("x", torch.zeros(shape, dtype=self.dtype), self.mesh)
        start = process_time()
        self.model(block, batch=shape[0], sizes=sizes)
        return process_time() - start


def speed(shapes: int, calls: int) -> None:
    case, draw = deep(), Random(0)
    ours = OneRank(case.graph)
    first, again = list[float](), list[float]()
    for h, w in {(8 * draw.randint(4, 12), 8 * draw.randint(4, 12)) for _ in range(shapes)}:
        at = (*case.shape[:2], h, w)
        first.append(ours.seconds(at))
        again.append(ours.seconds(at))
    new = sorted(a - b for a, b in zip(first, again, strict=True))
    least, middle, most, call = (1e3 * n for n in (new[0], median(new), new[-1], median(again)))
    print(f"{ours.rows} rows, {len(new)} shapes: a new one takes {least:.0f} ms at the least, {middle:.0f} ms in the "
          f"middle, {most:.0f} ms at the most, beside {call:.0f} ms of its call", flush=True)  # fmt: skip
    alone = OneRank(case.graph.at({"N": 1, "H": case.shape[2], "W": case.shape[3]}))
    each = [(ours.seconds(case.shape), alone.seconds(case.shape)) for _ in range(calls + 3)][3:]
    open_, fixed = (median(one) * 1e3 for one in zip(*each, strict=True))
    ratio = median(a / b for a, b in each)
    print(f"{calls} calls in turn: {open_:.1f} ms, of a package for this shape alone {fixed:.1f} ms; "
          f"a pair's ratio in the middle {ratio:.3f}", flush=True)  # fmt: skip


def many(count: int) -> None:
    case, draw = case_of("tiny"), Random(0)
    ours, most = OneRank(case.graph), FAMILIES["tiny"].most
    shapes = [(h, w) for h in range(1, most + 1) for w in range(1, most + 1)]
    draw.shuffle(shapes)
    for k, at in enumerate(shapes[:count], 1):
        ours.seconds((*case.shape[:2], *at))
        if k % 100 == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            print(f"{k} shapes: {pages * 4 / 1024:.0f} MiB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--many", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        if args.many:
            many(args.many)
        else:
            speed(args.shapes, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
