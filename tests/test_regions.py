"""Regions: which part of a global tensor is a rank's, with its halo or without; and reading no more than that."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from free_networks import free_network, imported
from generate import uneven
from operation_cases import a_grid
from oracle import split
from runtime_parts import ROOT
from sampling import cases_of
from small_networks import ResNet, UNet, seeded
from test_networks_free import Branches, Volume
from torch import Tensor, nn

import convgen
from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.network_compiler import compile_network
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.fuse_forms import FuseForms
from convgen.passes.start_halos import StartHalos
from convgen.spec.exported import graph_of
from convgen.spec.reader import read_layer
from convgen.verify.processes import spawn
from convgen.verify.program import load_module
from convgen.verify.virtual import VirtualTransport, World

sys.path.insert(0, str(ROOT / "templates"))
from runtime.regions import read_region  # isort: skip

GRIDS = ({"H": 2}, {"H": 3}, {"W": 2}, {"N": 2, "H": 2}, {"H": 2, "W": 2})


class Read:
    """An array that tells what of it is read."""

    def __init__(self, whole: np.ndarray[Any, Any]) -> None:
        self.whole, self.shape, self.dtype, self.elements = whole, whole.shape, whole.dtype, 0

    def __getitem__(self, where: Any) -> Any:
        part = self.whole[where]
        self.elements += part.size
        return part


def tiles(regions: list[tuple[slice, ...]], shape: tuple[int, ...]) -> bool:
    """Whether the regions cover every element equally often: copies of blocks lie on ranks of whole axes."""
    times = np.zeros(shape, dtype=int)
    for region in regions:
        times[region] += 1
    return bool((times == times.flat[0]).all()) and times.flat[0] > 0


class Line(nn.Module):
    """One dimension, rows of its own length in a second result."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        self.wide = nn.Conv1d(channels, 4, 5, draw.choice((1, 2)), 2)
        self.back = nn.ConvTranspose1d(4, 2, 3, draw.choice((1, 2)), 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.wide(x))
        return self.back(x), nn.functional.avg_pool1d(x, 3, 1)


@pytest.mark.parametrize("number", cases_of(24, "regions of free networks"))
def test_regions_of_random_networks(tmp_path: Path, number: int) -> None:
    assert check_regions(tmp_path, number) > 0


def check_regions(folder: Path, number: int) -> int:
    """Of every value of a network with any layout the regions tile the tensor, and are what `scatter` gives.

    Returns:
        How many values it has.
    """
    draw = Random(f"regions {number}")
    seeded()
    grid = a_grid(draw)
    batch, channels = draw.randint(2, 5), draw.randint(1, 3)
    make, dims = draw.choice(((Branches, 2), (Branches, 2), (Volume, 3), (Line, 1)))
    module = make(draw, channels).double()
    size = [draw.randint(9, 12) for _ in range(dims)]
    x = torch.randn(batch, channels, *size, dtype=torch.float64)
    graph, _ = graph_of(module, (x,))
    net: Any = imported(free_network(draw, graph, grid).package().files, folder)
    other = batch + draw.choice((-1, 0, 1))

    def program(end: VirtualTransport) -> dict[str, tuple[slice, ...]]:
        mesh, found = net.init_mesh("cpu", transport=end), dict[str, tuple[slice, ...]]()
        for name in net.NET.values:
            shape = net.NET.extents(name, other)
            kind = net.NET.types.get(name, torch.float64)
            whole = torch.arange(int(np.prod(shape))).view(shape).to(kind)
            region = found[name] = net.region(name, mesh, batch=other)
            assert torch.equal(whole[region], net.scatter(name, whole, mesh))
            array = Read(whole.numpy())
            block = net.block(name, array, mesh, batch=other)
            assert block.dtype == kind and torch.equal(block, whole[region])
            assert array.elements == block.numel()
        return found

    ranks = World(grid.ranks).run(program)
    for name in net.NET.values:
        assert tiles([found[name] for found in ranks], net.NET.extents(name, other)), name
    return len(net.NET.values)


