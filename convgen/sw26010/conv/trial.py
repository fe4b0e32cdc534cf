"""The choice of a plan by running both, as swCaffe does in its first two iterations ([SW] 6.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from convgen.errors import InternalError
from convgen.program.nodes import Phase
from convgen.sw26010.conv.cost import Choice, explicit_plan
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.run import ConvRun, run_conv
from convgen.sw26010.conv.support import implicit_refusal
from convgen.sw26010.gemm.cost import clock_seconds
from convgen.sw26010.machine.core_group import CPES
from convgen.sw26010.machine.rates import Rates


def trial_seconds(run: ConvRun, rates: Rates) -> float:
    """A logged run on the emulator's clock: cycles of instructions, and DMA with a round for what is waited for.

    No fitted constant enters: what the paper leaves unexplained (cost.py) is not in it.
    """
    moved = run.moved
    rounds = -(-(moved.get_ops + moved.put_ops) // CPES)
    by_moves = rates.transfer_s(moved.get) + rates.transfer_s(moved.put) + rounds * rates.dma_round_s
    return clock_seconds(run.events, rates, by_cycles=True) + by_moves


def choose_by_running(problem: ConvProblem, phase: Phase, first: Any, second: Any, rates: Rates) -> Choice:
    """Run the possible plans of a phase on the same operands, float32, and take the faster.

    Args:
        first, second: as `run_conv` takes them.
    Raises:
        InputError: shapes that are not the problem's.
        InternalError: the plans' results differ by more than rounding.
    """
    refusal = implicit_refusal(problem, phase)
    runs = [run_conv(explicit_plan(problem, phase, rates), first, second, log=True)]
    if refusal is None:
        runs.append(run_conv(implicit_plan(problem, phase), first, second, log=True))
        largest = float(np.abs(runs[0].result).max())
        if not np.allclose(runs[0].result, runs[1].result, rtol=0, atol=1e-5 * largest):
            raise InternalError(f"{problem}, {phase}: the plans give different results")
    timed = sorted(((run.plan, trial_seconds(run, rates)) for run in runs), key=lambda item: item[1])
    return Choice(tuple(timed), refusal)
