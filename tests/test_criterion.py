"""Losses and metrics on blocks: any module of a network's outputs, its value on all ranks, gradients behind it."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from free_networks import free_network, imported
from operation_cases import a_grid
from sampling import cases_of
from small_networks import seeded
from torch import Tensor, nn

import convgen
from convgen import losses
from convgen.data import Blocks
from convgen.errors import InputError
from convgen.packages import load_package
from convgen.spec.exported import graph_of
from convgen.spec.placement import build_grid
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ({"N": 2}, {"H": 3}, {"H": 2, "W": 2}, {"C": 2}, {"N": 2, "H": (1, 2)})
SIZE = (4, 13, 12)  # of an output: 3 ranks' blocks of rows are ragged, and smaller than a window of 11


class Dice(nn.Module):
    """1 - 2 |y t| / (|y| + |t|), of classes, of the whole batch."""

    def forward(self, y: Tensor, labels: Tensor) -> Tensor:
        p, t = y.softmax(1), F.one_hot(labels, y.shape[1]).movedim(-1, 1).to(y.dtype)
        both, each = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
        return 1 - (2 * both / (each + 1e-6)).mean()


class SSIM(nn.Module):
    """1 - the structural similarity, by a Gaussian window of 11x11 of sigma 1.5. Source: Wang et al., 2004, (13)."""

    window: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        g = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
        window = torch.outer(g, g) / g.sum() ** 2
        self.register_buffer("window", window.expand(channels, 1, 11, 11).clone())

    def mean(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.window, groups=x.shape[1])

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        a, b = self.mean(y), self.mean(target)
        aa, bb, ab = self.mean(y * y) - a * a, self.mean(target * target) - b * b, self.mean(y * target) - a * b
        near = (2 * a * b + 0.01**2) * (2 * ab + 0.03**2)
        return 1 - (near / ((a * a + b * b + 0.01**2) * (aa + bb + 0.03**2))).mean()


def psnr(y: Tensor, target: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of a range of 1, in dB."""
    return -10 * torch.log10((y - target).square().mean())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, SIZE[0], 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(image)))


