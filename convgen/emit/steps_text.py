"""Steps as a package's text lists them: by block of the source, with short names, so that equal blocks have equal
texts.

    ~0.x = fetch ~0.x ($1)         # exchange over=H : [N, *, H+(1,1), *]

`~` stands for the block; `$1`, `$2`, ... for other blocks' slots (templates/runtime/listing.py reads the text).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convgen.emit.literals import WIDTH, literal
from convgen.emit.names import identifier
from convgen.program.blocks import LONGEST, Block, blocks
from convgen.program.network import Program
from convgen.program.norms import norms
from convgen.program.steps import NOTHING, Lowered, Step

BASE = re.compile(r"\[[^\]]*\]|[^.:/']+")  # the value or the parameter in a slot's name
OF_STATE = ("update", "gradient")
COMMENTS = 60  # the column of comments, where lines are shorter


@dataclass
class StepBlock:
    """The steps of a block of the source; `rows`: the numbers of its rows."""

    path: str
    rows: list[int] = field(default_factory=list[int])
    forward: list[Step] = field(default_factory=list[Step])
    backward: list[Step] = field(default_factory=list[Step])


def by_block(program: Program, lowered: Lowered) -> list[StepBlock]:
    """The blocks, in forward's order; backward takes them in the opposite order, and steps keep their order in each.
    Steps behind all rows are a block of their own."""
    place = _places(program)
    found = [StepBlock(block.path) for block in place.blocks]
    for i, n in enumerate(place.of):
        found[n].rows.append(i)
    if any(step.row == len(program.rows) for step in (*lowered.forward, *lowered.backward)):
        found.append(StepBlock(""))
        place.of.append(len(found) - 1)
    least = len(found) - 1
    forward: list[int] = []
    for step in reversed(lowered.forward):  # a collective that is started ahead stands in the block where it starts
        least = min(least, place.of[step.row])
        forward.append(least)
    for step, n in zip(lowered.forward, reversed(forward), strict=True):
        found[n].forward.append(step)
    least = len(found) - 1
    for step in lowered.backward:
        least = min(least, place.of[step.row])
        found[least].backward.append(step)
    return found


@dataclass(frozen=True)
class _Places:
    blocks: list[Block]
    of: list[int]  # for each row, the number of its block


def _places(program: Program) -> _Places:
    modules = [row.bound.module for row in program.rows]
    _, others = norms(program)  # a batch norm is in the block of its first row
    counted = [i for i in range(len(modules)) if i not in others]
    functions = _merged(blocks([modules[i] for i in counted]))
    known = {i: n for n, block in enumerate(functions) for i in counted[block.start : block.stop]}
    of: list[int] = []
    for i, module in enumerate(modules):
        if i not in known:  # a batch norm's line stands for its rows
            behind = next((j for j in range(i + 1, len(modules)) if j in known and modules[j] == module), None)
            known[i] = known[behind] if behind is not None and (not of or known[behind] >= of[-1]) else of[-1]
        of.append(max(known[i], of[-1] if of else 0))
    return _Places(functions, of)


def _merged(found: Sequence[Block]) -> list[Block]:
    """The blocks, with neighbouring rows of the network's own forward merged into blocks of at most LONGEST rows."""
    merged: list[Block] = []
    for block in found:
        last = merged[-1] if merged else None
        if last is not None and last.path == block.path == "" and block.stop - last.start <= LONGEST:
            merged[-1] = Block("", last.start, block.stop)
        else:
            merged.append(block)
    return merged


class Names:
    """Names in a block's text.

    Attributes:
        outer: the slots for which `$1`, `$2`, ... stand; `labels`: rows' whole labels.
    """

    def __init__(self, path: str) -> None:
        self.path, self.start = path, f"{identifier(path)}_" if path else ""
        self.outer: list[str] = []
        self.labels: list[str] = []

    def slot(self, name: str) -> str:
        """The short name of a value's, a gradient's, a step's or a parameter's slot."""
        if not self.path or name == NOTHING:
            self.labels.append(name)
            return name
        if name.startswith(f"[{self.path}."):
            return f"[~{name[len(self.path) + 2 :]}"
        if name.startswith(self.start):
            return f"~{name[len(self.start) :]}"
        match = BASE.match(name)
        base = match[0] if match else name
        if base not in self.outer:
            self.outer.append(base)
        return f"${self.outer.index(base) + 1}{name[len(base) :]}"

    def module(self, name: str) -> str:
        """The short name of a module, a parameter or a buffer."""
        if self.path and f"{name}.".startswith(f"{self.path}."):
            return f"~{name[len(self.path) + 1 :]}"
        return name or NOTHING

    def line(self, step: Step, comment: str) -> str:
        makes, reads = (", ".join(map(self.slot, names)) for names in (step.makes, step.reads))
        key = self.module(step.key) if step.kind in OF_STATE else self.slot(step.key)
        text = f"{makes} = " * bool(makes) + f"{step.kind} {key} ({reads})"
        if step.when is not None:
            module, trains = step.when
            text += f" when {'training' if trains else 'evaluation'} {self.module(module)}"
        text += " again" * step.again
        return f"{text:<{COMMENTS}}  # {comment}" if comment else text


def wrapped(pairs: Sequence[str]) -> list[str]:
    """A dict's items, in lines that are not too long."""
    lines = ["    {"]
    for pair in pairs:
        if len(lines) > 1 and len(lines[-1]) + len(pair) < WIDTH - 3:
            lines[-1] += f" {pair},"
        else:
            lines.append(f"        {pair},")
    return [*lines, "    },"]


def section(rows: Mapping[str, str], forward: Sequence[str], backward: Sequence[str], norms: Sequence[str]) -> str:
    """The lines of a block's text, as a call of `Section`."""
    pairs = [f"{literal(label)}: {constant}" for label, constant in rows.items()]
    lines = ["Section(", *wrapped(pairs)]
    for steps in (forward, backward):
        lines += ['    """', *(f"    {step}" for step in steps), '    """,']
    if norms:
        lines += ["    (", *(f"        {norm}," for norm in norms), "    ),"]
    return "\n".join([*lines, ")"])
