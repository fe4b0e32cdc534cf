"""Kernels on paper: of networks partitioned 2, 4 and 8 ways, the least time of each rank's convolution, the model's
time of the best family and the bound of what it compiles to, by what the least time is made of.

    python bench/kernels_on_paper.py ROWS.jsonl             # model, compile and count; goes on where the file ends
    python bench/kernels_on_paper.py ROWS.jsonl --table

No GPU, and nothing is timed. Regimes: the least time is the products' at the peak (compute), the operands' bytes
(memory), or a launch (floor), by tuning/machines/cuda.yaml. `share` is the least time over another: the bound's, the
model's. `for 1.5x`: the share of the least time that a library's kernel may reach at most, so that the model's time is
1.5 times as fast; beside it, in compute, what the best published matrix product of the GPU's library reaches.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from convgen.kernels.config import Config
from convgen.kernels.estimate import data_sheet, estimated_s
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.families import FAMILIES, of_gpu
from convgen.kernels.partition import SPLITS, Split, local_problem
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel
from convgen.kernels.work import whole_bytes, whole_products
from convgen.program.nodes import Phase
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target

NETWORKS = ("resnet50", "vgg16", "wrn50_2")
WAYS = (2, 4, 8)
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")
TARGET = read_target("cuda:sm_90").known()
REGIMES = ("compute", "memory", "floor")
DENSE_SHARE = 685 / 989  # cuBLAS, 8192 x 8192 x 8192 in 16 bits, H200 NVL (github.com/NVIDIA/tilus, thread 154)


def problems(
    networks: Sequence[str], ways: Sequence[int], dtype: str
) -> Iterator[tuple[str, str, int, Split, Problem]]:
    """Network, layer, ways, split, and what the rank with most to do convolves in a phase."""
    for network in networks:
        layers = read_csv(data_file("tuning", "layers", f"{network}.csv"), grid={"N": 1}, algorithm="sample")
        for count in ways:
            for layer in layers:
                for split in SPLITS:
                    for phase in PHASES:
                        p = local_problem(layer.conv, split, count, phase, dtype)
                        if p is not None and p.flops:
                            yield network, layer.name, count, split, p


def best(p: Problem) -> tuple[Config, float]:
    """The family's default of the least estimated time, and its seconds."""
    device = data_sheet(TARGET, p.dtype)
    able = [made.default(p, TARGET) for made in FAMILIES if made.refusal(p, TARGET) is None]
    works = [(config, of_gpu(config).work(p, config)) for config in able]
    seconds = [(config, estimated_s(p, config, w, TARGET, device)) for config, w in works if w is not None]
    return min(seconds, key=lambda pair: pair[1])


def least_us(p: Problem) -> dict[str, float]:
    device = data_sheet(TARGET, p.dtype)
    return {
        "compute": 2 * whole_products(p) / device.flops_per_s * 1e6,
        "memory": whole_bytes(p) / device.bytes_per_s * 1e6,
        "floor": device.floor_s * 1e6,
    }


@cache
def counted(p: Problem) -> dict[str, Any]:
    """The part of a row that layers which are alike share."""
    config, seconds = best(p)
    kernel, least = Kernel((p,), config, TARGET), least_us(p)
    (main,) = (one for one in launches(kernel, p) if one.name == kernel.name)
    found = bound(kernel, p, main, facts(main, TARGET))
    return {
        "phase": p.phase, "dtype": p.dtype,
        "kernel": str(config), "regime": max(least, key=lambda n: least[n]), "least_us": round(max(least.values()), 2),
        "model_us": round(seconds * 1e6, 2), "bound_us": None if found is None else round(found.us, 2),
        "around_us": None if found is None else round(found.times_us["around"], 2),
    }  # fmt: skip


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "network   ways regime   kernels  least us   share: bound  model   for 1.5x   published"
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["bound_us"] is not None:
            groups[row["network"], row["ways"], row["regime"]].append(row)
    for (network, ways, regime), found in sorted(
        groups.items(), key=lambda g: (g[0][0], g[0][1], REGIMES.index(g[0][2]))
    ):
        least = mean([r["least_us"] for r in found])
        of_bound, of_model = (mean([min(1.0, r["least_us"] / r[n]) for r in found]) for n in ("bound_us", "model_us"))
        published = f"{DENSE_SHARE:.2f}" if regime == "compute" else "none"
        yield (
            f"{network:9} {ways:4} {regime:8} {len(found):7}  {least:8.1f}  {of_bound:12.2f}  {of_model:5.2f}"
            f"  {of_model / 1.5:9.2f}   {published:>9}"
        )


@click.command(help=__doc__)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--networks", default=",".join(NETWORKS))
@click.option("--ways", default=",".join(map(str, WAYS)))
@click.option("--dtype", default="bfloat16")
@click.option("--table", "as_table", is_flag=True)
def main(path: Path, networks: str, ways: str, dtype: str, as_table: bool) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    if as_table:
        click.echo("\n".join(table([r for r in rows if r["dtype"] == dtype])))
        return
    keys = ("network", "layer", "ways", "split", "phase", "dtype")
    done = {tuple(r[k] for k in keys) for r in rows}
    with path.open("a", encoding="utf-8") as file:
        for network, layer, count, split, p in problems(networks.split(","), [int(n) for n in ways.split(",")], dtype):
            if (network, layer, count, split, p.phase, dtype) not in done:
                names = {"network": network, "layer": layer, "ways": count, "split": split}
                file.write(json.dumps(names | counted(p)) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
