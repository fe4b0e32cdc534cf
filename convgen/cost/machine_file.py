"""Machine files: YAML, every key checked.

```yaml
name: lassen
device: NVIDIA V100 SXM2          # optional
ranks_per_node: 4
levels:                           # innermost first; the last one has no `ranks`
  - {name: socket, ranks: 2, latency_s: 8e-6, bytes_per_s: 3.7e+10}
  - {name: node, ranks: 4, latency_s: 8e-6, bytes_per_s: 3e+10, shared_bytes_per_s: 3e+10}
  - {name: machine, latency_s: 8e-6, bytes_per_s: 1e+10, shared_bytes_per_s: 2e+10}
memory_bytes: 1.6e+10             # optional
memory_bytes_per_s: 8e+11
peak_flops_per_s: {float64: ..., float32: ..., tfloat32: ..., bfloat16: ..., float16: ...}
efficiency: 0.5
launch_s: 1e-5                    # around a local operation of a layer's module
network_launch_s: 1e-5            # optional: of a network's package; launch_s where it is not there
message_processor_s: 5e-5         # optional, with processor_s_per_byte; both 0 where they are not there
processor_s_per_byte: 4e-10
collectives: {all_reduce: best}   # optional; rings where it says nothing
measured_collectives:             # optional: measured over modelled seconds, by the bytes that a rank sends
  - {collective: all_gather, ranks: 2, bytes: [2048, 131072], over_model: [1.6, 2.1]}
measured_convolutions:            # optional: share of the peak of forward, backward-data, backward-filter
  - {channels: 64, filters: 64, taps: 9, pixels: 3136, efficiency: [0.8, 0.7, 0.6]}   # groups: 1, step: 1
```

A machine with links of one kind may say `latency_s` and `link_bytes_per_s` instead of `levels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from convgen.cost.collectives import ALGORITHMS, RINGS, Collectives
from convgen.cost.machine import Level, Machine
from convgen.cost.machine_measured import PHASES, Misfit, Probe
from convgen.errors import InputError
from convgen.spec.formats import without_format
from convgen.spec.layer import DTYPES
from convgen.spec.names import did_you_mean
from convgen.spec.source import locate
from convgen.spec.text import shown

_NUMBERS = ("memory_bytes_per_s", "efficiency", "launch_s")
_ONE_LEVEL = ("latency_s", "link_bytes_per_s")
_NETWORK = "network_launch_s"
_PROCESSOR = ("message_processor_s", "processor_s_per_byte")
_OPTIONAL = (
    *("device", "memory_bytes", _NETWORK, *_PROCESSOR),
    *("collectives", "measured_collectives", "measured_convolutions"),
)
_MISFIT = ("collective", "ranks", "bytes", "over_model")
_PROBE = ("channels", "filters", "taps", "pixels", "efficiency")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
_LEVEL = ("name", "latency_s", "bytes_per_s")
_LEVEL_OPTIONAL = ("ranks", "shared_bytes_per_s")
_ZERO = ("latency_s", "launch_s", _NETWORK, *_PROCESSOR)  # may be 0


def read_machine(path: Path) -> Machine:
    """The machine that a YAML file describes.

    Raises:
        InputError: the file can't be read, or says what no machine is; names file and line.
    """
    from convgen.spec.yaml import read_yaml

    document = read_yaml(path)
    try:
        return machine_from_dict(document.data)
    except InputError as error:
        raise locate(error, document.source) from None


def machine_from_dict(data: dict[str, Any]) -> Machine:
    """The same from what the file holds.

    Raises:
        InputError: keys that are unknown or missing, or values that can't be.
    """
    data = without_format(data)
    links = ("levels",) if "levels" in data else _ONE_LEVEL
    _check_keys(data, ("name", "ranks_per_node", *links, *_NUMBERS, "peak_flops_per_s"), (), _OPTIONAL)
    numbers = {key: _positive(data[key], (key,)) for key in _NUMBERS}
    if numbers["efficiency"] > 1:
        raise InputError(f"efficiency can't be {numbers['efficiency']:g}", ("efficiency",), hint="above 0, at most 1")
    ranks = _whole(data["ranks_per_node"], ("ranks_per_node",))
    said = [key for key in _PROCESSOR if key in data]
    if len(said) == 1:
        raise InputError(f"{said[0]} alone", (said[0],), hint=f"{' and '.join(_PROCESSOR)}, or neither")
    numbers |= {key: _positive(data[key], (key,)) for key in said}
    peaks = _mapping(data["peak_flops_per_s"], ("peak_flops_per_s",), f"flop/s for {', '.join(DTYPES)}")
    _check_keys(peaks, DTYPES, ("peak_flops_per_s",))
    memory = data.get("memory_bytes")
    return Machine(
        name=_text(data["name"], ("name",)),
        device=_text(data["device"], ("device",)) if "device" in data else "",
        ranks_per_node=ranks,
        levels=_levels(data, ranks),
        memory_bytes=None if memory is None else _positive(memory, ("memory_bytes",)),
        peak_flops=tuple((d, _positive(peaks[d], ("peak_flops_per_s", d))) for d in DTYPES),
        collectives=_collectives(data.get("collectives")),
        misfits=tuple(_misfit(item, path) for item, path in _items(data, "measured_collectives")),
        probes=tuple(_probe(item, path) for item, path in _items(data, "measured_convolutions")),
        memory_bytes_per_s=numbers["memory_bytes_per_s"],
        efficiency=numbers["efficiency"],
        launch_s=numbers["launch_s"],
        network_launch_s=_positive(data[_NETWORK], (_NETWORK,)) if _NETWORK in data else None,
        message_processor_s=numbers.get("message_processor_s", 0.0),
        processor_s_per_byte=numbers.get("processor_s_per_byte", 0.0),
    )


def _levels(data: dict[str, Any], ranks_per_node: int) -> tuple[Level, ...]:
    if "levels" not in data:
        latency, rate = (_positive(data[key], (key,)) for key in _ONE_LEVEL)
        return (Level(name="machine", latency_s=latency, bytes_per_s=rate),)
    items: Any = data["levels"]
    if not isinstance(items, list) or not items:
        raise InputError("levels is no list", ("levels",), hint="a list of levels, innermost first")
    items = cast("list[Any]", items)
    levels = tuple(_level(item, i, i + 1 == len(items)) for i, item in enumerate(items))
    sizes = [level.ranks for level in levels if level.ranks is not None]
    for i, (inner, outer) in enumerate(pairwise(sizes)):
        if outer <= inner or outer % inner:
            raise InputError(
                f"level {levels[i + 1].name} has {outer} ranks, and {levels[i].name} in it {inner}",
                ("levels", i + 1),
                hint=f"a multiple of {inner}, innermost level first",
            )
    if sizes and ranks_per_node != 1 and ranks_per_node not in sizes:
        raise InputError(
            f"ranks_per_node is {ranks_per_node}, and levels have {', '.join(map(str, sizes))} ranks",
            ("ranks_per_node",),
            hint="the ranks of one of the levels; or 1",
        )
    if len({level.name for level in levels}) < len(levels):
        raise InputError("two levels have one name", ("levels",), hint="a name each")
    return levels


def _level(item: object, index: int, last: bool) -> Level:
    path = ("levels", index)
    data = _mapping(item, path, f"a mapping with {', '.join(_LEVEL)}")
    _check_keys(data, _LEVEL, path, _LEVEL_OPTIONAL)
    name = _text(data["name"], (*path, "name"))
    if last and "ranks" in data:
        raise InputError(
            f"level {name} is the last and has {shown(data['ranks'])} ranks",
            (*path, "ranks"),
            hint="no `ranks`: the last level is the whole machine, however many ranks a grid has",
        )
    if not last and "ranks" not in data:
        raise InputError(f"level {name} has no ranks", path, hint="ranks: how many ranks one such unit has")
    if index == 0 and "shared_bytes_per_s" in data:
        raise InputError(
            f"level {name} shares links out of nothing",
            (*path, "shared_bytes_per_s"),
            hint="shared_bytes_per_s is what a unit of the level below sends; the first level has none below",
        )
    shared = data.get("shared_bytes_per_s")
    return Level(
        name=name,
        ranks=None if last else _whole(data["ranks"], (*path, "ranks")),
        latency_s=_positive(data["latency_s"], (*path, "latency_s")),
        bytes_per_s=_positive(data["bytes_per_s"], (*path, "bytes_per_s")),
        shared_bytes_per_s=None if shared is None else _positive(shared, (*path, "shared_bytes_per_s")),
    )


def _collectives(value: object) -> Collectives:
    if value is None:
        return RINGS
    data = _mapping(value, ("collectives",), f"an algorithm for {', '.join(ALGORITHMS)}")
    for kind, name in data.items():
        if kind not in ALGORITHMS:
            hint = did_you_mean(kind, tuple(ALGORITHMS), f"one of {', '.join(ALGORITHMS)}")
            raise InputError(f"unknown collective {shown(kind)}", ("collectives", kind), hint=hint)
        known = (*ALGORITHMS[kind], "best")
        if name not in known:
            hint = did_you_mean(str(name), known, f"one of {', '.join(known)}")
            raise InputError(f"{kind} can't be by {shown(name)}", ("collectives", kind), hint=hint)
    return Collectives(**data)


def _items(data: dict[str, Any], key: str) -> Iterator[tuple[object, tuple[str | int, ...]]]:
    """What a list has, and where."""
    found: Any = data.get(key, [])
    if not isinstance(found, list):
        raise InputError(f"{key} is no list", (key,), hint="a list of measurements, or nothing")
    for i, item in enumerate(cast("list[Any]", found)):
        yield item, (key, i)


def _misfit(item: object, path: tuple[str | int, ...]) -> Misfit:
    data = _mapping(item, path, f"a mapping with {', '.join(_MISFIT)}")
    _check_keys(data, _MISFIT, path)
    kind = data["collective"]
    if kind not in _KINDS:
        hint = did_you_mean(str(kind), _KINDS, f"one of {', '.join(_KINDS)}")
        raise InputError(f"unknown collective {shown(kind)}", (*path, "collective"), hint=hint)
    sizes, over = (_numbers(data[key], (*path, key)) for key in ("bytes", "over_model"))
    if len(sizes) != len(over):
        raise InputError(f"{len(sizes)} bytes and {len(over)} over_model", path, hint="as many of both")
    if any(b <= a for a, b in pairwise(sizes)):
        raise InputError("bytes don't ascend", (*path, "bytes"), hint="each size once, least first")
    return Misfit(kind=kind, ranks=_whole(data["ranks"], (*path, "ranks")), bytes=sizes, over_model=over)


def _probe(item: object, path: tuple[str | int, ...]) -> Probe:
    data = _mapping(item, path, f"a mapping with {', '.join(_PROBE)}")
    _check_keys(data, _PROBE, path, ("groups", "step"))
    sizes = {key: _whole(data.get(key, 1), (*path, key)) for key in (*_PROBE[:-1], "groups", "step")}
    shares = _numbers(data["efficiency"], (*path, "efficiency"))
    if len(shares) != len(PHASES):
        fact = f"efficiency has {len(shares)} numbers"
        raise InputError(fact, (*path, "efficiency"), hint=f"one of {', '.join(PHASES)} each")
    return Probe(efficiency=(shares[0], shares[1], shares[2]), **sizes)


def _numbers(value: object, path: tuple[str | int, ...]) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{_dotted(path)} is no list of numbers", path, hint="numbers above 0")
    return tuple(_positive(one, path) for one in cast("list[object]", value))


def _mapping(value: object, path: tuple[str | int, ...], hint: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{_dotted(path)} is no mapping", path, hint=hint)
    return cast("dict[str, Any]", value)


def _check_keys(
    data: dict[str, Any], needed: tuple[str, ...], path: tuple[str | int, ...], optional: tuple[str, ...] = ()
) -> None:
    place = f" in {_dotted(path)}" if path else " of a machine"
    known = (*needed, *optional)
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known, f"keys{place} are {', '.join(known)}")
            raise InputError(f"unknown key {shown(key)}{place}", (*path, key), hint=hint)
    if missing := [key for key in needed if key not in data]:
        raise InputError(f"{', '.join(missing)}{place} is missing", path, hint=f"keys{place} are {', '.join(known)}")


def _text(value: object, path: tuple[str | int, ...]) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InputError(f"{_dotted(path)} can't be {shown(value)}", path, hint=f"{path[-1]}: a text in one line")
    return value


def _whole(value: object, path: tuple[str | int, ...]) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{_dotted(path)} can't be {shown(value)}", path, hint="a whole number, 1 or more")
    return value


def _positive(value: object, path: tuple[str | int, ...]) -> float:
    zero = path[-1] in _ZERO
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (0 < value < 1e30 or (zero and value == 0)):
        return float(value)
    hint = "a number, 0 or more" if zero else "a number above 0"
    raise InputError(f"{_dotted(path)} can't be {shown(value)}", path, hint=hint)


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(p) for p in path)
