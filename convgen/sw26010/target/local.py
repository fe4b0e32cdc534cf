"""The processor of one rank of a generated module: its core groups, emulated, and what they did.

A module for target sw26010 imports this file and nothing else of convgen.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.conv.cost import Plan
from convgen.sw26010.conv.problem import Axis
from convgen.sw26010.conv.run import ConvRun, run_conv
from convgen.sw26010.conv.trial import trial_seconds
from convgen.sw26010.gemm.run import Level
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.operations.task import run_operation
from convgen.sw26010.target.plan import Done, LocalPlan, LocalProblem, Share, account, sorted_plans
from convgen.sw26010.target.sums import run_sum
from convgen.sw26010.target.volume import VolumePlan, plan_rank, volume_account

__all__ = ["Axis", "LocalProblem", "Processor"]
Array = NDArray[Any]
Choosing = Literal["model", "trial"]
# Ranks that are threads of one process would take the interpreter from each other at every array operation.
one_at_a_time = threading.RLock()


class Processor:
    """The core groups of a rank. `report` has for each phase what its last run did."""

    def __init__(self, core_groups: int = 1, choosing: Choosing = "model") -> None:
        """
        Args:
            choosing: plans by the cost model; or `trial`: the first run of a problem takes the explicit plan, the
                second the implicit one, and those after it the faster by the emulator's clock ([SW] 6.1).
        """
        self.core_groups, self.choosing = core_groups, choosing
        self.report: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, int] = {}
        self._tried: dict[tuple[LocalProblem, int], dict[Plan, float]] = {}

    def convolve(self, problem: LocalProblem, first: Array, second: Array, level: Level = "fast") -> Array:
        """One phase of a rank, on the mesh.

        Args:
            first, second: x and w; dy and w; or dy and x, contiguous: x [N, groups C, H, W], w [groups F, C, K, K], dy
                as y [N, groups F, H_out, W_out]; of three dimensions with D before H. Nothing is empty.
            level: as `run_conv` has it. Trials are timed by events, which a run message by message doesn't keep: with
                that level they run with the mesh at once, in the order of the messages.
        Returns:
            y, dx or dw, of the problem's dtype.
        """
        if level not in get_args(Level):
            raise InputError(f"no level of emulation is named {level}", hint=", ".join(get_args(Level)))
        plan = plan_rank(problem, self.core_groups)
        if problem.phase == "backward_filter":
            first, second = second, first  # as the plans have them
        with one_at_a_time:
            if isinstance(plan, VolumePlan):
                result, chosen, said = self._volume(plan, first, second, level)
            else:
                result, done, summed, chosen = self._run(plan, first, second, level)
                said = account(plan, done, summed)
        calls = self._calls[problem.phase] = self._calls.get(problem.phase, 0) + 1
        self.report[problem.phase] = {"call": calls, "chosen": chosen, "level": level, **said}
        return result

    def _volume(
        self, plan: VolumePlan, first: Array, second: Array, level: Level
    ) -> tuple[Array, list[str], dict[str, Any]]:
        """Tap after tap of the first dimension, added up on the mesh: the result, why these plans, and the account."""
        problem, depth = plan.problem, plan.problem.depth
        assert depth is not None
        rows, columns = problem.rows, problem.columns
        channels, filters = problem.groups * problem.c, problem.groups * problem.f
        shape: tuple[int, ...] = {
            "forward": (problem.n, filters, depth.out, rows.out, columns.out),
            "backward_data": (problem.n, channels, depth.extent, rows.extent, columns.extent),
            "backward_filter": (filters, problem.c, depth.kernel, rows.kernel, columns.kernel),
        }[problem.phase]
        out = np.zeros(shape, problem.dtype)
        reasons: list[str] = []
        accounts: list[dict[str, Any]] = []
        for tap in plan.taps:
            x_rows, y_rows = list(tap.x_rows), list(tap.y_rows)
            read = y_rows if problem.phase == "backward_data" else x_rows
            other = _flat(second, y_rows) if problem.phase == "backward_filter" else second[:, :, tap.at]
            result, done, summed, chosen = self._run(tap.plan, _flat(first, read), np.ascontiguousarray(other), level)
            reasons += chosen
            accounts.append(account(tap.plan, done, summed))
            if tap.add is None:
                out[:, :, tap.at] = result
                continue
            made = y_rows if problem.phase == "forward" else x_rows
            deep = result.reshape(problem.n, len(made), *result.shape[1:]).swapaxes(1, 2)
            before = out[:, :, made]
            added, _ = run_operation(tap.add, before, deep)
            out[:, :, made] = added["y"].reshape(before.shape)
        return out, reasons, volume_account(plan, accounts)

    def _run(
        self, plan: LocalPlan, first: Array, second: Array, level: Level
    ) -> tuple[Array, list[Done], Counts | None, list[str]]:
        problem, parts = plan.problem, len(plan.shares)
        rows, columns = problem.rows, problem.columns
        channels, filters = problem.groups * problem.c, problem.groups * problem.f
        shape: tuple[int, ...] = {
            "forward": (problem.n, filters, rows.out, columns.out),
            "backward_data": (problem.n, channels, rows.extent, columns.extent),
            "backward_filter": (parts, filters, problem.c, rows.kernel, columns.kernel),
        }[problem.phase]
        out = np.empty(shape, problem.dtype)
        done: list[Done] = []
        reasons: list[str] = []
        for at, share in enumerate(plan.shares):
            chosen, reason = self._plan(problem, share)
            trying = reason.endswith("trial")
            counts, ldm, seconds = Counts(), 0, 0.0
            for group in range(problem.groups):
                run = _run_group(problem, share, chosen, group, first, second, level, trying)
                _store(out, problem, share, at, group, run.result)
                counts.add(run.counts)
                ldm = max(ldm, run.ldm_bytes)
                seconds += trial_seconds(run, taken_rates()) if trying else 0.0
            if trying:
                self._tried.setdefault((problem, share.first), {})[chosen] = seconds
            done.append(Done(chosen, counts, ldm))
            reasons.append(reason)
        if problem.phase != "backward_filter":
            return out, done, None, reasons
        if plan.sum is None:
            return out[0], done, None, reasons
        total, summed = run_sum(plan.sum, out.reshape(parts, -1))
        return total.reshape(out.shape[1:]), done, summed, reasons

    def _plan(self, problem: LocalProblem, share: Share) -> tuple[Plan, str]:
        """The plan of a core group's next run, and why it is taken."""
        choice = share.choice
        if self.choosing == "model" or len(choice.plans) == 1:
            return choice.plan, "the only one" if len(choice.plans) == 1 else "by the cost model"
        tried = self._tried.get((problem, share.first), {})
        for (plan, _), which in zip(sorted_plans(choice), ("first", "second"), strict=True):
            if plan not in tried:
                return plan, f"{which} trial"
        return min(tried, key=lambda plan: tried[plan]), "the faster of two trials"


