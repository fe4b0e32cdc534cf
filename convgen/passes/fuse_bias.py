"""Give the bias to the convolution where its result is whole already.

      %y_summed = conv_forward %x, %w
      %y = add_bias %y_summed, %bias            --->   %y = conv_forward %x, %w, %bias

Needs:  nothing.
Sound:  the convolution's result is not partial, so the bias is still added once; its type does not change.
Leaves: a bias behind a reduction or another conversion; a transposed convolution's, whose kernels make gradients and
        add none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.passes.contract import Context, SchedulePass
from convgen.program.nodes import Compute, Schedule, is_convolution


@dataclass(frozen=True)
class FuseBias(SchedulePass):
    """Merge `add_bias` into the convolution that it directly follows."""

    name: ClassVar[str] = "fuse-bias"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        if len(schedule.forward) < 2:
            return schedule
        *rest, conv, add = schedule.forward
        follows = isinstance(add, Compute) and add.operation == "add_bias" and add.inputs[0] == conv.result
        if not (follows and is_convolution(conv)) or conv.transposed:
            return schedule
        fused = replace(conv, result=add.result, inputs=(*conv.inputs, "bias"))
        return replace(schedule, forward=(*rest, fused))
