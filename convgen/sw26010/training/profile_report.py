"""What `convgen sw26010 profile` prints and draws: measured seconds of layers beside two models of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.pictures.canvas import GREY, INK, Canvas
from convgen.spec.network_reader import network_from_dict, read_network
from convgen.spec.yaml import read_yaml
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.training.layers import ConvLayer, Layers
from convgen.sw26010.training.of_graph import layers_of_network
from convgen.sw26010.training.profiles import (
    LEFT_OUT,
    Profile,
    Took,
    fit_library,
    predicted,
    predicted_convolution,
    read_profiles,
)
from convgen.sw26010.training.published import read_table3

AUXILIARY = 2  # convolutions of GoogLeNet's profile that its network file leaves out
COLOURS = (("measured", INK), ("mesh", "#77aadd"), ("counted", "#ee8866"))


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of layer: what was measured, the mesh's programs, and Caffe's layers as counted."""

    kind: str
    measured: Took | None
    mesh: Took | None
    counted: Took | None

    @property
    def tooks(self) -> tuple[Took | None, Took | None, Took | None]:
        return self.measured, self.mesh, self.counted


@dataclass(frozen=True, slots=True)
class Compared:
    """A profile by kinds of layer."""

    profile: Profile
    rows: tuple[Row, ...]

    @property
    def totals(self) -> tuple[float, float, float]:
        """Seconds measured, by the mesh and counted, without local response normalisation."""
        rows = [row.tooks for row in self.rows if row.kind != LEFT_OUT]
        measured, mesh, counted = (
            sum(t.seconds for t in column if t is not None) for column in zip(*rows, strict=True)
        )
        return measured, mesh, counted


def profiled_layers(file: str | Path) -> tuple[Profile, Layers]:
    """The profile of a network file's network, and its layers with the profile's planes and samples.

    Raises:
        InputError: no profile of this network, or other convolutions than the profile's.
    """
    name, known = read_network(file).name, read_profiles()
    if name not in known:
        raise InputError(f"{file}: no profile of {name}", hint=f"a file of {', '.join(known)}, as in examples/networks")
    profile, document = known[name], read_yaml(file)
    document.data["input"] = [profile.samples, 3, profile.image, profile.image]
    layers = layers_of_network(network_from_dict(document.data, document.source))
    mine = Counter(_shape(layer) for layer in layers.layers if isinstance(layer, ConvLayer))
    given = Counter({_shape(layer): 0 for layer, _ in profile.convolutions})
    for layer, took in profile.convolutions:
        given[_shape(layer)] += took.layers
    if (absent := (given - mine).total()) > AUXILIARY:
        fact = f"{file}: {absent} of the profile's {given.total()} convolutions are not in this {name}"
        raise InputError(fact, hint="the file in examples/networks")
    return profile, layers


def _shape(layer: ConvLayer) -> tuple[int, ...]:
    return layer.c, layer.f, layer.rows.kernel, layer.rows.stride, layer.groups


def compare(file: str | Path) -> Compared:
    """Raises InputError: no profile of this network, or other convolutions than the profile's."""
    profile, layers = profiled_layers(file)
    models = predicted(profile, layers.layers)
    if LEFT_OUT in profile.kinds:  # the network file has batch normalisation in its place
        models = {kind: pair for kind, pair in models.items() if kind in profile.kinds}
    kinds = dict.fromkeys((*profile.kinds, *models))
    rows = tuple(Row(kind, profile.kinds.get(kind), *models.get(kind, (None, None))) for kind in kinds)
    return Compared(profile, rows)


def profile_json(compared: Sequence[Compared], *, convolutions: bool) -> dict[str, Any]:
    """The numbers as dictionaries; seconds of one core group with the profile's samples."""
    fit = fit_library(taken_rates())
    return {
        "library": {"products": fit.products, "call_s": fit.call_s, "row_s": fit.row_s, "error": fit.error},
        "profiles": [_json(one, convolutions=convolutions) for one in compared],
    }


def _json(one: Compared, *, convolutions: bool) -> dict[str, Any]:
    profile, speed = one.profile, read_table3()[one.profile.network]
    measured, mesh, counted = one.totals
    found: dict[str, Any] = {
        "network": profile.network, "samples": profile.samples, "paper_images_per_s": speed.images_per_s,
        "measured_s": measured, "mesh_s": mesh, "counted_s": counted,
        "measured_images_per_s": profile.images_per_s,
        "counted_images_per_s": 4 * profile.samples / counted,
        "kinds": [
            {"kind": row.kind, "measured": _pair(row.measured), "mesh": _pair(row.mesh), "counted": _pair(row.counted)}
            for row in one.rows
        ],
    }  # fmt: skip
    if convolutions:
        found["convolutions"] = [
            {"layer": layer.name, "layers": took.layers, "measured": _pair(took),
             "counted": _pair(predicted_convolution(profile, layer, took))}
            for layer, took in profile.convolutions
        ]  # fmt: skip
    return found


