"""The pipeline on one screen.

| stage | in | out |
|---|---|---|
| read (spec/) | a layer file | Layer |
| choose (plan/) | Layer, machine | stored layouts and roles of x, w, y: given, named, or searched |
| lower (program/)  | stored layouts, roles | a naive Schedule |
| passes (passes/) | Schedule | Schedule |
| kernels (kernels/) | each convolution of the schedule, all ranks | Kernels: families and configurations (GPUs) |
| emit (emit/) | Schedule | the module's source |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.machines import default_machine
from convgen.cost.model import Model
from convgen.cost.schedule import ScheduleCost, schedule_cost
from convgen.emit.local_mesh import MeshPlans, mesh_plans
from convgen.emit.module import emit_module
from convgen.emit.paste import SharedRuntime
from convgen.errors import InputError
from convgen.kernels.choose import choose_kernels
from convgen.kernels.source import Kernel
from convgen.knobs import verify_schedules
from convgen.passes.contract import After, Context, SchedulePass, run_passes, tell
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.fuse_layouts import FuseLayouts
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.plan.choose import Choice, Objective, choose
from convgen.program.build import lower
from convgen.program.edited import Expected, read_edited
from convgen.program.nodes import Schedule
from convgen.program.verify import verify
from convgen.spec.build import check_options, check_stride
from convgen.spec.layer import Layer
from convgen.spec.source import locate
from convgen.spec.target import read_target

PIPELINE: tuple[SchedulePass, ...] = (FuseBias(), HoldX(), Share(), FuseLayouts())
SCHEDULES = ("lower", *(p.name for p in PIPELINE))  # stages after which there is a schedule


def pipeline(layer: Layer) -> tuple[SchedulePass, ...]:
    """The passes, in the order in which they run, with the layer's options."""
    return tuple(replace(p, choice=layer.options.hold_x) if isinstance(p, HoldX) else p for p in PIPELINE)


def verifier(space: Space) -> After:
    """What verifies the schedule that each stage leaves."""

    def check(stage: str, schedule: Schedule | None) -> None:
        if schedule is not None:
            verify(schedule, space)

    return check


@dataclass(frozen=True)
class Compiled:
    """A layer with every decision made."""

    layer: Layer
    space: Space
    machine: Machine
    choice: Choice
    schedule: Schedule
    options: str = ""  # of the command line, where they differ from the defaults

    @cached_property
    def cost(self) -> ScheduleCost:
        """What the schedule costs on the machine."""
        return schedule_cost(self.schedule, Model(self.space, self.machine, self.layer.dtype))

    def module(self, beside: SharedRuntime | None = None, after: Sequence[After] = ()) -> str:
        """Source of the generated module. Raises InputError: a convolution that the target can't do.

        Args:
            beside: the runtime as a file in the module's folder; by default the module contains what it needs of it.
            after: called after each stage.
        """
        try:
            kernels = self.kernels()
            tell(after, "kernels", self.schedule)
            text = emit_module(self.layer, self.schedule, self.space, kernels, command=self.options, beside=beside)
        except InputError as error:
            raise locate(error, self.layer.source) from None
        tell(after, "emit", self.schedule)
        return text

    def with_schedule(self, text: str, file: str) -> Compiled:
        """The same layer by an edited schedule.

        Args:
            text: the schedule's, as `--emit schedule` prints it.
            file: where it is from, for messages.
        Raises:
            InputError: it can't be read, is another layer's, is wrong, or is more than the target's kernels can do.
        """
        layer = self.layer
        searched = layer.distribution is None and layer.algorithm in (None, "auto")
        stored = None if searched else self.choice.stored
        expected = Expected(layer.name, self.space, layer.target, layer.conv.bias, stored)
        schedule = read_edited(text, file, expected)
        if schedule == self.schedule:
            return self
        stored = {tensor: layout for tensor, layout in schedule.stored if tensor != "bias"}
        told = ("edited: the schedule is given",)
        made = replace(
            self,
            layer=replace(layer, options=replace(layer.options, hold_x=schedule.hold_x)),
            choice=Choice(stored, dict(schedule.roles), "edited", told),
            schedule=schedule,
            options=f"{self.options} --schedule {layer.name}.txt",
        )
        made.kernels()
        return made

    def mesh_plans(self) -> MeshPlans:
        """By phase, the plans of ranks' convolutions on the mesh of an SW26010. Raises InputError."""
        try:
            return mesh_plans(self.layer, self.schedule, self.space)
        except InputError as error:
            raise locate(error, self.layer.source) from None

    def kernels(self) -> tuple[Kernel, ...]:
        """The local kernels that the module will have; none on a mesh, and none on a CPU whose layer names none: ATen
        convolves there.

        Raises:
            InputError: a kernel that the layer names can't do what a rank has to.
        """
        if not self.layer.target.is_gpu and not self.layer.options.kernels:
            return ()
        return choose_kernels(self.layer, self.schedule, self.space)


def compile_layer(
    layer: Layer,
    *,
    target: str | None = None,
    machine: Machine | None = None,
    objective: Objective = "seconds",
    passes: Sequence[SchedulePass] | None = None,
    after: Sequence[After] = (),
) -> Compiled:
    """From a layer to its schedule.

    Args:
        target: takes the place of the layer's.
        machine: what `auto` models; by default the layer's, or one node of the target's kind.
        objective: what `auto` minimises, modelled seconds or bytes sent.
        passes: take the place of the layer's pipeline.
        after: called after each stage.
    Raises:
        InputError: the layer's layout can't work.
    """
    if target is not None:
        layer = layer.made_for(read_target(target))
    check_options(layer)
    check_stride(layer)
    machine = machine or default_machine(layer)
    space = Space(layer.conv, layer.grid, virtual_padding=layer.target.pads_virtually)
    try:
        choice = choose(layer, space, machine, objective)
    except InputError as error:
        about = f"{layer.name}: {layer.kind} "
        error.notes = tuple(replace(n, text=about + n.text) if n.label == "layer" else n for n in error.notes)
        raise
    if verify_schedules():
        after = (verifier(space), *after)
    tell(after, "choose", None)
    schedule = lower(layer.name, space, choice.stored, choice.roles, bias=layer.conv.bias)
    tell(after, "lower", schedule)
    context = Context(space, layer.target)
    chosen = pipeline(layer) if passes is None else passes
    schedule = run_passes(chosen, schedule, lambda one, given: one.run(given, context), after)
    made = Compiled(layer, space, machine, choice, schedule)
    if layer.options.kernels:
        if layer.target.is_mesh:
            fact = "sw26010 has no families of kernels"
            raise InputError(fact, ("options", "kernels"), hint="options: {plan: trial}")
        made.kernels()  # refuses what can't serve
    return made
