"""Local kernels read what collectives deliver, and write what collectives take, without a copy in between.

    %x_gathered = all_gather %x dim=C over=C            %x_gathered = all_gather %x dim=C over=C as=parts
    %y_partial = conv_forward %x_gathered, %w     --->  %y_partial = conv_forward %x_gathered, %w as=parts
    %y = reduce_scatter %y_partial dim=F over=F         %y = reduce_scatter %y_partial dim=F over=F

    %x_halo = exchange %x dim=H over=H            --->  %x_halo = exchange %x dim=H over=H as=rim
    %y = conv_forward %x_halo, %w                       %y = conv_forward %x_halo, %w own=x

Needs:  local kernels that take parts and rims (a GPU target).
Sound:  a value's elements are the same; only where they lie changes, and only for steps that know where.
Leaves: parts of fewer than 16 channels, which would leave a matrix unit's step half empty; unequal parts and groups;
        what is read or made with few channels, which the packed family does on tensors; halos in more than three boxes,
        each of which costs every row of a tile a comparison; values that other steps read.
        Those are unpacked and packed by kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Form
from convgen.algebra.space import Space
from convgen.passes.contract import Context, SchedulePass
from convgen.program.forms import LEAST_PART, MOST_BOXES, boxes, parts
from convgen.program.nodes import GIVEN, Compute, Convert, Schedule, Step, is_convolution, reads


@dataclass(frozen=True)
class FuseLayouts(SchedulePass):
    """Give values the form in which a collective delivers or takes them, where it pays.

    Attributes:
        least_part: channels that a part has, at least.
        most_boxes: boxes that a rim has, at most.
    """

    name: ClassVar[str] = "fuse-layouts"
    least_part: int = LEAST_PART
    most_boxes: int = MOST_BOXES

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        forms = self._forms(schedule, context.space) if context.target.reads_parts else {}
        if not forms:
            return schedule
        conversions = [s for _, s in schedule.steps() if isinstance(s, Convert)]
        around = {s.result: s.source for s in conversions if forms.get(s.result) == "rim"}

        def give(step: Step) -> Step:
            if is_convolution(step):
                own = tuple(around[v] for v in step.inputs if v in around)
                return replace(step, form=forms.get(step.result, "whole"), own=own)
            given = isinstance(step, Convert) and step.result in forms
            return replace(step, form=forms[step.result]) if given else step

        forward, data, filter_ = (tuple(map(give, schedule.section(p))) for p, _ in schedule.roles)
        fused = replace(schedule, forward=forward, backward_data=data, backward_filter=filter_)
        return schedule if fused == schedule else fused

    def _forms(self, schedule: Schedule, space: Space) -> dict[str, Form]:
        """By name, the form of each value that comes in parts or as a rim."""
        types = schedule.types()
        readers: dict[str, list[Step]] = {}
        for _, step in schedule.steps():
            for value in reads(step):
                readers.setdefault(value, []).append(step)
        forms: dict[str, Form] = {}
        for _, step in schedule.steps():
            after = readers.get(step.result, [])
            match step:
                case Convert(kind="all_gather") if after and all(map(is_convolution, after)):
                    if parts(space, step.type, types[step.source], step.over) >= self.least_part:
                        forms[step.result] = "parts"
                case Convert(kind="exchange") if after and all(_reads_rim(r, step.result) for r in after):
                    count = boxes(space, types[step.source], step.type, step.over)
                    few = count is not None and count.max() <= self.most_boxes
                    if few and step.source in GIVEN and not self._few_channels(space, step.type):
                        forms[step.result] = "rim"
                case Compute() if is_convolution(step) and len(after) == 1 and isinstance(reader := after[0], Convert):
                    many = reader.kind == "reduce_scatter" and not self._few_channels(space, types[step.inputs[0]])
                    if many and parts(space, step.type, reader.type, reader.over) >= self.least_part:
                        forms[step.result] = "parts"
                case _:
                    pass
        return forms

    def _few_channels(self, space: Space, layout: Layout) -> bool:
        """Whether every rank has fewer channels of x (filters of y) than one step of a kernel at one tap takes."""
        box = space.frame(layout)
        return space.conv.groups == 1 and int((box[:, 1, 1] - box[:, 1, 0]).max()) < self.least_part


def _reads_rim(step: Step, value: str) -> bool:
    """Whether a step is a convolution with this value as its windowed operand, which it can read from block and rim.

    Kernels of backward_filter read only the fine activation so: x, or dy of a transposed convolution.
    """
    if not is_convolution(step):
        return False
    if step.phase != "backward_filter":
        return step.inputs[0] == value
    return step.inputs[not step.transposed] == value and not step.by_fine_rows
