"""Kernels that draw: to the bit what ATen's calls draw, wherever a block stands and however it lies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.draws import draws_module
from convgen.kernels.facts import Launch, facts
from convgen.kernels.load import load_text
from convgen.network_compiler import compile_network
from convgen.operations import dropout
from convgen.operations.dropout import Bernoulli, Dropout, Noise, some_words, words
from convgen.operations.row import At, standing
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = load_text(draws_module())
    monkeypatch.setattr(module, "launch", launch)
    return module


def placed(rng: random.Random, shape: tuple[int, ...]) -> At:
    """A block somewhere in it."""
    operation = Bernoulli(shape, 0.5)
    blocks = {i: sorted((rng.randint(0, n), rng.randint(0, n))) for i, n in operation.signatures[0].extents}
    return standing(operation.signatures[0], {i: (lo, hi) for i, (lo, hi) in blocks.items()})


def seeds(rng: random.Random) -> Tensor:
    return torch.tensor([rng.getrandbits(63), rng.choice((0, 7, dropout.EVALUATION + 3, 2**33 + 1))])


@pytest.mark.parametrize("seed", cases_of(16, "drawn words"))
def test_words_are_those_of_every_layout(seed: int, draws: Any) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 5)))
    at, drawn, call = placed(rng, shape), seeds(rng), rng.choice((0, 1, 5, 2**31 + 1))
    box = list(at.blocks.values())
    one, two = draws.words(shape, box, drawn, call, True)
    wanted = words(shape, at, drawn, call)
    assert torch.equal(one, wanted[0]) and torch.equal(two, wanted[1])
    assert torch.equal(draws.words(shape, box, drawn, call, False)[0], one)


def test_words_of_large_numbers(draws: Any) -> None:
    """Of elements beyond 2**32 of the whole."""
    shape, box, drawn = (5, 2**31, 3), [(3, 5), (2**31 - 2, 2**31), (1, 3)], torch.tensor([11, 4])
    one, two = draws.words(shape, box, drawn, 2, True)
    numbers = [(i * 2**31 + j) * 3 + k for i in (3, 4) for j in (2**31 - 2, 2**31 - 1) for k in (1, 2)]
    wanted = torch.tensor(some_words(numbers, drawn, 2)).view(2, 2, 2, 4)
    assert torch.equal(one, wanted[..., 0]) and torch.equal(two, wanted[..., 1])


@pytest.mark.parametrize("seed", cases_of(16, "drawn dropouts"))
def test_dropouts_are_those_of_every_layout(seed: int, draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    shape = tuple(rng.randint(1, 8) for _ in range(rng.choice((2, 3, 4, 4, 5))))
    operation = Dropout(shape, rng.choice((0.1, 0.5, 0.9)), rng.randint(0, 3))
    at, drawn = placed(rng, shape), seeds(rng)
    dtype = rng.choice((torch.float64, torch.float32, torch.bfloat16))
    x = torch.randn([hi - lo for lo, hi in at.blocks.values()]).to(dtype)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    lies = rng.choice(("as it does", "last", "turned", "with gaps"))
    if lies == "last" and last is not None:
        x = x.contiguous(memory_format=last)
    elif lies == "turned":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif lies == "with gaps":
        x = torch.cat([x, x], -1)[..., : x.shape[-1]]
    if x.numel():
        x[(0,) * x.dim()] = rng.choice((torch.inf, torch.nan, 1.0))
    dy = torch.randn(x.shape).to(dtype)
    both = (True, False)
    (y,), kept = operation.kept(0, at, both, x, drawn)
    dx, _ = operation.vjp(0, at, both, kept, dy)
    monkeypatch.setattr(dropout, "DRAWS", [draws])
    (found,), kept_of_it = operation.kept(0, at, both, x, drawn)
    found_dx, _ = operation.vjp(0, at, both, kept_of_it, dy)
    torch.testing.assert_close(found, y, equal_nan=True)
    torch.testing.assert_close(found_dx, dx)
    assert torch.equal(found == 0, y == 0)
    assert lies == "with gaps" or found.stride() == x.stride()
    assert not any(isinstance(t, Tensor) and t.dtype == torch.bool for t in kept_of_it)  # no mask is kept


def test_a_dropout_of_everything_makes_zeros(draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's does, which divides nothing by the share that stays."""
    x, drawn, both = torch.randn(4, 30), torch.tensor([9, 1]), (True, False)
    operation = Dropout((4, 30), 1.0)
    at = standing(operation.signatures[0], {"d0": (0, 4), "d1": (0, 30)})
    for modules in ([], [draws]):
        monkeypatch.setattr(dropout, "DRAWS", modules)
        (y,), kept = operation.kept(0, at, both, x, drawn)
        for found in (y, operation.local(0, at, x, drawn)[0], operation.vjp(0, at, both, kept, x)[0]):
            assert not found.any() and not found.isnan().any()
    assert torch.equal(operation.reference(x, drawn)[0], torch.zeros(4, 30))


def test_a_word_at_the_limit_stays(draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, drawn = (4, 5), torch.tensor([9, 1])
    at = standing(Bernoulli(shape, 0.5).signatures[0], {"d0": (0, 4), "d1": (0, 5)})
    word = int(words(shape, at, drawn, 0)[0][2, 3])
    operation = Dropout(shape, word / 2**32)
    monkeypatch.setattr(dropout, "DRAWS", [draws])
    (y,) = operation.local(0, at, torch.ones(shape), drawn)
    assert y[2, 3] != 0 and torch.equal(y != 0, words(shape, at, drawn, 0)[0] >= word)


@pytest.mark.parametrize("operation", [Bernoulli((6, 7), 0.3, 1, "float32"), Noise((9, 5), "uniform", 2, "float32"),
                                       Noise((9, 5), "normal", 3, "float64")])  # fmt: skip
def test_noise_is_that_of_every_layout(operation: Any, draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at, drawn = placed(random.Random(3), operation.shape), torch.tensor([5, 6])
    (wanted,) = operation.local(0, at, drawn)
    monkeypatch.setattr(dropout, "DRAWS", [draws])
    assert torch.equal(operation.local(0, at, drawn)[0], wanted)


def test_kernels_spill_nothing() -> None:
    module: Any = load_text(draws_module())
    held: list[Launch] = []
    module.launch = lambda f, grid, *args, **more: held.append(Launch(f, grid, args, more))
    drawn = torch.empty(2, dtype=torch.int64, device="meta")
    x = torch.empty(16, 64, 56, 56, dtype=torch.bfloat16, device="meta", memory_format=torch.channels_last)
    box = [(16, 32), (0, 64), (0, 56), (0, 56)]
    module.words((32, 64, 56, 56), box, drawn, 1, True)
    module.dropped(x, (32, 64, 56, 56), box, drawn, 1, 1 << 31, 0.5)
    assert [one.name for one in held] == ["draw_words", "draw_dropped"]
    assert all(facts(one, SM_90.known()).spill_bytes == 0 for one in held)


class Dropping(nn.Module):
    """Elements, channels and samples are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.drops, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.channels(torch.relu(self.drops(self.a(x)))))


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2, "W": 2}, {"C": 2}], ids=str)
def test_networks_that_drop(grid: dict[str, int]) -> None:
    graph, tensors = graph_of(Dropping(), (torch.randn(4, 4, 6, 5),), name="dropping")
    one = compile_network(with_dtype(graph, "float64"), Grid(tuple(grid.items())), target=SM_90)
    assert "draws.py" in one.package().files
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)
