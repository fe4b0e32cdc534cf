"""Batches of blocks that are read by region, outputs that are written so; what one process would have, on all ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from free_networks import imported
from sampling import cases_of
from small_networks import seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader

from convgen.algebra.grid import Grid
from convgen.data import Batches, Blocks, Flip, Noise, create, write
from convgen.data.chunks import shares
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ({"N": 2}, {"H": 2}, {"W": 3}, {"N": 2, "H": 2}, {"C": 2}, {"H": 2, "W": 2})
COUNT = 11
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.standard_normal((COUNT, 2, 9, 10)).astype(np.float32)
TARGETS = GENERATOR.standard_normal((COUNT, 2, 9, 10))


class Net(nn.Module):
    """A convolution and a loss of every element, each a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.relu(self.a(image)))
        return y, (y - target).square().mean()


def compiled(folder: Path, grid: dict[str, int], batch: int = 4) -> Any:
    seeded()
    graph, _ = graph_of(Net(), (torch.zeros(batch, 2, 9, 10), torch.zeros(batch, 2, 9, 10)), name="net")
    return imported(compile_network(graph, Grid(tuple(grid.items()))).package().files, folder)


def module() -> Net:
    seeded()
    return Net()


STATE = module().state_dict()


def ranks(grid: dict[str, int]) -> World:
    return World(Grid(tuple(grid.items())).ranks)


class Counted:
    """An array that counts the bytes that are read of it; of `broken` samples reading fails."""

    def __init__(self, whole: np.ndarray[Any, Any], broken: int = -1) -> None:
        self.whole, self.shape, self.dtype, self.bytes, self.broken = whole, whole.shape, whole.dtype, 0, broken

    def __getitem__(self, where: Any) -> Any:
        if self.broken in range(where[0].start, where[0].stop):
            raise OSError("the file ends too soon")
        part = self.whole[where]
        self.bytes += part.nbytes
        return part


