"""`chunk-collectives`: a gather before a convolution, or a scatter behind it, travels by chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.operations.running import PartStatistics
from convgen.passes.contract import NetworkPass
from convgen.program.chunks import in_chunks
from convgen.program.network import Program, label
from convgen.program.rows import PlacedRow


@dataclass(frozen=True)
class ChunkCollectives(NetworkPass):
    """Cut rows along an index, so that one chunk travels while another is computed.

        %c.x = all_gather %x over=F                    start %c.x:1, start %c.x:2
        %c   = conv_forward %x, %w            --->     wait %c.x:1
                                                       %c = conv_forward %x, %w  (chunk 1 of 2)
                                                       wait %c.x:2
                                                       %c = conv_forward %x, %w  (chunk 2 of 2)

        %c = conv_forward %x, %w                       %c = conv_forward %x, %w  (chunk 1 of 2)
        %c = reduce_scatter %c over=C         --->     start %c:1
                                                       %c = conv_forward %x, %w  (chunk 2 of 2)
                                                       start %c:2; wait %c:1, wait %c:2

    In backward the last chunk comes first: its gradient is gathered, and its result is scattered behind the others.

    Needs:  conversions that are final.
    Sound:  chunks are blocks of a dimension of the result, which what moves leaves as it is. Each element is summed
        over the same ranks in the same order; only a filter's gradient, and rows that several chunks read, are added
        chunk by chunk.
    Leaves: sums of parameters' gradients and of running statistics, which buckets take; rows whose halo is early,
        gathers with other conversions before or behind them, and indices summed over.

    Args:
        count: how many chunks.
        index: the one that is cut; by default the one along which most can travel by chunks.
        only: labels of rows, with commas; all by default. `c.dx` is the row that makes the gradient of c's x.

    Source: [CF] 3.2, there future work.
    """

    name: ClassVar[str] = "chunk-collectives"

    count: int = 4
    index: str = ""
    only: str = ""

    def run(self, program: Program) -> Program:
        names = set(self.only.split(",")) if self.only else None
        rows = tuple(self._chunked(row, label(row), names, program) for row in program.rows)
        return program if rows == program.rows else replace(program, rows=rows)

    def _chunked(self, row: PlacedRow, name: str, names: set[str] | None, program: Program) -> PlacedRow:
        derived: list[tuple[int, PlacedRow]] = []
        for k, one in row.derived:
            of = f"{name}.d{row.signature.inputs[k].name}"
            derived.append((k, self._chunked(one, of, names, program)))
        if (names is None or name in names) and not isinstance(row.bound.operation, PartStatistics):
            parameters = {k for k, v in enumerate(row.bound.reads) if _is_parameter(program, v) and not row.fetch[k]}
            row = in_chunks(row, program.grid, self.count, self.index, parameters)
        return row if tuple(derived) == row.derived else replace(row, derived=tuple(derived))


def _is_parameter(program: Program, name: str) -> bool:
    """Whether a name is a parameter's. Gradients' rows name their operation's own operands, which never are."""
    return name in program.values and program.values[name].kind == "parameter"
