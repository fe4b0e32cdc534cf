"""Rows that write their result over their first operand, as ranks do where nothing else needs it."""

from __future__ import annotations

from collections import Counter

from convgen.program.network import Program


def overwriting(program: Program) -> frozenset[int]:
    """Numbers of such rows: no other row reads the operand, nor does the gradient of the row that makes it
    (templates/runtime/actions.py, may_write_over).

    Where a GPU's norm does the steps behind it, backward reads the result of the last of these again, so that nothing
    is written over it (NormByKernels.reads_result); but not what that step reads: as many blocks stay.
    """
    readers = Counter(v for row in program.rows for v in row.bound.reads)
    makers = {v: i for i, row in enumerate(program.rows) for v in row.bound.makes if v}
    outputs = {v for _, v in program.outputs}
    again = {i: s.path for s in program.again for i in range(s.start, s.stop)}
    found: set[int] = set()
    for i, row in enumerate(program.rows):
        operation = row.bound.operation
        if not operation.writes_over or row.fetch[0]:
            continue
        value = row.bound.reads[0]
        maker = makers.get(value)
        if readers[value] != 1 or value in outputs or maker is None or again.get(maker) != again.get(i):
            continue
        before = program.rows[maker]
        if before.bound.operation.leaves_results and not any(before.store) and before.chunks is None:
            found.add(i)
    return frozenset(found)
