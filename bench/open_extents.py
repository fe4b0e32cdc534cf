"""Real families at shapes drawn at random, from one import and one package a grid, against the module.

    PYTHONPATH=/path/to/diffusers:... python bench/open_extents.py [--families kl_decoder ...] [--grids H=2 H=2,W=2 ...]
        [--shapes 30] [--seed 0]
    python bench/open_extents.py --residues [--families kl_decoder ...] [--pairs 50]
    python bench/open_extents.py --baked

Reduced configurations, every parameter drawn anew, in float64 on virtual ranks of one process. Each package runs at so
many shapes on H=2 and on H=2,W=2 and at five on the other grids: ragged ones, one row, fewer rows than a halo or than
ranks, and its first shape again. A line a grid: shapes, shapes that a condition refuses, and the largest error of all
ranks, relative to the largest entry. At a shape that is refused the module is run as well: it fails there, or computes
something else than its graph does; `needless` counts those where it doesn't.

--residues compares bytes, step by step, with those of a package compiled for the shape alone: H and W modulo twice the
whole stride, each alone and pairs drawn at random. --baked imports videos' models with T open: whose loops over frames
are baked in says so by T's name.

Some models cast to float32 inside. They are traced, and run, with casts of float64 to float32 left out, so that what is
compared isn't rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from free_networks import imported
from networks_on_ranks import draw_parameters
from zoo.diffusers import COGVIDEO, DIFFUSERS, HUNYUAN, KL, LTX, VQ, WAN
from zoo.makers import IN_OUT, Make, coded, decoded, diffusers, monai, vision

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.exported import exported
from convgen.spec.graph import Graph
from convgen.spec.text import parse_grid
from convgen.verify.graph_reference import run_graph
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ("H=2", "H=2,W=2", "W=2", "H=3", "N=2,H=2")
MANY = 2  # grids that see all shapes; the others see five
NEAR = 1e-12
Shape = tuple[int, int]


@dataclass(frozen=True)
class Family:
    """A model, its input's shape, whose last two extents are open.

    Attributes:
        stride: rows of the input that a row of what is smallest stands for.
        most: rows, and columns, that are drawn at most.
    """

    make: Make
    stride: int
    most: int


# fmt: off
KL3: dict[str, Any] = {**KL, "block_out_channels": (8, 8, 16), "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
KL8 = KL3 | {"block_out_channels": (4, 4, 4, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4}
FAMILIES: Mapping[str, Family] = {
    "kl_decoder": Family(diffusers("AutoencoderKL", (2, 4, 12, 10), decoded, **KL3), 1, 17),
    "kl_encoder_8": Family(diffusers("AutoencoderKL", (1, 3, 40, 36), coded, **KL8), 8, 96),
    "kl_encoder": Family(diffusers("AutoencoderKL", (2, 3, 24, 20), coded, **KL3), 4, 49),
    "wan_decoder": Family(diffusers("AutoencoderKLWan", (1, 4, 2, 12, 10), decoded, **WAN), 1, 17),
    "wan_encoder": Family(diffusers("AutoencoderKLWan", (1, 3, 5, 24, 20), coded, **WAN), 2, 41),
    "qwen_decoder": Family(diffusers("AutoencoderKLQwenImage", (1, 4, 1, 12, 10), decoded, **WAN), 1, 17),
    "qwen_encoder": Family(diffusers("AutoencoderKLQwenImage", (1, 3, 1, 24, 20), coded, **WAN), 2, 41),
    "cogvideo_decoder": Family(diffusers("AutoencoderKLCogVideoX", (1, 4, 2, 12, 10), decoded, **COGVIDEO), 1, 15),
    "cogvideo_encoder": Family(diffusers("AutoencoderKLCogVideoX", (1, 3, 5, 24, 20), coded, **COGVIDEO), 2, 33),
    "ltx_decoder": Family(diffusers("AutoencoderKLLTXVideo", (1, 8, 2, 6, 5), decoded, **LTX,
        decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1,) * 5), 1, 9),
    "ltx_encoder": Family(diffusers("AutoencoderKLLTXVideo", (1, 3, 9, 96, 64), coded, **LTX,
        decoder_block_out_channels=(8, 8, 8, 8), decoder_layers_per_block=(1,) * 5), 32, 160),
    "hunyuan_decoder": Family(diffusers("AutoencoderKLHunyuanVideo", (1, 4, 2, 12, 10), decoded, **HUNYUAN), 1, 9),
    "hunyuan_encoder": Family(diffusers("AutoencoderKLHunyuanVideo", (1, 3, 5, 32, 40), coded, **HUNYUAN), 8, 64),
    "vq_decoder": Family(diffusers("VQModel", (2, 3, 12, 10),
        lambda m, x: m.decode(x, force_not_quantize=True).sample, **VQ), 1, 17),
    "vq_encoder": Family(diffusers("VQModel", (2, 3, 24, 20), lambda m, x: m.encode(x).latents, **VQ), 2, 41),
    "tiny": Family(DIFFUSERS["tiny_vae"], 2, 41),
    "unet2d": Family(DIFFUSERS["diffusers_unet2d"], 2, 31),
    "resnet18": Family(vision("resnet18", (2, 3, 72, 60), num_classes=10), 32, 130),
    "deeplabv3": Family(vision("deeplabv3_resnet50", (2, 3, 65, 50), kind="segmentation", weights_backbone=None,
        num_classes=5), 8, 90),
    "monai_unet": Family(monai("UNet", (2, 1, 32, 28), dims=2, **IN_OUT, channels=(4, 8, 16), strides=(2, 2)), 4, 60),
    "monai_segresnet": Family(monai("SegResNet", (2, 1, 24, 40), dims=2, init_filters=8, **IN_OUT,
        blocks_down=(1, 2), blocks_up=(1,)), 2, 40),
}
VIDEOS = [name for name in FAMILIES if name.split("_")[0] in ("wan", "qwen", "cogvideo", "ltx", "hunyuan")]
# fmt: on


@dataclass
class Case:
    """A family's module, its graph of evaluation, and its input's shape."""

    module: nn.Module
    graph: Graph
    shape: tuple[int, ...]
    constants: Mapping[str, Tensor]

    def draw(self, at: Shape, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn((*self.shape[:-2], *at), generator=draw, dtype=torch.float64)

    @property
    def state(self) -> dict[str, Tensor]:
        return {**self.module.state_dict(), **self.constants}

    def graph_for(self, x: Tensor) -> Graph:
        """The graph of this shape alone."""
        frames = {"T": x.shape[2]} if "T" in self.graph.letters else {}
        return self.graph.at({"N": x.shape[0], "H": x.shape[-2], "W": x.shape[-1], **frames})

    def graph_at(self, x: Tensor) -> list[Tensor]:
        """What the graph makes on one device, whatever its conditions say of the shape."""
        graph = self.graph_for(x)
        made = run_graph(graph, {**self.state, graph.inputs[0].name: x}, training=False).outputs
        return [made[name] for name, _ in graph.outputs]


class Listed(nn.Module):
    """A module's tensors: DeepLabV3 gives a mapping, others one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        made = self.module(x)
        return made["out"] if isinstance(made, Mapping) else made


