"""Lines of a package's functions: rows that have one, what is written where it is read, and how long names keep values.

A function's frame keeps what it names until it returns, whether autograd wants it or not.
"""

from __future__ import annotations

from collections import Counter

from convgen.operations.batch_norm import Centred
from convgen.operations.calls import Elementwise, Slot
from convgen.operations.contraction import Contraction
from convgen.operations.convolution import Convolution
from convgen.operations.pointwise import Pointwise
from convgen.operations.transposed import TransposedConvolution
from convgen.program.blocks import Block, blocks
from convgen.program.network import Program
from convgen.program.norms import norms
from convgen.program.rows import PlacedRow

TORCH = frozenset({"relu", "sigmoid", "tanh", "exp", "sqrt", "square"})
SIGNS = {"add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/"}


class Lines:
    """Of a program.

    Attributes:
        norms: batch norms by the number of the row whose line they are; `gone`: rows that have none.
        readers: of each value, how many.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.norms, self.gone = norms(program)
        self.readers = Counter(v for row in program.rows for v in row.bound.reads)
        self.makers = {v: i for i, row in enumerate(program.rows) for v in row.bound.makes if v}
        self.outputs = {v for _, v in program.outputs}
        self.last = {v: i for i, row in enumerate(program.rows) for v in row.bound.reads}  # that reads it

    def parts(self, i: int) -> tuple[int, ...]:
        """Rows that a line is of."""
        norm = self.norms.get(i)
        return (i,) if norm is None else norm.rows

    def functions(self) -> list[tuple[Block, list[int]]]:
        """Of each the rows that have lines."""
        shown = [i for i in range(len(self.program.rows)) if i not in self.gone]
        found = blocks([self.program.rows[i].bound.module for i in shown])
        return [(block, shown[block.start : block.stop]) for block in found]

    def stop(self, numbers: list[int]) -> int:
        """Behind the last row of these lines."""
        return max(n for i in numbers for n in self.parts(i)) + 1

    def leaves(self, value: str, stop: int) -> bool:
        """Whether a value is read behind its function."""
        return value in self.outputs or self.last.get(value, -1) >= stop

    def named_until(self) -> dict[str, int]:
        """Of values with names, the number of the last row of the function that keeps them."""
        found: dict[str, int] = {}
        for block, numbers in self.functions():
            stop = self.stop(numbers)
            for i in numbers:
                row = self.program.rows[self.norms[i].centred if i in self.norms else i]
                for value in row.bound.makes if not self.is_operand(i) else ():
                    inside = block.path and not self.leaves(value, stop)
                    found[value] = stop - 1 if inside else len(self.program.rows) - 1
        return found

    def is_operand(self, i: int) -> bool:
        """Whether a row is written where it is read: a product, of the bias that is added to it. It has no name, which
        would keep it as long as its function runs."""
        row, after = self.program.rows[i], self.program.rows[i + 1 : i + 2]
        if not after or not isinstance(row.bound.operation, Contraction | Convolution | TransposedConvolution):
            return False
        value, to = row.bound.makes[0], after[0].bound
        adds = isinstance(to.operation, Pointwise) and to.operation.function == "add" and to.reads[0] == value
        return adds and self.readers[value] == 1 and value not in self.outputs and to.module == row.bound.module

    def overwrites(self, i: int) -> bool:
        """Whether a row's result takes its first operand's place."""
        row = self.program.rows[i]
        operation = row.bound.operation
        if not isinstance(operation, Elementwise) or not is_plain(row):
            return False
        return (operation.op == "add.Tensor" or operation.name == "relu") and self.may_be_overwritten(i)

    def may_be_overwritten(self, i: int) -> bool:
        """Whether nothing but this row needs its first operand: no other reader, and its maker's gradient neither."""
        value = next(iter(self.program.rows[i].bound.reads), "")
        if self.readers.get(value) != 1 or value in self.outputs:
            return False
        maker = self.makers.get(value)
        if maker is None or self.again(maker) != self.again(i):  # a block that is computed again keeps what it takes
            return False
        row = self.program.rows[maker]
        if any(row.store):  # a slice of what was made is a view, which autograd keeps whole
            return False
        added = (
            is_plain(row) and isinstance(row.bound.operation, Elementwise) and row.bound.operation.op == "add.Tensor"
        )
        return added or (
            isinstance(row.bound.operation, Centred) and any(n.centred == maker for n in self.norms.values())
        )

    def again(self, i: int) -> str:
        """The block that a row is computed again with."""
        return next((s.path for s in self.program.again if s.start <= i < s.stop), "")


def is_plain(row: PlacedRow) -> bool:
    """Whether a row is one of a few that read like Python."""
    operation = row.bound.operation
    if not isinstance(operation, Elementwise) or not row.is_silent or operation.shape == ():
        return False
    if any(s != operation.shape for s in operation.shapes):
        return False
    if operation.op in SIGNS:
        return operation.args[:2] == (Slot(0), Slot(1)) and operation.args[2:] in ((), (1,))
    return operation.name in TORCH and operation.args == (Slot(0),)
