"""Blocks of a network that backward computes again: forward keeps what they read, and nothing inside of them.

A block is a function of the package (blocks.py). What forward moves in it, backward moves again where it comes to the
block, in the same order on all ranks; buffers keep what the first time made of them.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; [SP] VI leaves it out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from convgen.errors import InputError
from convgen.program.blocks import blocks
from convgen.program.network import Program, Stretch
from convgen.program.norms import norms
from convgen.spec.names import did_you_mean


def stretches(program: Program) -> tuple[Stretch, ...]:
    """The functions of a program's package as stretches of rows, each with its module of the source."""
    known, gone = norms(program)
    shown = [i for i in range(len(program.rows)) if i not in gone]

    def parts(i: int) -> Sequence[int]:
        norm = known.get(i)
        return (i,) if norm is None else norm.rows

    found: list[Stretch] = []
    for block in blocks([program.rows[i].bound.module for i in shown]):
        numbers = [n for i in shown[block.start : block.stop] for n in parts(i)]
        if block.path:
            found.append(Stretch(block.path, min(numbers), max(numbers) + 1))
    return tuple(found)


def with_again(program: Program, paths: Collection[str]) -> Program:
    """The program that computes these blocks again, each whole.

    Args:
        paths: modules of the source; of one that holds several blocks, all of them.
    Raises:
        InputError: the network has no such block.
    """
    known = stretches(program) if paths else ()
    chosen: list[Stretch] = []
    for path in paths:
        inside = [s for s in known if s.path == path or s.path.startswith(f"{path}.")]
        if not inside:
            there = [s.path for s in known]
            hint = did_you_mean(path, there, ", ".join(there) if there else "none: every row stands alone")
            raise InputError(f"{program.name} has no block {path!r} to compute again", ("again",), hint=hint)
        chosen += inside
    return replace(program, again=tuple(s for s in known if s in chosen))
