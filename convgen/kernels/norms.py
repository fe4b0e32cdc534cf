"""Kernels of a network's batch, group and instance norms on a GPU: a file for each chain of steps behind one, from the
steps' own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.kernels.environment import environment
from convgen.kernels.epilogues import lines, operands
from convgen.operations.batch_norm import IMAGES, Centred, back_behind, chain_of, steps_behind
from convgen.operations.group_norms import is_by_group, rows_behind
from convgen.operations.moments import Normalise
from convgen.operations.row import Epilogue, Operation
from convgen.program.network import Program


@dataclass(frozen=True)
class NormFile:
    """A file of kernels of norms.

    Attributes:
        steps: that are done with what is normalised before it is written.
        back: Triton's text of the gradient of what the last of them reads, of the result's gradient {x} and {0}, the
            result; or what the step reads, where `of_input` says so. Nothing where there are no steps.
        name: of the file; said: the steps' names.
    """

    name: str
    steps: Epilogue
    back: str
    said: str
    of_input: bool = False

    @property
    def text(self) -> str:
        made = lines(self.steps, lambda name: f"tl.load({name} + at, mask=there, other=0.0).to(WIDE)", _no_vector, "")
        return (
            environment()
            .get_template("kernels/norm.py.jinja")
            .render(
                made=made,
                others=[name for name, _ in operands(self.steps)],
                back=self.back.format("acc", x="g"),
                reads_result=len(self.steps) > 1,
                reads_input=self.of_input,
                said=self.said,
            )
        )


def _no_vector(name: str, n: int) -> str:
    raise AssertionError("a norm's steps read no vectors")


def norm_files(program: Program) -> tuple[NormFile, ...]:
    """Of a program's batch, group and instance norms of images and volumes, those that are alike once."""
    readers: dict[str, list[int]] = {}
    for i, row in enumerate(program.rows):
        for value in dict.fromkeys(row.bound.reads):
            readers.setdefault(value, []).append(i)

    def reader(value: str) -> tuple[int, Operation, Sequence[str], str] | None:
        there = readers.get(value, [])
        if len(there) != 1:
            return None
        bound = program.rows[there[0]].bound
        return there[0], bound.operation, bound.reads, bound.makes[0]

    makers = {value: row.bound.operation for row in program.rows for value in row.bound.makes}
    chains: dict[Epilogue, tuple[str, str, bool]] = {}
    for row in program.rows:
        operation = row.bound.operation
        if isinstance(operation, Normalise) and is_by_group(makers.get(row.bound.reads[1]), operation):
            chains.setdefault((), ("", "", False))
            if (last := rows_behind(operation.of, row.bound.makes[0], reader).activation) is not None:
                chains.setdefault(*_chain([(*last, 0)]))
        if isinstance(operation, Centred) and len(operation.of.shape) in IMAGES:
            chains.setdefault((), ("", "", False))
            if behind := steps_behind(row.bound.makes[0], reader):
                chains.setdefault(*_chain(behind))
    return tuple(NormFile(f"norm_{n}", steps, *of) for n, (steps, of) in enumerate(chains.items(), 1))


def _chain(behind: Sequence[tuple[int, Operation, int]]) -> tuple[Epilogue, tuple[str, str, bool]]:
    last, names = behind[-1][1], [operation.name for _, operation, _ in behind if not operation.casts_to]
    back = back_behind(last, len(names) - 1)
    assert back is not None
    return chain_of(behind), (back.text, " and ".join(names), last.back_of_result() is None)