@pytest.mark.parametrize("number", cases_of(12, "epochs of blocks"))
def test_epochs_train_as_one_process_does(tmp_path: Path, number: int) -> None:
    """Batches in a shuffled order, of an array or of one a sample, with halos and without: losses are those of one
    process that takes the same samples, and a rank reads its regions alone."""
    draw = Random(f"epochs {number}")
    grid, shuffle, seed, size = draw.choice(GRIDS), draw.random() < 0.7, draw.randrange(9), draw.choice((3, 4))
    last, halo, listed = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
    net = compiled(tmp_path, grid)
    one, wanted = module(), list[float]()
    of_one = Batches(COUNT, size, shuffle=shuffle, seed=seed, drop_last=last)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    seen: list[tuple[int, ...]] = []
    for of_one.epoch in (0, 1):
        for samples in of_one:
            seen.append(samples)
            optimizer.zero_grad()
            _, loss = one(torch.from_numpy(IMAGES[[*samples]]), torch.from_numpy(TARGETS[[*samples]]).float())
            loss.backward()
            optimizer.step()
            wanted.append(float(loss.detach()))
    assert last or sorted(k for s in seen[: len(of_one)] for k in s) == [*range(COUNT)]

    def program(end: VirtualTransport) -> tuple[list[float], list[tuple[int, ...]]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(STATE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        images, targets = Counted(IMAGES), Counted(TARGETS)
        source: Any = {"image": [*IMAGES] if listed else images, "target": [*TARGETS] if listed else targets}
        blocks = Blocks(source, net, mesh, halo=["image"] * halo)
        loader = blocks.loader(size, shuffle=shuffle, seed=seed, drop_last=last)
        losses, order, count = list[float](), list[tuple[int, ...]](), 0
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            for batch in loader:
                order.append(batch.samples)
                optimizer.zero_grad()
                _, loss = model(*batch.values(), batch=len(batch.samples), halo=["image"] * halo)
                loss = net.gather("1", loss, mesh)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                count += sum(t.numel() * n for t, n in zip(batch.values(), (4, 8), strict=True))
        assert blocks.bytes_read == count
        if not listed:
            assert images.bytes + targets.bytes == count
        return losses, order

    for losses, order in ranks(grid).run(program):
        assert order == seen
        assert np.allclose(losses, wanted, rtol=1e-5)


def test_workers_read_what_the_process_itself_reads(tmp_path: Path) -> None:
    """Two worker processes, of a mapped file, in the second rank's place."""
    net = compiled(tmp_path, {"H": 2})
    np.save(tmp_path / "images.npy", IMAGES)
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    _, blocks = World(2).run(lambda end: Blocks({"image": images}, net, net.init_mesh("cpu", transport=end)))
    read = [*DataLoader(blocks, batch_size=None, sampler=Batches(COUNT, 4, shuffle=True), num_workers=2)]
    order = [*Batches(COUNT, 4, shuffle=True)]
    assert [batch.samples for batch in read] == order and [batch.bytes_read for batch in read] == [
        4 * 2 * 4 * 10 * 4
    ] * 2
    for samples, batch in zip(order, read, strict=True):
        assert torch.equal(batch["image"], torch.from_numpy(IMAGES[[*samples]])[:, :, 5:])


class Flat(nn.Module):
    """Of two samples and no other number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1).sum(1)


def test_a_network_of_one_number_of_samples(tmp_path: Path) -> None:
    graph, _ = graph_of(Flat(), (torch.zeros(2, 3, 4),), name="flat")
    net: Any = imported(compile_network(graph, Grid((("N", 2),))).package().files, tmp_path)
    samples = np.arange(60, dtype=np.float32).reshape(5, 3, 4)

    def program(end: VirtualTransport) -> list[float]:
        mesh = net.init_mesh("cpu", transport=end)
        blocks = Blocks({"x": samples}, net, mesh)
        with pytest.raises(InputError, match="flat is of 2 samples, and a batch has 3"):
            blocks[0, 1, 2]
        model = net.Network(mesh)
        return [float(n) for batch in blocks.loader(2) for n in model(batch["x"])]

    assert World(2).run(program) == [[float(samples[k].sum()) for k in own] for own in ((0, 2), (1, 3))]


def test_a_file_that_fails_on_one_rank(tmp_path: Path) -> None:
    """All ranks raise at that batch, and no rank waits; so they do where orders differ."""
    net = compiled(tmp_path, {"H": 2})
    reached: list[list[int]] = [[], []]

    def program(end: VirtualTransport, seeds: tuple[int, int] = (0, 0)) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        images = Counted(IMAGES, broken=6 if end.rank == 1 and seeds == (0, 0) else -1)
        loader = Blocks({"image": images}, net, mesh).loader(4, shuffle=seeds != (0, 0), seed=seeds[end.rank])
        for batch in loader:
            reached[end.rank].append(len(batch))

    with pytest.raises((RuntimeError, ValueError), match=r"can't be read at .*OSError: the file ends too soon"):
        World(2).run(program)
    assert reached == [[1], [1]]
    with pytest.raises(RuntimeError, match="samples"):
        World(2).run(lambda end: program(end, (1, 2)))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    net = compiled(tmp_path, {"N": 1})

    def blocks(end: VirtualTransport, source: Any, **how: Any) -> Blocks:
        return Blocks(source, net, net.init_mesh("cpu", transport=end), **how)

    for source, words in (
        ({}, "differ in the number of samples: there is none"),
        ({"image": IMAGES, "target": TARGETS[:5]}, "image has 11, target has 5"),
        ({"picture": IMAGES}, "net has no value 'picture'"),
        ({"image": IMAGES[:, :1]}, "a sample of image has shape [1, 9, 10]"),
        ({"image": [IMAGES[0], IMAGES[0, :, 1:]]}, "a sample of image has shape [2, 8, 10]"),
        ({"a.weight": IMAGES}, "its first dimension is not that of samples"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            World(1).run(lambda end, source=source: blocks(end, source))
    with pytest.raises(InputError, match="halo= names target"):
        World(1).run(lambda end: blocks(end, {"image": IMAGES}, halo="target"))
    with pytest.raises(InputError, match="batches of 12 samples, of which there are 11"):
        World(1).run(lambda end: blocks(end, {"image": IMAGES}).loader(12))
    for source, how, words in (
        (IMAGES, {}, "the source is a ndarray"),
        ({"image": 3}, {}, "image: a int is no array"),
        ({"image": [3]}, {}, "image: a int is no array"),
        ({"image": np.zeros(())}, {}, "image: an array without dimensions has no samples"),
        ({"image": IMAGES}, {"augment": [3]}, "augment=[3]"),
        ({"image": IMAGES}, {"augment": Flip(-1)}, "augment=Flip(dims=-1"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            World(1).run(lambda end, source=source, how=how: blocks(end, source, **how))
    # Where one rank alone has such a source, the others are told.
    net = compiled(tmp_path, {"H": 2})
    with pytest.raises((InputError, ValueError), match="the source is a ndarray"):
        World(2).run(lambda end: blocks(end, IMAGES if end.rank else {"image": IMAGES}))


def test_numbers_of_samples_are_whole(tmp_path: Path) -> None:
    """Of whichever type: numpy's give the order that Python's give. Others are refused."""
    net = compiled(tmp_path, {"N": 1})

    def program(end: VirtualTransport) -> list[tuple[int, ...]]:
        blocks = Blocks({"image": IMAGES}, net, net.init_mesh("cpu", transport=end), augment=[Noise("image", 0.1)])
        for sizes, words in (
            ({"size": 2.5}, "the size of a batch is a whole number, got 2.5"),
            ({"size": 2, "seed": 0.5}, "seed= is a whole number, got 0.5"),
            ({"size": 2, "seed": 2**63}, f"seed= is {2**63}"),
        ):
            with pytest.raises(InputError, match=re.escape(words)):
                blocks.loader(**sizes, shuffle=True)
        loader = blocks.loader(np.int64(4), shuffle=True, seed=np.int64(3))
        with pytest.raises(InputError, match=r"an epoch is a whole number, got 0\.5"):
            loader.set_epoch(0.5)
        for state, words in (({}, "without epoch"), (loader.state_dict() | {"done": 9}, "9 are done, and there are 2")):
            with pytest.raises(InputError, match=words):
                loader.load_state_dict(state)
        with pytest.raises(InputError, match=r"a sample's number is a whole number, got 1\.5"):
            blocks[1.5]  # pyright: ignore[reportArgumentType]
        for k in (-1, COUNT):
            with pytest.raises(IndexError, match=f"there is no sample {k}: there are {COUNT}, from 0 on"):
                blocks[k]
        assert len([*blocks]) == COUNT
        for same in (np.int64(3), np.array([3]), torch.tensor(3), [torch.tensor(3)]):
            assert torch.equal(blocks[same]["image"], blocks[3]["image"])  # pyright: ignore[reportArgumentType]
        return [batch.samples for batch in loader]

    assert World(1).run(program) == [[*Batches(COUNT, 4, shuffle=True, seed=3)]]


class Marked(nn.Module):
    """Classes, and what is positive."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.argmax(1), x > 0, x + 1


def test_files_have_the_outputs_types(tmp_path: Path) -> None:
    graph, _ = graph_of(Marked(), (torch.zeros(2, 3, 4, 4),), name="marked")
    net: Any = imported(compile_network(graph, Grid((("H", 2),))).package().files, tmp_path)
    x = torch.randn(2, 3, 4, 4)

    def program(end: VirtualTransport) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        for name, y in enumerate(net.Network(mesh)(net.block("x", x, mesh))):
            write(create(tmp_path / f"{name}.npy", net, f"{name}", mesh), net, f"{name}", y, mesh)

    World(2).run(program)
    for name, y in enumerate(Marked()(x)):
        found = np.load(tmp_path / f"{name}.npy")
        assert found.dtype == y.numpy().dtype and (found == y.numpy()).all()


class Chunks:
    """An array that is kept by chunks: writing a part of one reads it and writes it whole, as files of chunks do."""

    def __init__(self, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        self.whole, self.shape, self.chunks, self.at_work = np.zeros(shape), shape, chunks, 0

    def __setitem__(self, where: tuple[slice, ...], part: Any) -> None:
        self.whole[where] = part


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("chunks", [(1, 2, 9, 10), (1, 1, 5, 5), None], ids=str)
def test_outputs_are_written_by_region(tmp_path: Path, grid: dict[str, int], chunks: tuple[int, ...] | None) -> None:
    """What ranks write is the whole output, at any sample; each element is written once, in turns where chunks meet."""
    net = compiled(tmp_path, grid)
    x = torch.from_numpy(IMAGES[:4])
    with torch.no_grad():
        truth = module()(x, x)[0].numpy()
    target: Any = Chunks(truth.shape, chunks) if chunks else np.zeros((9, *truth.shape[1:]))
    at = 0 if chunks else 3

    def program(end: VirtualTransport) -> list[tuple[slice, ...]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(STATE)
        with torch.no_grad():
            y, _ = model(net.block("image", x, mesh), net.block("target", x, mesh))
        write(target, net, "0", y, mesh, at=at)
        with pytest.raises((RuntimeError, ValueError), match="the target has shape"):
            write(np.zeros((2, 2, 9, 10)), net, "0", y, mesh)
        for shape in (
            (4, 2, 9, 11),
            (4, 2, 90),
        ):  # also where ranks would write in turn, or chunks are of other dimensions
            with pytest.raises((RuntimeError, ValueError), match="the target has shape"):
                write(Chunks(shape, (1,) * (len(shape) - 1) + (99,)), net, "0", y, mesh)
        return net.NET.regions("0", mesh)

    ranks(grid).run(program)
    found = target.whole if chunks else target
    assert np.allclose(found[at : at + 4], truth, atol=1e-5) and not found[at + 4 :].any()


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2}], ids=str)
def test_where_nothing_can_be_written_is_refused(tmp_path: Path, grid: dict[str, int]) -> None:
    """A sample below 0 would be another one, or none: of one sample, nothing was written and nothing said. Where one
    rank's arguments are wrong, the others are told."""
    net, target = compiled(tmp_path, grid), np.zeros((9, 2, 9, 10))

    def program(end: VirtualTransport, at: Any, batch: int, name: str = "0", other: Any = None) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        block = torch.ones([s.stop - s.start for s in net.region("0", mesh, batch=batch)])
        write(target, net, name, block, mesh, at=at if other is None or end.rank else other, batch=batch)

    for at in (-1, -4, 0.5, "1", None):
        for batch in (1, 4):
            with pytest.raises((RuntimeError, ValueError), match="at= is the number of a sample of the target, from 0"):
                ranks(grid).run(lambda end, at=at, batch=batch: program(end, at, batch))
    with pytest.raises((RuntimeError, ValueError), match=r"from 0 on, got -2"):
        ranks(grid).run(lambda end: program(end, 0, 4, other=-2))
    with pytest.raises((RuntimeError, ValueError), match="1 is one number, and a target has samples"):
        ranks(grid).run(lambda end: program(end, 0, 4, "1"))
    with pytest.raises((RuntimeError, ValueError), match="no value 'none'"):
        ranks(grid).run(lambda end: program(end, 0, 4, "none" if end.rank else "0"))
    assert not target.any()


def test_numbers_that_the_target_can_not_have_are_refused(tmp_path: Path) -> None:
    """Classes go into bytes; numbers with a point, and larger ones, would be others there. Nothing is written then."""
    net = compiled(tmp_path, {"H": 2})

    def program(end: VirtualTransport, target: Any, value: complex, kind: torch.dtype) -> None:
        mesh = net.init_mesh("cpu", transport=end)
        block = torch.zeros([s.stop - s.start for s in net.region("0", mesh)], dtype=kind)
        block[..., -1:] = value if end.rank else 1
        write(target, net, "0", block, mesh)

    cases: list[tuple[str, complex, torch.dtype, bool]] = [
        ("u1", 7, torch.int64, True), ("u1", 7, torch.float32, True), ("?", 1, torch.float32, True),
        ("f2", 0.1, torch.float64, True), ("u1", 0.5, torch.float32, False), ("u1", 256, torch.int64, False),
        ("u1", -1, torch.int64, False), ("i8", float("nan"), torch.float64, False), ("?", 2, torch.int64, False),
        ("f4", 1e300, torch.float64, False), ("f2", 1e6, torch.float32, False), ("f4", 1j, torch.complex64, False),
        ("f4", float("inf"), torch.float64, True), ("f4", 2**60, torch.int64, True),
        ("c8", 1j, torch.complex128, True), ("c8", 1e300j, torch.complex128, False),
        ("c8", 1e300, torch.float64, False),
    ]  # fmt: skip
    for kind, value, of, fits in cases:
        target = np.zeros((4, 2, 9, 10), dtype=kind)
        if fits:
            ranks({"H": 2}).run(lambda end, t=target, v=value, k=of: program(end, t, v, k))
            assert target[..., -1].any()
            continue
        with pytest.raises((RuntimeError, ValueError), match=r"that a target of .* can't have"):
            ranks({"H": 2}).run(lambda end, t=target, v=value, k=of: program(end, t, v, k))
        assert not target.any()
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"a tensor doesn't; its .numpy\(\) has its memory"):
        ranks({"H": 2}).run(lambda end: program(end, torch.zeros(4, 2, 9, 10), 1, torch.float32))


def test_chunks_that_several_ranks_write() -> None:
    """By brute force: a chunk of which two regions have elements."""
    draw = Random(4)
    for _ in range(200):
        shape = (draw.randint(1, 9), draw.randint(1, 9))
        chunks = (draw.randint(1, 4), draw.randint(1, 4))
        cuts = sorted(draw.sample(range(shape[0] + 1), min(3, shape[0] + 1)))
        regions = [(slice(a, b), slice(0, shape[1])) for a, b in pairwise(cuts) if b > a]
        touched = [
            {(i // chunks[0], j // chunks[1]) for i in range(r[0].start, r[0].stop) for j in range(shape[1])}
            for r in regions
        ]
        wanted = any(a & b for k, a in enumerate(touched) for b in touched[:k])
        assert shares(chunks, regions) == wanted
    assert not shares(None, []) and not shares(((2, 2), (3, 1)), [(slice(0, 4), slice(0, 4))] * 2)
