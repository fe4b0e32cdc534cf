"""What makes the models of the zoo, and calls of one tensor. A library is imported when one of its models is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from convgen.spec.torchvision_ops import declare_operators

Made = tuple[nn.Module, tuple[int, ...]]  # and its input's shape
Make = Callable[[], Made]
Run = Callable[[Any, Tensor], Any]

# Three samples, and most rows, divide by no grid: ragged blocks and empty ranks are among the cases.
IN_OUT = {"in_channels": 1, "out_channels": 2}
SMALL = (3, 3, 64, 50)
SQUARE = (3, 3, 64, 64)  # of models that want all rows of the extent they are made for
VOLUME = (3, 1, 16, 20, 12)
CUBE = (2, 1, 32, 32, 32)


class Called(nn.Module):
    """A model by a call of one tensor, whatever it takes and gives."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.model, x)


def small(made: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]) -> Mapping[str, Make]:
    """Models of their makers and shapes."""
    return {name: lambda make=make, shape=shape: (make(), shape) for name, (make, shape) in made.items()}


def of(home: str, name: str, shape: tuple[int, ...], run: Run | None, *given: Any, **settings: Any) -> Made:
    """A model of a module of a library, by `run` where its own call takes other than one tensor."""
    declare_operators()
    model = getattr(importlib.import_module(home), name)(*given, **settings)
    return (Called(model, run) if run else model), shape


def vision(name: str, shape: tuple[int, ...] = SMALL, kind: str = "", **settings: Any) -> Make:
    return lambda: of(f"torchvision.models{kind and '.' + kind}", name, shape, None, weights=None, **settings)


def timm(name: str, shape: tuple[int, ...] = SMALL, **settings: Any) -> Make:
    return lambda: of("timm", "create_model", shape, None, name, pretrained=False, **({"num_classes": 10} | settings))


def monai(
    name: str, shape: tuple[int, ...] = VOLUME, run: Run | None = None, dims: int = 3, home: str = "", **settings: Any
) -> Make:
    dimensions = {"spatial_dims": dims} if dims else {}
    return lambda: of(f"monai.networks.nets{home}", name, shape, run, **dimensions, **settings)


def smp(name: str, shape: tuple[int, ...] = SQUARE, encoder: str = "resnet18", **settings: Any) -> Make:
    settings |= {"encoder_weights": None, "classes": 3}
    return lambda: of("segmentation_models_pytorch", name, shape, None, encoder, **settings)


def diffusers(name: str, shape: tuple[int, ...], run: Run, **settings: Any) -> Make:
    return lambda: of("diffusers", name, shape, run, **settings)


def spandrel(
    family: str,
    module: str,
    name: str,
    shape: tuple[int, ...] = (2, 3, 16, 16),
    run: Run | None = None,
    **settings: Any,
) -> Make:
    return lambda: of(f"spandrel.architectures.{family}.__arch.{module}", name, shape, run, **settings)


def hf(model: str, config: str, shape: tuple[int, ...], run: Run, **settings: Any) -> Make:
    def make() -> Made:
        configuration: Any = of("transformers", config, shape, None, **settings)[0]
        configuration._attn_implementation = "eager"
        return of("transformers", model, shape, run, configuration)

    return make


def over(make: Make, part: Callable[[Any], nn.Module], run: Run, shape: Any = None) -> Make:
    """A part of a model, by a call of one tensor."""

    def made() -> Made:
        model, of_model = make()
        return Called(part(model), run), shape or of_model

    return made


# ---- Calls of one tensor ----


def filled(x: Tensor, *shape: int, value: float = 0.0) -> Tensor:
    """As many samples as x has, all of one value."""
    return torch.full((x.shape[0], *shape), value, dtype=x.dtype, device=x.device)


def px(key: Any) -> Run:
    """One of a model's results."""
    return lambda m, x: m(x)[key]


def called(m: Any, x: Tensor) -> Any:
    return m(x)


def sample(m: Any, x: Tensor) -> Any:
    return m(x).sample


def maps(m: Any, x: Tensor) -> Any:
    return m(x).feature_maps


def by_encoder(m: Any, x: Tensor) -> Any:
    return m.encoder(x)


def by_decoder(m: Any, x: Tensor) -> Any:
    return m.decoder(x)


def through(m: Any, x: Tensor) -> Any:
    return m.decoder(m.encoder(x))


def coded(m: Any, x: Tensor) -> Any:
    return m.encode(x).latent_dist.mode()


def decoded(m: Any, x: Tensor) -> Any:
    return m.decode(x).sample


def both(m: Any, x: Tensor) -> Any:
    return m.decode(m.encode(x).latent_dist.mode()).sample


def by_time(m: Any, x: Tensor) -> Any:
    """A denoiser at a time step."""
    return m(x, filled(x, value=7.0)).sample


def by_words(width: int) -> Run:
    """A denoiser at a time step, beside words: here all alike, a function of nothing."""

    def run(m: Any, x: Tensor) -> Any:
        words = torch.sin(torch.arange(4 * width, dtype=x.dtype, device=x.device)).reshape(1, 4, width)
        return m(x, filled(x, value=7.0), words.expand(x.shape[0], -1, -1)).sample

    return run
