"""Kernels of a network's batch, group and instance norms on a GPU: a file for each chain of steps behind one, from the
steps' own text."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.kernels.environment import environment
from convgen.kernels.epilogues import lines, no_vector, operands
from convgen.kernels.prologues import Before
from convgen.operations.batch_norm import Coefficients, back_behind, chain_of
from convgen.operations.row import Epilogue, Prologue
from convgen.program.behind_norms import Steps, behind_batch_norms, behind_norms, readers_of
from convgen.program.network import Program, label
from convgen.program.nodes import Phase


@dataclass(frozen=True)
class NormFile:
    """A file of kernels of norms.

    Attributes:
        steps: those done on the normalised value before it is written.
        back: Triton's text of the gradient of what the last step reads, from the result's gradient {x} and {0}: the
            result, or what the step reads if `of_input` says so. "" without steps.
        name: the file's; said: the steps' names.
    """

    name: str
    steps: Epilogue
    back: str
    said: str
    of_input: bool = False

    @property
    def text(self) -> str:
        made = lines(self.steps, lambda name: f"tl.load({name} + at, mask=there, other=0.0).to(WIDE)", no_vector, "")
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


def norm_files(program: Program) -> tuple[NormFile, ...]:
    """Files for a program's batch, group and instance norms of images and volumes; norms that are alike share one."""
    chains: dict[Epilogue, tuple[str, str, bool]] = {}
    for _, behind in behind_norms(program):
        chains.setdefault((), ("", "", False))
        if behind:
            chains.setdefault(*_chain(behind))
    return tuple(NormFile(f"norm_{n}", steps, *of) for n, (steps, of) in enumerate(chains.items(), 1))


def _chain(behind: Steps) -> tuple[Epilogue, tuple[str, str, bool]]:
    last, names = behind[-1][1], [operation.name for _, operation, _ in behind if not operation.casts_to]
    back = back_behind(last, len(names) - 1)
    assert back is not None
    return chain_of(behind), (back.text, " and ".join(names), last.back_of_result() is None)


def last_steps(program: Program) -> dict[str, dict[Phase, Before]]:
    """By label of a convolution and by phase, the batch norm's last step that its kernel can do: forward, that of the
    norm whose result it is the first to read; backward, that of the norm that alone reads its result."""
    readers, outputs = readers_of(program), {value for _, value in program.outputs}
    makers = {value: row for row in program.rows for value in row.bound.makes}
    found: dict[str, dict[Phase, Before]] = {}
    taken: set[int] = set()  # the rows that norms before this one do
    nothing: Steps = ()
    for centred, there in behind_batch_norms(program):
        behind = nothing if any(i in taken for i, _, _ in there) else there
        taken |= {i for i, _, _ in behind}
        coefficients = makers[centred.bound.reads[1]].bound.operation
        if not (isinstance(coefficients, Coefficients) and coefficients.weight and coefficients.bias):
            continue
        chain, (back, _, of_input) = _chain(behind) if behind else ((), ("", "", False))
        value = (program.rows[behind[-1][0]] if behind else centred).bound.makes[0]
        for i in readers.get(value, [])[:1]:
            first = program.rows[i]
            if first.bound.reads[0] == value and not (first.fetch[0] or first.is_cut):
                found.setdefault(label(first), {})["forward"] = Before(Prologue(False, chain))
        x = centred.bound.reads[0]
        own = all(program.rows[i].bound.norm == centred.bound.norm for i in readers[x])
        if (maker := makers.get(x)) is None or not own or x in outputs:
            continue
        if not (maker.given[0] or maker.store[0] or maker.is_cut):
            before = Before(Prologue(True, chain), back, of_input) if len(chain) == 1 else Before(Prologue(True, ()))
            found.setdefault(label(maker), {})["backward_data"] = before
    return found
