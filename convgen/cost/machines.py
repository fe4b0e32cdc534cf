"""The machines that exist: a layer's, one by name in tuning/machines, or one by the path of a file."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from convgen.cost.machine import Machine
from convgen.cost.machine_file import read_machine
from convgen.errors import InputError
from convgen.resources import data_file
from convgen.spec.layer import Layer
from convgen.spec.names import did_you_mean
from convgen.spec.source import locate
from convgen.spec.text import shown


def default_machine(layer: Layer) -> Machine:
    """The machine that a layer names, or one node of its target's kind.

    Raises:
        InputError: the layer names a machine that does not exist.
    """
    if layer.machine is None:
        machine = _shipped(layer.target.kind)
        return _with_core_groups(machine, layer.options.core_groups)
    try:
        return load_machine(layer.machine)
    except InputError as error:
        raise locate(error, layer.source) from None


def _with_core_groups(machine: Machine, core_groups: int) -> Machine:
    """Ranks of several core groups of an SW26010 each: every core group computes, and has memory of its own."""
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
    return read_machine(data_file("tuning", "machines", f"{name}.yaml"))
