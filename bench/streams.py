"""Causal VAEs of diffusers in reduced configurations: chunk after chunk on virtual ranks, beside one shot.

    PYTHONPATH=/path/to/diffusers python bench/streams.py [NAME ...] [--grids H=2 W=2 H=2,W=2] [--dtype float64]
        [--shapes 4] [--open] [--steps]

A line a family, way, grid and shape: the largest error beside the largest element, bytes that ranks send for a later
chunk with halos kept and with rows of cached frames sent again, and what a rank's caches are of all. With --open one
stream, compiled once a grid, takes all shapes; sent is of the shape that it was compiled for. With --steps what a later
chunk sends by kind of step: of rows of new frames, of rows of cached ones, and of what is no halo.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.one_set import Asked, prepared
from convgen.packages import load_package
from convgen.parallel import Prepared, how_of
from convgen.spec.text import parse_grid
from convgen.streams import Chunk, chunks, graphs
from convgen.verify.virtual import VirtualTransport, World


class Family(NamedTuple):
    """A VAE of diffusers, small.

    Attributes:
        latent, image: channels; `scale`: rows of an image for one of a latent.
        frames: of decode and encode, those of the first chunk, of a later one, and of all.
    """

    settings: dict[str, Any]
    latent: int
    image: int
    scale: int
    frames: dict[str, tuple[int, int, int]]


STATISTICS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, **STATISTICS}
COG: dict[str, Any] = {
    "block_out_channels": (8, 8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4,
    "down_block_types": ("CogVideoXDownBlock3D",) * 3, "up_block_types": ("CogVideoXUpBlock3D",) * 3,
    "temporal_compression_ratio": 4, "sample_height": 64, "sample_width": 64,
}  # fmt: skip
FAMILIES = {
    "AutoencoderKLWan": Family(WAN, 4, 3, 8, {"decode": (1, 1, 4), "encode": (1, 4, 9)}),
    "AutoencoderKLQwenImage": Family(WAN, 4, 3, 8, {"decode": (1, 1, 3), "encode": (1, 4, 9)}),
    "AutoencoderKLCogVideoX": Family(COG, 4, 3, 4, {"decode": (3, 2, 7), "encode": (9, 8, 17)}),
}
SHAPES = ((4, 5), (6, 3), (5, 8), (7, 6))  # rows and columns of a latent
ONE_SHOT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "decode": lambda vae, z: vae.decode(z).sample,
    "encode": lambda vae, x: vae.encode(x).latent_dist.parameters,
}


class Ready(NamedTuple):
    """A stream that is compiled."""

    asked: dict[str, Asked]
    packages: dict[str, Prepared]
    net: Any


def main(
    names: Sequence[str], grids: Sequence[str], shapes: int, dtype: torch.dtype, opened: bool, steps: bool
) -> None:
    print(
        f"{'family':24}{'way':8}{'grid':9}{'latent':8}{'chunks':>6} {'error':>9}{'sent':>10}{'again':>10}  a rank keeps"
    )
    for name in names or FAMILIES:
        family = FAMILIES[name]
        torch.manual_seed(0)
        vae: Any = getattr(importlib.import_module("diffusers"), name)(**family.settings).eval().to(dtype)
        with torch.no_grad():
            for parameter in vae.parameters():  # so that no signal dies out on its way
                parameter.mul_(1.5 if parameter.dim() > 1 else 1.0)
        for way, frames in family.frames.items():
            for grid in grids:
                ready: Ready | None = None
                for height, width in SHAPES[:shapes]:
                    if ready is None or not opened:
                        ready = compiled(vae, family, way, frames, (height, width), grid, dtype, opened)
                    row = one(vae, ready, family, way, frames, (height, width), grid, dtype)
                    print(f"{name:24}{way:8}{grid:9}{f'{height}x{width}':8}{row}", flush=True)
                if steps and ready is not None:
                    print_steps(vae, ready, grid)


def video(family: Family, way: str, count: int, rows: tuple[int, int], dtype: torch.dtype) -> Tensor:
    scale, channels = (1, family.latent) if way == "decode" else (family.scale, family.image)
    return torch.randn(1, channels, count, *(n * scale for n in rows), dtype=dtype)


def compiled(
    vae: Any, family: Family, way: str, frames: tuple[int, int, int], rows: tuple[int, int], grid: str,
    dtype: torch.dtype, opened: bool,
) -> Ready:  # fmt: skip
    begins, each, count = frames
    x, axes = video(family, way, count, rows, dtype), parse_grid(grid, "H=2", "--grids")
    given = (x[:, :, :begins],), (x[:, :, begins : begins + each],)
    extents = {"z" if way == "decode" else "x": {"H": 3, "W": 4}} if opened else None
    asked = graphs(vae, *given, how_of(axes, None, "cpu", None, None), way, extents)
    packages = prepared(asked, axes)
    return Ready(asked, packages, load_package(packages["first"][1], files=packages["first"][2]))


def print_steps(vae: Any, ready: Ready, grid: str) -> None:
    """What a later chunk sends, by kind of step."""

    def program(transport: VirtualTransport) -> list[str]:
        _, steady = chunks(
            vae, ready.asked, ready.packages, ready.net.init_mesh("cpu", transport=transport), whole=True
        )
        return [*sent_lines(steady)]

    for line in World(prod(parse_grid(grid).values())).run(program)[0]:
        print(line, flush=True)


def sent_lines(steady: Chunk) -> Iterator[str]:
    caches = {*steady.both.inputs.values()}
    lines = [*steady.network._steps.forward, *steady.network._steps.backward]
    of_caches = {one.key for one in lines if one.kind in ("fetch", "start", "wait") and caches & {*one.reads}}
    found: dict[tuple[str, str], list[int]] = {}
    for step in steady.package.VOLUME["forward"]:
        exchanged = "rows of new frames" if step["collective"] == "exchange" else "what is no halo"
        what = "rows of cached frames" if step["step"] in of_caches else exchanged
        found.setdefault((what, step["collective"]), []).append(sum(step["bytes_sent_per_rank"]))
    for (what, collective), sent in sorted(found.items()):
        again = "; a full resend alone sends them" if what == "rows of cached frames" else ""
        yield f"  {what}, {collective}: {sum(sent):,} bytes in {len(sent)} steps{again}"


def one(
    vae: Any, ready: Ready, family: Family, way: str, frames: tuple[int, int, int], rows: tuple[int, int], grid: str,
    dtype: torch.dtype,
) -> str:  # fmt: skip
    """A line: chunks, error, bytes, share."""
    begins, each, count = frames
    x = video(family, way, count, rows, dtype)
    with torch.no_grad():
        want = ONE_SHOT[way](vae, x)
    asked, packages, net = ready

    def program(transport: VirtualTransport) -> tuple[Tensor, int, int, int]:
        mesh = net.init_mesh("cpu", transport=transport)
        first, steady = chunks(vae, asked, packages, mesh, whole=True)
        y, state = first(x[:, :, :begins])
        made = [y]
        for start in range(begins, count, each):
            y, state = steady(x[:, :, start : start + each], state)
            made.append(y)
        return torch.cat(made, 2), steady.bytes_sent(state), steady.bytes_sent(), state.bytes

    (y, sent, again, held), *others = World(prod(parse_grid(grid).values())).run(program)
    share = held / (held + sum(one[-1] for one in others))
    error = float((y - want).abs().max() / want.abs().max())
    return f"{1 + (count - begins) // each:6} {error:9.1e}{sent:10}{again:10}  {held} bytes, {share:.0%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Causal VAEs chunk after chunk, beside one shot.")
    parser.add_argument("names", nargs="*", choices=[[], *FAMILIES])
    parser.add_argument("--grids", nargs="+", default=["H=2", "W=2", "H=2,W=2"])
    parser.add_argument("--shapes", type=int, default=1, help=f"how many of {SHAPES}")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--open", action="store_true", help="rows and columns are known at run time only")
    parser.add_argument("--steps", action="store_true", help="what a later chunk sends, by kind of step")
    options = parser.parse_args()
    kind = getattr(torch, options.dtype)
    sys.exit(main(options.names, options.grids, options.shapes, kind, options.open, options.steps))
