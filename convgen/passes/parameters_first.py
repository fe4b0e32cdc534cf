"""`parameters-first`: a row makes its parameter's gradient before its other gradients, which then hide its sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.passes.contract import NetworkPass
from convgen.program.network import Program, label
from convgen.program.rows import PlacedRow, place_gradient, stored_by_name


@dataclass(frozen=True)
class ParametersFirst(NetworkPass):
    """Give gradients of parameters that are all-reduced rows of their own, which come before the vjp of the others.

        %c.dx, %c.dw = ... (one vjp)                   %c.dw = conv_backward_filter %x, %c.dy
        %c.dw = all_reduce %c.w over=N        --->     start %bucket_1 = all_reduce %c.dw over=N
                                                       %c.dx = ...                 (behind which it travels)

    Needs:  only the sum moves: nothing moves for what the gradient's row reads, nor for the other gradients. Buckets
        are packed later, as they start what is there.
    Sound:  the row is the phase of the operation that makes this gradient, on the same blocks.
    Leaves: rows in chunks, rows whose gradients all have rows of their own, and rows without another wanted gradient.

    Args:
        only: labels of rows, with commas; all by default.

    Source: docs/overlap.md; what is started first of a backward pass is hidden by what is left of it.
    """

    name: ClassVar[str] = "parameters-first"

    only: str = ""

    def run(self, program: Program) -> Program:
        names = self.only.split(",") if self.only else None
        rows = tuple(self._first(row, program) if names is None or label(row) in names else row for row in program.rows)
        return program if rows == program.rows else replace(program, rows=rows)

    def _first(self, row: PlacedRow, program: Program) -> PlacedRow:
        chosen = dict(ready(row, program))
        if not chosen:
            return row
        return replace(
            row,
            back=tuple(None if k in chosen else chain for k, chain in enumerate(row.back)),
            derived=tuple(sorted((*row.derived, *chosen.items()))),
        )


def ready(row: PlacedRow, program: Program) -> Iterator[tuple[int, PlacedRow]]:
    """Numbers of a row's operands that are parameters, with the rows that can make their gradients first."""
    bound, signature = row.bound, row.signature
    back = {k for k, chain in enumerate(row.back) if chain is not None}
    summed = [k for k in back if program.values[bound.reads[k]].kind == "parameter"]
    others = [k for k in back if k not in summed]
    if row.is_cut or any(row.given) or not others:
        return
    wanted = program.differentiable(of_inputs=True)
    if not any(bound.reads[k] in wanted and not row.back[k] for k in others):
        return
    stored = stored_by_name(signature, row.reads, row.makes)
    for k in summed:
        name, sums = signature.inputs[k].name, [(c.kind, c.over) for c in row.back[k] or ()]
        if [kind for kind, _ in sums] != ["all_reduce"] or name not in bound.operation.gradients:
            continue
        for way, own in enumerate(bound.operation.gradients[name].operation.signatures):
            roles = {i: axes for i, axes in row.roles if i in own.extent}
            if len(roles) != len(row.roles):
                continue
            one = place_gradient(bound, name, program.grid, way, roles, stored)
            if not any(one.fetch) and [(c.kind, c.over) for c in one.store[0]] == sums:
                yield k, one
                break
