"""Convolutions over three dimensions: one over two for every tap of the first, added up.

    y[n, f, o] = sum over k of conv2d(x[n, c, o S + d k - P], w[f, c, k])

For a tap, samples and the rows of depth that it meets are the samples of an ordinary plan; what falls into the padding
is not computed. Results are added in memory by the program of a sum, so in float32 they are rounded after every tap. A
filter's gradient has nothing to add: each tap is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds
from convgen.sw26010.target.plan import LocalPlan, LocalProblem, plan_local, predicted, rounded

SUMMED = (
    "useful_flops", "issued_flops", "putr", "putc", "getr", "getc", "vmad", "vadd", "convert", "shuffle",
    "get_operations", "put_operations", "cycles",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap of the first dimension: the rows of y and x that meet, and their plan; `add` adds the result to the sum."""

    at: int
    y_rows: tuple[int, ...]
    x_rows: tuple[int, ...]
    plan: LocalPlan
    add: Stream | None


@dataclass(frozen=True, slots=True)
class VolumePlan:
    """A rank's phase over three dimensions; taps that meet padding alone are left out."""

    problem: LocalProblem
    taps: tuple[Tap, ...]


AnyPlan = LocalPlan | VolumePlan


def meets(axis: Axis, tap: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows of y, rows of x) that a tap brings together."""
    found = [(o, o * axis.stride + tap * axis.dilation - axis.padding) for o in range(axis.out)]
    inside = [(o, x) for o, x in found if 0 <= x < axis.extent]
    return tuple(o for o, _ in inside), tuple(x for _, x in inside)


@cache
def plan_rank(problem: LocalProblem, core_groups: int) -> AnyPlan:
    """Plans by the cost model, of two or three dimensions.

    Raises:
        InputError: a row of the image doesn't fit into LDM.
    """
    if problem.depth is None:
        return plan_local(problem, core_groups)
    taps: list[Tap] = []
    for at in range(problem.depth.kernel):
        y_rows, x_rows = meets(problem.depth, at)
        if y_rows:
            flat = replace(problem, n=problem.n * len(y_rows), depth=None)
            taps.append(Tap(at, y_rows, x_rows, plan_local(flat, core_groups), _add(flat)))
    return VolumePlan(problem, tuple(taps))


def _add(flat: LocalProblem) -> Stream | None:
    """The addition of a tap's result to the sum; a filter's gradient has none."""
    if flat.phase == "backward_filter":
        return None
    channels = flat.f if flat.phase == "forward" else flat.c
    down, across = (
        (axis.out if flat.phase == "forward" else axis.extent) for axis in (flat.rows, flat.columns)
    )  # fmt: skip
    return Stream("add", flat.n * flat.groups * channels * down * across, flat.dtype)


def predicted_rank(plan: AnyPlan, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """The account of a run, by closed form.

    Args:
        kinds: of each share's plan, tap after tap; by default the cost model's choices.
    """
    if isinstance(plan, LocalPlan):
        return predicted(plan, kinds)
    accounts: list[dict[str, Any]] = []
    left = list(kinds)
    for tap in plan.taps:
        mine, left = left[: len(tap.plan.shares)], left[len(tap.plan.shares) :]
        accounts.append(predicted(tap.plan, mine))
    return volume_account(plan, accounts)


def volume_account(plan: VolumePlan, accounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The taps' accounts together, with the additions. `core_groups` has a line for each tap and core group."""
    added, seconds = Counts(), 0.0
    for tap in plan.taps:
        if tap.add is not None:
            added.add(tap.add.cost())
            seconds += operation_seconds(tap.add, taken_rates())
    own = {
        "useful_flops": 0, "issued_flops": added.issued_flops, "get_operations": added.get_ops,
        "put_operations": added.put_ops,
        **{name: getattr(added, name) for name in SUMMED[2:10]}, "cycles": added.cycles,
    }  # fmt: skip
    sums = [account["sum_of_dw"] for account in accounts if account["sum_of_dw"] is not None]
    total = sum(account["seconds"] for account in accounts) + seconds
    return {
        "problem": str(plan.problem),
        "core_groups": [
            {"tap": tap.at, **part}
            for tap, account in zip(plan.taps, accounts, strict=True)
            for part in account["core_groups"]
        ],
        "ldm_bytes": max(
            [*(account["ldm_bytes"] for account in accounts), *(t.add.ldm_bytes for t in plan.taps if t.add)], default=0
        ),
        **{name: own[name] + sum(account[name] for account in accounts) for name in SUMMED[:-1]},
        **{name: _blocks(name, accounts, added) for name in ("get_bytes_by_block", "put_bytes_by_block")},
        "cycles": own["cycles"] + sum(account["cycles"] for account in accounts),
        "seconds": rounded(total),
        "sum_of_dw": None if not sums else {
            "dma_bytes": sum(s["dma_bytes"] for s in sums), "cycles": sum(s["cycles"] for s in sums),
            "seconds": rounded(sum(s["seconds"] for s in sums)),
        },
        "sum_of_taps": None if not added.put_ops else {"dma_bytes": added.dma_bytes, "seconds": rounded(seconds)},
    }  # fmt: skip


def _blocks(name: str, accounts: Sequence[dict[str, Any]], added: Counts) -> dict[str, int]:
    sizes = dict(added.get if name.startswith("get") else added.put)
    for account in accounts:
        for block, size in account[name].items():
            sizes[int(block)] = sizes.get(int(block), 0) + size
    return {str(block): sizes[block] for block in sorted(sizes)}
