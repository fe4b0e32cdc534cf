"""The generated module: its context, and printing it.

Source: docs/design.md, A module. Same input, same bytes: no clock, no path, no order of sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import jinja2

from convgen import __version__
from convgen.algebra.conv import Spatial
from convgen.algebra.space import Space
from convgen.emit.literals import in_comment, literal, yaml_flow
from convgen.emit.local import Convolution, local_kernels
from convgen.emit.local_mesh import MeshConvolution, local_mesh
from convgen.emit.paste import SharedRuntime, insert_runtime
from convgen.emit.steps import LayoutNames, Lines, NamedLayout
from convgen.emit.volume import volume
from convgen.kernels.add import unit
from convgen.kernels.environment import environment as kernels_environment
from convgen.kernels.on_cpu import cpu_helpers
from convgen.kernels.source import Kernel
from convgen.program.nodes import Schedule, reads
from convgen.program.text import show
from convgen.spec.formats import FORMAT, KEY
from convgen.spec.layer import Layer
from convgen.spec.reader import layer_to_dict

MEMORY_FORMATS = {
    ("contiguous", 1): "contiguous_format",
    ("contiguous", 2): "contiguous_format",
    ("contiguous", 3): "contiguous_format",
    ("channels_last", 2): "channels_last",
    ("channels_last", 3): "channels_last_3d",
}


@dataclass(frozen=True, slots=True)
class Rows:
    """One spatial dimension as the module's table has it."""

    name: str
    x: int
    y: int
    kernel: int
    stride: int
    padding: int
    dilation: int


@dataclass(frozen=True, slots=True)
class PhaseText:
    """A function of the module: its docstring, its lines, and the tensors like its results."""

    summary: str
    lines: tuple[str, ...]
    fakes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleContext:
    """Everything that templates/module.py.jinja names, and nothing else."""

    header: tuple[str, ...]
    summary: str
    name: str
    spec: str
    schedule: str
    volume: str
    torch_dtype: str
    memory_format: str
    spatial: tuple[Rows, ...]
    dims: int
    torch_class: str
    bias: bool
    device: str
    channels_last: bool
    layouts: tuple[NamedLayout, ...]
    stored: tuple[tuple[str, str], ...]
    stored_names: str
    saved: tuple[str, ...]
    held: tuple[str, ...]
    forward: PhaseText
    backward: PhaseText
    gpu: bool
    core_groups: int
    choosing: str
    mesh_convolutions: tuple[MeshConvolution, ...]
    plans: str
    launch: str
    kernels: tuple[str, ...]
    convolutions: tuple[Convolution, ...]
    rims: bool
    copied: tuple[str, ...]
    copy_kernels: str
    copy_choice: str
    add_kernel: str
    vector: int
    ways: dict[str, str]
    helpers: str


@cache
def environment() -> jinja2.Environment:
    """The templates' environment: the kernels', with a filter that prints Python literals for modules."""
    made = kernels_environment()
    made.filters["literal"] = literal  # pyright: ignore[reportUnknownMemberType]
    return made


def emit_module(
    layer: Layer,
    schedule: Schedule,
    space: Space,
    kernels: Sequence[Kernel] = (),
    *,
    command: str = "",
    beside: SharedRuntime | None = None,
) -> str:
    """Python source of a layer's module.

    Args:
        schedule: the schedule after its passes, with no decision left.
        kernels: for a GPU target, one for each convolution of the schedule, in its order.
        command: the options besides the file with which the layer was compiled, for the header.
        beside: the name of the runtime's file in the module's folder, from which it imports; without one, the parts it
            needs are pasted in.
    """
    context = module_context(layer, schedule, space, kernels, command)
    values = {f.name: getattr(context, f.name) for f in fields(context)}
    text = environment().get_template("module.py.jinja").render(**values)
    return insert_runtime(text, beside)


