"""Layers beside convolution, one by one, on ranks: those that the papers' authors' later library gets silently wrong
(max and average pooling, batch norm in training, group norm, interpolation, global pooling, transposed convolution with
a kernel that is not its stride), and parameters that its tests have: strides, circular padding, many ranks.

Each against the module on one device, forward and backward, buffers and bytes; extents that nothing divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest
import torch
from networks_on_ranks import check, draw_parameters, imported, random_input
from sampling import cases_of
from torch import Tensor, nn

C = 4


class Upsampled(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, **self.options)  # type: ignore[arg-type]


SEVEN: Mapping[str, Callable[[], nn.Module]] = {
    "max pooling": lambda: nn.MaxPool2d(3, 2, 1),
    "average pooling": lambda: nn.AvgPool2d(3, 1, 1),
    "batch norm": lambda: nn.BatchNorm2d(C),
    "group norm": lambda: nn.GroupNorm(2, C),
    "bilinear": lambda: Upsampled(scale_factor=2, mode="bilinear"),
    "global pooling": lambda: nn.AdaptiveAvgPool2d(1),
    "transposed": lambda: nn.ConvTranspose2d(C, 3, 3, 1, 1),
}
GRIDS = ({"H": 4}, {"N": 2, "W": 2})


def right(module: nn.Module, shape: tuple[int, ...], *grids: Mapping[str, int]) -> None:
    module = module.double()
    draw_parameters(module)
    given = imported(module, random_input(shape))
    for grid in grids:
        found = check(given, grid)
        assert found.right, f"{module} of {shape} on {grid}: {found}"


@pytest.mark.parametrize("layer", SEVEN)
def test_what_is_silently_wrong_elsewhere(layer: str) -> None:
    right(SEVEN[layer](), (3, C, 11, 10), *GRIDS)


def drawn(draw: Random) -> tuple[nn.Module, tuple[int, ...], dict[str, int]]:
    """A convolution, transposed or not, a pooling: of a kernel, stride, padding and mode of its tests, or near them."""
    dims = draw.choice((1, 2, 2, 3))
    kernel, stride = draw.choice((1, 2, 3, 5)), draw.choice((1, 2, 4))
    padding, ranks = draw.choice(((kernel - 1) // 2, 0)), draw.choice((4, 8, 9) if dims == 1 else (2, 3, 4))
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    fine = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    pool = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1]
    module = draw.choice((
        lambda: conv(C, 6, kernel, stride, padding),
        lambda: conv(C, 6, kernel, stride, kernel // 2, padding_mode="circular"),
        lambda: fine(C, 6, kernel, draw.choice((1, kernel)), draw.choice((0, kernel // 2))),
        lambda: pool(kernel, stride, min(padding, kernel // 2)),
    ))()  # fmt: skip
    rows = tuple(draw.randint(7, 13) if d else draw.randint(ranks, 3 * ranks + 4) for d in range(dims))
    axis = "W" if dims == 1 else "H" if dims == 2 else "D"
    more = {"W": 2} if dims == 2 and ranks < 4 and draw.random() < 0.5 else {}
    return module, (2, C, *(max(n, kernel) for n in rows)), {axis: ranks, **more}


@pytest.mark.parametrize("seed", cases_of(8, "test_parameters_of_its_tests"))
def test_parameters_of_its_tests(seed: int) -> None:
    module, shape, grid = drawn(Random(f"layers {seed}"))
    right(module, shape, grid)


def test_channels_last_comes_in_and_is_the_same() -> None:
    """Blocks are contiguous, whatever the order of the inputs in memory."""
    module = nn.Sequential(nn.Conv2d(C, 6, 3, 2, 1), nn.MaxPool2d(2)).double().to(memory_format=torch.channels_last)
    draw_parameters(module)
    x = random_input((2, C, 9, 12)).to(memory_format=torch.channels_last)
    assert check(imported(module, x), {"H": 2, "W": 2}).right


class NormAndMore(nn.BatchNorm2d):
    """A batch norm with an activation inside of it, as timm has them: a block whose parameters are its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Standardised(nn.Conv2d):
    """Weights normalised by a batch norm that is no module: it has neither their names nor running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        w = nn.functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return nn.functional.conv2d(x, w.reshape_as(self.weight), self.bias, self.stride, self.padding)


def test_batch_norms_that_are_no_module_alone() -> None:
    module = nn.Sequential(Standardised(C, 6, 3, 2, 1), NormAndMore(6), NormAndMore(6))
    right(module, (3, C, 9, 8), {"N": 2, "H": 2}, {"C": 2})


class Spare(nn.Module):
    """A head whose result nobody takes: its batch norm has running statistics all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(C, 6, 3), nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.head(x)
        return x


def test_a_batch_norm_that_nobody_reads_is_updated() -> None:
    right(Spare(), (3, C, 9, 8), {"N": 2, "H": 2}, {"C": 2})


class Operands(nn.Module):
    """A block whose parts are named as its operands are in its function, on operands of such names."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.run, self.ADD_1 = (nn.Conv2d(C, C, 3, padding=1) for _ in range(4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(self.x(a) + self.y(b)) * self.run(a) + self.ADD_1(b) * b


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.run = Operands(), nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor, run: Tensor) -> Tensor:
        y = self.run(run)
        return self.part(self.part(x, y), self.part(y, x))


def test_every_name_is_of_one_value() -> None:
    module = Named().double()
    draw_parameters(module)
    given = imported(module, random_input((3, C, 7, 6)), random_input((3, C, 7, 6), 1))
    for grid in ({"H": 2, "W": 2}, {"C": 2}):
        found = check(given, grid)
        assert found.right, f"{grid}: {found}"
