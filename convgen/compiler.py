"""The pipeline on one screen.

| stage | in | out |
|---|---|---|
| read (spec/) | a layer file | Layer |
| choose (plan/) | Layer, machine | stored layouts and roles of x, w, y: given, named, or searched |
| lower (schedule/) | stored layouts, roles | a naive Schedule |
| passes (passes/) | Schedule | Schedule |
| kernels (kernels/) | each convolution of the schedule, all ranks | Kernels: families and configurations (GPUs) |
| emit (emit/) | Schedule | the module's source |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.machines import default_machine
from convgen.emit.local_mesh import MeshPlans, mesh_plans
from convgen.emit.module import emit_module
from convgen.errors import InputError
from convgen.kernels.choose import choose_kernels
from convgen.kernels.source import Kernel
from convgen.knobs import verify_schedules
from convgen.passes.drop_single_rank import drop_single_rank
from convgen.passes.fuse_bias import fuse_bias
from convgen.passes.fuse_layouts import fuse_layouts
from convgen.passes.hold_x import hold_x
from convgen.passes.share import share
from convgen.plan.choose import Choice, Objective, choose
from convgen.schedule.build import lower
from convgen.schedule.nodes import Schedule
from convgen.schedule.verify import verify
from convgen.spec.build import check_options, check_stride
from convgen.spec.layer import Layer
from convgen.spec.source import locate

Pass = Callable[[Schedule, Layer, Space], Schedule]
PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("drop-single-rank", lambda schedule, layer, space: drop_single_rank(schedule, space)),
    ("fuse-bias", lambda schedule, layer, space: fuse_bias(schedule)),
    ("hold-x", lambda schedule, layer, space: hold_x(schedule, layer.options.hold_x)),
    ("share", lambda schedule, layer, space: share(schedule)),
    ("fuse-layouts", lambda schedule, layer, space: fuse_layouts(schedule, space) if layer.on_gpu else schedule),
)


@dataclass(frozen=True)
class Compiled:
    """A layer with every decision made."""

    layer: Layer
    space: Space
    machine: Machine
    choice: Choice
    schedule: Schedule
    options: str = ""  # of the command line, where they differ from the defaults

    def module(self) -> str:
        """Source of the generated module. Raises InputError: a convolution that the target can't do."""
        try:
            return emit_module(self.layer, self.schedule, self.space, self.kernels(), command=self.options)
        except InputError as error:
            raise locate(error, self.layer.source) from None

    def mesh_plans(self) -> MeshPlans:
        """By phase the plans of the ranks' convolutions on the mesh of an SW26010. Raises InputError."""
        try:
            return mesh_plans(self.layer, self.schedule, self.space)
        except InputError as error:
            raise locate(error, self.layer.source) from None

    def kernels(self) -> tuple[Kernel, ...]:
        """The local kernels that the module will have; none on a mesh, and on a cpu whose layer names none: there ATen
        convolves.

        Raises:
            InputError: a kernel that the layer names can't do what a rank has to.
        """
        if not self.layer.on_gpu and not self.layer.options.kernels:
            return ()
        return choose_kernels(self.layer, self.schedule, self.space)


def compile_layer(
    layer: Layer, *, target: str | None = None, machine: Machine | None = None, objective: Objective = "seconds"
) -> Compiled:
    """From a layer to its schedule.

    Args:
        target: instead of the layer's.
        machine: what `auto` models; by default the layer's, or one node of the target's kind.
        objective: what `auto` minimises, modelled seconds or bytes sent.
    Raises:
        InputError: the layer's layout can't work.
    """
    if target is not None:
        layer = replace(layer, target=target)
    check_options(layer)
    check_stride(layer)
    machine = machine or default_machine(layer)
    space = Space(layer.conv, layer.grid, virtual_padding=layer.virtual_padding)
    try:
        choice = choose(layer, space, machine, objective)
    except InputError as error:
        about = f"{layer.name}: {layer.kind} "
        error.notes = tuple(replace(n, text=about + n.text) if n.label == "layer" else n for n in error.notes)
        raise
    schedule = lower(layer.name, space, choice.stored, choice.roles, bias=layer.conv.bias)
    for _, run in PIPELINE:
        if verify_schedules():
            verify(schedule, space)
        schedule = run(schedule, layer, space)
    if verify_schedules():
        verify(schedule, space)
    made = Compiled(layer, space, machine, choice, schedule)
    if layer.options.kernels:
        if layer.target == "sw26010":
            raise InputError(
                "sw26010 has no families of kernels", ("options", "kernels"), hint="options: {plan: trial}"
            )
        made.kernels()  # refuses what can't serve
    return made
