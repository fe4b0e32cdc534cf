"""The programs that a rank's CPEs run for a phase, one after the other, and what each counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import Plan
from convgen.sw26010.conv.implicit_plan import ImplicitPlan, implicit_counts
from convgen.sw26010.conv.programs import columns_program, implicit_program
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.program import gemm_program
from convgen.sw26010.machine.core_group import LANES, REGISTER_COLUMNS, REGISTER_ROWS
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.target.plan import LocalPlan, plan_blocks
from convgen.sw26010.target.sums import sum_counts, sum_program
from convgen.sw26010.target.volume import AnyPlan

# Of a CPE's 32 registers the kernel takes those of a block of C, of A's vectors beside it and of B's elements above it.
KERNEL_REGISTERS = REGISTER_ROWS // LANES * REGISTER_COLUMNS + REGISTER_ROWS // LANES + REGISTER_COLUMNS


@dataclass(slots=True)
class CpeProgram:
    """A program, and the events of all its `runs` in one call of the module, on all core groups that run it."""

    name: str
    text: str
    config: dict[str, int]
    ldm_bytes: int
    registers: int | None = None
    runs: int = 0
    counts: Counts = field(default_factory=Counts)


def local_programs(plan: AnyPlan) -> tuple[CpeProgram, ...]:
    """The programs for one CPE, message by message, with the plans that the cost model chose; equal ones once."""
    if isinstance(plan, LocalPlan):
        return _of_two(plan)
    found: dict[str, CpeProgram] = {}
    for tap in plan.taps:
        adding = () if tap.add is None else (_add(plan.problem.phase, tap.add),)
        for program in (*_of_two(tap.plan), *adding):
            kept = found.setdefault(program.text, program)
            if kept is not program:
                kept.counts.add(program.counts)
                kept.runs += program.runs
    return tuple(found.values())


def _add(phase: Phase, stream: Stream) -> CpeProgram:
    program = CpeProgram(f"{phase}_add", stream.program(), {"piece": stream.piece}, stream.ldm_bytes, runs=1)
    program.counts = stream.cost()
    return program


def _of_two(plan: LocalPlan) -> tuple[CpeProgram, ...]:
    """Of a plan over two dimensions."""
    found: dict[str, CpeProgram] = {}
    for share in plan.shares:
        for program, counts, runs in _programs(share.choice.plan):
            kept = found.setdefault(program.text, program)
            kept.counts.add(counts, runs * plan.problem.groups)
            kept.runs += runs * plan.problem.groups
    if plan.sum is not None:
        config = {"groups": plan.sum.groups, "piece": plan.sum.piece}
        summing = CpeProgram("backward_filter_sum", sum_program(plan.sum), config, plan.sum.ldm_bytes, runs=1)
        summing.counts = sum_counts(plan.sum)
        found[summing.text] = summing
    return tuple(found.values())


def _programs(plan: Plan) -> list[tuple[CpeProgram, Counts, int]]:
    """In the order of running, with the events of a run and how often it runs."""
    if isinstance(plan, ImplicitPlan):
        text, name = implicit_program(plan, messages=True), f"{plan.phase}_implicit"
        program = CpeProgram(name, text, plan_blocks(plan), plan.ldm_bytes, KERNEL_REGISTERS)
        return [(program, implicit_counts(plan), 1)]
    multiplied: list[tuple[CpeProgram, Counts, int]] = []
    for gemm, times in plan.products:
        text, name = gemm_program(gemm, messages=True), f"{plan.phase}_gemm"
        program = CpeProgram(name, text, plan_blocks(plan), gemm.ldm_bytes, KERNEL_REGISTERS)
        multiplied.append((program, gemm_counts(gemm), times))
    if not plan.moves:
        return multiplied
    kind = "col2im" if plan.phase == "backward_data" else "im2col"
    move = CpeProgram(f"{plan.phase}_{kind}", columns_program(kind, plan.problem, plan.dtype), {}, plan.move_ldm_bytes)
    moved = [(move, plan.move_counts, plan.problem.n)]
    return [*multiplied, *moved] if kind == "col2im" else [*moved, *multiplied]
