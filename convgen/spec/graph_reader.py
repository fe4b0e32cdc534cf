"""Reads graph files, and names the line of a mistake; `graph_file` describes the format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

from convgen.errors import InputError
from convgen.operations.typed import ByAutocast
from convgen.spec.extents import LETTERS, Condition, Extent
from convgen.spec.fields import check_keys, text_of
from convgen.spec.formats import without_format
from convgen.spec.graph import DTYPES, TFLOAT32, Arg, Call, Graph, Module, Ref, Size, Value, refs
from convgen.spec.names import did_you_mean
from convgen.spec.source import KeyPath, Source, locate
from convgen.spec.text import LONGEST, as_list, beginning, shown
from convgen.spec.yaml import read_yaml

KEYS = (
    "network", "source", "modes", "batch", "open", "conditions", "dtype", "inputs", "parameters", "buffers",
    "constants", "calls", "updates", "outputs", "aliases", "modules", "asks",
)  # fmt: skip
NEEDED = ("network", "modes", "batch", "inputs", "calls", "outputs")
CALL_KEYS = ("make", "op", "args", "shape", "dtype", "module", "kind", "autocast")
BY_AUTOCAST = ("plain", "bfloat16", "float16")
MODES = (["train", "eval"], ["train"], ["eval"])
DTYPE = "float32"
_INIT = re.compile(r"given|zeros|ones|normal|(kaiming_uniform|uniform):[0-9]+|fill:\S+", re.ASCII)
_FIRST = re.compile(r"\s*network\s*:")


def is_graph_file(path: str | Path) -> bool:
    """Whether a file begins as a graph file does, with its key `network`; False if it can't be read."""
    skipped = ("#", "---", "%YAML")
    lines = (line for line in beginning(path).splitlines() if line.strip() and not line.lstrip().startswith(skipped))
    return _FIRST.match(next(lines, "")) is not None


def read_graph(path: str | Path, *, checked: bool = True) -> Graph:
    """The graph that a file holds.

    Args:
        checked: whether to check operators, arguments, shapes and types too (spec/graph_check.py), which needs torch.
    Raises:
        InputError: the file can't be read, is no graph file, or says what can't be; names the line.
    """
    from convgen.spec.graph_check import check_graph  # with torch, which tells no files of layers from graphs

    document = read_yaml(path, LONGEST)
    try:
        graph = _Reader(document.source).graph(document.data)
        if checked:
            check_graph(graph)
        return graph
    except InputError as error:
        raise locate(error, document.source) from None


