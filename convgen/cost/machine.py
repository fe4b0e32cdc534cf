"""Machines: what the cost model knows of one. Files that say it: machine_file.py and tuning/machines/NAME.yaml."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from convgen.cost.collectives import RINGS, Collectives
from convgen.errors import InputError
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.names import did_you_mean
from convgen.spec.source import locate
from convgen.spec.text import shown

TARGETS = ("cpu", "cuda", "hip", "sw26010")  # each has a machine of its name: one node of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links between ranks of one unit (a socket, a node, a rack, the machine) that no smaller unit has both of.

    Attributes:
        name: the unit's.
        ranks: of one unit; None for the whole machine.
        latency_s: alpha, of one message.
        bytes_per_s: 1/beta: what one rank sends over these links, while it receives as much.
        shared_bytes_per_s: what all ranks of one unit of the level below (a node's, through its adapters) send over
            these links together, while they receive as much; None where only bytes_per_s limits them.
    """

    name: str
    ranks: int | None = None
    latency_s: float
    bytes_per_s: float
    shared_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Ranks alike, numbered node by node, and the links between them by level.

    Attributes:
        device: what one rank computes on, for the reader.
        ranks_per_node: of a node; one of the levels where there are several.
        levels: innermost first; the last holds any number of ranks.
        memory_bytes: of one rank's device; None where the file doesn't say.
        memory_bytes_per_s: of one rank's device.
        peak_flops: (dtype, flop/s) of one rank's device.
        efficiency: share of that peak that convolutions reach.
        launch_s: overhead of one local operation.
        collectives: the algorithms that its library uses.
    """

    name: str
    device: str = ""
    ranks_per_node: int
    levels: tuple[Level, ...]
    memory_bytes: float | None = None
    memory_bytes_per_s: float
    peak_flops: tuple[tuple[str, float], ...]
    efficiency: float
    launch_s: float
    collectives: Collectives = RINGS

    def flops_per_s(self, dtype: str) -> float:
        """What convolutions reach in this dtype."""
        return dict(self.peak_flops)[dtype] * self.efficiency

    @property
    def add_s_per_byte(self) -> float:
        """gamma: adding a received byte reads two bytes and writes one."""
        return 3 / self.memory_bytes_per_s


def default_machine(layer: Layer) -> Machine:
    """The machine that a layer names, or one node of its target's kind.

    Raises:
        InputError: the layer names a machine that there is none of.
    """
    if layer.machine is None:
        machine = _shipped(layer.target.split(":")[0])
        return _with_core_groups(machine, layer.options.core_groups)
    try:
        return load_machine(layer.machine)
    except InputError as error:
        raise locate(error, layer.source) from None


def _with_core_groups(machine: Machine, core_groups: int) -> Machine:
    """Ranks of several core groups of an SW26010: each group computes, and has memory of its own."""
    return replace(
        machine,
        ranks_per_node=max(1, machine.ranks_per_node // core_groups),
        memory_bytes_per_s=core_groups * machine.memory_bytes_per_s,
        peak_flops=tuple((dtype, core_groups * peak) for dtype, peak in machine.peak_flops),
    )


def load_machine(name: str) -> Machine:
    """A machine by its name in tuning/machines, or by the path of a YAML file.

    Raises:
        InputError: neither exists (the message says which do), or the file is wrong.
    """
    from convgen.cost.machine_file import read_machine

    if name.endswith((".yaml", ".yml")) or "/" in name:
        return read_machine(Path(name))
    if name not in (known := machine_names()):
        hint = did_you_mean(name, known, f"one of {', '.join(known)}, or the path of a YAML file")
        raise InputError(f"machine {shown(name)} is unknown", ("machine",), hint=hint)
    return _shipped(name)


def machine_names() -> tuple[str, ...]:
    """The machines in tuning/machines."""
    return tuple(sorted(path.stem for path in data_file("tuning", "machines").glob("*.yaml")))


@cache
def _shipped(name: str) -> Machine:
    from convgen.cost.machine_file import read_machine

    return read_machine(data_file("tuning", "machines", f"{name}.yaml"))
