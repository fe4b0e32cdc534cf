"""Complex numbers and Fourier transforms inside of networks, against the module on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import check, imported, random_input
from test_networks_training import on_ranks
from torch import Tensor, fft, nn

from convgen.errors import InputError
from convgen.parallel import from_torch
from convgen.spec.exported import graph_of
from convgen.spec.graph_file import read_graph, write_graph
from convgen.verify.graph_reference import run_graph

NORMS = ("forward", "backward", "ortho")


class Modes(nn.Module):
    """The lowest modes of a field, mixed by complex weights, as neural operators do; a rotation by a constant."""

    def __init__(self, norm: str = "backward", kept: int = 2) -> None:
        super().__init__()
        self.lift, self.norm, self.kept = nn.Conv2d(2, 3, 3, padding=1), norm, kept
        self.high, self.low = (nn.Parameter(torch.randn(3, 3, kept, kept, dtype=torch.complex128)) for _ in range(2))
        self.register_buffer("turn", torch.polar(torch.ones(3, 1, 1), torch.arange(3.0).view(3, 1, 1)).to(self.low))
        self.turn: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x, k = self.lift(x), self.kept
        y = fft.rfft2(x, norm=self.norm)
        out = torch.zeros(x.shape[0], *y.shape[1:], dtype=y.dtype, device=x.device)
        out[:, :, :k, :k] = torch.einsum("nixy,ioxy->noxy", y[:, :, :k, :k], self.high)
        out[:, :, -k:, :k] = torch.einsum("nixy,ioxy->noxy", y[:, :, -k:, :k], self.low)
        return fft.irfft2(out * self.turn, s=x.shape[-2:], norm=self.norm)


class Spectrogram(nn.Module):
    """Magnitudes and phases of short transforms, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(2, 1, 3, padding=1)
        self.register_buffer("window", torch.hann_window(8), persistent=False)
        self.window: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.stft(self.mix(x)[:, 0], 8, 4, window=self.window, return_complex=True)
        size = z.abs()
        return size, torch.istft(torch.polar(size.tanh(), z.angle()), 8, 4, window=self.window)


def test_fields() -> None:
    draw = Random("fields")
    torch.manual_seed(draw.randrange(1000))
    shape = (3, 2, draw.randint(5, 9), draw.randint(5, 9))
    given = imported(Modes(draw.choice(NORMS)).double(), random_input(shape))
    assert given.graph.is_dynamic
    for grid in draw.sample(({"N": 2}, {"H": 2, "W": 2}, {"C": 2}, {"H": 3}), 2):
        found = check(given, grid, steps=2)
        assert found.right, (shape, grid, found)


def test_short_transforms() -> None:
    torch.manual_seed(1)
    found = check(imported(Spectrogram().double(), random_input((2, 2, 32))), {"W": 2})
    assert found.right, found


class Of(nn.Module):
    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


RIGHT: Mapping[str, Callable[[Tensor], Any]] = {
    "samples": lambda x: fft.fft2(x, dim=(0, 2)).imag,
    "hfft": lambda x: fft.hfft(fft.rfft(x)),
    "lengths": lambda x: fft.irfft(fft.rfft(x, n=11), n=8),
    "shifts": lambda x: fft.ifft2(fft.ifftshift(fft.fftshift(fft.fft2(x)) * (1 + 2j))).real,
    "powers": lambda x: (fft.fft2(x) ** 2).abs(),
    "exponentials": lambda x: torch.exp(1j * x + x).real,
    "sums": lambda x: fft.fft2(x).sum((1, 2)).abs() + fft.fft2(x * x).mean(1).angle()[:, 0],
    "products": lambda x: (fft.rfft(x) @ fft.rfft(x).mT).abs(),
    "quotients": lambda x: (fft.rfft(x) / (fft.rfft(x * 2) + (3 - 1j)) / 2j - x[..., :5] * (2 + 1j)).abs(),
    "conjugates": lambda x: (fft.rfft(x) * fft.rfft(x).conj()).real,
    "parts": lambda x: torch.complex(*(fft.rfft(x).real.relu(), fft.rfft(x).imag.relu())).abs(),
    "views": lambda x: torch.view_as_complex(torch.view_as_real(fft.rfft2(x).contiguous()).tanh()).abs(),
    "masks": lambda x: fft.ifft2(fft.fft2(x).masked_fill(x > 0, 2 + 1j)).real,
    "joins": lambda x: torch.cat([fft.fft(x), x + 0j], 1).flip(1).abs(),
    "types": lambda x: fft.fft(x).to(torch.complex64).abs().double(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_computed_with_them(name: str) -> None:
    x, y = (random_input((3, 4, 8)).requires_grad_() for _ in range(2))
    graph, constants = graph_of(Of(RIGHT[name]), (x,))
    truth = RIGHT[name](y)
    (got,) = run_graph(graph, {"x": x, **constants}).outputs.values()
    dy = random_input(truth.shape, 3)
    got.backward(dy)
    truth.backward(dy)
    assert x.grad is not None and y.grad is not None
    wide = 1e-5 if name == "types" else 1e-11
    for a, b in ((got.detach(), truth.detach()), (x.grad, y.grad)):
        torch.testing.assert_close(a, b, rtol=wide, atol=wide * float(b.abs().max()))


@pytest.mark.parametrize(
    ("run", "fact"),
    [
        (fft.rfft, "gives complex numbers"),
        (lambda x: torch.tanh(fft.rfft(x)).real, "tanh.default of complex numbers"),
        (lambda x: (fft.rfft(x) ** 3).real, "the power 3"),
    ],
)
def test_what_is_refused(run: Callable[[Tensor], Any], fact: str) -> None:
    with pytest.raises(InputError) as caught:
        graph_of(Of(run), (torch.zeros(3, 4, 8),))
    assert fact in str(caught.value) and caught.value.hint
    with pytest.raises(InputError, match="complex64"):
        graph_of(Of(torch.real), (torch.zeros(3, 4, 8, dtype=torch.complex64),))


def test_states_are_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complex in the module's state dict, and in the package's whole one; a file of the graph keeps it."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    torch.manual_seed(2)
    module, x = Modes().double(), random_input((2, 2, 6, 5))
    graph, _ = graph_of(module, (x,))
    (tmp_path / "net.yaml").write_text(write_graph(graph))
    assert read_graph(tmp_path / "net.yaml") == graph
    net, state = from_torch(module, (x,), grid={"C": 2}), module.state_dict()
    module(x).square().sum().backward()

    def program(model: Any, mesh: Any) -> None:
        assert all(torch.equal(model.full_state_dict()[n], t) for n, t in state.items())  # those of the module's own
        model.load_full({n: t * 2 for n, t in state.items()})
        assert all(torch.equal(model.full_state_dict()[n], t * 2) for n, t in state.items())
        model.load_full(state)
        net.gather("output", model(net.scatter("x", x, mesh)), mesh).square().sum().backward()
        found = model.full_gradients()
        for n, p in module.named_parameters():
            torch.testing.assert_close(found[n], p.grad, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match=r"high has shape \(3, 3, 2, 2, 2\), got \(3, 3, 2, 2\)"):
            model.load_full(state | {"high": state["high"].real})

    on_ranks(net, program, state)
