"""Fields on a latitude-longitude grid, whose columns go round: a network that steps them forward, trained from a file.

    torchrun --nproc-per-node 4 examples/globe.py [--grid H=2,W=2] [--steps 8]

Convolutions read beyond the last column into the first, and past a pole mirrored rows. Both are in the module as anyone
writes them; where columns are split the rows that travel are those of the neighbour round the globe. The file has waves
that travel east, each time a sample; a process maps it, and reads its region of a time and of the next one.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import convgen
from convgen.data import Blocks

ROWS, COLUMNS, FIELDS = 31, 60, 3  # latitudes that no grid divides


class Round(nn.Module):
    """A convolution of 3 x 3 that goes round in longitude; `poles` as torch.nn.functional.pad has its modes."""

    def __init__(self, channels: int, filters: int, poles: str) -> None:
        super().__init__()
        self.convolve, self.poles = nn.Conv2d(channels, filters, 3), poles

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(pad(pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode=self.poles))


class Globe(nn.Module):
    """Fields [N, fields, latitude, longitude] to the next time's, and the mean square of what they miss, by area."""

    weights: Tensor

    def __init__(self, width: int = 16, poles: str = "reflect", rows: int = ROWS) -> None:
        super().__init__()
        self.first, self.last = Round(FIELDS, width, poles), Round(width, FIELDS, poles)
        self.between = nn.ModuleList(Round(width, width, poles) for _ in range(2))
        area = torch.cos(math.pi * ((torch.arange(rows) + 0.5) / rows - 0.5))
        self.register_buffer("weights", (area / area.mean())[:, None])

    def forward(self, now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(now)
        for one in self.between:
            x = x + one(gelu(x))
        made = now + self.last(gelu(x))
        return made, (self.weights * (made - then).square()).mean()


def zonal() -> Globe:
    """With zeros beyond the poles."""
    return Globe(poles="constant")


def write_fields(file: Path, times: int) -> None:
    """Waves of the fields' own numbers, that go a column east in a time, and fade towards the poles."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(times, FIELDS, ROWS, COLUMNS))
    latitude = np.pi * ((np.arange(ROWS) + 0.5) / ROWS - 0.5)
    for time in range(times):
        for field in range(FIELDS):
            phase = 2 * np.pi * (field + 1) * (np.arange(COLUMNS) - time) / COLUMNS
            array[time, field] = np.cos(latitude)[:, None] * np.cos(phase + (field + 1) * latitude[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="H=2,W=2", help="axes are letters of [N, C, H, W] and F, and their ranks")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--poles", default="reflect", choices=("reflect", "constant", "replicate"))
    options = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    file = Path(folder[0]) / "fields.npy"
    if first:
        write_fields(file, 2 * options.steps + 1)
    dist.barrier()
    fields = np.load(file, mmap_mode="r")

    torch.manual_seed(0)
    alone = Globe(poles=options.poles)
    example = torch.zeros(2, FIELDS, ROWS, COLUMNS)
    net = convgen.from_torch(alone, (example, example), options.grid)
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh)
    model.load_full(alone.state_dict())
    optimizer, one = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, alone))
    blocks = Blocks({"now": fields[:-1], "then": fields[1:]}, net, mesh)  # regions are slices: none goes round
    if first:
        print(f"step   {dist.get_world_size()} processes, {options.grid}   1 process")
    for step, batch in enumerate(blocks.loader(2, shuffle=True), 1):
        optimizer.zero_grad()
        _, loss = model(batch["now"], batch["then"])
        loss.backward()
        optimizer.step()
        if first:
            now, then = (torch.from_numpy(fields[[k + later for k in batch.samples]]) for later in (0, 1))
            one.zero_grad()
            _, same = alone(now, then)
            same.backward()
            one.step()
            print(f"{step:4d}   {loss.item():20.5f}   {same.item():9.5f}", flush=True)
    if first:
        _, _, rows, columns = net.region("now", mesh)
        print(
            f"bytes that this process has read: {blocks.bytes_read:,}, of rows {rows.start}:{rows.stop} and columns "
            f"{columns.start}:{columns.stop}; one process reads {2 * 2 * options.steps * fields[0].nbytes:,}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
