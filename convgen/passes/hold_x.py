"""Hold or re-gather x: which x backward-filter reads where forward has gathered x already.

    hold_x: gathered                                     hold_x: stored
      forward:                                             forward:
        %x_gathered = all_gather %x over=F                   %x_gathered = all_gather %x over=F
      backward_filter:                                     backward_filter:
                                                             %x_gathered_2 = all_gather %x over=F
        %t = conv_backward_filter %dy, %x_gathered           %t = conv_backward_filter %dy, %x_gathered_2

Needs:  to run before `share`, which does the merging.
Sound:  x does not change between the phases.
Leaves: everything but the choice. Held costs memory until backward ([CF] section 4), stored the gather twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from convgen.passes.contract import Context, SchedulePass
from convgen.program.nodes import Schedule


@dataclass(frozen=True)
class HoldX(SchedulePass):
    """Record the choice in the schedule."""

    name: ClassVar[str] = "hold-x"
    choice: Literal["gathered", "stored"] = "gathered"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        return schedule if schedule.hold_x == self.choice else replace(schedule, hold_x=self.choice)
