"""Hold or re-gather x: what backward-filter reads when forward has gathered x already.

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

from dataclasses import replace
from typing import Literal

from convgen.schedule.nodes import Schedule


def hold_x(schedule: Schedule, choice: Literal["gathered", "stored"]) -> Schedule:
    """Record the choice in the schedule."""
    return schedule if schedule.hold_x == choice else replace(schedule, hold_x=choice)
