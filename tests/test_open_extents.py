"""Random small networks at shapes drawn at random from one package: numbers, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from free_networks import imported, ranks_of, sent_by
from sampling import cases_of, draws
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.program.network import Program
from convgen.program.other_sizes import for_any_extents, program_like
from convgen.program.rows import PlacedRow
from convgen.spec.aten.sizes import for_any_sizes
from convgen.spec.exported import exported
from convgen.spec.graph import Graph
from convgen.spec.text import parse_grid
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ("H=2", "W=2", "H=3", "H=2,W=2", "N=2,H=2", "C=2,H=2")
Shape = tuple[int, int, int]  # samples, rows, columns


class Sliced(nn.Module):
    """Without the first row and the last column."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:, :-1]


class Pooled(nn.Module):
    """A gate by means over three rows of parts."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.pool, self.weigh = nn.AdaptiveAvgPool2d((3, 1)), nn.Conv2d(c, c, (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.weigh(self.pool(x)))


class Resized(nn.Module):
    """As many rows again as there were, beside them."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(c, c, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.interpolate(self.down(x), x.shape[2:])


def a_layer(draw: Random, c: int) -> nn.Module:
    """A layer of as many channels, an even number."""
    return draw.choice((
        lambda: nn.Conv2d(c, c, 3, padding=1, groups=draw.choice((1, 2))),
        lambda: nn.Conv2d(c, c, 3, padding=2, dilation=2),
        lambda: nn.Conv2d(c, c, 4, 1, draw.choice((1, 2))),
        lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(c, c, 3, 2)),
        lambda: nn.Conv2d(c, c, 3, draw.choice((2, 3)), 1),
        lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        lambda: nn.AvgPool2d(2, ceil_mode=draw.random() < 0.5),
        lambda: nn.ConvTranspose2d(c, c, 3, 2, 1, output_padding=draw.choice((0, 1))),
        lambda: nn.ConvTranspose2d(c, c, 2, 2, groups=2),
        lambda: nn.Upsample(scale_factor=2.0),
        lambda: nn.GroupNorm(2, c),
        lambda: nn.BatchNorm2d(c),
        Sliced,
        lambda: Pooled(c),
        lambda: Resized(c),
    ))()  # fmt: skip


def a_network(draw: Random) -> nn.Module:
    torch.manual_seed(draw.randrange(2**31))
    c = draw.choice((2, 4))
    layers = [a_layer(draw, c) for _ in range(draw.randint(2, 5))]
    return nn.Sequential(nn.Conv2d(2, c, draw.choice((1, 3)), padding=1), *layers, nn.SiLU()).double()


def graph_of(module: nn.Module) -> Graph:
    """Of training, with rows and columns open, and of evaluation."""
    x = torch.randn(2, 2, 26, 22, dtype=torch.float64)
    return exported(module.train(), (x,), name="net", opened={"input": {"H": 2, "W": 3}}).graph


def named(graph: Graph, x: Tensor) -> Graph:
    """The graph for this shape alone."""
    return graph.at({"N": x.shape[0], "H": x.shape[2], "W": x.shape[3]})


def shape_alone(compiled: CompiledNetwork, graph: Graph) -> Program:
    """The same layout, with what moves derived for the shape of a graph."""
    known = for_any_sizes(graph)
    return for_any_extents(program_like(compiled.plain, known.here), known)


def shapes_of(draw: Random, graph: Graph, count: int) -> list[Shape]:
    """Some that fulfil the conditions, of which the first comes again."""
    found: list[Shape] = []
    while len(found) < count:
        n, h, w = draw.choice((1, 2, 3)), draw.randint(1, 40), draw.randint(1, 40)
        if all(c.holds({"N": n, "H": h, "W": w}) for c in graph.conditions):
            found.append((n, h, w))
    return [*found, found[0]]


def compare(module: nn.Module, net: Any, grid: Grid, x: Tensor) -> list[list[tuple[str, int]]]:
    """On ranks and on one device; gives what ranks have sent."""
    module.eval().zero_grad()
    whole = x.clone().requires_grad_()
    y: Tensor = module(whole)
    dy = torch.randn_like(y.detach())
    y.backward(dy)
    assert whole.grad is not None
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    ran = ranks_of(net, grid, {"input": x}, state, [dy], ["output"], train=False)
    for one in ran:
        near(one.outputs[0], y.detach())
        assert one.inputs[0] is not None
        near(one.inputs[0], whole.grad)
        for n, p in module.named_parameters():
            near(one.gradients[n], p.grad if p.grad is not None else torch.zeros_like(p))
    return [one.sent for one in ran]


