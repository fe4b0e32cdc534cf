"""YAML 1.2 with line numbers: the core schema's plain data, nothing else.

Built from ruamel's parse events, so no tag is ever constructed. An alias stands for a copy of what its
anchor names. What could surprise is refused: duplicate keys, keys that aren't text, tags beyond the core
schema's, several documents, recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from convgen.errors import InputError
from convgen.spec.source import KeyPath, Source
from convgen.spec.text import MAX_FILE_BYTES, kind, one_line, read_text, shown

Scalar: TypeAlias = "None | bool | int | float | str"
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"

MAX_DEPTH = 32
MAX_VALUES = 100_000

# YAML 1.2.2, 10.3.2: the core schema's plain scalars.
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CORE = "tag:yaml.org,2002:"
_TAGGED: dict[str, type] = {
    _CORE + "null": type(None),
    _CORE + "bool": bool,
    _CORE + "int": int,
    _CORE + "float": float,
    _CORE + "str": str,
    _CORE + "seq": list,
    _CORE + "map": dict,
}


@dataclass(frozen=True, slots=True)
class Document:
    """A file's top-level mapping, and where each key path stands in it."""

    data: dict[str, Value]
    source: Source


@dataclass(slots=True)
class _Node:
    """A value before aliases are copied; `line` is the line of its key or list entry, from 1."""

    content: Scalar | list[_Node] | dict[str, _Node]
    line: int


def read_yaml(path: str | Path, times: int = 1) -> Document:
    """The mapping that a file holds.

    Args:
        path: the file; its name as given goes into messages.
        times: how many times as long as a layer file it may be.
    Raises:
        InputError: the file can't be read, isn't YAML 1.2, or isn't one mapping; names file and line.
    """
    return parse_yaml(read_text(path, MAX_FILE_BYTES * times), str(path), times)


def parse_yaml(text: str, file: str = "", times: int = 1) -> Document:
    """`read_yaml` for text in memory.

    Example:
        >>> parse_yaml("grid: {N: 2, C: 0x4}").data
        {'grid': {'N': 2, 'C': 4}}
    """
    reader = _Reader(text, file)
    root = reader.document()
    lines: dict[KeyPath, int] = {}
    value = _Copier(lines, file, MAX_VALUES * times).value(root, ())
    assert isinstance(value, dict)
    return Document(value, Source(file, lines))


