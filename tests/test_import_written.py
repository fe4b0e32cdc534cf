"""What people write beside layers: gradients of their own, modules shared, names that are taken, no samples."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import check, draw_parameters, imported, package, random_input, truth_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.aten.describe import describe
from convgen.verify.graph_reference import run_graph
from convgen.verify.virtual import World

GRIDS: tuple[dict[str, int], ...] = ({"H": 2, "W": 2}, {"N": 2, "C": 2}, {"H": 3}, {"C": 2, "W": 2})


class Sign(torch.autograd.Function):
    """Passed straight through where it is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (ctx.saved_tensors[0].abs() <= 1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.by * gradients[0], None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Swish(torch.autograd.Function):
    """The derivative itself, of less memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0]
        s = x.sigmoid()
        return gradients[0] * (s * (1 + x * (1 - s)))


class Flipped(torch.autograd.Function):
    """What no gradient of elements is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].flip(2)


class Clipped(torch.autograd.Function):
    """The gradient where it is small, and no more than so much where it is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0].clamp(-10, 10)


signed: Any = Sign.apply  # as modules have it: before anything is traced
FUNCTIONS: dict[str, Any] = {
    "sign": signed,
    "reverse": lambda x: Reverse.apply(x, 0.3),
    "round": Round.apply,
    "swish": Swish.apply,
    "again": lambda x: checkpoint(F.gelu, x, use_reentrant=True),
}


class Functions(nn.Module):
    def __init__(self, functions: list[Any]) -> None:
        super().__init__()
        self.functions = functions
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in functions)

    def forward(self, x: Tensor) -> Tensor:
        for function, conv in zip(self.functions, self.convs, strict=True):
            x = x + function(F.conv2d(x, signed(conv.weight) * 0.1, conv.bias, padding=1))
        return x


def right(module: nn.Module, grid: dict[str, int], shape: tuple[int, ...], steps: int = 2) -> None:
    module = module.double()
    draw_parameters(module)
    given = imported(module, random_input(shape))
    found = check(given, grid, truth=truth_of(given, steps=steps))
    assert found.right, found
    assert not describe(given.graph.at(given.graph.batch)).whole


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_their_own_are_kept(name: str) -> None:
    """Beside another function's, so that one's gradient goes through the other."""
    draw = Random(name)
    others = draw.sample([*FUNCTIONS.values()], 1)
    right(Functions([FUNCTIONS[name], *others]), draw.choice(GRIDS), (3, 4, draw.choice((7, 9)), 8))


@pytest.mark.parametrize(("function", "train"), [(Flipped, True), (Flipped, False), (Clipped, True)])
def test_gradients_that_cant_be_traced_are_refused(function: Any, train: bool) -> None:
    module = Functions([function.apply]).train(train)
    with pytest.raises(InputError, match=f"{function.__name__}, a torch.autograd.Function, has gradients that can't"):
        imported(module, torch.zeros(2, 4, 8, 8), train=train)


def test_gradients_are_functions_own_again_afterwards() -> None:
    x = torch.randn(5, requires_grad=True)
    signed(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.abs() <= 1).to(x.dtype))


class Summed(nn.Module):
    """One weight of two parameters, whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(4, 3, 3, 3)) for _ in range(2))
        self.shift, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.one + self.two, self.shift + self.other, padding=1)


@pytest.mark.parametrize("kind", ["dtensors", "blocks"])
def test_gradients_have_memory_of_their_own(kind: str) -> None:
    grid = Random(kind).choice(GRIDS)
    right(Summed(), grid, (3, 3, 7, 8), steps=3)
    given = imported(Summed().double(), random_input((3, 3, 7, 8)))
    with package(compile_network(given.graph, Grid(tuple(grid.items()))).package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh, parameters=kind)
            net.gather("output", model(net.scatter("x", given.inputs[0], mesh)), mesh).sum().backward()
            runtime = {n: p.grad.to_local() for n, p in model.named_parameters()}
            assert len({g.data_ptr() for g in runtime.values() if g.numel()}) == sum(
                g.numel() > 0 for g in runtime.values()
            )
            before = runtime["two"].clone()
            runtime["one"].mul_(2)
            assert torch.equal(runtime["two"], before)

        World(Grid(tuple(grid.items())).ranks).run(program)


