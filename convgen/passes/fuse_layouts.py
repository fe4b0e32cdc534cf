"""Read and write what collectives deliver and take, without a copy in between.

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

from dataclasses import replace

from convgen.algebra.layout import Layout
from convgen.algebra.space import Space
from convgen.schedule.forms import boxes, parts
from convgen.schedule.nodes import GIVEN, Convert, Convolve, Form, Schedule, Step, reads

LEAST_PART = 16
MOST_BOXES = 3


def fuse_layouts(schedule: Schedule, space: Space) -> Schedule:
    """Give values the form in which a collective delivers or takes them, where it pays."""
    types = schedule.types()
    readers: dict[str, list[Step]] = {}
    for _, step in schedule.steps():
        for value in reads(step):
            readers.setdefault(value, []).append(step)
    forms: dict[str, Form] = {}
    for _, step in schedule.steps():
        after = readers.get(step.result, [])
        match step:
            case Convert(kind="all_gather") if after and all(isinstance(r, Convolve) for r in after):
                if parts(space, step.type, types[step.source], step.over) >= LEAST_PART:
                    forms[step.result] = "parts"
            case Convert(kind="exchange") if after and all(_reads_rim(r, step.result) for r in after):
                count = boxes(space, types[step.source], step.type, step.over)
                if (
                    step.source in GIVEN
                    and not _few_channels(space, step.type)
                    and count is not None
                    and count.max() <= MOST_BOXES
                ):
                    forms[step.result] = "rim"
            case Convolve() if len(after) == 1 and isinstance(reader := after[0], Convert):
                many = reader.kind == "reduce_scatter" and not _few_channels(space, types[step.inputs[0]])
                if many and parts(space, step.type, reader.type, reader.over) >= LEAST_PART:
                    forms[step.result] = "parts"
            case _:
                pass
    if not forms:
        return schedule
    around = {
        s.result: s.source for _, s in schedule.steps() if isinstance(s, Convert) and forms.get(s.result) == "rim"
    }

    def give(step: Step) -> Step:
        if isinstance(step, Convolve):
            own = tuple(around[v] for v in step.inputs if v in around)
            return replace(step, form=forms.get(step.result, "whole"), own=own)
        return replace(step, form=forms[step.result]) if isinstance(step, Convert) and step.result in forms else step

    forward, data, filter_ = (tuple(map(give, schedule.section(p))) for p, _ in schedule.roles)
    return replace(schedule, forward=forward, backward_data=data, backward_filter=filter_)


def _few_channels(space: Space, layout: Layout) -> bool:
    """Whether no rank has enough channels of x (filters of y) for a step of one tap."""
    box = space.frame(layout)
    return space.conv.groups == 1 and int((box[:, 1, 1] - box[:, 1, 0]).max()) < LEAST_PART


def _reads_rim(step: Step, value: str) -> bool:
    """Whether a step is a convolution whose windowed operand this is: x, or dy in backward_data."""
    if not isinstance(step, Convolve):
        return False
    windowed = {"forward": 0, "backward_data": 0, "backward_filter": 1}[step.phase]
    return step.inputs[windowed] == value and not (step.phase == "backward_filter" and step.rows == "input")
