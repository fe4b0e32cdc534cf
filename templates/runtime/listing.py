"""A network's steps as its package has them: a text for each block of the source, forward and backward.

    ~0.x = fetch ~0.x ($1)
    ~0, ~0.kept = forward ~0 (~0.x, [~0.weight])

`~` stands for the block, `$1` for the first slot of others that it reads or makes, `[...]` for a parameter, buffer or
constant, `_` for what nobody reads. A step may be of a module's training or evaluation alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .rows import Row

LINE = re.compile(r"(?:(.+?) = )?(\w+) (\S+) \(([^()]*)\)(?: when (training|evaluation) (\S+))?( again)?")
OUTER = re.compile(r"\$(\d+)")
NOTHING = "_"
OF_STATE = ("update", "gradient")  # steps whose key is a parameter, a buffer or an input


class Line(NamedTuple):
    """A step.

    Attributes:
        key: the row, conversion, buffer, parameter or input that it is of.
        makes, reads: slots.
        when: a module, and whether the step is of its training or of its evaluation; None for both.
        again: whether backward computes again what forward has computed.
    """

    kind: str
    key: str
    makes: tuple[str, ...]
    reads: tuple[str, ...]
    when: tuple[str, bool] | None
    again: bool


class Norm(NamedTuple):
    """A batch norm: the labels of its rows, which are computed with few passes over memory where nothing moves between
    them but moments and a gradient.

    Attributes:
        renewed: of running statistics; `averaged`: of statistics by parts, what averages them for these; `counted`: of
            how many batches there were.
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


LABELS = ("moments", "coefficients", "centred", "renewed", "averaged", "counted")  # of a norm's rows


class Within(NamedTuple):
    """A block of the source: how the names of its text read."""

    path: str
    start: str
    outer: tuple[str, ...]

    def slot(self, name: str) -> str:
        """Of a value, a gradient, or a parameter."""
        if name.startswith("[~"):
            return f"[{self.module(name[1:-1])}]"
        if match := OUTER.match(name):
            return f"{self.outer[int(match[1]) - 1]}{name[match.end() :]}"
        return f"{self.start}{name[1:]}" if name.startswith("~") else name

    def module(self, name: str) -> str:
        """Of a module, a parameter or a buffer."""
        if not name.startswith("~"):
            return "" if name == NOTHING else name
        return f"{self.path}.{name[1:]}".removesuffix(".")


class Section:
    """The steps of blocks of the source that are alike."""

    def __init__(self, rows: Mapping[str, Row], forward: str, backward: str = "", norms: Sequence[Norm] = ()) -> None:
        self.rows, self.forward, self.backward, self.norms = rows, forward, backward, norms

    def at(self, path: str, *outer: str) -> tuple[Section, Within]:
        """The block of a module of the source.

        Args:
            outer: names of `$1`, `$2`, ...
        """
        return self, Within(path, re.sub(r"\W", "_", path) + "_" if path else "", outer)


class Steps:
    """A network's steps.

    Args:
        blocks: in the order of forward; backward comes to them in the opposite one.
        outputs: by name the slot, and that of its gradient.

    Attributes:
        rows: by label.
        norms: batch norms.
    """

    def __init__(self, blocks: Sequence[tuple[Section, Within]], outputs: Mapping[str, tuple[str, str]]) -> None:
        self.outputs = outputs
        self.forward = [line for block, names in blocks for line in lines_of(block.forward, names)]
        self.backward = [line for block, names in reversed(blocks) for line in lines_of(block.backward, names)]
        self.rows = {names.slot(label): row for block, names in blocks for label, row in block.rows.items()}
        self.norms = [
            n._replace(module=names.module(n.module), **{role: names.slot(getattr(n, role)) for role in LABELS})
            for block, names in blocks
            for n in block.norms
        ]


def lines_of(text: str, names: Within) -> Iterator[Line]:
    """The steps of a block's text."""
    for raw in text.splitlines():
        line = " ".join(raw.split("#")[0].split())
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"cannot read the step {line!r}; steps are like: a, b = forward row (x, y)")
        makes, kind, key, reads, mode, module, again = match.groups()
        key = names.module(key) if kind in OF_STATE else names.slot(key)
        when = None if mode is None else (names.module(module), mode == "training")
        made, read = ([names.slot(n) for n in (text or "").split(", ") if n] for text in (makes, reads))
        yield Line(kind, key, tuple(made), tuple(read), when, bool(again))