class _Reader:
    """Turns events into nodes."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.last_line = max(1, text.count("\n") + (not text.endswith("\n")))
        self.anchors: dict[str, _Node | None] = {}
        self.events = self._events(text)

    def _events(self, text: str) -> Iterator[Any]:
        yaml: Any = YAML(typ="safe", pure=True, plug_ins=[])
        try:
            yield from yaml.parse(text)
        except MarkedYAMLError as marked:
            error: Any = marked
            mark = error.problem_mark or error.context_mark
            said = ", ".join(str(part) for part in (error.problem, error.context) if part)
            hint = "indent with spaces, 'key: value' with a space, close brackets and quotes, quote text with : or #"
            self.refuse(f"not YAML: {one_line(said)}", mark.line if mark else 0, hint)
        except InputError:
            raise
        except Exception as unexpected:
            # The scanner lets what it stumbles over through, e.g. chr()'s ValueError for "\UFFFFFFFF".
            self.refuse(f"not YAML: {one_line(str(unexpected))}", 0, "write plain text, numbers, lists and mappings")

    def refuse(self, fact: str, line: int, hint: str) -> NoReturn:
        """Raise for a 0-based line."""
        raise InputError(fact, where=f"{self.file}:{min(line + 1, self.last_line)}", hint=hint)

    def document(self) -> _Node:
        root: _Node | None = None
        for event in self.events:
            line: int = event.start_mark.line
            version: Any = getattr(event, "version", None)
            if isinstance(event, DocumentStartEvent):
                if root is not None:
                    self.refuse("a second YAML document begins", line, "one document a file: remove the '---' line")
                if version not in (None, (1, 2)):
                    said = ".".join(map(str, version))
                    self.refuse(f"this is YAML {said}, convgen reads YAML 1.2", line, "remove the %YAML line")
                root = self.node(next(self.events), 0)
                if root.content is None:
                    self.refuse("the file is empty", root.line - 1, "write a mapping, 'key: value' a line")
                if not isinstance(root.content, dict):
                    fact = f"the file holds {kind(root.content)}, not a mapping"
                    self.refuse(fact, root.line - 1, "write 'key: value' a line")
        if root is None:
            self.refuse("the file is empty", 0, "write a mapping, 'key: value' a line")
        return root

    def node(self, event: Any, depth: int) -> _Node:
        line: int = event.start_mark.line
        if depth > MAX_DEPTH:
            self.refuse(f"nested more than {MAX_DEPTH} deep", line, "a layer file nests three deep")
        if isinstance(event, AliasEvent):
            return self.alias(event, line)
        anchor: str | None = event.anchor
        if anchor is not None:
            self.anchors[anchor] = None
        node = _Node(self.content(event, depth, line), line + 1)
        self.check_tag(event, node, line)
        if anchor is not None:
            self.anchors[anchor] = node
        return node

    def alias(self, event: Any, line: int) -> _Node:
        name: str = event.anchor
        if name not in self.anchors:
            self.refuse(
                f"alias {shown('*' + name)} names no anchor above it",
                line,
                "write &name before the value that *name repeats",
            )
        node = self.anchors[name]
        if node is None:
            self.refuse(f"alias {shown('*' + name)} stands inside its own anchor", line, "write the value out")
        return _Node(node.content, line + 1)

    def content(self, event: Any, depth: int, line: int) -> Scalar | list[_Node] | dict[str, _Node]:
        match event:
            case ScalarEvent():
                return self.scalar(event, line)
            case SequenceStartEvent():
                items: list[_Node] = []
                while not isinstance(item := next(self.events), SequenceEndEvent):
                    items.append(self.node(item, depth + 1))
                return items
            case MappingStartEvent():
                return self.mapping(depth)
            case _:
                self.refuse(f"unexpected {type(event).__name__}", line, "write plain values")

    def mapping(self, depth: int) -> dict[str, _Node]:
        entries: dict[str, _Node] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self.node(event, depth + 1)
            name, line = key.content, key.line - 1
            if isinstance(name, (list, dict)):
                self.refuse(f"{kind(name)} can't be a key", line, "keys are names: 'key: value'")
            if not isinstance(name, str):
                said = shown(name) if name is not None else "null"
                self.refuse(f"key {said} is {kind(name)}, not a name", line, f'put it in quotes: "{said}"')
            if name in entries:
                first = entries[name].line
                self.refuse(f"key {shown(name)} stands twice, first on line {first}", line, "remove one of the two")
            # The key is entered before its value is read, so that the first of two equal keys is reported.
            entries[name] = _Node(self.node(next(self.events), depth + 1).content, key.line)
        return entries

    def scalar(self, event: Any, line: int) -> Scalar:
        text: str = event.value
        tag = str(event.ctag) if event.ctag is not None else None
        if event.style is not None or tag == _CORE + "str":
            try:
                return text.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON writes pairs: "\ud835\udd38"
            except UnicodeDecodeError:
                self.refuse(f"text {shown(text)} has half a surrogate pair", line, "write the character itself")
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            return self.integer(text, line)
        if _FLOAT.fullmatch(text):
            return float(text)
        if _SPECIAL.fullmatch(text):
            return float(text.replace(".", ""))
        return text

    def integer(self, text: str, line: int) -> int:
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        digits = text.lstrip("+-").removeprefix("0o").removeprefix("0x").lstrip("0") or "0"
        number = int(digits, base) if len(digits) < 24 else 2**63
        if number >= 2**63:
            self.refuse(f"{shown(text)} doesn't fit in 64 bits", line, "a number below 2**63")
        return -number if text.startswith("-") else number

    def check_tag(self, event: Any, node: _Node, line: int) -> None:
        """Only the core schema's tags, and only on values of their kind."""
        if event.ctag is None:
            return
        tag = str(event.ctag)
        said = shown(tag.replace(_CORE, "!!"))
        if tag not in _TAGGED:
            self.refuse(f"tag {said} is not allowed", line, "write the plain value without a tag")
        if type(node.content) is not _TAGGED[tag]:
            self.refuse(f"tag {said} on {kind(node.content)}", line, "write the plain value without a tag")


class _Copier:
    """Turns nodes into plain data: copies aliases, and notes the line of every key path."""

    def __init__(self, lines: dict[KeyPath, int], file: str, most: int) -> None:
        self.lines, self.file, self.most, self.left = lines, file, most, most

    def value(self, node: _Node, path: KeyPath) -> Value:
        self.left -= 1
        if self.left < 0 or len(path) > MAX_DEPTH:
            fact = f"more than {self.most} values or {MAX_DEPTH} levels, aliases written out"
            raise InputError(fact, where=f"{self.file}:{node.line}", hint="a layer file has about 50 values")
        self.lines[path] = node.line
        match node.content:
            case list():
                return [self.value(item, (*path, i)) for i, item in enumerate(node.content)]
            case dict():
                return {key: self.value(item, (*path, key)) for key, item in node.content.items()}
            case _:
                return node.content