class First(nn.Module):
    """Convolutions of several windows that read one input, and its values themselves."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.padding, self.stride, self.dilation = draw.choice((0, 1, 2)), draw.choice((1, 2)), draw.choice((1, 2))
        self.kernel = draw.choice((1, 3, 5))
        self.one = nn.Conv2d(2, 3, self.kernel, padding=self.padding)
        self.two = nn.Conv2d(2, 2, 3, self.stride, 2, self.dilation)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.one(x), self.two(x)
        return a, b, self.head(torch.cat([one.mean((2, 3)) for one in (a, b, x * x)], 1))


MAKERS = (First, lambda _: ResNet(0.0), lambda _: UNet())
PASSES = (None, (), (StartHalos(), BucketGradients(0)), (StartHalos(gradients="whole"), FuseForms()))


@pytest.mark.parametrize("number", cases_of(24, "halos that are given"))
def test_an_input_with_its_halo(tmp_path: Path, number: int) -> None:
    """A network that is given its input's halo computes the same to the bit, gradients too, and sends none of it."""
    draw = Random(f"halos {number}")
    seeded()
    grid = Grid(tuple([(axis, uneven(draw, n)) for axis, n in draw.choice(GRIDS).items()]))
    which = draw.randrange(len(MAKERS))
    module = MAKERS[which](draw).double()
    x = torch.randn(3, 3 if which == 1 else 2, *[draw.choice((12, 16, 20)) for _ in range(2)], dtype=torch.float64)
    graph, tensors = graph_of(module, (x,))
    passes = draw.choice(PASSES)
    net: Any = imported(compile_network(graph, grid, passes=passes).package().files, tmp_path)

    def program(end: VirtualTransport) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(tensors | module.state_dict())
        found: list[Any] = []
        for halo in (False, True):
            model.zero_grad()
            block = block_of(model, "x", x.numpy(), halo=halo)
            assert torch.equal(block, x[model.region("x", halo=halo)])
            before = len(end.sent)
            made = model(block, halo=["x"] * halo)
            sent = [(s.collective, s.bytes) for s in end.sent[before:]]
            made = [*made.values()] if isinstance(made, dict) else [*made] if isinstance(made, tuple) else [made]
            torch.autograd.backward(made, [torch.ones_like(y) for y in made])
            found.append((made, model.full_gradients(), sent))
        return found, model.region("x"), model.region("x", halo=True)

    ranks = World(grid.ranks).run(program)
    for (without, given), own, around in ranks:
        for a, b in zip(without[0], given[0], strict=True):
            assert torch.equal(a, b)
        for n, g in without[1].items():
            assert torch.equal(g, given[1][n]), n
        assert all(a.start <= o.start and a.stop >= o.stop for o, a in zip(own, around, strict=True))
        more = sum(kind == "exchange" for kind, _ in without[2]) - sum(kind == "exchange" for kind, _ in given[2])
        assert more >= 0 and (more > 0 or around == own or not without[2])
        if which == 0:
            assert not any(kind == "exchange" for kind, _ in given[2])
            assert around[2:] == tuple(read_of(module, x.shape[d], d, own, grid) for d in (2, 3))