def case_of(name: str, frames: bool = False) -> Case:
    """
    Args:
        frames: whether their number is open, too.
    Raises:
        InputError: as `exported` does.
    """
    torch.manual_seed(0)
    module, shape = FAMILIES[name].make()
    module = Listed(module).double().eval()
    draw_parameters(module)
    d = len(shape)
    letters = ({"T": 2} if frames else {}) | {"H": d - 2, "W": d - 1}
    example = torch.randn(shape, dtype=torch.float64)
    found = exported(module, (example,), name=name, training=False, opened={"x": letters})
    return Case(module, found.graph, shape, found.tensors)


def shapes_of(family: Family, count: int, draw: Random, first: Shape, multiple: int) -> list[Shape]:
    """The example's, one row, few rows, and others; of three, one is a multiple of the stride."""
    found = [first, (1, 1), (1, family.most), (3, 2), (family.stride, family.stride + 1)]
    while len(found) < count - 1:
        k = family.stride if len(found) % 3 else 1
        found.append((k * draw.randint(1, family.most // k), k * draw.randint(1, family.most // k)))
    if multiple > 1:
        found = [(-(-h // multiple) * multiple, -(-w // multiple) * multiple) if i % 4 else (h, w)
                 for i, (h, w) in enumerate(found)]  # fmt: skip
    return [*found[: count - 1], first]


def off(made: Tensor, wanted: Tensor) -> float:
    if made.shape != wanted.shape:
        return float("inf")
    most = float(wanted.abs().max()) if wanted.numel() else 0.0
    far = float((made - wanted).abs().max()) if wanted.numel() else 0.0
    return far if most == 0 else far / most


@dataclass
class Seen:
    """A package at its shapes: errors of those that ran, and refusals."""

    errors: dict[Shape, float]
    refused: dict[Shape, str]
    needless: list[Shape]


def run_package(case: Case, grid: Grid, shapes: Sequence[Shape]) -> Seen:
    """All shapes from one import, by models that live on."""
    package = compile_network(case.graph, grid).package()
    with tempfile.TemporaryDirectory(prefix="open_extents_") as folder:
        net = imported(package.files, Path(folder))
        letters = net.NET.letters
        seen = Seen({}, {}, [])
        wanted: list[tuple[Shape, Tensor, Tensor]] = []
        for k, at in enumerate(shapes):
            x = case.draw(at, k)
            known = {"N": x.shape[0], "H": at[0], "W": at[1]}
            unmet = net.NET.unmet(tuple(known[a] for a in letters))
            if unmet:
                seen.refused[at] = unmet
                if agrees(case, x):
                    seen.needless.append(at)
                continue
            with torch.no_grad():
                wanted.append((at, x, case.module(x)))

        for (at, _, _), *ones in zip(wanted, *on_ranks(net, grid, case, wanted), strict=True):
            seen.errors[at] = max(*(far for far, _ in ones), seen.errors.get(at, 0.0))
    return seen


def on_ranks(
    net: Any, grid: Grid, case: Case, wanted: Sequence[tuple[Shape, Tensor, Tensor]]
) -> list[list[tuple[float, list[tuple[str, int]]]]]:
    """Of each rank, at each shape: the error, and what it has sent: (collective, bytes)."""

    def rank(end: VirtualTransport) -> list[tuple[float, list[tuple[str, int]]]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(case.state)
        model.eval()
        found: list[tuple[float, list[tuple[str, int]]]] = []
        with torch.no_grad():
            for (h, w), x, y in wanted:
                sizes = {"H": h, "W": w}
                block = net.scatter("x", x, mesh)
                before = len(end.sent)
                made = model(block, batch=x.shape[0], sizes=sizes)
                sent = [(one.collective, one.bytes) for one in end.sent[before:] if one.bytes]
                whole = net.gather("output", made, mesh, batch=x.shape[0], sizes=sizes)
                found.append((off(whole, y), sent))
        return found

    return World(grid.ranks).run(rank)


def agrees(case: Case, x: Tensor) -> bool:
    """Whether the module and its graph compute the same; not where the module fails."""
    try:
        with torch.no_grad():
            wanted = case.module(x)
            (made,) = case.graph_at(x)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError):
        return False
    stated = {v.name: v.shape for c in case.graph_for(x).calls for v in c.results if v}
    (shape,) = [stated[of] for _, of in case.graph.outputs]
    return off(made, wanted) < NEAR and tuple(made.shape) == shape


def residues(names: Sequence[str], grids: Sequence[str], pairs: int, seed: int) -> bool:
    """Bytes of each step and results, at all residues of an axis and at pairs of them."""
    right = True
    for name in names:
        case, family, draw = case_of(name), FAMILIES[name], Random(f"{name} {seed}")
        period = 2 * family.stride
        h, w = (-(-n // period) * period for n in case.shape[-2:])
        shapes = [*((h + r, w) for r in range(period)), *((h, w + r) for r in range(1, period))]
        shapes += [(h + draw.randrange(period), w + draw.randrange(period)) for _ in range(pairs)]
        for text in grids:
            grid, start = Grid(tuple(parse_grid(text).items())), process_time()
            package = compile_network(case.graph, grid, passes=[]).package()
            with tempfile.TemporaryDirectory(prefix="open_extents_") as folder:
                net = imported(package.files, Path(folder))
                inputs = [(at, case.draw(at, k)) for k, at in enumerate(dict.fromkeys(shapes))]
                known = [net.NET.unmet(net.NET.opened(x.shape[0], {"H": h, "W": w})) for (h, w), x in inputs]
                with torch.no_grad():
                    wanted = [
                        (at, x, case.module(x)) for (at, x), unmet in zip(inputs, known, strict=True) if not unmet
                    ]
                each = on_ranks(net, grid, case, wanted)
            others: list[Shape] = []
            for (at, x, _), *ones in zip(wanted, *each, strict=True):
                alone = volume(compile_network(case.graph_for(x), grid, passes=[]).plain)["forward"]
                said = [[(s["collective"], n) for s in alone if (n := s["bytes_sent_per_rank"][rank])]
                        for rank in range(grid.ranks)]  # fmt: skip
                others += [at] * (said != [sent for _, sent in ones])
            far = max(far for one in each for far, _ in one)
            right &= far <= NEAR and not others
            print(f"{name} {text}: {len(wanted)} shapes modulo {period}, other bytes at {others}; {far:.1e}; "
                  f"{process_time() - start:.0f} s", flush=True)  # fmt: skip
    return right


def baked(names: Sequence[str]) -> bool:
    """What is said of T where it is open, too; at numbers of frames that aren't refused the graph is the module."""
    right = True
    for name in names:
        try:
            case = case_of(name, frames=True)
        except InputError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            right &= " T" in str(error)
            continue
        said = [str(c) for c in case.graph.conditions if "T" in c.letters]
        frames, refused, wrong = case.shape[2], list[int](), list[int]()
        for t in range(1, 2 * frames + 6):
            x = torch.randn((*case.shape[:2], t, *case.shape[3:]), dtype=torch.float64)
            sizes = {"N": x.shape[0], "T": t, "H": x.shape[3], "W": x.shape[4]}
            if not all(c.holds(sizes) for c in case.graph.conditions):
                refused.append(t)
            elif not agrees(case, x):
                wrong.append(t)
        right &= not wrong
        print(f"{name}: {'; '.join(said) or 'any T'}: refused {refused}, wrong {wrong}", flush=True)
    return right


def compare(names: Sequence[str], grids: Sequence[str], count: int, seed: int) -> bool:
    right = True
    for name in names:
        start = process_time()
        case = case_of(name)
        conditions = "; ".join(map(str, case.graph.conditions)) or "none"
        print(
            f"{name}: {len(case.graph.calls)} calls, {process_time() - start:.0f} s; conditions: {conditions}",
            flush=True,
        )
        for k, text in enumerate(grids):
            draw, family = Random(f"{name} {text} {seed}"), FAMILIES[name]
            first: Shape = (case.shape[-2], case.shape[-1])
            multiple = multiple_of(case.graph)
            shapes = shapes_of(family, count if k < MANY else 5, draw, first, multiple)
            start = process_time()
            try:
                seen = run_package(case, Grid(tuple(parse_grid(text).items())), shapes)
            except Exception as error:  # so that the others are seen
                print(f"  {text:8} FAILED {type(error).__name__}: {str(error)[:600]}", flush=True)
                right = False
                continue
            worst = max(seen.errors, key=lambda at: seen.errors[at])
            far = seen.errors[worst]
            right &= far <= NEAR and not seen.needless
            print(f"  {text:8} {len(seen.errors)} shapes, {len(seen.refused)} refused, needless {seen.needless}; "
                  f"{far:.1e} at {worst}; {process_time() - start:.0f} s", flush=True)  # fmt: skip
    return right


def multiple_of(graph: Graph) -> int:
    """The least number whose multiples fulfil the conditions."""
    return next((k for k in (1, 2, 4, 8, 16, 32) if all(
        c.holds({"N": 2, "H": 6 * k, "W": 10 * k}) for c in graph.conditions if c.sign == "==")), 1)  # fmt: skip


def without_rounding() -> None:
    """Casts of float64 to float32 leave it as it is, in this process."""
    to = torch.Tensor.to

    def kept(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            named = {k: torch.float64 if a is torch.float32 else a for k, a in named.items()}
        return to(tensor, *args, **named)

    torch.Tensor.to = kept  # type: ignore[method-assign]
    torch.Tensor.float = lambda tensor: kept(tensor, torch.float32)  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--families", nargs="*", default=[], metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--grids", nargs="*", default=[], metavar="GRID")
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--residues", action="store_true")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--baked", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    without_rounding()
    names, grids = args.families or list(FAMILIES), args.grids
    if args.baked:
        right = baked(args.families or VIDEOS)
    elif args.residues:
        right = residues(names, grids or GRIDS[:MANY], args.pairs, args.seed)
    else:
        right = compare(names, grids or GRIDS, args.shapes, args.seed)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