def near(made: Tensor, wanted: Tensor) -> None:
    assert made.shape == wanted.shape
    assert not wanted.numel() or float((made - wanted).abs().max()) <= 1e-10 * max(1.0, float(wanted.abs().max()))


def moved(sent: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [one for one in sent if one[1]]


def reads_all(program: Program) -> bool:
    """Whether each row of every operand is read."""
    signatures = [one.signature for row in program.rows for one in (row, *(d for _, d in row.derived))]
    read = (
        (made.relation.hull(*made.relation.window(0, s.extent[made.indices[0]]), n), n)
        for s in signatures for o in s.inputs for made, n in zip(o.dims, o.shape, strict=True) if made.relation
    )  # fmt: skip
    return all(rows == (0, n) for rows, n in read)


@pytest.mark.parametrize("seed", cases_of(8, "open extents"))
def test_numbers_and_bytes_at_any_shape(seed: int, tmp_path: Path) -> None:
    """Forward and backward; what ranks send is what a package for the shape alone says."""
    draw = Random(seed)
    module = a_network(draw)
    graph, grid = graph_of(module), Grid(tuple(parse_grid(draw.choice(GRIDS)).items()))
    compiled = compile_network(graph, grid, passes=[])
    net = imported(compiled.package().files, tmp_path)
    for n, h, w in shapes_of(draw, graph, draws(5)):
        x = torch.randn(n, 2, h, w, dtype=torch.float64)
        sent = compare(module, net, grid, x)
        if any(isinstance(m, nn.BatchNorm2d) for m in module.modules()):
            continue  # which is in evaluation here; bytes are said of training
        alone = shape_alone(compiled, named(graph, x))
        for rank, one in enumerate(sent):
            said = sent_by(alone, rank, of_inputs=True)
            if reads_all(alone):
                assert moved(one) == moved(said), (n, h, w)
            else:  # rows that nobody reads stay in blocks that serve as they are, and travel with columns
                assert sum(b for _, b in one) <= sum(b for _, b in said), (n, h, w)


def without_exchanges(program: Program) -> Iterator[tuple[str, Program]]:
    """Programs in which a row doesn't fetch its halo, forward or of its gradient; with the row's name."""
    for i, row in enumerate(program.rows):
        for k, chain in enumerate(row.fetch):
            if chain and chain[-1].kind == "exchange":
                yield row.bound.makes[0], with_row(program, i, fetching(row, k))
        for k, (operand, one) in enumerate(row.derived):
            if one.fetch[0] and one.fetch[0][-1].kind == "exchange":
                derived = (*row.derived[:k], (operand, fetching(one, 0)), *row.derived[k + 1 :])
                yield f"{row.bound.makes[0]}.d", with_row(program, i, replace(row, derived=derived))


def fetching(row: PlacedRow, k: int) -> PlacedRow:
    return replace(row, fetch=(*row.fetch[:k], row.fetch[k][:-1], *row.fetch[k + 1 :]))


def with_row(program: Program, i: int, row: PlacedRow) -> Program:
    return replace(program, rows=(*program.rows[:i], row, *program.rows[i + 1 :]))


def test_an_exchange_left_out_is_refused_or_moves_nothing(tmp_path: Path) -> None:
    """On all ranks, before anything moves; at shapes where it moves nothing the numbers stay right."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(2, 2, 3, 2), nn.Upsample(scale_factor=2.0),
        nn.ConvTranspose2d(2, 2, 3, 2, 1), nn.MaxPool2d(2, ceil_mode=True),
    ).double()  # fmt: skip
    graph, grid = graph_of(module), Grid((("H", 2),))
    compiled = compile_network(graph, grid, passes=[])
    refused = right = 0
    for name, program in without_exchanges(compiled.plain):
        wrong = replace(compiled, program=program, other=program_like(program, compiled.any_sizes.many))
        net = imported(wrong.package().files, tmp_path / name)
        for h in (13, 14, 15, 16):
            try:
                compare(module, net, grid, torch.randn(1, 2, h, 6, dtype=torch.float64))
                right += 1
            except ValueError as error:
                assert "on this rank, which has" in str(error), error
                refused += 1
    assert refused >= 8 and right >= 1, (refused, right)


class Unet(nn.Module):
    """Two levels, of rows that are multiples of two."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.norm, self.deep = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.enter(x))
        y = self.up(torch.relu(self.deep(self.norm(self.down(x)))))
        return self.leave(torch.cat([x, y], 1))


@cache
def graph_of_unet() -> Graph:
    x = torch.randn(2, 2, 26, 22, dtype=torch.float64)
    return exported(Unet().double().train(), (x,), name="net", opened={"x": {"H": 2, "W": 3}}).graph


def a_unet() -> tuple[nn.Module, Graph]:
    """Anew, and its graph."""
    torch.manual_seed(0)
    return Unet().double().train(), graph_of_unet()


@pytest.mark.parametrize("grid", ["H=2,W=2", "N=2,H=2"])
def test_a_unet_trained_at_five_sizes_in_turn(grid: str, tmp_path: Path) -> None:
    """Steps of SGD with momentum, samples, rows and columns another number in each: as one process."""
    module, graph = a_unet()
    axes = Grid(tuple(parse_grid(grid).items()))
    net = imported(compile_network(graph, axes).package().files, tmp_path)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    sizes = [(2, 26, 22), (3, 8, 14), (1, 2, 6), (2, 18, 4), (4, 12, 12)]
    batches = [torch.randn(n, 2, h, w, dtype=torch.float64) for n, h, w in (*sizes, *sizes)]

    def train(call: Any, parameters: Any) -> None:
        optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            loss, count = call(batch), batch.numel()
            (loss / count).backward()
            optimizer.step()

    train(lambda batch: (module(batch) - batch).square().sum(), module.parameters())

    def program(end: VirtualTransport) -> dict[str, Tensor]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(state)
        model.train()

        def call(batch: Tensor) -> Tensor:
            known = {"H": batch.shape[2], "W": batch.shape[3]}
            block = net.scatter("x", batch, mesh)
            return (model(block, batch=batch.shape[0], sizes=known) - block).square().sum()

        train(call, model.parameters())
        return model.full_state_dict()

    for made in World(axes.ranks).run(program):
        for n, t in module.state_dict().items():
            near(made[n], t)


def test_sizes_that_conditions_refuse_are_named_on_all_ranks(tmp_path: Path) -> None:
    """An odd number of rows, at which the source fails."""
    module, graph = a_unet()
    grid, x = Grid((("H", 2),)), torch.randn(2, 2, 26, 22, dtype=torch.float64)
    net = imported(compile_network(graph, grid).package().files, tmp_path)
    with pytest.raises(RuntimeError):
        module(x[:, :, 1:])

    def program(end: VirtualTransport) -> str:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        with pytest.raises(ValueError, match="is not so for N=2, H=25, W=22") as caught:
            model(net.scatter("x", x[:, :, 1:], mesh), batch=2, sizes={"H": 25})
        return str(caught.value)

    first, second = World(2).run(program)
    assert first == second


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        ({"q": {"H": 2}}, "open: Sequential has no input q"),
        ({"input": {"H": 4}}, "open: input [2, 1, 9, 8] has no dimension 4"),
        ({"input": {"H": -1}}, "open: input [2, 1, 9, 8] has no dimension -1"),
        ({"input": {"H": 2.0}}, "open: input [2, 1, 9, 8] has no dimension 2.0"),
        ({"input": {"H": 2, "W": 2}}, "open: dimension 2 of input is H and W"),
        ({"input": {"H": 1}}, "open: H of input is 1 in the example"),
        ({"input": {"C": 1}}, "open: dimension 1 of input can't be C"),
    ],
    ids=str,
)
def test_what_can_not_be_open_is_refused(opened: Any, said: str) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    with pytest.raises(InputError) as caught:
        exported(module, (torch.zeros(2, 1, 9, 8),), name="net", opened=opened)
    assert said in str(caught.value)
