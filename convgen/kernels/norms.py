"""Kernels of a network's batch norms on a GPU: a file for each chain of steps behind one, from the steps' own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgen.kernels.environment import environment
from convgen.kernels.epilogues import lines, operands
from convgen.operations.batch_norm import IMAGES, Centred, chain_of, steps_behind
from convgen.operations.row import Epilogue, Operation
from convgen.program.network import Program


@dataclass(frozen=True)
class NormFile:
    """A file of kernels of norms.

    Attributes:
        steps: that are done with what is normalised before it is written.
        back: Triton's text of the gradient of what the last of them reads, of the result's gradient {x} and the
            result {0}; nothing where there are no steps.
        name: of the file; said: the steps' names.
    """

    name: str
    steps: Epilogue
    back: str
    said: str

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
                said=self.said,
            )
        )


def _no_vector(name: str, n: int) -> str:
    raise AssertionError("a norm's steps read no vectors")


def norm_files(program: Program) -> tuple[NormFile, ...]:
    """Of a program's batch norms of images and volumes, those that are alike once."""
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

    chains: dict[Epilogue, tuple[str, str]] = {}
    for row in program.rows:
        operation = row.bound.operation
        if isinstance(operation, Centred) and len(operation.of.shape) in IMAGES:
            chains.setdefault((), ("", ""))
            if behind := steps_behind(row.bound.makes[0], reader):
                chains.setdefault(*_chain(behind))
    return tuple(NormFile(f"norm_{n}", steps, *of) for n, (steps, of) in enumerate(chains.items(), 1))


def _chain(behind: Sequence[tuple[int, Operation, int]]) -> tuple[Epilogue, tuple[str, str]]:
    last = behind[-1][1].back_of_result()
    assert last is not None
    names = [operation.name for _, operation, _ in behind if not operation.casts_to]
    return chain_of(behind), (last.text, " and ".join(names))