class OfClasses(nn.Module):
    """Cross entropies, without and with weights and a label that doesn't count, and dice."""

    def __init__(self) -> None:
        super().__init__()
        self.weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 0.2, 3.0, 0.7], dtype=torch.float64), ignore_index=2)
        self.dice = Dice()

    def forward(self, y: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return F.cross_entropy(y, labels), self.weighted(y, labels), self.dice(y, labels)


def of_pixels(y: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return F.mse_loss(y, target), F.l1_loss(y, target), psnr(y, target)


LOSSES: dict[str, Any] = {"classes": OfClasses(), "pixels": of_pixels, "ssim": SSIM(SIZE[0])}


def several(found: Any) -> Tensor:
    """A loss's numbers."""
    return torch.stack(found if isinstance(found, tuple) else (found,))


def module() -> Net:
    seeded()
    return Net().double()


STATE = module().state_dict()


@cache
def compiled(axes: tuple[tuple[str, int], ...]) -> Any:
    return convgen.from_torch(module(), (torch.zeros(4, 2, *SIZE[1:], dtype=torch.float64),), grid=dict(axes))


@pytest.fixture(scope="module")
def cache_of_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def exported_first(monkeypatch: pytest.MonkeyPatch, cache_of_file: Path) -> None:
    """Ranks that are threads take what `export_first` has made; a file's cache has an export for all grids."""
    monkeypatch.setenv("CONVGEN_CACHE", str(cache_of_file))
    together, known = losses.together, dict[Any, Any]()

    def once(question: Any, how: Any, ranks: Any) -> Any:
        key = question.key, repr(how)
        if key not in known:
            assert question.key and threading.current_thread() is threading.main_thread()
            known[key] = together(question, how, ranks)
            load_package(known[key][1], files=known[key][2])
        return known[key]

    monkeypatch.setattr(losses, "together", once)


def export_first(net: Any, ranks: int, loss: Any, *targets: Tensor, outputs: Any = ()) -> None:
    """Here, before there are threads: what an export changes of torch meanwhile, all threads see."""
    mesh = net.init_mesh("cpu", transport=VirtualTransport(World(ranks), 0))
    question, how, _ = losses.asked(loss, net.Network(mesh), targets, outputs)
    losses.together(question, how, ())


@pytest.mark.usefixtures("exported_first")
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_on_blocks(kind: str) -> None:
    """A loss is that of one device on every rank, and so are the gradients of the network's parameters, for any number
    of samples; targets are read by region."""
    draw = Random(f"losses {kind}")
    torch.manual_seed(0)
    loss, labelled = LOSSES[kind], kind == "classes"
    for grid in GRIDS:
        batch, one = draw.choice((3, 4, 5)), module()
        net = compiled(tuple(grid.items()))
        x = torch.randn(batch, 2, *SIZE[1:], dtype=torch.float64)
        target = torch.randint(SIZE[0], (batch, *SIZE[1:])) if labelled else torch.rand(batch, *SIZE).double()
        example = target[:1].expand(4, *target.shape[1:])
        wanted = several(loss(one(x), target))
        wanted.sum().backward()

        export_first(net, build_grid(grid).ranks, loss, example)

        def program(end: VirtualTransport, net: Any = net, x: Any = x, target: Any = target, e: Any = example) -> Any:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(STATE)
            criterion: Any = convgen.criterion(loss, model, e)
            (of_outputs, of_targets) = criterion._inputs
            assert criterion.region(of_outputs, batch=len(x)) == net.region("output", mesh, batch=len(x))
            both = Blocks({"image": x, of_targets: target}, [net, criterion.package], mesh)[range(len(x))]
            found = several(criterion(model(both["image"], batch=len(x)), both[of_targets], batch=len(x)))
            found.sum().backward()
            return tuple(found.tolist()), model.full_gradients(), both.bytes_read

        ranks = World(build_grid(grid).ranks).run(program)
        assert len({value for value, *_ in ranks}) == 1
        for value, gradients, _ in ranks:
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), wanted.detach(), rtol=1e-12, atol=1e-12), (
                grid
            )
            for name, p in one.named_parameters():
                assert p.grad is not None and torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-12), grid
        split = {*grid} - {"C"}  # labels have no channels, whose axis has copies of them
        if split == {*grid} and grid != {"N": 2}:
            whole = x.nbytes + target.nbytes
            assert all(read < 0.8 * whole for *_, read in ranks)


class Both(nn.Module):
    """Softmax, a window and a sum over samples: what a loss wants of other blocks, in one."""

    def forward(self, y: Tensor, labels: Tensor, target: Tensor) -> Tensor:
        near = F.avg_pool2d(y - target, 5, 2, 1).square().mean()
        return F.cross_entropy(y, labels) + near + (y.mean(0) * target.amax((0, 1))).abs().sum()


@pytest.mark.usefixtures("exported_first")
@pytest.mark.parametrize("number", cases_of(4, "losses of free layouts"))
def test_losses_of_any_layout(tmp_path: Path, number: int) -> None:
    """Outputs that are stored anyhow, on axes of any names."""
    draw = Random(f"free losses {number}")
    torch.manual_seed(number)
    grid, batch, one = a_grid(draw), draw.choice((2, 3, 5)), module()
    example = (torch.zeros(4, 2, *SIZE[1:], dtype=torch.float64),)
    net: Any = imported(free_network(draw, graph_of(module(), example)[0], grid).package().files, tmp_path)
    x = torch.randn(batch, 2, *SIZE[1:], dtype=torch.float64)
    labels, target = torch.randint(SIZE[0], (batch, *SIZE[1:])), torch.rand(batch, *SIZE).double()
    wanted = Both()(one(x), labels, target)
    wanted.backward()
    examples = [torch.zeros((), dtype=t.dtype).expand(4, *t.shape[1:]) for t in (labels, target)]
    export_first(net, grid.ranks, Both(), *examples)

    def program(end: VirtualTransport) -> tuple[float, dict[str, Tensor]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(STATE)
        criterion: Any = convgen.criterion(Both(), model, *examples)
        there = [criterion.package.scatter(n, t, mesh) for n, t in (("labels", labels), ("target", target))]
        found = criterion(model(net.scatter("image", x, mesh), batch=batch), *there, batch=batch)
        found.backward()
        return float(found.detach()), model.full_gradients()

    for value, gradients in World(grid.ranks).run(program):
        assert abs(value - float(wanted.detach())) < 1e-12 * abs(value)
        for name, p in one.named_parameters():
            assert p.grad is not None and torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-12)


