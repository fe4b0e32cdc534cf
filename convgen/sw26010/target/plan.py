"""What one rank convolves, cut for the core groups of its processor: plans, and what they will count.

Core groups split the rank's samples ([SW] Algorithm 1, line 4); each has a memory of its own, so each has a plan of its
own. Groups of a grouped convolution are run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import Choice, Plan, choose_plan, conv_terms
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.implicit_plan import ImplicitPlan
from convgen.sw26010.conv.layouts import Transform, transform_counts
from convgen.sw26010.conv.plan_words import plan_blocks, plan_ldm_bytes, plan_name, sorted_plans
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.machine.rates import load_rates, taken_rates
from convgen.sw26010.target.sums import Sum, sum_counts, sum_seconds


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """One phase of a rank: `groups` convolutions side by side, of `c` channels and `f` filters each.

    One spatial dimension is one row of columns; `depth` is the first of three.
    """

    phase: Phase
    n: int
    c: int
    f: int
    groups: int
    rows: Axis
    columns: Axis
    dtype: Dtype
    depth: Axis | None = None

    @property
    def flops(self) -> int:
        """Taps in the padding included."""
        deep = 1 if self.depth is None else self.depth.out * self.depth.kernel
        return deep * self.groups * ConvProblem(self.n, self.c, self.f, self.rows, self.columns).flops

    def __str__(self) -> str:
        text = f"{ConvProblem(self.n, self.c, self.f, self.rows, self.columns)} {self.dtype}"
        if self.depth is not None:
            d = self.depth
            text = f"{text} for each of {d.kernel} taps over D={d.extent} S={d.stride} P={d.padding} d={d.dilation}"
        return text if self.groups == 1 else f"{text}, {self.groups} groups of them"


@dataclass(frozen=True, slots=True)
class Share:
    """One core group's samples [first, last), and the plans for them, the fastest first."""

    first: int
    last: int
    choice: Choice

    @property
    def problem(self) -> ConvProblem:
        return self.choice.plan.problem


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """A rank's phase on its core groups; `sum` adds up their filter gradients. Groups without samples do nothing."""

    problem: LocalProblem
    shares: tuple[Share, ...]
    sum: Sum | None


@cache
def plan_local(problem: LocalProblem, core_groups: int) -> LocalPlan:
    """Plans by the cost model.

    Args:
        core_groups: that share the rank's samples by the block rule.
    Raises:
        InputError: a row of the image doesn't fit into LDM.
    """
    shares: list[Share] = []
    size, more = divmod(problem.n, core_groups)
    first = 0
    for i in range(core_groups):
        last = first + size + (i < more)
        if last > first:
            part = ConvProblem(last - first, problem.c, problem.f, problem.rows, problem.columns)
            choice = choose_plan(part, problem.phase, taken_rates(), load_rates().fitted(), problem.dtype)
            shares.append(Share(first, last, choice))
        first = last
    elements = problem.groups * problem.f * problem.c * problem.rows.kernel * problem.columns.kernel
    summed = problem.phase == "backward_filter" and len(shares) > 1
    return LocalPlan(problem, tuple(shares), Sum(len(shares), elements, problem.dtype) if summed else None)


@dataclass(frozen=True, slots=True)
class Done:
    """What a core group did, or will do: its plan, events of all groups of the convolution, bytes of a CPE's LDM."""

    plan: Plan
    counts: Counts
    ldm_bytes: int


def predicted(plan: LocalPlan, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """The account of a run, by closed form.

    Args:
        kinds: of each share's plan, implicit or explicit; by default the cost model's choice.
    """
    done: list[Done] = []
    for at, share in enumerate(plan.shares):
        chosen, counts = share.choice.plan, Counts()
        if kinds:
            (chosen,) = (p for p, _ in share.choice.plans if plan_name(p) == kinds[at])
        counts.add(conv_counts(chosen), plan.problem.groups)
        done.append(Done(chosen, counts, plan_ldm_bytes(chosen)))
    return account(plan, done, None if plan.sum is None else sum_counts(plan.sum))


def account(plan: LocalPlan, done: Sequence[Done], summed: Counts | None) -> dict[str, Any]:
    """Plain data. Events are sums over the core groups; cycles and seconds are the slowest one's and those of dw's sum.

    `cycles` are of instructions of one CPE (kernel_cycles.py); `seconds` are the cost model's, rounded.
    """
    problem = plan.problem
    parts = [d.counts for d in done]
    counts = total(parts if summed is None else [*parts, summed])
    own = [_seconds(d.plan) * problem.groups for d in done]
    after = 0.0 if plan.sum is None else sum_seconds(plan.sum, taken_rates())
    return {
        "problem": str(problem),
        "core_groups": [
            {
                "samples": [share.first, share.last],
                "plan": plan_name(d.plan),
                "blocks": plan_blocks(d.plan),
                "seconds_by_plan": {plan_name(p): rounded(s * problem.groups) for p, s in sorted_plans(share.choice)},
                "not_possible": share.choice.refusal and f"implicit: {share.choice.refusal}",
                "cycles": d.counts.cycles,
                "layout": _layout(d.plan, problem.groups),
            }
            for share, d in zip(plan.shares, done, strict=True)
        ],
        "ldm_bytes": max([d.ldm_bytes for d in done] + ([] if plan.sum is None else [plan.sum.ldm_bytes])),
        "useful_flops": problem.flops,
        "issued_flops": counts.issued_flops,
        **{name: getattr(counts, name) for name in ("putr", "putc", "getr", "getc", "vmad", "vadd")},
        **{name: getattr(counts, name) for name in ("convert", "shuffle")},
        "get_bytes_by_block": {str(b): counts.get[b] for b in sorted(counts.get)},
        "put_bytes_by_block": {str(b): counts.put[b] for b in sorted(counts.put)},
        "get_operations": counts.get_ops,
        "put_operations": counts.put_ops,
        "cycles": max(c.cycles for c in parts) + (0 if summed is None else summed.cycles),
        "seconds": rounded(max(own) + after),
        "sum_of_dw": None
        if summed is None
        else {"dma_bytes": summed.dma_bytes, "cycles": summed.cycles, "seconds": rounded(after)},
    }


def _seconds(plan: Plan) -> float:
    return conv_terms(plan, taken_rates()).seconds(load_rates().fitted())


def _layout(plan: Plan, groups: int) -> dict[str, Any] | None:
    """What it would take, besides, to bring images to (R, C, N, B) and back; layers that keep the layout save that."""
    if not isinstance(plan, ImplicitPlan):
        return None
    p, moved = plan.problem, Counts()
    x, y = (p.n, p.c, p.h, p.w), (p.n, p.f, p.h_out, p.w_out)
    to, back = {"forward": ([x], [y]), "backward_data": ([y], [x]), "backward_filter": ([x, y], [])}[plan.phase]
    for shape in to:
        moved.add(transform_counts(Transform(*shape, plan.dtype, "to_implicit")), groups)
    for shape in back:
        moved.add(transform_counts(Transform(*shape, plan.dtype, "to_explicit")), groups)
    seconds = taken_rates().transfer_s(moved.get) + taken_rates().transfer_s(moved.put)
    return {"dma_bytes": moved.dma_bytes, "shuffle": moved.shuffle, "seconds": rounded(seconds)}


def rounded(seconds: float) -> float:
    """Six digits: the same text on every machine."""
    return float(f"{seconds:.6g}")
