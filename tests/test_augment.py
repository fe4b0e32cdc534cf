"""Augmented blocks are those of what one process makes of whole samples, to the bit; nothing else is read."""

from __future__ import annotations

import re
from functools import cache
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from sampling import cases_of
from small_networks import seeded
from test_data import Counted
from torch import Tensor, nn
from torch.utils.data import DataLoader

import convgen
from convgen.data import Batches, Blocks, Crop, Flip, Intensity, Noise, Rotate
from convgen.data.augment import OF_NAMES, Augmentation, Draw, names_of
from convgen.errors import InputError
from convgen.operations.dropout import Noise as Numbers
from convgen.operations.row import At
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ({"N": 2}, {"H": 2}, {"N": 2, "H": 2}, {"H": 2, "W": 3}, {"C": 2})
SIZE = (9, 10)
COUNT = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.a(image), labels)


@cache
def compiled(axes: tuple[tuple[str, int], ...]) -> Any:
    seeded()
    return convgen.from_torch(Net(), (torch.zeros(4, 2, *SIZE), torch.zeros(4, *SIZE).long()), grid=dict(axes))


def each_rank(grid: dict[str, int]) -> list[tuple[Any, Any]]:
    """The package and the mesh of each rank; nothing is sent."""
    net = compiled(tuple(grid.items()))
    world = World(prod(grid.values()))
    return [(net, net.init_mesh("cpu", transport=VirtualTransport(world, r))) for r in range(world.ranks)]


def files(draw: Random, larger: bool) -> dict[str, Any]:
    """Images and labels; larger than the network's, of extents of their own, some of them square."""
    made = np.random.default_rng(draw.randrange(99))
    sides = [(side := draw.randint(10, 13), side) if larger else SIZE for _ in range(COUNT)]
    images = [made.random((2, *side), dtype=np.float32) for side in sides]
    labels = [made.integers(0, 2, side) for side in sides]
    return {"image": images, "labels": labels}


def steps_of(draw: Random, larger: bool) -> list[Augmentation]:
    """A random list; of larger samples a crop is among them, and before it they may be rotated."""
    numbers: list[Augmentation] = [
        Intensity("image", scale=(0.5, 2.0), shift=(-1.0, 1.0), p=0.8),
        Intensity("image", gamma=(0.5, 2.0), about=0.5, scale=(0.9, 1.1)),
        Noise("image", std=0.3, p=0.8),
        Flip(-1),
        Flip((-2, -1), p=0.7),
        Flip(-3, names="image"),
    ]
    before = draw.sample([*numbers, *[Rotate(), Rotate((-1, -2))] * larger], draw.randint(0, 4))
    crops = [Crop((-2, -1), center=draw.random() < 0.3)] if draw.random() < 0.6 else [Crop(-1), Crop(-2)]
    return [*before, *crops * larger, *draw.sample(numbers, draw.randint(1, 3))]


