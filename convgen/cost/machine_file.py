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
tiles: {processors: 132, reading: 65, adding: 195}   # optional: of a GPU, which reaches less by small blocks (tiles.py)
adds_biases: true                 # optional: false where a network's biases are steps of their own
uncertainty: {computing: 0.1, links: 0.2}   # optional: of seconds, one standard deviation
measured_steps:                   # optional: steps of packages where the model was off (steps_file.py)
  - {row: conv_forward, extents: {N: 4, ...}, flops: 37748736, elements: 73728, type: float32, seconds: 1e-3, spread: 0}
  - {collective: all_reduce, ranks: 2, links: machine, bytes: 306880, seconds: 7e-4, spread: 0.2}
```

A machine with links of one kind may say `latency_s` and `link_bytes_per_s` instead of `levels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from convgen.cost.collectives import ALGORITHMS, RINGS, Collectives
from convgen.cost.file_values import check_keys, mapping, numbers, positive, text, whole
from convgen.cost.machine import Level, Machine
from convgen.cost.machine_measured import PHASES, Misfit, Probe
from convgen.cost.steps_file import STEPS, read_steps
from convgen.cost.tiles import Tiles
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
_BIASES = "adds_biases"
_OPTIONAL = (
    *("device", "memory_bytes", _NETWORK, *_PROCESSOR, _BIASES),
    *("collectives", "measured_collectives", "measured_convolutions", "tiles", "uncertainty", STEPS),
)
UNCERTAIN = ("computing", "links")
_TILES = ("processors", "reading", "adding")
_MISFIT = ("collective", "ranks", "bytes", "over_model")
_PROBE = ("channels", "filters", "taps", "pixels", "efficiency")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
_LEVEL = ("name", "latency_s", "bytes_per_s")
_LEVEL_OPTIONAL = ("ranks", "shared_bytes_per_s")


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
    """The machine that a file's data describe.

    Raises:
        InputError: keys that are unknown or missing, or values that can't be.
    """
    data = without_format(data)
    links = ("levels",) if "levels" in data else _ONE_LEVEL
    check_keys(data, ("name", "ranks_per_node", *links, *_NUMBERS, "peak_flops_per_s"), (), _OPTIONAL)
    values = {key: positive(data[key], (key,)) for key in _NUMBERS}
    if values["efficiency"] > 1:
        raise InputError(f"efficiency can't be {values['efficiency']:g}", ("efficiency",), hint="above 0, at most 1")
    ranks = whole(data["ranks_per_node"], ("ranks_per_node",))
    said = [key for key in _PROCESSOR if key in data]
    if len(said) == 1:
        raise InputError(f"{said[0]} alone", (said[0],), hint=f"{' and '.join(_PROCESSOR)}, or neither")
    values |= {key: positive(data[key], (key,)) for key in said}
    peaks = mapping(data["peak_flops_per_s"], ("peak_flops_per_s",), f"flop/s for {', '.join(DTYPES)}")
    check_keys(peaks, DTYPES, ("peak_flops_per_s",))
    memory = data.get("memory_bytes")
    return Machine(
        name=text(data["name"], ("name",)),
        device=text(data["device"], ("device",)) if "device" in data else "",
        ranks_per_node=ranks,
        levels=_levels(data, ranks),
        memory_bytes=None if memory is None else positive(memory, ("memory_bytes",)),
        peak_flops=tuple((d, positive(peaks[d], ("peak_flops_per_s", d))) for d in DTYPES),
        collectives=_collectives(data.get("collectives")),
        misfits=_misfits(data),
        probes=tuple(_probe(item, path) for item, path in _items(data, "measured_convolutions")),
        tiles=_tiles(data.get("tiles")),
        memory_bytes_per_s=values["memory_bytes_per_s"],
        efficiency=values["efficiency"],
        launch_s=values["launch_s"],
        network_launch_s=positive(data[_NETWORK], (_NETWORK,)) if _NETWORK in data else None,
        message_processor_s=values.get("message_processor_s", 0.0),
        processor_s_per_byte=values.get("processor_s_per_byte", 0.0),
        uncertainty=_uncertainty(data.get("uncertainty")),
        steps=read_steps(data.get(STEPS, [])),
        adds_biases=_adds_biases(data.get(_BIASES, True)),
    )