class Offset(nn.Module):
    """A parameter whose gradient is that of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(2, 4, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + self.offset


@pytest.mark.parametrize("kind", ["dtensors", "blocks"])
def test_the_gradient_of_a_result_stays_as_it_is(kind: str) -> None:
    """Added to twice, a gradient that were the given one would change it for the third pass."""
    given = imported(Offset().double(), random_input((2, 4, 6, 8)))
    with package(compile_network(given.graph, Grid((("H", 2),))).package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh, parameters=kind)
            x = net.scatter("x", given.inputs[0], mesh)
            dy = torch.ones_like(x)
            for _ in range(3):
                model(x).backward(dy)
            assert torch.equal(dy, torch.ones_like(x))
            assert torch.equal(model.offset.grad.to_local(), 3 * dy)

        World(2).run(program)


class Named(nn.Module):
    """Modules called as what lies between the rows of others."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        kinds: list[Any] = [lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.GroupNorm(2, 4), nn.GELU]
        for k, name in enumerate(names):
            setattr(self, name, kinds[k % 3]())
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return F.unfold(F.unfold(x, 2, stride=2).unsqueeze(1), 2, stride=2) * x.mean()


@pytest.mark.parametrize("seed", range(2))
def test_values_between_rows_have_no_others_names(seed: int) -> None:
    draw = Random(seed)
    names = ["a", "n", "a_sum", "a_sum_sum", "n_moments", "n_normal", "a_2", "n_2", "im2col", "im2col_2"]
    module = Named(draw.sample(names, 7)).double()
    draw_parameters(module)
    given = imported(module, random_input((3, 4, 8, 8)))
    made = Counter(v for row in describe(given.graph.at(3)).rows for v in row.makes if v)
    assert {v for v, n in made.items() if n > 1} == set()
    assert check(given, draw.choice(GRIDS)).right


class Shared(nn.Module):
    """A block under several names, norms without a momentum, names that torch's modules of graphs have."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        self.blocks = nn.ModuleList([self.block, self.block])
        self.code = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("graph", torch.zeros(4, 1, 1))
        self.register_buffer("meta", torch.full((4, 1, 1), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.graph.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)).view(4, 1, 1))
        return x * self.code + self.graph + self.meta


@pytest.mark.parametrize("momentum", [0.1, None])
def test_shared_blocks_and_their_statistics(momentum: float | None) -> None:
    draw = Random(f"shared {momentum}")
    right(Shared(momentum), draw.choice(GRIDS), (3, 4, draw.choice((5, 8)), 7), steps=3)


def test_shared_blocks_have_all_their_names() -> None:
    module = Shared(None).double()
    given = imported(module, random_input((3, 4, 6, 6)))
    with package(compile_network(given.graph, Grid((("H", 2),))).package().files) as net:

        def program(end: Any) -> Any:
            model = net.Network(net.init_mesh("cpu", transport=end))
            model.load_full(module.state_dict() | given.constants)
            return model.full_state_dict(), {*model.state_dict()}

        for whole, names in World(2).run(program):
            assert {*whole} == {*module.state_dict()} == names
            assert all(torch.equal(whole[n], t) for n, t in module.state_dict().items())


class Alone(nn.Module):
    """Layers and pools of samples one by one, without their dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 6, 3, 2, 1), nn.ConvTranspose2d(6, 2, 3, 2, 1)
        self.c = nn.Conv1d(7, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        ys = [self.b(torch.tanh(self.a(one))) for one in x.unbind()]
        pools = F.max_pool2d(ys[0], 3, 2, 1), F.avg_pool2d(ys[1], 2), F.adaptive_avg_pool2d(ys[2], (3, 1))
        pooled = torch.vmap(lambda one: F.avg_pool2d(one, 2))(x)
        return torch.stack(ys), pools, F.adaptive_max_pool2d(ys[0], 2), self.c(x[0, 0]), pooled


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_layers_without_samples(grid: dict[str, int]) -> None:
    right(Alone(), grid, (3, 4, 7, 8), steps=0)


class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :, 1:-1] = self.conv(x)[:, :, 1:-1]
        y[:, 0] = 1.0
        return y


def test_assignments_have_gradients_in_the_reference() -> None:
    """What `convgen check` compares with."""
    module, x = Assigned().double(), random_input((3, 4, 7, 8))
    given = imported(module, x)
    assert "copy" in {c.op for c in given.graph.calls}
    state = {n: t.detach().clone().requires_grad_() for n, t in module.state_dict().items()}
    (name, _), *_ = given.graph.outputs
    y = run_graph(given.graph, state | given.constants | {"x": x}, training=True).outputs[name]
    y.square().sum().backward()
    truth = module(x)
    truth.square().sum().backward()
    assert torch.equal(y, truth)
    for n, p in module.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(state[n].grad, p.grad)


class Keyed(nn.Module):
    """An output called as an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, 2, 1)

    def forward(self, sample: Tensor) -> Any:
        return {"sample": self.conv(sample), "sample_out": sample.mean((2, 3))}


def test_outputs_are_not_called_as_inputs() -> None:
    given = imported(Keyed().double(), random_input((3, 4, 7, 8)))
    assert [name for name, _ in given.graph.outputs] == ["sample_out_out", "sample_out"]
    assert check(given, {"H": 2, "N": 2}).right
