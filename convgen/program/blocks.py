"""Which rows of a network are one function: the source's modules, as far down as a screen holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONGEST = 36  # rows of a function


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop), a module of the source by its path; "" for rows of the network's own function."""

    path: str
    start: int
    stop: int


def blocks(modules: Sequence[str]) -> list[Block]:
    """From each row's module, in order, to the largest modules whose rows are few and side by side."""
    found: list[Block] = []
    _split(modules, 0, len(modules), "", found)
    return found


def _split(modules: Sequence[str], start: int, stop: int, inside: str, found: list[Block]) -> None:
    depth = len(inside.split(".")) if inside else 0
    runs = _runs([_prefix(m, depth + 1) for m in modules[start:stop]])
    several = {name for name, count in _counted(runs).items() if count > 1}
    at = start
    for name, count in runs:
        here = modules[at : at + count]
        if name == inside or name in several or all(m == name for m in here):
            found.append(Block("", at, at + count))
        elif count > LONGEST or _holds_blocks(here, name):
            _split(modules, at, at + count, name, found)
        else:
            found.append(Block(name, at, at + count))
        at += count


def _holds_blocks(modules: Sequence[str], name: str) -> bool:
    """Whether a module only holds others, and several of these are more than a line."""
    depth = len(name.split("."))
    children = _runs([_prefix(m, depth + 1) for m in modules])
    return all(child != name for child, _ in children) and sum(count > 2 for _, count in children) > 1


def _prefix(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs


def _counted(runs: Sequence[tuple[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for name, _ in runs:
        found[name] = found.get(name, 0) + 1
    return found
