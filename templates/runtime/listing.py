"""A network's steps as its package has them: a text for each block of the source, forward and backward.

    ~0.x = fetch ~0.x ($1)
    ~0, ~0.kept = forward ~0 (~0.x, [~0.weight])

`~` stands for the block, `$1` for the first slot of others that it reads or makes, `[...]` for a parameter, buffer or
constant, `_` for what nobody reads. A step may be of a module's training or evaluation alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from .rows import Row

LINE = re.compile(r"(?:(.+?) = )?(\w+) (\S+) \(([^()]*)\)(?: when (training|evaluation) (\S+))?( again)?")
OUTER = re.compile(r"\$(\d+)")
NOTHING = "_"
OF_STATE = ("update", "gradient")  # steps whose key is a parameter, a buffer or an input
OF_ROWS = ("forward", "interior", "boundary", "chunk", "join", "vjp", "vjp_interior", "vjp_boundary", "vjp_chunk")
STEP_KINDS = frozenset(
    {
        *OF_STATE, *OF_ROWS, "vjp_join", "fetch", "store", "given", "back", "start", "start_back", "start_bucket",
        "send_fetch", "send_store", "send_given", "send_back", "wait", "wait_back", "wait_chunk", "wait_bucket", "add",
        "same", "fill",
    }
)  # fmt: skip


class Line(NamedTuple):
    """A step.

    Attributes:
        key: the row, conversion, buffer, parameter or input that the step belongs to.
        makes, reads: slots.
        when: a module, and whether the step runs in its training or in its evaluation; None where it runs in both.
        again: whether backward computes again what forward has computed.
    """

    kind: str
    key: str
    makes: tuple[str, ...]
    reads: tuple[str, ...]
    when: tuple[str, bool] | None
    again: bool


class Norm(NamedTuple):
    """A batch norm: the labels of its rows. Where nothing moves between these but moments and a gradient, their steps
    take few passes over memory.

    Attributes:
        renewed: the row that renews running statistics; `averaged`: with statistics by parts, the row that averages
            them for the running ones; `counted`: the row that counts batches.
    """

    module: str
    moments: str
    coefficients: str
    centred: str
    renewed: str
    averaged: str
    counted: str
    momentum: float
    eps: float


LABELS = ("moments", "coefficients", "centred", "renewed", "averaged", "counted")  # a norm's rows


class Within(NamedTuple):
    """A block of the source, by which the short names in its text become whole ones."""

    path: str
    start: str
    outer: tuple[str, ...]

    def slot(self, name: str) -> str:
        """The whole name of a value's, a gradient's or a parameter's slot."""
        if name.startswith("[~"):
            return f"[{self.module(name[1:-1])}]"
        if match := OUTER.match(name):
            return f"{self.outer[int(match[1]) - 1]}{name[match.end() :]}"
        return f"{self.start}{name[1:]}" if name.startswith("~") else name

    def module(self, name: str) -> str:
        """The whole name of a module, a parameter or a buffer."""
        if not name.startswith("~"):
            return "" if name == NOTHING else name
        return f"{self.path}.{name[1:]}".removesuffix(".")


class Section:
    """The steps that blocks of the source have alike."""

    def __init__(self, rows: Mapping[str, Row], forward: str, backward: str = "", norms: Sequence[Norm] = ()) -> None:
        self.rows, self.forward, self.backward, self.norms = rows, forward, backward, norms

    def at(self, path: str, *outer: str) -> tuple[Section, Within]:
        """These steps for the block that is the module at `path`.

        Args:
            outer: the slots that `$1`, `$2`, ... stand for.
        """
        return self, Within(path, re.sub(r"\W", "_", path) + "_" if path else "", outer)


