"""What `convgen sw26010 conv` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import Choice, Plan, conv_terms
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.implicit_plan import ImplicitPlan, implicit_trips
from convgen.sw26010.conv.plan_words import plan_blocks, plan_ldm_bytes, plan_name, times_text
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import load_rates, taken_rates
from convgen.sw26010.machine.table import table


def conv_json(problem: ConvProblem, choices: Mapping[Phase, Choice], groups: int = 1) -> dict[str, Any]:
    """Of each phase the plans, the fastest first, with their events by closed form; and why implicit isn't one.

    Args:
        groups: the problem so many times.
    """
    return {
        "problem": str(problem),
        "groups": groups,
        **{
            phase: {
                "not_possible": choice.refusal and f"implicit: {choice.refusal}",
                "plans": [_plan_json(plan, seconds, groups) for plan, seconds in choice.plans],
            }
            for phase, choice in choices.items()
        },
    }


def _plan_json(plan: Plan, seconds: float, groups: int) -> dict[str, Any]:
    counts = _counts(plan, groups)
    trips = implicit_trips(plan) if isinstance(plan, ImplicitPlan) else None
    return {
        "plan": plan_name(plan), "blocks": plan_blocks(plan), "seconds": seconds * groups,
        "ldm_bytes": plan_ldm_bytes(plan),
        "useful_flops": plan.problem.flops * groups, "issued_flops": counts.issued_flops, "vmad": counts.vmad,
        "putr": counts.putr, "putc": counts.putc, "getr": counts.getr, "getc": counts.getc,
        "convert": counts.convert, "shuffle": counts.shuffle, "vadd": counts.vadd, "cycles": counts.cycles,
        "get_bytes_by_block": {str(b): counts.get[b] for b in sorted(counts.get)},
        "put_bytes_by_block": {str(b): counts.put[b] for b in sorted(counts.put)},
        "get_operations": counts.get_ops, "put_operations": counts.put_ops,
        **({} if trips is None else {
            "products": trips.gemms * groups, "data_tiles": trips.data_tiles * groups,
            "out_tiles": trips.out_tiles * groups,
        }),
    }  # fmt: skip


def _counts(plan: Plan, groups: int) -> Counts:
    counts = Counts()
    counts.add(conv_counts(plan), groups)
    return counts


def causes_text(problem: ConvProblem, choices: Mapping[Phase, Choice], groups: int = 1) -> str:
    """Seconds of every plan by what they are counted for, the longest first."""
    fitted = load_rates().fitted()
    rows: list[list[str]] = []
    for phase, choice in choices.items():
        for plan, seconds in choice.plans:
            terms = conv_terms(plan, taken_rates())
            causes = [*terms.fixed, *((name, count * fitted[name]) for name, count in terms.counts)]
            said = (f"{name} {groups * s:.4f}" for name, s in sorted(causes, key=lambda cause: -cause[1]))
            rows.append([phase, plan_name(plan), f"{groups * seconds:.4f}", ", ".join(said)])
    return f"{_title(problem, choices, groups)}\n{table(('phase', 'plan', 'seconds', 'of these'), rows)}"


def conv_text(problem: ConvProblem, choices: Mapping[Phase, Choice], groups: int = 1) -> str:
    """The same for people, in short."""
    rows: list[list[str]] = []
    for phase, choice in choices.items():
        for place, (plan, seconds) in enumerate(choice.plans):
            counts = _counts(plan, groups)
            why = f"implicit: {choice.refusal}" if choice.refusal and place == 0 else ""
            rows.append([
                phase, plan_name(plan), f"{seconds * groups:.4f}", "chosen" if place == 0 else "",
                f"{plan_ldm_bytes(plan):,}", f"{counts.dma_bytes:,}", f"{counts.messages:,}", f"{counts.vmad:,}", why,
            ])  # fmt: skip
    head = ("phase", "plan", "seconds", "", "LDM B", "DMA B", "messages", "vmad", "not possible")
    return f"{_title(problem, choices, groups)}\n{table(head, rows)}"


def _title(problem: ConvProblem, choices: Mapping[Phase, Choice], groups: int) -> str:
    dtype = next(iter(choices.values())).plan.dtype
    return f"{problem} {dtype}{times_text(groups)} on one core group"
