"""Noise that is drawn otherwise than by rand and randn: spread as torch's is, the same for every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import check, imported, package, random_input
from scipy.stats import kstest
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.operations.dropout import EVALUATION
from convgen.verify.graph_reference import run_graph
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

SHAPE = (3, 8, 24, 26)
GRIDS: tuple[dict[str, int], ...] = ({"H": 2, "W": 2}, {"N": 2, "C": 2}, {"H": 5})
FLAT = torch.zeros(SHAPE, dtype=torch.float64)


class Drawn(nn.Module):
    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Any:
        return self.of(x)


# What is drawn, and the distribution (scipy.stats) that it has.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Any, ...]]] = {
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), ("norm", (2, 3))),
    "normal of a shape": (lambda x: torch.normal(1.0, 2.0, x.shape, dtype=x.dtype), ("norm", (1, 2))),
    "normal of a mean": (lambda x: torch.normal(x, 0.5) - x, ("norm", (0, 0.5))),
    "normal of both": (lambda x: (torch.normal(x, x.exp()) - x) / x.exp(), ("norm", ())),
    "rsample": (lambda x: (torch.distributions.Normal(x, F.softplus(x)).rsample() - x) / F.softplus(x), ("norm", ())),
    "uniform_": (lambda x: torch.zeros_like(x).uniform_(-1, 3), ("uniform", (-1, 4))),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), ("expon", (0, 0.5))),
    "gumbel": (lambda x: -torch.empty_like(x).exponential_().log(), ("gumbel_r", ())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_spread_as_torch_spreads_it(kind: str) -> None:
    of, (name, args) = KINDS[kind]
    x = random_input(SHAPE)
    given = imported(Drawn(of), x)

    def by_graph(x: Tensor) -> Tensor:
        return run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs["output"]

    assert kstest(by_graph(x).flatten().numpy(), name, args).pvalue > 1e-3
    assert kstest(of(x).flatten().numpy(), name, args).pvalue > 1e-6  # the distribution is that of eager PyTorch
    for grid in GRIDS[:2]:
        assert check(given, grid, reference=by_graph, seed=5).right


def test_bernoulli_of_tensors_and_whole_numbers() -> None:
    def of(x: Tensor) -> Any:
        p = torch.sigmoid(x)
        return torch.bernoulli(p), p, torch.randint(2, 7, x.shape), x * torch.randint(0, 5, (1,))

    x = random_input(SHAPE)
    given = imported(Drawn(of), x)

    def by_graph(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs.values())

    ones, p, whole, _ = by_graph(x)
    assert {*ones.unique().tolist()} == {0.0, 1.0}
    off = (ones - p).sum() / (p * (1 - p)).sum().sqrt()
    assert abs(off) < 4
    counts = torch.bincount(whole.flatten(), minlength=7)
    assert counts[:2].sum() == 0 and ((counts[2:] - whole.numel() / 5).abs() < 4 * (whole.numel() * 0.16) ** 0.5).all()
    for grid in GRIDS:
        assert check(given, grid, reference=by_graph, seed=5).right


def test_gradients_pass_noise_as_they_do_in_torch() -> None:
    """Those of gumbel_softmax and rsample reach what is added to; a normal's mean and bernoulli's odds have none."""

    def of(x: Tensor) -> Any:
        mean = x[:, :4]
        drawn = torch.distributions.Normal(mean, F.softplus(x[:, 4:])).rsample()
        return F.gumbel_softmax(x, dim=1), drawn, x * torch.normal(x, 1.0) * torch.bernoulli(torch.sigmoid(x))

    x = random_input(SHAPE)
    given = imported(Drawn(of), x)

    def by_graph(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_graph(given.graph, {"x": x}, seed=(5, 0)).outputs.values())

    soft, drawn, product = by_graph(x.requires_grad_())
    assert torch.allclose(soft.sum(1), torch.ones(()).double())
    (dx,) = torch.autograd.grad(drawn.sum(), x, retain_graph=True)
    assert torch.equal(dx[:, :4], torch.ones_like(dx[:, :4])) and (dx[:, 4:] != 0).all()
    (dx,) = torch.autograd.grad(product.sum(), x)
    assert torch.allclose(dx * x, product)
    x.requires_grad_(False)
    for grid in GRIDS:
        assert check(given, grid, reference=by_graph, seed=5).right


class Noisy(nn.Module):
    """A mask before the noise, which evaluation leaves out: the noise is of the same place in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.5, self.training)
        return y + torch.randn_like(y)


class MonteCarlo(nn.Module):
    """It drops in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout2d(F.dropout(x, 0.3, True), 0.5, True)


@pytest.mark.parametrize(("module", "train"), [(Noisy(), True), (Noisy(), False), (MonteCarlo(), False)])
def test_check_knows_what_evaluation_draws(module: nn.Module, train: bool) -> None:
    shape = (4, 6, 3, 2) if isinstance(module, MonteCarlo) else (4, 6)
    given = imported(module.double(), random_input(shape), train=train)
    report = check_network(compile_network(given.graph, Grid((("N", 2),))), given.constants)
    assert report.ok, report_text(report)
    assert (given.graph.modes == ("train", "eval")) == train


def test_calls_in_evaluation_are_counted_apart() -> None:
    """Every call draws anew, none what training draws; training goes on as if there had been no evaluation."""
    given = imported(Noisy().double(), random_input((4, 6)))
    state = {n: t.detach() for n, t in given.module.state_dict().items()}
    x = given.inputs[0]

    def truth(training: bool, step: int) -> Tensor:
        return run_graph(given.graph, state | {"x": x}, training=training, seed=(5, step)).outputs["output"]

    wanted = [truth(True, 0), truth(False, EVALUATION), truth(False, EVALUATION + 1), truth(True, 1)]
    wanted += [truth(False, EVALUATION + 2)]
    with package(compile_network(given.graph, Grid((("N", 2),))).package().files) as net:

        def program(end: Any) -> list[Tensor]:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh, seed=5)
            model.load_full(state)
            found: list[Tensor] = []
            for training in (True, False, False, True, False):
                model.train(training)
                found.append(net.gather("output", model(net.scatter("x", x, mesh)), mesh).detach())
            return found

        for found in World(2).run(program):
            for one, other in zip(found, wanted, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-14)
    assert min(float((a - b).abs().max()) for k, a in enumerate(wanted) for b in wanted[:k]) > 0.1