def by_one(sample: Any, steps: list[Augmentation], name: str, seed: int, epoch: int, k: int) -> Tensor:
    """A whole sample as one process makes it, by numpy's own."""
    x = np.asarray(sample)
    for number, one in enumerate(steps):
        draw = Draw(seed, epoch, k, number)
        if one.names and name not in names_of(one.names):
            continue
        match one:
            case Flip():
                dims = (one.dims,) if isinstance(one.dims, int) else one.dims
                x = np.flip(x, [d for i, d in enumerate(dims) if draw.uniform(i) < one.p])
            case Rotate():
                x = np.rot90(x, int(draw.uniform(0) * 4), one.dims)
            case Crop():
                for i, d in enumerate((one.dims,) if isinstance(one.dims, int) else one.dims):
                    n = SIZE[d]
                    at = (x.shape[d] - n) // 2 if one.center else int(draw.uniform(i) * (x.shape[d] - n + 1))
                    x = np.take(x, range(at, at + n), d)
            case Intensity() | Noise() if draw.uniform(0) >= one.p:
                pass
            case Intensity():
                x = (x - one.about) * draw.uniform(1, one.scale) + (one.about + draw.uniform(2, one.shift))
                if one.gamma:
                    g = one.gamma[0] * (one.gamma[1] / one.gamma[0]) ** draw.uniform(3)
                    x = torch.exp(g * torch.log(torch.from_numpy(x.copy()).clamp(0, 1))).numpy()
            case Noise():
                low, high, *_ = draw.words(OF_NAMES)
                at = At({f"d{d}": (0, n) for d, n in enumerate(x.shape)}, (), ())
                noise = Numbers(x.shape, "normal").local(0, at, torch.tensor([low + (high // 2) * 2**32, 0]))[0]
                x = x + 0.3 * noise.numpy().astype(x.dtype)
            case _:
                raise AssertionError(one)
    return torch.from_numpy(x.copy())


@pytest.mark.parametrize("number", cases_of(20, "augmented blocks"))
def test_blocks_are_those_of_one_process(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(f"augmented {number}")
    larger, seed, epoch = draw.random() < 0.7, draw.randrange(1 << 40), draw.randrange(5)
    workers, halo, grid = 2 * (number % 4 == 0), draw.random() < 0.5, GRIDS[number % len(GRIDS)]
    source, steps = files(draw, larger), steps_of(draw, larger)
    if not larger and draw.random() < 0.5:
        source = {name: np.stack(those) for name, those in source.items()}  # one array of all samples
    order = Batches(COUNT, 3, shuffle=True, seed=seed, drop_last=False)
    order.epoch = epoch
    made = {
        name: [by_one(those[k], steps, name, seed, epoch, k) for k in range(COUNT)] for name, those in source.items()
    }
    whole = [{name: torch.stack([those[k] for k in samples]) for name, those in made.items()} for samples in order]
    for net, mesh in each_rank(grid):
        counted = {n: [Counted(np.asarray(one)[None]) for one in those] for n, those in source.items()}
        read = {n: [_One(one) for one in those] for n, those in counted.items()} if not workers else source
        monkeypatch.setattr(
            net.NET, "agree", lambda *_: None
        )  # ranks one by one, whose workers are forked of no thread
        blocks = Blocks(read, net, mesh, halo=["image"] * halo, augment=steps)
        found = [*DataLoader(blocks, batch_size=None, sampler=order, num_workers=workers)]
        total = 0
        for batch, wanted in zip(found, whole, strict=True):
            count = len(batch.samples)
            for name, t in batch.items():
                where = net.region(name, mesh, batch=count, halo=halo and name == "image")
                assert t.is_contiguous() and torch.equal(t, wanted[name][where]), (grid, steps, name)
            total += sum(t.numel() * t.element_size() for t in batch.values())
            assert batch.bytes_read == sum(t.numel() * t.element_size() for t in batch.values())
        if not workers:
            assert sum(one.bytes for those in counted.values() for one in those) == total


class _One:
    """A sample of a counted array."""

    def __init__(self, of: Counted) -> None:
        self.of, self.shape, self.dtype = of, of.shape[1:], of.dtype

    def __getitem__(self, where: Any) -> Any:
        return self.of[(slice(0, 1), *where)][0]


def test_an_epoch_reaches_workers_that_stay() -> None:
    """Persistent workers began in the first epoch; what they draw later is of later ones, as without workers."""
    ((net, mesh),) = each_rank({"N": 1})
    source, steps = files(Random(0), True), [Crop((-2, -1)), Noise("image", 1.0)]

    def epochs(workers: int, **how: Any) -> list[Tensor]:
        loader = Blocks(source, net, mesh, augment=steps).loader(3, seed=5, workers=workers, **how)
        found: list[Tensor] = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            found += [batch["image"] for batch in loader]
        return found

    of_one = epochs(0)
    assert len(of_one) == 6 and not torch.equal(of_one[0], of_one[2]) and torch.equal(of_one[0], of_one[4])
    for a, b in zip(of_one, epochs(1, persistent_workers=True), strict=True):
        assert torch.equal(a, b)


def test_ranks_that_would_augment_otherwise_are_told() -> None:
    net = compiled((("H", 2),))

    def program(end: VirtualTransport, what: str) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        steps = [Flip(-1, p=end.rank / 2)] if what == "augmentations" else [Flip(-1)]
        blocks = Blocks({"image": np.zeros((COUNT, 2, *SIZE), np.float32)}, net, mesh, augment=steps)
        next(iter(blocks.loader(3, seed=end.rank if what == "seed" else 0)))

    for what in ("augmentations", "seed"):
        with pytest.raises(RuntimeError, match=f"{what}: "):
            World(2).run(lambda end, what=what: program(end, what))


def test_draws() -> None:
    """Of another seed, epoch, sample, step or place they differ, and are spread evenly; normal numbers are normal."""
    base = (1, 2, 3, 4)
    found = {Draw(*base).words(0), Draw(*base).words(1)}
    found |= {Draw(*base[:i], base[i] + 1, *base[i + 1 :]).words(0) for i in range(4)}
    assert len(found) == 6 and Draw(1 << 33, 0, 0, 0).words(0) != Draw(0, 0, 0, 0).words(0)
    spread = torch.tensor([Draw(0, 0, k, 0).chosen(0, 4) for k in range(2000)])
    assert all(abs(int((spread == v).sum()) - 500) < 100 for v in range(4))
    ((net, mesh),) = each_rank({"N": 1})
    source = {"image": np.zeros((40, 2, *SIZE), np.float32)}
    noise = Blocks(source, net, mesh, augment=[Noise("image", 2.0)])[range(40)]["image"]
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 2) < 0.1 and len(noise.unique()) > 0.99 * noise.numel()


def test_what_does_not_fit_is_refused() -> None:
    ((net, mesh),) = each_rank({"N": 1})
    images, labels = np.zeros((COUNT, 2, 12, 13), np.float32), np.zeros((COUNT, 12, 13), np.int64)
    crop = Crop((-2, -1))
    for steps, words in (
        ([], "a sample of image has shape [2, 12, 13]"),
        ([Crop(-1)], "a sample of image has shape [2, 12, 13], which becomes [2, 12, 10]"),
        ([Rotate(), crop], "a rotation of dimensions -2 and -1 of a sample of shape [2, 12, 13]"),
        ([crop, Rotate()], "a rotation of dimensions -2 and -1 of a sample of shape [2, 9, 10]"),
        ([crop, Flip(0)], "dimension 0 of a sample of shape [2, 9, 10], whose dimensions are -1 to -3"),
        ([crop, Flip(-4)], "dimension -4 of a sample"),
        ([crop, Flip(-3)], "dimension -3 of a sample of shape [9, 10]"),
        ([crop, Flip((-1, -1))], "dimension -1 of a sample"),
        ([crop, Noise("picture", 1.0)], "names picture, of which there is no array"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            Blocks({"image": images, "labels": labels}, net, mesh, augment=steps)
    with pytest.raises(InputError, match=re.escape("a crop of 9 along dimension -2 of a sample of shape [2, 8, 13]")):
        Blocks({"image": [images[0], images[0, :, :8]]}, net, mesh, augment=[crop])
    with pytest.raises(InputError, match="a crop along dimension -2: image has 12, labels has 11"):
        Blocks({"image": images, "labels": labels[:, :11]}, net, mesh, augment=[crop])
    with pytest.raises(InputError, match=r"Noise changes floats, and labels is of torch\.int64"):
        Blocks({"labels": labels}, net, mesh, augment=[crop, Noise("labels", 1.0)])[0]
    for wrong in (lambda: Flip(-1, p=1.5), lambda: Intensity("x", scale=(2, 1)), lambda: Intensity("x", gamma=(0, 1))):
        with pytest.raises(InputError):
            wrong()
