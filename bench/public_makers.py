"""What makes the public models of bench/public_models.py and more_models.py; packages are imported by then only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from convgen.spec.torchvision_ops import declare_operators

Made = tuple[nn.Module, tuple[int, ...]]
Make = Callable[[], Made]

IN_OUT = {"in_channels": 1, "out_channels": 2}
SMALL = (3, 3, 64, 50)
SQUARE = (3, 3, 64, 64)  # of models that want all rows of the extent they are made for
VOLUME = (3, 1, 16, 20, 12)
CUBE = (2, 1, 32, 32, 32)


class Called(nn.Module):
    """A model by a call of one tensor, whatever it takes and gives."""

    def __init__(self, model: nn.Module, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.model, x)


def small(made: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]) -> Mapping[str, Make]:
    """Models of their makers and shapes."""
    return {name: lambda make=make, shape=shape: (make(), shape) for name, (make, shape) in made.items()}


def vision(name: str, shape: tuple[int, ...] = SMALL, kind: str = "", **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        home: Any = importlib.import_module(f"torchvision.models{kind and '.' + kind}")
        return getattr(home, name)(weights=None, **settings), shape

    return make


def timm(name: str, shape: tuple[int, ...] = SMALL, **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package = importlib.import_module("timm")
        return package.create_model(name, pretrained=False, **({"num_classes": 10} | settings)), shape

    return make


def monai(name: str, shape: tuple[int, ...] = VOLUME, run: Any = None, dims: int = 3, **settings: Any) -> Make:
    def make() -> Made:
        nets: Any = importlib.import_module("monai.networks.nets")
        model = getattr(nets, name)(**({"spatial_dims": dims} if dims else {}), **settings)
        return (Called(model, run) if run else model), shape

    return make


def smp(name: str, shape: tuple[int, ...] = SQUARE, encoder: str = "resnet18", **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package: Any = importlib.import_module("segmentation_models_pytorch")
        return getattr(package, name)(encoder, encoder_weights=None, classes=3, **settings), shape

    return make


def diffusers(name: str, shape: tuple[int, ...], run: Callable[[Any, torch.Tensor], Any], **settings: Any) -> Make:
    def make() -> Made:
        declare_operators()
        package: Any = importlib.import_module("diffusers")
        return Called(getattr(package, name)(**settings), run), shape

    return make


def by_time(model: Any, x: torch.Tensor) -> Any:
    """A denoiser at a time step."""
    return model(x, torch.full((x.shape[0],), 7.0, dtype=x.dtype, device=x.device)).sample


def by_words(width: int) -> Callable[[Any, torch.Tensor], Any]:
    """A denoiser at a time step, beside words: here all alike, a function of nothing."""

    def run(model: Any, x: torch.Tensor) -> Any:
        words = torch.sin(torch.arange(4 * width, dtype=x.dtype, device=x.device)).reshape(1, 4, width)
        time = torch.full((x.shape[0],), 7.0, dtype=x.dtype, device=x.device)
        return model(x, time, words.expand(x.shape[0], -1, -1)).sample

    return run
