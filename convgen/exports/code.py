"""What code reads, by its bytecode: globals and imports with the attributes behind them, and names of attributes."""

from __future__ import annotations

import dis
import hashlib
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple


class Unknown(Exception):
    """Something on which an export may depend can't be judged; the text says why."""


class Chain(NamedTuple):
    """A global name, or an import within a function, with the attributes that are read from it one after the other.

    Args:
        level: for an import, how many packages up it begins; None: `name` is a global.
        part: for an import, the name that `from` takes.
    """

    name: str
    attributes: tuple[str, ...]
    level: int | None = None
    part: str = ""


@dataclass
class Reads:
    """What a function's code, and all code within it, may read.

    Args:
        digest: the hash of what the code does, without comments, line numbers and file names.
        names: all attributes for which it asks by name, of any object.
    """

    digest: str = ""
    chains: list[Chain] = field(default_factory=list[Chain])
    names: set[str] = field(default_factory=set[str])


def reads_of(code: CodeType) -> Reads:
    """What a code object reads. Raises Unknown: it imports a name that isn't known."""
    known = _known.get(code)
    if known is None:
        known = Reads(digest_of(code))
        _read(code, {}, known)
        _known[code] = known
    return known


_known: dict[CodeType, Reads] = {}


def names_of(code: CodeType) -> set[str]:
    """All names for which code asks."""
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_of(constant)
    return found


def digest_of(code: CodeType) -> str:
    facts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_name)
    said = (*facts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_exceptiontable)
    digest = hashlib.sha256(repr(said).encode() + code.co_code)
    for constant in code.co_consts:
        digest.update(_constant(constant).encode() + b"\0")
    return digest.hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return digest_of(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return f"{type(value).__name__} {value!r}"


Bound = dict[str, list[tuple[int, str, str]]]  # by variable, what is imported into it: level, module, part


def _read(code: CodeType, bound: Bound, found: Reads) -> None:
    found.names.update(code.co_names)
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("EXTENDED_ARG", "CACHE", "PRECALL", "NOP")]
    bound = {**bound}
    module: tuple[int, str] | None = None
    for k, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[k - 2].argval if k > 1 else None
            if not isinstance(level, int):
                raise Unknown(f"{code.co_name} imports {step.argval}")
            module = level, str(step.argval)
            after = steps[k + 1] if k + 1 < len(steps) else None
            if after is not None and after.opname.startswith("STORE_"):
                bound.setdefault(str(after.argval), []).append((*module, ""))
            elif after is None or after.opname not in ("IMPORT_FROM", "POP_TOP"):
                raise Unknown(f"{code.co_name} imports {step.argval}")
            found.chains.append(Chain(module[1], (), module[0], "\0"))
        elif step.opname == "IMPORT_FROM":
            after = steps[k + 1] if k + 1 < len(steps) else None
            if module is None or after is None or not after.opname.startswith("STORE_"):
                raise Unknown(f"{code.co_name} imports {step.argval}")
            bound.setdefault(str(after.argval), []).append((*module, str(step.argval)))
    for k, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            found.chains.append(Chain(str(step.argval), _behind(steps, k)))
        alone = not isinstance(step.argval, tuple)
        if step.opcode not in _VARIABLES or (
            alone and step.opname.startswith(("STORE_", "DELETE_", "LOAD_CLOSURE", "MAKE_CELL"))
        ):
            continue
        several: Any = (step.argval,) if alone else step.argval
        for name in several:
            for level, path, part in bound.get(name, ()):
                found.chains.append(Chain(path, _behind(steps, k) if alone else (), level, part))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _read(constant, bound, found)


_VARIABLES = frozenset((*dis.haslocal, *dis.hasfree))


def _behind(steps: list[Any], place: int) -> tuple[str, ...]:
    """The attributes that are read from a value as soon as it is loaded."""
    found: list[str] = []
    for step in steps[place + 1 :]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        found.append(str(step.argval))
    return tuple(found)
