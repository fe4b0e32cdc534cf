"""An operation of a network, bound to values."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.operations.row import Operation


@dataclass(frozen=True)
class Bound:
    """An operation with the values that it reads and makes.

    Attributes:
        reads, makes: names of values, as its signatures order operands and results; a result that nobody reads is "".
        module: of the source, for messages.
        norm: of a batch norm's rows, which one it is.
        autocast: by operand how torch.autocast takes it (spec/autocast.py); () if all are taken as they are.
    """

    operation: Operation
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    module: str = ""
    norm: str = ""
    autocast: tuple[str, ...] = ()