class Steps:
    """A network's steps.

    Args:
        blocks: in the order of forward; backward takes them in the opposite order.
        outputs: by an output's name, its slot and its gradient's slot.

    Attributes:
        rows: the network's rows, by label.
        norms: the network's batch norms.
    """

    def __init__(self, blocks: Sequence[tuple[Section, Within]], outputs: Mapping[str, tuple[str, str]]) -> None:
        self.outputs = outputs
        self.forward = [line for block, names in blocks for line in lines_of(block.forward, names)]
        self.backward = [line for block, names in reversed(blocks) for line in lines_of(block.backward, names)]
        self.rows = {names.slot(label): row for block, names in blocks for label, row in block.rows.items()}
        self._refuse_disorder()
        self.norms = [
            n._replace(module=names.module(n.module), **{role: names.slot(getattr(n, role)) for role in LABELS})
            for block, names in blocks
            for n in block.norms
        ]

    def _refuse_disorder(self) -> None:
        """Refuse an edited list in which a step reads what no step before it makes, or two make one slot."""
        outputs = {of for _, of in self.outputs.values()}
        labels = {*self.rows} | {f"{label}.d" for label, row in self.rows.items() if row.derived}
        for line in (*self.forward, *self.backward):
            of = line.key.partition(":")[0]
            if line.kind in OF_ROWS and of not in labels and f"{of.rpartition('.d')[0]}.d" not in labels:
                raise ValueError(f"step {said(line)}: there is no row {of}")
        every = {n for line in (*self.forward, *self.backward) for n in line.makes} | outputs
        modes: tuple[tuple[bool, Callable[[str], bool]], ...] = ((True, lambda _: True), (False, lambda _: False))
        for training, trains in modes:
            made = {NOTHING}
            for lines, given in ((self.forward, set[str]()), (self.backward, outputs)):
                made |= given
                for line in in_mode(lines, trains):
                    late = [n for n in line.reads if n in every and n not in made]
                    twice = [n for n in line.makes if n in made and n != NOTHING]
                    if late and (training or line.kind != "add"):  # in evaluation some gradients have no addend
                        raise ValueError(f"step {said(line)}: no step before it makes {', '.join(late)}")
                    if twice:
                        raise ValueError(f"step {said(line)}: a step before it makes {', '.join(twice)}")
                    made |= {*line.makes}


def said(line: Line) -> str:
    """A step's text with whole names, for messages."""
    makes = f"{', '.join(line.makes)} = " * bool(line.makes)
    return f"{makes}{line.kind} {line.key} ({', '.join(line.reads)})"


def in_mode(lines: Sequence[Line], trains: Callable[[str], bool]) -> list[Line]:
    """The steps that run in the modules' present modes.

    Args:
        trains: says of a module whether it is in training.
    """
    run = [line for line in lines if line.when is None or trains(line.when[0]) == line.when[1]]
    missing = {n for line in lines for n in line.makes}.difference(*(line.makes for line in run))
    return [*_with_fewer(run, missing)] if missing else run


def _with_fewer(lines: Sequence[Line], missing: Collection[str]) -> Iterator[Line]:
    """The steps, where buckets have only the slots that are made in this mode."""
    there: dict[str, list[bool]] = {}
    for line in lines:
        if line.kind == "start_bucket":
            found = there[line.makes[0]] = [n not in missing for n in line.reads]
            line = line._replace(reads=tuple(compress(line.reads, found)))
        elif line.kind == "wait_bucket":
            line = line._replace(makes=tuple(compress(line.makes, there[line.reads[0]])))
        if line.kind not in ("start_bucket", "wait_bucket") or (line.reads and line.makes):
            yield line


def lines_of(text: str, names: Within) -> Iterator[Line]:
    """The steps that a block's text lists."""
    for raw in text.splitlines():
        line = " ".join(raw.split("#")[0].split())
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"cannot read the step {line!r}; steps are like: a, b = forward row (x, y)")
        makes, kind, key, reads, mode, module, again = match.groups()
        if kind not in STEP_KINDS:
            raise ValueError(f"step {line!r}: there is no kind {kind}; kinds are {', '.join(sorted(STEP_KINDS))}")
        key = names.module(key) if kind in OF_STATE else names.slot(key)
        when = None if mode is None else (names.module(module), mode == "training")
        made, read = ([names.slot(n) for n in (text or "").split(", ") if n] for text in (makes, reads))
        yield Line(kind, key, tuple(made), tuple(read), when, bool(again))