def read_of(module: Any, n: int, d: int, own: tuple[slice, ...], grid: Grid) -> slice:
    """Rows of the input that a rank's rows of both convolutions' results read, and its own, counted one by one."""
    axis, rows = "HW"[d - 2], {*range(own[d].start, own[d].stop)}
    ranks = dict(grid.axes).get(axis, 1)
    blocks = split([*range(n)], ranks)
    me = blocks.index([*range(own[d].start, own[d].stop)])
    for k, s, p, r in ((module.kernel, 1, module.padding, 1), (3, module.stride, 2, module.dilation)):
        results = split([*range((n + 2 * p - r * (k - 1) - 1) // s + 1)], ranks)[me]
        rows |= {o * s - p + r * t for o in results for t in range(k)}
    inside = [row for row in rows if 0 <= row < n]
    return slice(min(inside), max(inside) + 1)


class Waves(nn.Module):
    """A Fourier transform of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        return torch.fft.rfft(input, dim=2).abs() * self.gain


def test_a_halo_that_is_no_window(tmp_path: Path) -> None:
    """An input that a step gathers has no halo to be read with; nor has what is no input, or wants a gradient."""
    seeded()
    net = small(tmp_path, Waves().double(), H=2)
    with pytest.raises(ValueError, match=r"can't be read with its halo: the step `.*` is an all"):
        on_first(net, 2, lambda model: model.region("input", halo=True))
    net = small(tmp_path, nn.Conv2d(2, 3, 3, padding=1).double(), H=2)
    with pytest.raises(ValueError, match="halo=True is of inputs, and weight is none"):
        on_first(net, 2, lambda model: model.region("weight", halo=True))
    with pytest.raises(ValueError, match="input comes with its halo, and has no gradient"):
        on_first(
            net, 2, lambda model: model(block_of(model, "input", WHOLE, halo=True).requires_grad_(), halo=["input"])
        )
    with pytest.raises(ValueError, match="halo= names inputs, input; got image"):
        on_first(net, 2, lambda model: model(block_of(model, "input", WHOLE), halo=["image"]))
    with pytest.raises(ValueError, match="this rank's block of input has shape"):
        on_first(net, 2, lambda model: model(block_of(model, "input", WHOLE), halo=["input"]))


WHOLE = np.arange(144, dtype=np.float64).reshape(2, 2, 6, 6)


def block_of(model: Any, name: str, array: Any, *, halo: bool = False) -> Tensor:
    found: Tensor = model._net.block(name, array, model._mesh, halo=halo)
    return found


def small(folder: Path, module: nn.Module, **grid: int) -> Any:
    x = torch.from_numpy(WHOLE).to(next(module.parameters()).dtype)
    graph, _ = graph_of(module, (x,))
    return imported(compile_network(graph, Grid(tuple(grid.items()))).package().files, folder)


def on_first(net: Any, ranks: int, asked: Callable[[Any], Any]) -> Any:
    """What the first rank's model answers, that of each asked."""
    return World(ranks).run(lambda end: asked(net.Network(net.init_mesh("cpu", transport=end))))[0]


class Broken:
    """A file that ends too soon, or says a shape that it hasn't."""

    shape = WHOLE.shape

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __getitem__(self, where: Any) -> Any:
        if self.error is not None:
            raise self.error
        return WHOLE[where][:, :, :1]


def test_what_is_read(tmp_path: Path) -> None:
    """Numbers of any type and order of bytes become the input's, or are refused, and so is what can't be read."""
    seeded()
    net = small(tmp_path, nn.Conv2d(2, 3, 3, padding=1), H=2)

    def block(array: Any) -> Tensor:
        found: Tensor = on_first(net, 2, lambda model: block_of(model, "input", array))
        assert found.dtype == torch.float32 and found.is_contiguous()
        return found

    own = torch.from_numpy(WHOLE).float()[:, :, :3]
    file = tmp_path / "x.npy"
    np.save(file, WHOLE)
    arrays = [WHOLE.astype(kind) for kind in ("f4", ">f4", ">i2", "u1", "u2", ">u4", "u8", "i8", "f2", "g")]
    arrays += [
        np.load(file, mmap_mode="r"),
        np.ma.array(WHOLE),
        torch.from_numpy(WHOLE),
        torch.from_numpy(WHOLE).half(),
    ]
    arrays += [np.asfortranarray(WHOLE)]
    for array in arrays:
        assert torch.equal(block(array), own), array.dtype
    with pytest.raises(ValueError, match="input: 1 elements are missing"):
        block(np.ma.array(WHOLE, mask=WHOLE == 3.0))
    for array, words in (
        (WHOLE.astype(complex), "torch.float32 is wanted, and the array is of torch.complex128"),
        (WHOLE.astype(str), "numbers are wanted"),
        (Broken(None), "gives (2, 2, 1, 6) at [0:2, 0:2, "),
        (WHOLE[:, :1], "the whole input has shape [2, 2, 6, 6], got (2, 1, 6, 6)"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            block(array)
    with pytest.raises(
        RuntimeError, match=r"input: test_regions's Broken of \(2, 2, 6, 6\) can't be read at \[0:2.*OSError: short"
    ):
        block(Broken(OSError("short")))


def test_floats_that_fit() -> None:
    """Rounding is as ever, and infinities stay; a number that would become one is refused."""
    region = (slice(0, 2),)
    for array, kind, most in (
        (np.array([1, 65535], dtype=np.uint16), torch.float16, "65504"),
        (np.array([1.0, -1e300]), torch.float32, "3.4028e+38"),
        (torch.tensor([1.0, 3.3e38]), torch.float16, "65504"),
    ):
        words = f"t: {kind} is wanted, and the array has numbers beyond {most}"
        with pytest.raises(ValueError, match=re.escape(words)):
            read_region(array, region, "t", kind)
        wider = torch.bfloat16 if kind == torch.float16 else torch.float64
        assert bool(read_region(array, region, "t", wider).isfinite().all())
    for pair in (np.array([1, 1e300j]), np.array([1.0, -1e300])):
        with pytest.raises(ValueError, match=r"t: torch\.complex64 is wanted, and the array has numbers beyond"):
            read_region(pair, region, "t", torch.complex64)
        assert torch.equal(read_region(pair, region, "t", torch.complex128), torch.tensor(pair, dtype=torch.complex128))
    half = read_region(np.array([np.inf, 0.1]), region, "t", torch.float16)
    assert half.tolist() == [np.inf, float(np.float16(0.1))]


def test_whole_numbers_that_fit() -> None:
    """Whole numbers become others that can have them; floats don't become whole."""
    region = (slice(0, 3),)
    assert read_region(np.array([1, 2, 250], dtype=np.uint8), region, "t", torch.int64).tolist() == [1, 2, 250]
    assert read_region(np.array([0, 1, 1], dtype=bool), region, "t", torch.int64).tolist() == [0, 1, 1]
    for array, kind in (
        (np.array([1, 2, 2**31]), torch.int32),
        (np.array([1.0, 2.0, 3.0]), torch.int64),
        (np.array([0, 1, 1]), torch.bool),
        (np.array([0, 1, 2**63], dtype=np.uint64), torch.int64),
    ):
        with pytest.raises(ValueError, match="t: "):
            read_region(array, region, "t", kind)
    assert read_region(Broken(OSError()), (slice(2, 2), slice(0, 3)), "t", None).shape == (0, 3)


@pytest.mark.parametrize(
    "example", ["spatial_2x2", "integrated", "mixed_roles", "transposed", "sharded_weights", "depthwise"]
)
def test_regions_of_layers(tmp_path: Path, example: str) -> None:
    """Of a layer's tensors, too, the regions tile the whole and are what `scatter` gives."""
    layer = read_layer(ROOT / "examples" / f"{example}.yaml")
    file = tmp_path / f"regions_{example}.py"
    file.write_text(compile_layer(layer).module())
    module: Any = load_module(file)
    shapes: dict[str, tuple[int, ...]] = {}

    def program(end: VirtualTransport) -> dict[str, Any]:
        mesh, found = module.init_mesh("cpu", transport=end), dict[str, Any]()
        for name, layout in module.LAYER.stored.items():
            shape = shapes[name] = module.LAYER.whole_shape(layout, module.LAYER.batch)
            whole = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=module.LAYER.dtype)
            found[name] = module.region(name, mesh)
            assert torch.equal(whole[found[name]], module.scatter(name, whole, mesh))
            assert torch.equal(module.block(name, whole.numpy(), mesh), whole[found[name]])
        return found

    ranks = World(layer.grid.ranks).run(program)
    for name, shape in shapes.items():
        assert tiles([found[name] for found in ranks], shape), name


@pytest.mark.slow
def test_samples_of_a_layer_that_are_no_number(tmp_path: Path) -> None:
    """Their half was a region, too."""
    file = tmp_path / "layer_of_samples.py"
    layer = read_layer(ROOT / "examples" / "spatial_2x2.yaml")
    file.write_text(compile_layer(layer).module())
    module: Any = load_module(file)

    def program(transport: VirtualTransport) -> None:
        mesh = module.init_mesh("cpu", transport=transport)
        for batch in (-1, 2.5, "3"):
            with pytest.raises(ValueError, match="batch= wants the global number of samples, got"):
                module.region("x", mesh, batch=batch)
            with pytest.raises(ValueError, match="batch= wants the global number of samples, got"):
                module.block("x", np.zeros((2, 16, 57, 45)), mesh, batch=batch)

    World(layer.grid.ranks).run(program)


def test_a_model_that_reads_its_region_under_autocast() -> None:
    """`parallelize` with whole=False, compiled for autocast: blocks by region, with halos or without; torch's types."""

    def module() -> nn.Module:
        seeded()
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

    x = torch.from_numpy(WHOLE).float() / 64
    with torch.autocast("cpu", torch.bfloat16):
        truth = module()(x).detach()

    def program(rank: int) -> tuple[tuple[slice, ...], Tensor, int]:
        model: Any = convgen.parallelize(module(), (x,), {"H": 2}, None, whole=False, autocast=torch.bfloat16)
        assert str(model.package.SCHEDULE).count("autocast: bfloat16") == 1
        made: list[Tensor] = []
        for halo in ((), ("input",)):
            with torch.autocast("cpu", torch.bfloat16):
                made.append(model(block_of(model, "input", x.numpy(), halo=bool(halo)), halo=halo))
        assert torch.equal(*made)
        return model.region("output"), made[0].detach(), model.package.VOLUME["forward"][0]["bytes_sent_per_rank"][0]

    for region, y, sent in spawn(program, 2):
        assert y.dtype == truth.dtype and sent == 2 * 2 * 6 * 2  # a row of two samples and channels, in bfloat16
        assert float((y - truth[region]).abs().max()) < 0.1
