"""The 2K mesh model of [SP] VI, shrunk eight times, trained from a file on H=2,W=2: losses, and bytes that ranks read.

    python bench/mesh_from_file.py [--steps 4] [--filters 128]

Images of 256x256 in float64, one a step, beside the same package on one process. Each process maps the files, and reads
its block of an image and of its labels.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convgen.algebra.grid import Grid
from convgen.data import Blocks
from convgen.network_compiler import compile_network
from convgen.package_cache import keep
from convgen.packages import files_of, load_package
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import read_network
from convgen.verify.processes import spawn

MESH2K = Path(__file__).resolve().parent.parent / "examples" / "networks" / "mesh2k.yaml"
SHRUNK = {"[1, 18, 2048, 2048]": "[1, 18, 256, 256]", "name: mesh2k": "name: mesh2k_shrunk\ndtype: float64"}
Run = tuple[list[float], int]  # losses, bytes read


def package(folder: Path, grid: Grid, filters: int) -> Any:
    text = MESH2K.read_text(encoding="utf-8")
    for old, new in {**SHRUNK, "out_channels: 128": f"out_channels: {filters}"}.items():
        text = text.replace(old, new)
    file = folder / "mesh2k_shrunk.yaml"
    file.write_text(text, encoding="utf-8")
    files = files_of(compile_network(network_graph(read_network(file)), grid), {})
    where = folder / "_".join(f"{a}{n}" for a, n in grid.axes)
    keep(where, files)
    return load_package(where)


def write_files(folder: Path, net: Any, samples: int) -> None:
    """An image and its labels at a time."""
    draw = np.random.default_rng(0)
    for name, kind in (("input", np.float32), ("target", np.uint8)):
        shape = (samples, *net.NET.values[name][0][1:])
        array = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=kind, shape=shape)
        for k in range(samples):
            array[k] = draw.standard_normal(shape[1:]) if kind == np.float32 else draw.integers(2, size=shape[1:])


def train(net: Any, folder: Path, off: float, _: int) -> Run:
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("input", "target")}
    blocks, losses = Blocks(arrays, net, mesh), list[float]()
    for batch in blocks.loader(1, shuffle=True):
        optimizer.zero_grad()
        *_, loss = model(batch["input"] * (1 + off), batch["target"]).values()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, blocks.bytes_read


def compared(steps: int, filters: int) -> tuple[float, float, list[int], int]:
    """(the largest relative difference of ranks' losses from one process's, of one process's whose images are a unit in
    the last place off, bytes that each rank reads, bytes that one process reads)."""
    with tempfile.TemporaryDirectory() as name:
        folder, one = Path(name), Grid((("N", 1),))
        net, split = package(folder, one, filters), package(folder, Grid((("H", 2), ("W", 2))), filters)
        write_files(folder, net, steps)
        (wanted,), (nudged,) = (spawn(partial(train, net, folder, off), 1, 3600) for off in (0.0, 2.0**-52))
        ranks = spawn(partial(train, split, folder, 0.0), 4, 3600)

    def far(runs: list[Run]) -> float:
        return max(abs(a / b - 1) for losses, _ in runs for a, b in zip(losses, wanted[0], strict=True))

    return far(ranks), far([nudged]), [read for _, read in ranks], wanted[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--filters", type=int, default=128)
    options = parser.parse_args()
    off, rounding, read, whole = compared(options.steps, options.filters)
    print(f"mesh2k shrunk eight times on H=2,W=2: {options.steps} losses at most {off:.0e} from one process's")
    print(f"of one process whose images are a unit in the last place off: {rounding:.0e}")
    print(f"bytes read by ranks: {', '.join(f'{n:,}' for n in read)}; by one process {whole:,}")


if __name__ == "__main__":
    main()
