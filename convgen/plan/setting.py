"""What a network's plan is for: the machine, and how training uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from convgen.cost.machine import Machine
from convgen.errors import InputError
from convgen.plan.parts import ANY, Room


@dataclass(frozen=True, kw_only=True)
class Setting:
    """
    Attributes:
        room: memory for what a rank keeps; without a bound of its own the machine's applies, where its file has one.
        statistics: which batch norms have in training: global, spatial or local ([SP] III-B).
        recompute: whether blocks may be computed again in backward.
        by_step: steps are compared with what travels meanwhile (program/by_timeline.py).
        layouts: how many are looked at near the plan of such a step, beyond those that every plan looks at.
        dtype: the type of products and of what is moved; by default the network's.
        reduce_dtype, autocast: as a program's. Machines with a name of their own are taken to have GPUs, of which
            autocast has other lists than of CPUs.
    """

    machine: Machine
    room: Room = ANY
    statistics: str = "global"
    recompute: bool = False
    by_step: bool = False
    layouts: int = 0
    dtype: str | None = None
    reduce_dtype: str = ""
    autocast: str = ""

    def __post_init__(self) -> None:
        if self.recompute and self.room.keep == "every":
            fact = "what is computed again is not kept, and keep is every: the output of every layer stays"
            raise InputError(fact, hint="--recompute with --keep needed")

        if self.layouts and not self.by_step:
            fact = "layouts near a plan are compared by the step with what travels meanwhile"
            raise InputError(fact, hint="--layouts without --in-order and --hide-dw")
        if self.layouts and (self.recompute or self.autocast):
            fact = "no layouts near a plan are looked at that computes blocks again, or whose types are autocast's"
            raise InputError(fact, hint="--layouts without --recompute and --autocast")

    @property
    def bounded(self) -> Room:
        """The room, bounded by the machine's memory where it has no bound of its own."""
        memory = self.machine.memory_bytes
        if self.room.memory_bytes is not None or not memory:
            return self.room
        return replace(self.room, memory_bytes=int(memory))
