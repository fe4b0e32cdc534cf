"""The class Bound: an operation of a network, bound to values."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.operations.row import Operation


@dataclass(frozen=True)
class Bound:
    """An operation with the values that it reads and makes.

    Attributes:
        reads, makes: names of values, in the order of its signatures' operands and results; a result that nobody reads
            is "".
        module: the source's module, for messages.
        norm: for a batch norm's row, the norm to which it belongs.
        autocast: for each operand, how torch.autocast takes it (spec/autocast.py); () if all are taken as they are.
    """

    operation: Operation
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    module: str = ""
    norm: str = ""
    autocast: tuple[str, ...] = ()