def _pair(took: Took | None) -> dict[str, float] | None:
    return None if took is None else {"forward_s": took.forward_s, "backward_s": took.backward_s}


def profile_text(compared: Sequence[Compared], *, convolutions: bool) -> str:
    """The same for people."""
    fit = fit_library(taken_rates())
    head = ("network", "samples", "measured s", "mesh s", "counted s", "images/s", "counted", "[SW]", "measured/[SW]")
    rows: list[list[str]] = []
    for one in compared:
        profile, paper = one.profile, read_table3()[one.profile.network].images_per_s
        rows.append(
            [profile.network, str(profile.samples), *(f"{seconds:.2f}" for seconds in one.totals),
             f"{profile.images_per_s:.2f}", f"{4 * profile.samples / one.totals[-1]:.2f}", f"{paper:.2f}",
             f"{profile.images_per_s / paper:.3f}"]
        )  # fmt: skip
    lines = [
        "profiles of the public code on one core group, beside programs of the mesh and Caffe's layers as counted",
        f"images/s: four core groups; without {LEFT_OUT}",
        "",
        table(head, rows),
        "",
        f"a product by the general library: {fit.call_s * 1e3:.3f} ms and {fit.row_s * 1e6:.3f} us a row beside the "
        f"mesh's work, from {fit.products} products of ResNet-50, {fit.error:.0%} off on average",
    ]
    for one in compared:
        lines += ["", f"{one.profile.network}: seconds by kind of layer, forward and backward", _kinds(one)]
        if convolutions:
            lines += ["", f"{one.profile.network}: ms an image of a convolution", _convolutions(one.profile)]
    return "\n".join(lines)


def _kinds(one: Compared) -> str:
    rows: list[list[str]] = []
    for row in one.rows:
        kind, (measured, mesh, counted) = row.kind, row.tooks
        share = "-" if measured is None or kind == LEFT_OUT else f"{measured.seconds / one.totals[0]:.1%}"
        ratio = "-" if measured is None or counted is None else f"{counted.seconds / measured.seconds:.2f}"
        number = "-" if measured is None else str(measured.layers)
        rows.append([kind, number, *_seconds(measured), share, *_seconds(mesh), *_seconds(counted), ratio])
    head = ("kind", "layers", "measured", "", "share", "mesh", "", "counted", "", "counted/measured")
    return table(head, rows)


def _seconds(took: Took | None) -> list[str]:
    return ["-", "-"] if took is None else [f"{took.forward_s:.3f}", f"{took.backward_s:.3f}"]


def _convolutions(profile: Profile) -> str:
    rows: list[list[str]] = []
    for layer, took in profile.convolutions:
        counted = predicted_convolution(profile, layer, took)
        each = 1e3 / took.layers / profile.samples
        rows.append(
            [layer.name + (f", {layer.groups} groups" if layer.groups > 1 else ""), str(took.layers),
             *(f"{s * each:.2f}" for s in (took.forward_s, counted.forward_s, took.backward_s, counted.backward_s)),
             f"{counted.seconds / took.seconds:.2f}"]
        )  # fmt: skip
    return table(("kernel, channels", "layers", "forward", "counted", "backward", "counted", "counted/measured"), rows)


def profile_page(one: Compared) -> Canvas:
    """Bars of milliseconds an image on one core group, by kind of layer."""
    least = 0.005 * one.totals[0]
    shown = [row for row in one.rows if any(took is not None and took.seconds > least for took in row.tooks)]
    canvas, profile = Canvas(7.4, 1.5 + 0.62 * len(shown)), one.profile
    canvas.text(0.3, 0.25, f"{profile.network}: ms an image on one core group", 11, bold=True)
    for place, (words, colour) in enumerate(COLOURS):
        canvas.rect(0.3 + 2.3 * place, 0.45, 0.12, 0.12, fill=colour)
        said = {"measured": "the public profile", "mesh": "programs of the mesh", "counted": "Caffe's layers, counted"}
        canvas.text(0.47 + 2.3 * place, 0.53, said[words], 8, colour=GREY)
    most = max(took.seconds for row in shown for took in row.tooks if took)
    for line, row in enumerate(shown):
        top = 0.85 + 0.62 * line
        canvas.text(2.35, top + 0.22, row.kind, 8, align="right")
        for place, (took, (_, colour)) in enumerate(zip(row.tooks, COLOURS, strict=True)):
            if took is not None:
                width = 4.0 * took.seconds / most
                canvas.rect(2.45, top + 0.15 * place, width, 0.13, fill=colour)
                said = f"{took.seconds / profile.samples * 1e3:.1f}"
                canvas.text(2.5 + width, top + 0.15 * place + 0.08, said, 7, colour=GREY)
    return canvas