def _adds_biases(value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{_BIASES} can't be {shown(value)}", (_BIASES,), hint="true or false")
    return value


def _levels(data: dict[str, Any], ranks_per_node: int) -> tuple[Level, ...]:
    if "levels" not in data:
        latency, rate = (positive(data[key], (key,)) for key in _ONE_LEVEL)
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
    data = mapping(item, path, f"a mapping with {', '.join(_LEVEL)}")
    check_keys(data, _LEVEL, path, _LEVEL_OPTIONAL)
    name = text(data["name"], (*path, "name"))
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
        ranks=None if last else whole(data["ranks"], (*path, "ranks")),
        latency_s=positive(data["latency_s"], (*path, "latency_s")),
        bytes_per_s=positive(data["bytes_per_s"], (*path, "bytes_per_s")),
        shared_bytes_per_s=None if shared is None else positive(shared, (*path, "shared_bytes_per_s")),
    )


def _collectives(value: object) -> Collectives:
    if value is None:
        return RINGS
    data = mapping(value, ("collectives",), f"an algorithm for {', '.join(ALGORITHMS)}")
    for kind, name in data.items():
        if kind not in ALGORITHMS:
            hint = did_you_mean(kind, tuple(ALGORITHMS), f"one of {', '.join(ALGORITHMS)}")
            raise InputError(f"unknown collective {shown(kind)}", ("collectives", kind), hint=hint)
        known = (*ALGORITHMS[kind], "best")
        if name not in known:
            hint = did_you_mean(str(name), known, f"one of {', '.join(known)}")
            raise InputError(f"{kind} can't be by {shown(name)}", ("collectives", kind), hint=hint)
    return Collectives(**data)


def _uncertainty(value: object) -> tuple[tuple[str, float], ...]:
    if value is None:
        return ()
    said = mapping(value, ("uncertainty",), "computing and links: one standard deviation as a share of seconds")
    check_keys(said, UNCERTAIN, ("uncertainty",))
    return tuple((key, positive(said[key], ("uncertainty", key))) for key in UNCERTAIN)


def _tiles(value: object) -> Tiles | None:
    if value is None:
        return None
    said = mapping(value, ("tiles",), f"a mapping with {', '.join(_TILES)}")
    check_keys(said, _TILES, ("tiles",))
    _, reading, adding = (positive(said[key], ("tiles", key)) for key in _TILES)
    return Tiles(processors=whole(said["processors"], ("tiles", "processors")), reading=reading, adding=adding)


def _items(data: dict[str, Any], key: str) -> Iterator[tuple[object, tuple[str | int, ...]]]:
    """The items of a list of the file, and the place of each."""
    found: Any = data.get(key, [])
    if not isinstance(found, list):
        raise InputError(f"{key} is no list", (key,), hint="a list of measurements, or nothing")
    for i, item in enumerate(cast("list[Any]", found)):
        yield item, (key, i)


def _misfits(data: dict[str, Any]) -> tuple[Misfit, ...]:
    found: dict[tuple[str, int], Misfit] = {}
    for item, path in _items(data, "measured_collectives"):
        one = _misfit(item, path)
        if (one.kind, one.ranks) in found:
            hint = "one of the two; or all bytes in one"
            raise InputError(f"{one.kind} of {one.ranks} ranks is measured twice", path, hint=hint)
        found[one.kind, one.ranks] = one
    return tuple(found.values())


def _misfit(item: object, path: tuple[str | int, ...]) -> Misfit:
    data = mapping(item, path, f"a mapping with {', '.join(_MISFIT)}")
    check_keys(data, _MISFIT, path)
    kind = data["collective"]
    if kind not in _KINDS:
        hint = did_you_mean(str(kind), _KINDS, f"one of {', '.join(_KINDS)}")
        raise InputError(f"unknown collective {shown(kind)}", (*path, "collective"), hint=hint)
    sizes, over = (numbers(data[key], (*path, key)) for key in ("bytes", "over_model"))
    if len(sizes) != len(over):
        raise InputError(f"{len(sizes)} bytes and {len(over)} over_model", path, hint="as many of both")
    if any(b <= a for a, b in pairwise(sizes)):
        raise InputError("bytes don't ascend", (*path, "bytes"), hint="each size once, least first")
    return Misfit(kind=kind, ranks=whole(data["ranks"], (*path, "ranks")), bytes=sizes, over_model=over)


def _probe(item: object, path: tuple[str | int, ...]) -> Probe:
    data = mapping(item, path, f"a mapping with {', '.join(_PROBE)}")
    check_keys(data, _PROBE, path, ("groups", "step"))
    sizes = {key: whole(data.get(key, 1), (*path, key)) for key in (*_PROBE[:-1], "groups", "step")}
    shares = numbers(data["efficiency"], (*path, "efficiency"))
    if len(shares) != len(PHASES):
        fact = f"efficiency has {len(shares)} numbers"
        raise InputError(fact, (*path, "efficiency"), hint=f"one of {', '.join(PHASES)} each")
    return Probe(efficiency=(shares[0], shares[1], shares[2]), **sizes)
