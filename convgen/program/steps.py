"""A network's program as the list of steps that its ranks run, forward and backward.

    makes = kind key (reads)

| kind | a rank | reads |
|---|---|---|
| forward | computes its part of a row, or of a gradient's row | operands, as they were fetched |
| interior, boundary | computes a piece of it | operands; strips, the interior's result and operands |
| chunk, join | computes a chunk of it; puts chunks together | what has come, operands; chunks |
| vjp, vjp_interior, vjp_boundary, vjp_chunk, vjp_join | computes local code's gradients | what is kept, gradients |
| fetch, store, given, back | converts an operand, a result, a result's gradient, an operand's, and waits | it |
| start, start_back, send_fetch, send_store, send_given, send_back, start_bucket | sends something on its way | it |
| wait, wait_back, wait_chunk, wait_bucket | waits for it | what start has made |
| add | adds gradients of one value | both |
| same, fill | passes a value on; fills it with a number | it |
| update | renews a buffer | its new value |
| gradient | hands a gradient to the caller | it |

A slot has one maker. `_` is a value that nobody reads, or none. A step may be of training alone, or of evaluation.

Source: docs/design.md, A step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convgen.program.flow import Flow

Kind = Literal[
    "forward", "interior", "boundary", "chunk", "join", "vjp", "vjp_interior", "vjp_boundary", "vjp_chunk", "vjp_join",
    "fetch", "store", "given", "back", "start", "start_back", "send_fetch", "send_store", "send_given", "send_back",
    "start_bucket", "wait", "wait_back", "wait_chunk", "wait_bucket",
    "add", "same", "fill", "update", "gradient",
]  # fmt: skip
NOTHING = "_"


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the list.

    Attributes:
        key: a row's label, or the name of a conversion, a buffer, a parameter or an input.
        makes, reads: slots.
        row: number of the row at whose place it stands; behind all rows, their count.
        when: the module whose mode decides, and whether the step is of training; None for a step of both modes.
        flow: the same step in the order that prices and the verifier read; None for steps that they don't count.
        again: whether backward computes again what forward has computed.
    """

    kind: Kind
    key: str
    makes: tuple[str, ...]
    reads: tuple[str, ...]
    row: int
    when: tuple[str, bool] | None = None
    flow: Flow | None = None
    again: bool = False

    @property
    def head(self) -> str:
        """What it makes, its kind and its key, for messages."""
        makes = f"{', '.join(self.makes)} = " * bool(self.makes)
        return f"{makes}{self.kind} {self.key}"


@dataclass(frozen=True)
class Lowered:
    """A program's steps.

    Attributes:
        outputs: names of outputs, with the slot of each and that of its gradient.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    outputs: tuple[tuple[str, str, str], ...]


def state_slot(name: str) -> str:
    """The slot of a parameter, a buffer or a constant."""
    return f"[{name}]"
