"""Profiles that ship with the public code: what each kind of layer took on one core group, beside the models.

Source: tuning/sw26010/profiles.csv and profile_convolutions.csv, which name the logs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from convgen.sw26010.conv.cost import conv_terms, explicit_plan
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.machine.rates import Rates
from convgen.sw26010.training.caffe import Part, caffe_parts
from convgen.sw26010.training.layers import ConvLayer, ConvTask, Layer
from convgen.sw26010.training.published import csv_rows
from convgen.sw26010.training.step import layer_times

LEFT_OUT = "local response normalisation"  # what brings GoogLeNet's profile to Table 3


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of so many layers in one iteration on one core group."""

    layers: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Profile:
    """An iteration with so many samples; `image` is the extent with which examples/networks has its planes."""

    network: str
    samples: int
    image: int
    kinds: Mapping[str, Took]
    convolutions: tuple[tuple[ConvLayer, Took], ...]

    @property
    def seconds(self) -> float:
        """Seconds of all layers but local response normalisation."""
        return sum(took.seconds for kind, took in self.kinds.items() if kind != LEFT_OUT)

    @property
    def images_per_s(self) -> float:
        """Images a second of four core groups."""
        return 4 * self.samples / self.seconds


@cache
def read_profiles() -> dict[str, Profile]:
    """By the network's name."""
    heads: dict[str, tuple[int, int]] = {}
    kinds: dict[str, dict[str, Took]] = defaultdict(dict)
    convolutions: dict[str, list[tuple[ConvLayer, Took]]] = defaultdict(list)
    for row in csv_rows("profiles.csv"):
        heads[row["network"]] = int(row["samples"]), int(row["image"])
        kinds[row["network"]][row["kind"]] = _took(row)
    for row in csv_rows("profile_convolutions.csv"):
        convolutions[row["network"]].append((_layer(row), _took(row)))
    return {name: Profile(name, *head, kinds[name], tuple(convolutions[name])) for name, head in heads.items()}


def _took(row: Mapping[str, str]) -> Took:
    return Took(int(row["layers"]), float(row["forward_s"]), float(row["backward_s"]))


def _layer(row: Mapping[str, str]) -> ConvLayer:
    c, f, h, kernel, stride, padding, groups = (
        int(row[name]) for name in ("c", "f", "h", "kernel", "stride", "padding", "groups")
    )
    axis = Axis(h, (h + 2 * padding - kernel) // stride + 1, kernel, stride, padding)
    name = f"{kernel}x{kernel}, {c} to {f} at {h}"
    return ConvLayer(name, c // groups, f // groups, axis, axis, groups, row["bias"] == "1", first=c == 3)


@dataclass(frozen=True, slots=True)
class LibraryFit:
    """What a product by the general library takes beside the mesh's work, and how far the fit is off on average."""

    products: int
    call_s: float
    row_s: float
    error: float


def fit_library(rates: Rates) -> LibraryFit:
    """A call's and a row's seconds, from ResNet-50's convolutions of 1 x 1 with stride 1, forward: products alone.

    Least squares of relative errors; what the mesh's model says of the product is taken off first.
    """
    profile = read_profiles()["resnet50"]
    rows: list[tuple[float, float, float]] = []
    for layer, took in profile.convolutions:
        if layer.rows.kernel == layer.rows.stride == 1:
            (task,) = layer.forward(1)
            assert isinstance(task, ConvTask)
            plan = explicit_plan(task.problem, "forward", rates)
            each = took.forward_s / took.layers / profile.samples
            rows += [(plan.gemm.m, conv_terms(plan, rates).fixed_s, each)] * took.layers
    m, model, measured = np.array(rows, dtype=np.float64).T
    matrix = np.stack([1 / measured, m / measured], axis=1)
    solve: Any = np.linalg.lstsq
    call_s, row_s = (float(found) for found in solve(matrix, (measured - model) / measured, rcond=None)[0])
    error = float(np.abs((model + call_s + row_s * m) / measured - 1).mean())
    return LibraryFit(len(rows), call_s, row_s, error)


def uses_implicit(profile: Profile) -> bool:
    """ResNet-50's build was without the implicit plans, as its Makefile says."""
    return profile.network != "resnet50"


def predicted(profile: Profile, layers: Iterable[Layer]) -> dict[str, tuple[Took | None, Took]]:
    """By kind: what the mesh's programs would take, and Caffe's layers as caffe.py counts them. The mesh's program of a
    normalisation scales and shifts too.

    Args:
        layers: the network's; its convolutions are taken from the profile.
    """
    others = [layer for layer in layers if not isinstance(layer, ConvLayer)]
    mesh: dict[str, list[Took]] = defaultdict(list)
    caffe: dict[str, list[Took]] = defaultdict(list)
    weighted = [*((layer, 1) for layer in others), *((layer, took.layers) for layer, took in profile.convolutions)]
    for layer, times in weighted:
        parts = list(caffe_parts(layer, profile.samples, implicit=uses_implicit(profile)))
        for part in parts:
            caffe[part.kind].append(_times(part, times))
        (alone,) = layer_times((layer,), profile.samples)
        mesh[parts[0].kind].append(Took(times, times * alone.forward_s, times * alone.backward_s))
    return {kind: (_sum(mesh[kind]) if kind in mesh else None, _sum(caffe[kind])) for kind in caffe}


def predicted_convolution(profile: Profile, layer: ConvLayer, took: Took) -> Took:
    """As caffe.py counts them."""
    (part,) = caffe_parts(layer, profile.samples, implicit=uses_implicit(profile))
    return _times(part, took.layers)


def _times(part: Part, times: int) -> Took:
    return Took(times, times * part.forward_s, times * part.backward_s)


def _sum(parts: Iterable[Took]) -> Took:
    given = list(parts)
    forward, backward = sum(p.forward_s for p in given), sum(p.backward_s for p in given)
    return Took(sum(p.layers for p in given), forward, backward)