def module_context(
    layer: Layer, schedule: Schedule, space: Space, kernels: Sequence[Kernel], command: str
) -> ModuleContext:
    conv, text = layer.conv, show(schedule)
    gpu = layer.target.is_gpu
    names = LayoutNames(schedule, virtual=layer.target.pads_virtually)
    ways = {} if gpu else {k.problem.phase: k for k in kernels if k.config.family != "aten"}
    lines = Lines(schedule, conv, names, tuple(ways))
    local = local_kernels(schedule, names, lines, kernels if gpu else (), layer.options.sums)
    mesh = local_mesh(layer, schedule, space, names, lines)
    stored = [(n, names.of(t)) for n, t in schedule.stored]
    gradient = {"x": "dx", "w": "dw", "y": "dy", "bias": "dbias"}
    everything = stored + [(gradient[n], layout) for n, layout in stored]
    held = schedule.held()
    fakes = [lines.fake(v) for v in ("y", *held)]
    backward_reads = {
        v for s in (*schedule.backward_data, *schedule.backward_filter) for v in reads(s) if v in ("x", "w", *held)
    }
    saved = tuple(v for v in ("x", "w", *held) if v in backward_reads)
    return ModuleContext(
        header=_header(layer, text, command),
        summary=_summary(layer, schedule),
        name=layer.name,
        spec=literal({KEY: FORMAT, **layer_to_dict(layer)}),
        schedule=text,
        volume=literal(volume(schedule, space, layer.element_bytes)),
        torch_dtype="float32" if layer.dtype == "tfloat32" else layer.dtype,
        memory_format=MEMORY_FORMATS[layer.memory_format, len(conv.spatial)],
        spatial=tuple(_rows(s, conv.transposed) for s in conv.spatial),
        dims=len(conv.spatial),
        torch_class=f"Conv{'Transpose' if conv.transposed else ''}{len(conv.spatial)}d",
        bias=conv.bias,
        device=layer.target.device,
        gpu=gpu,
        core_groups=layer.options.core_groups,
        choosing=layer.options.plan,
        mesh_convolutions=mesh.convolutions,
        plans=mesh.plans,
        launch=local.launch,
        kernels=local.kernels,
        convolutions=local.convolutions,
        rims=local.rims,
        ways={str(phase): k.source().rstrip("\n") for phase, k in ways.items()},
        helpers=cpu_helpers([k.config for k in ways.values()]),
        copied=local.copied,
        copy_kernels=local.copy_kernels,
        copy_choice=local.copy_choice,
        add_kernel=local.add_kernel,
        vector=unit(layer.element_bytes),
        channels_last=layer.memory_format == "channels_last",
        layouts=tuple(names.table.values()),
        stored=tuple(everything),
        stored_names=" ".join(n for n, _ in everything),
        saved=saved,
        held=held,
        forward=PhaseText(
            summary=_phase_summary(schedule, "forward"),
            lines=tuple(lines.forward()),
            fakes=", ".join(fakes) + ("" if held else ","),
        ),
        backward=PhaseText(
            summary=_phase_summary(schedule, "backward"),
            lines=tuple(lines.backward()),
        ),
    )


def _rows(s: Spatial, transposed: bool) -> Rows:
    x, y = (s.out, s.extent) if transposed else (s.extent, s.out)
    return Rows(s.name, x, y, s.kernel, s.stride, s.pad_lo, s.dilation)


def _header(layer: Layer, text: str, command: str) -> tuple[str, ...]:
    """The header's lines, from which a stranger can make the module again."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    spec: list[str] = []
    for key, value in layer_to_dict(layer).items():
        nested = key in ("distribution", "roles")
        spec.append(f"{key}:" if nested else f"{key}: {yaml_flow(value)}")
        spec += [f"  {inner}: {yaml_flow(v)}" for inner, v in value.items()] if nested else []
    return (
        f"Generated by convgen {__version__}; edit the layer, not this file.",
        f"  {in_comment(f'convgen compile {layer.name}.yaml{command}')}",
        f"schedule  {digest}, below as SCHEDULE; bytes sent per rank as VOLUME",
        f"where {layer.name}.yaml says:",
        *(f"  {line}" for line in spec),
    )


def _summary(layer: Layer, schedule: Schedule) -> str:
    conv = layer.conv
    rows = "x".join(str(d.extent) for d in conv.dims("x")[2:])
    taps = "x".join(str(s.kernel) for s in conv.spatial)
    return (
        f"{layer.kind} N={conv.batch} C={conv.channels} F={conv.filters} {rows} K={taps} {layer.dtype} "
        f"on {schedule.grid}."
    )


def _phase_summary(schedule: Schedule, phase: str) -> str:
    stored = dict(schedule.stored)
    if phase == "forward":
        return f"{stored['x']}, {stored['w']} -> {stored['y']}" + (
            f", and {', '.join(schedule.held())}, which backward reads" if schedule.held() else ""
        )
    return f"{stored['y']} as dy -> {stored['x']} as dx, {stored['w']} as dw"
