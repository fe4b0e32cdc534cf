"""Machines: what the cost model knows of one, and the files that say it (tuning/machines/NAME.yaml)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from convgen.errors import InputError
from convgen.resources import data_file
from convgen.spec.layer import DTYPES, Layer
from convgen.spec.names import did_you_mean
from convgen.spec.source import locate
from convgen.spec.text import shown

TARGETS = ("cpu", "cuda", "hip", "sw26010")  # each has a machine of its name: one node of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node, ranks alike, one link level.

    Attributes:
        ranks_per_node: for the reader; larger grids are modelled with the same links.
        latency_s: alpha, of one message.
        link_bytes_per_s: 1/beta: what a rank sends, while it receives as much.
        memory_bytes_per_s: of one rank's device.
        peak_flops: (dtype, flop/s) of one rank's device.
        efficiency: share of that peak that convolutions reach.
        launch_s: overhead of one local operation.
    """

    name: str
    ranks_per_node: int
    latency_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float
    peak_flops: tuple[tuple[str, float], ...]
    efficiency: float
    launch_s: float

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
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _read(Path(name))
    if name not in (known := machine_names()):
        hint = did_you_mean(name, known, f"one of {', '.join(known)}, or the path of a YAML file")
        raise InputError(f"machine {shown(name)} is unknown", ("machine",), hint=hint)
    return _shipped(name)


def machine_names() -> tuple[str, ...]:
    """The machines in tuning/machines."""
    return tuple(sorted(path.stem for path in data_file("tuning", "machines").glob("*.yaml")))


@cache
def _shipped(name: str) -> Machine:
    return _read(data_file("tuning", "machines", f"{name}.yaml"))


_NUMBERS = ("latency_s", "link_bytes_per_s", "memory_bytes_per_s", "efficiency", "launch_s")
_KEYS = ("name", "ranks_per_node", *_NUMBERS, "peak_flops_per_s")


def _read(path: Path) -> Machine:
    from convgen.spec.yaml import read_yaml

    document = read_yaml(path)
    try:
        return _machine(document.data)
    except InputError as error:
        raise locate(error, document.source) from None


def _machine(data: dict[str, Any]) -> Machine:
    _check_keys(data, _KEYS, ())
    if not isinstance(data["name"], str) or not data["name"]:
        raise InputError(f"name can't be {shown(data['name'])}", ("name",), hint="name: a text")
    ranks = data["ranks_per_node"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise InputError(
            f"ranks_per_node can't be {shown(ranks)}", ("ranks_per_node",), hint="a whole number, 1 or more"
        )
    numbers = {key: _positive(data[key], (key,), zero=key in ("latency_s", "launch_s")) for key in _NUMBERS}
    if numbers["efficiency"] > 1:
        raise InputError(f"efficiency can't be {numbers['efficiency']:g}", ("efficiency",), hint="above 0, at most 1")
    peaks = data["peak_flops_per_s"]
    if not isinstance(peaks, dict):
        raise InputError(
            "peak_flops_per_s is no mapping", ("peak_flops_per_s",), hint=f"flop/s for {', '.join(DTYPES)}"
        )
    peaks = cast("dict[str, object]", peaks)
    _check_keys(peaks, DTYPES, ("peak_flops_per_s",))
    peak_flops = tuple((d, _positive(peaks[d], ("peak_flops_per_s", d))) for d in DTYPES)
    return Machine(name=data["name"], ranks_per_node=ranks, peak_flops=peak_flops, **numbers)


def _check_keys(data: dict[str, Any], known: tuple[str, ...], path: tuple[str, ...]) -> None:
    place = f" in {path[0]}" if path else " of a machine"
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known, f"keys{place} are {', '.join(known)}")
            raise InputError(f"unknown key {shown(key)}{place}", (*path, key), hint=hint)
    if missing := [key for key in known if key not in data]:
        raise InputError(f"{', '.join(missing)}{place} is missing", path, hint=f"keys{place} are {', '.join(known)}")


def _positive(value: object, path: tuple[str, ...], zero: bool = False) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (0 < value < 1e30 or (zero and value == 0)):
        return float(value)
    hint = "a number, 0 or more" if zero else "a number above 0"
    raise InputError(f"{'.'.join(path)} can't be {shown(value)}", path, hint=hint)