@dataclass
class _Reader:
    source: Source
    dtype: str = DTYPE
    known: dict[str, KeyPath] = field(default_factory=dict[str, KeyPath])  # by value so far, where it is made
    letters: frozenset[str] = frozenset("N")  # letters that sizes may have

    def graph(self, data: dict[str, Any]) -> Graph:
        data = without_format(data)
        check_keys(data, (), KEYS, NEEDED)
        tf32 = data.get("dtype") == TFLOAT32
        self.dtype = DTYPE if tf32 else _dtype(data.get("dtype", DTYPE), ("dtype",))
        modes = data["modes"]
        if modes not in MODES:
            raise InputError(f"modes can't be {shown(modes)}", ("modes",), hint="[train, eval], [train] or [eval]")
        batch = data["batch"]
        if type(batch) is not int or batch < 1:
            raise InputError(f"batch can't be {shown(batch)}", ("batch",), hint="the number of samples, 1 or more")
        opened = tuple(self.opened(data.get("open")))
        self.letters |= {letter for letter, _ in opened}
        groups = {key: self.values(data.get(key), key) for key in ("inputs", "parameters", "buffers", "constants")}
        calls = as_list(data["calls"])
        if calls is None:
            raise InputError(f"calls can't be {shown(data['calls'])}", ("calls",), hint="a list of calls")
        made = tuple(self.call(one, ("calls", k)) for k, one in enumerate(calls))
        buffers = [v.name for v in groups["buffers"]]
        held = [*buffers, *(v.name for v in groups["parameters"])]
        updates = self.pairs(data, "updates")
        for buffer, _ in updates:
            if buffer not in buffers:
                hint = did_you_mean(buffer, buffers, "a buffer, and the value that it becomes")
                raise InputError(f"{shown(buffer)} is no buffer", ("updates", buffer), hint=hint)
        return Graph(
            name=text_of(data["network"], ("network",)),
            source=text_of(data.get("source", ""), ("source",)),
            modes=tuple(cast("list[str]", modes)),
            batch=batch,
            **groups,
            calls=made,
            updates=updates,
            outputs=self.pairs(data, "outputs"),
            aliases=self.pairs(data, "aliases", held),
            modules=self.modules(data.get("modules")),
            given=(),
            tf32=tf32,
            asks=self.asks(data.get("asks")),
            stored=(),
            open=opened,
            conditions=tuple(self.conditions(data.get("conditions"))),
            caches=(),
            source_file=self.source,
        )

    def opened(self, data: object) -> Iterator[tuple[str, int]]:
        for letter, size in _entries(data, ("open",)):
            if letter not in LETTERS[1:]:
                hint = f"one of {', '.join(LETTERS[1:])}"
                raise InputError(f"{shown(letter)} is no letter of an extent", ("open", letter), hint=hint)
            if type(size) is not int or not 0 < size < 2**31:
                raise InputError(f"{letter} can't be {shown(size)}", ("open", letter), hint="the example's, 1 or more")
            yield letter, size

    def conditions(self, data: object) -> Iterator[Condition]:
        for k, text in enumerate([] if data is None else as_list(data) or [data]):
            found = Condition.read(text) if isinstance(text, str) else None
            if found is None or not found.letters <= self.letters:
                hint = f"such as {min(self.letters)}%8 == 0, of {', '.join(sorted(self.letters))}"
                raise InputError(f"a condition can't be {shown(text)}", ("conditions", k), hint=hint)
            yield found

    def size(self, value: object) -> Size | None:
        if type(value) is int and value >= 0:
            return value
        found = Extent.read(value) if isinstance(value, str) else None
        return found if found is not None and found.letters <= self.letters else None

    def shape(self, value: object, path: KeyPath) -> tuple[Size, ...]:
        given = as_list(value)
        sizes = [self.size(one) for one in given or []]
        found = tuple(size for size in sizes if size is not None)
        if given is None or len(found) < len(sizes):
            hint = f"a list of integers, and expressions of {', '.join(sorted(self.letters))}, as 3*N"
            raise InputError(f"a shape can't be {shown(value)}", path, hint=hint)
        return found

    def values(self, data: object, key: str) -> tuple[Value, ...]:
        found: list[Value] = []
        keys = ("shape", "dtype", "init", "pairs", "owner")[: 5 if key in ("parameters", "buffers") else 2]
        keys = (*keys, "frozen") if key == "parameters" else keys
        for name, said in _entries(data, (key,)):
            path: KeyPath = (key, name)
            if not isinstance(said, dict):
                raise InputError(f"{name} can't be {shown(said)}", path, hint="{shape: [...]}")
            entry = cast("dict[str, Any]", said)
            check_keys(entry, path, keys, ("shape", *(k for k in keys if k == "init")))
            init = entry.get("init", "")
            if init != "" and not (isinstance(init, str) and _INIT.fullmatch(init)):
                hint = "kaiming_uniform:FAN_IN, uniform:FAN_IN, zeros, ones, normal, fill:NUMBER or given"
                raise InputError(f"init can't be {shown(init)}", (*path, "init"), hint=hint)
            owner = text_of(entry.get("owner", ""), (*path, "owner"))
            flags = {flag: entry.get(flag, False) for flag in ("frozen", "pairs")}
            for flag, one in flags.items():
                if not isinstance(one, bool):
                    raise InputError(f"{flag} can't be {shown(one)}", (*path, flag), hint="true or false")
            shape, dtype = self.shape(entry["shape"], (*path, "shape")), entry.get("dtype", self.dtype)
            if key != "inputs" and any(isinstance(size, Extent) for size in shape):
                raise InputError(f"{name} has an open size: inputs and results have", (*path, "shape"), hint="integers")
            value = self.value(name, shape, _dtype(dtype, (*path, "dtype")), path, init)
            found.append(replace(value, owner=owner, **flags))
        return tuple(found)

    def value(self, name: object, shape: tuple[Size, ...], dtype: str, path: KeyPath, init: str = "") -> Value:
        said = text_of(name, path)
        if said in self.known:
            where = self.source.where(self.known[said])
            raise InputError(f"{said} is made twice, first at {where}", path, hint="a name a value")
        self.known[said] = path
        return Value(name=said, shape=shape, dtype=dtype, init=init)

    def call(self, data: object, path: KeyPath) -> Call:
        if not isinstance(data, dict):
            raise InputError(f"a call can't be {shown(data)}", path, hint="{make: ..., op: ..., args: [...], ...}")
        said = cast("dict[str, Any]", data)
        check_keys(said, path, CALL_KEYS, ("make", "op", "args", "shape"))
        args = as_list(said["args"])
        if args is None:
            raise InputError(f"args can't be {shown(said['args'])}", (*path, "args"), hint="a list of arguments")
        read = tuple(self.arg(one, (*path, "args", k)) for k, one in enumerate(args))
        autocast = said.get("autocast", "")
        if autocast not in ("", "off"):
            raise InputError(f"autocast can't be {shown(autocast)}", (*path, "autocast"), hint="off")
        return Call(
            op=text_of(said["op"], (*path, "op")),
            args=read,
            results=self.results(said, path),
            module=text_of(said.get("module", ""), (*path, "module")),
            kind=text_of(said.get("kind", ""), (*path, "kind")),
            autocast=str(autocast),
        )

    def results(self, said: dict[str, Any], path: KeyPath) -> tuple[Value | None, ...]:
        names = as_list(said["make"])
        if names is None:
            shape = self.shape(said["shape"], (*path, "shape"))
            return (self.value(said["make"], shape, _dtype(said.get("dtype", self.dtype), (*path, "dtype")), path),)
        shapes, dtypes = as_list(said["shape"]) or [], as_list(said.get("dtype", [self.dtype] * len(names))) or []
        if not len(names) == len(shapes) == len(dtypes):
            fact = f"{len(names)} results, {len(shapes)} shapes, {len(dtypes)} dtypes"
            raise InputError(fact, path, hint="lists as long as make's; null for a result that nobody reads")
        found: list[Value | None] = []
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
            sizes = None if name is None else self.shape(shape, (*path, "shape"))
            kind = None if name is None else _dtype(dtype, (*path, "dtype"))
            found.append(None if sizes is None or kind is None else self.value(name, sizes, kind, path))
        return tuple(found)

    def arg(self, data: object, path: KeyPath) -> Arg:
        match data:
            case str() if data.startswith("%%"):
                return data[2:]
            case str() if data.startswith("%"):
                return Ref(self.read(data[1:], path))
            case str() if (found := self.size(data)) is not None:
                return found
            case None | bool() | int() | float() | str():
                return data
            case dict() if {*cast("dict[str, Any]", data)} == {*BY_AUTOCAST}:
                values = cast("dict[str, object]", data)
                return ByAutocast(*(self.arg(values[name], path) for name in BY_AUTOCAST))
            case list():
                return tuple(self.arg(one, path) for one in cast("list[object]", data))
            case _:
                raise InputError(f"an argument can't be {shown(data)}", path, hint="text, numbers, null and lists")

    def asks(self, data: object) -> tuple[tuple[str, str], ...]:
        found = [(low, text_of(why, ("asks", low))) for low, why in _entries(data, ("asks",))]
        if found and [low for low, _ in found] != [*BY_AUTOCAST[1:]]:
            raise InputError(f"asks can't be {shown(data)}", ("asks",), hint="{bfloat16: TEXT, float16: TEXT}")
        return tuple(found)

    def read(self, name: str, path: KeyPath) -> str:
        if name not in self.known:
            hint = did_you_mean(name, self.known, "an input, a parameter, a buffer, a constant or a result above")
            raise InputError(f"{shown(name)} is no value that stands before", path, hint=hint)
        return name

    def modules(self, data: object) -> tuple[Module, ...]:
        found: dict[str, Module] = {}
        for path, said in _entries(data, ("modules",)):
            where: KeyPath = ("modules", path)
            entry = dict(_entries(said, where))
            check_keys(entry, where, ("kind", "has", "same"), ())
            if path and not all(path.split(".")):
                raise InputError(f"a module can't be called {shown(path)}", where, hint="names with points between")
            kind, same = (text_of(entry.get(key, ""), (*where, key)) for key in ("kind", "same"))
            if kind and not kind.isidentifier():
                raise InputError(f"kind can't be {shown(kind)}", (*where, "kind"), hint="a class of torch.nn")
            if same and (same not in found or found[same].same):
                hint = did_you_mean(same, [*found], "the path of a module that stands before")
                raise InputError(f"{shown(same)} is no module that stands before", (*where, "same"), hint=hint)
            has: list[tuple[str, Arg]] = []
            for name, value in _entries(entry.get("has"), (*where, "has")):
                read = self.arg(value, (*where, "has", name))
                if refs(read) or not name.isidentifier() or not _is_finite(read):
                    hint = "a name, and numbers, text, null and lists of these"
                    raise InputError(f"an attribute can't be {name}: {shown(value)}", (*where, "has", name), hint=hint)
                has.append((name, read))
            found[path] = Module(path, kind, tuple(has), same)
        return tuple(found.values())

    def pairs(self, data: dict[str, Any], key: str, of: list[str] | None = None) -> tuple[tuple[str, str], ...]:
        found: list[tuple[str, str]] = []
        for name, value in _entries(data.get(key), (key,)):
            made = self.read(text_of(value, (key, name)), (key, name))
            if of is not None and made not in of:
                hint = did_you_mean(made, of, "the name of a parameter or buffer")
                raise InputError(f"{made} is no parameter or buffer", (key, name), hint=hint)
            found.append((name, made))
        return tuple(found)


def _is_finite(value: Arg) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, Extent) and not (isinstance(value, float) and not isfinite(value))


def _entries(data: object, path: KeyPath) -> list[tuple[str, object]]:
    if data is None:
        return []
    if not isinstance(data, dict):
        raise InputError(f"{path[-1]} can't be {shown(data)}", path, hint="a mapping, an entry a name")
    return list(cast("dict[str, object]", data).items())


def _dtype(value: object, path: KeyPath) -> str:
    if value not in DTYPES:
        hint = did_you_mean(str(value), DTYPES, f"one of {', '.join(DTYPES)}")
        raise InputError(f"dtype can't be {shown(value)}", path, hint=hint)
    return cast("str", value)