def test_labels_are_split_as_the_output_is() -> None:
    """By extents: samples first, and the last ones last; what no dimension has is copies."""
    of = ((4, 9, 9, 10), (("N",), ("C",), ("H",), ("W",)))
    for shape, wanted in (
        ((4, 9, 10), (("N",), ("H",), ("W",))),
        ((4, 1, 9, 10), (("N",), (), ("H",), ("W",))),
        ((4, 9, 9, 10), (("N",), ("C",), ("H",), ("W",))),
        ((4, 9), (("N",), ("H",))),
        ((4,), (("N",),)),
        ((), ()),
        ((3, 10, 7), ((), ("W",), ())),
    ):
        assert losses.beside(shape, [of]) == wanted


class Several(nn.Module):
    """Outputs of several types, by names."""

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"y": image.mean(1), "wide": image.double(), "best": image.argmax(1)}


@pytest.mark.usefixtures("exported_first")
def test_metrics_of_several_outputs_and_types() -> None:
    """By name and by number; a metric of two sums, which are added over batches, of another number of samples."""
    net = convgen.from_torch(Several(), (torch.zeros(4, 3, 5, 6),), grid={"H": 2})
    x, labels = torch.randn(7, 3, 5, 6), torch.randint(3, (7, 5, 6))

    def hits(best: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (best == labels).sum(), torch.ones_like(labels).sum()

    def spread(wide: Tensor, y: Tensor) -> Tensor:
        return (wide - y.unsqueeze(1)).abs().amax()

    export_first(net, 2, hits, labels[:4], outputs="best")
    export_first(net, 2, spread, outputs=["1", "y"])

    def program(end: VirtualTransport) -> tuple[list[int], Tensor]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        metric: Any = convgen.criterion(hits, model, labels[:4], outputs="best")
        far = convgen.criterion(spread, model, outputs=["1", "y"])
        state = torch.zeros(2, dtype=torch.int64)
        for first, count in ((0, 4), (4, 3)):
            some = slice(first, first + count)
            made = model(net.scatter("image", x[some], mesh), batch=count)
            sums = metric(made["best"], metric.package.scatter("labels", labels[some], mesh), batch=count)
            state += torch.stack(sums)
            found = far(made["wide"], made["y"], batch=count)
        return state.tolist(), found

    for state, found in World(2).run(program):
        assert state == [int((x.argmax(1) == labels).sum()), labels.numel()]
        assert torch.equal(found, spread(x[4:].double(), x[4:].mean(1)))


def test_of_parallelized_modules_and_what_is_refused() -> None:
    net = compiled((("N", 1),))
    model = net.Network(net.init_mesh("cpu", transport=VirtualTransport(World(1), 0)))
    with pytest.raises(InputError, match="Net gives no output 'logits'"):
        convgen.criterion(nn.MSELoss(), model, outputs="logits")
    with pytest.raises(InputError, match="targets are example tensors, and one is a float"):
        convgen.criterion(nn.MSELoss(), model, 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a Linear is no network on ranks"):
        convgen.criterion(nn.MSELoss(), nn.Linear(2, 2))
    example = (torch.zeros(4, 2, *SIZE[1:], dtype=torch.float64),)
    mesh = net.init_mesh("cpu", transport=VirtualTransport(World(1), 0))
    with pytest.raises(InputError, match="Net gives whole tensors, of which any loss is right as it is"):
        convgen.criterion(nn.MSELoss(), convgen.parallelize(module(), example, mesh))
    model = convgen.parallelize(module(), example, mesh, whole=False)
    x, target = torch.randn(example[0].shape).double(), torch.rand(4, *SIZE).double()
    mse = convgen.criterion(nn.MSELoss(), model, target)
    assert torch.allclose(mse(model(x), target), F.mse_loss(module()(x), target))