def _flat(tensor: Array, rows: list[int]) -> Array:
    """[N, C, D, H, W] to [N rows, C, H, W], the rows of a sample one after another: the management core packs them."""
    taken = tensor[:, :, rows].swapaxes(1, 2)
    return np.ascontiguousarray(taken.reshape(-1, *taken.shape[2:]))


def _run_group(
    problem: LocalProblem, share: Share, plan: Plan, group: int, first: Array, second: Array, level: Level, log: bool
) -> ConvRun:
    """A group of the convolution on a core group's samples."""
    samples = slice(share.first, share.last)
    c, f = (slice(group * n, (group + 1) * n) for n in (problem.c, problem.f))
    if problem.phase == "backward_filter":
        one, other = first[samples, c], second[samples, f]
    else:
        one, other = first[samples, c if problem.phase == "forward" else f], second[f]
    return run_conv(plan, one, other, level="exact" if log and level == "messages" else level, log=log)


def _store(out: Array, problem: LocalProblem, share: Share, at: int, group: int, result: Array) -> None:
    samples = slice(share.first, share.last)
    c, f = (slice(group * n, (group + 1) * n) for n in (problem.c, problem.f))
    if problem.phase == "forward":
        out[samples, f] = result
    elif problem.phase == "backward_data":
        out[samples, c] = result
    else:
        out[at, f] = result
