# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (parts of torch.distributed have no types)
"""The processor's time that messages take; where no core is left for them, a rank computes so much less meanwhile.

Another thread than the one that computes sends messages, as in lanes (templates/runtime/lanes.py). The time is that of
all of a process's threads, the library's own included, which hardly changes with what else the machine does. It leaves
out the kernel's work on behalf of others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from convgen.calibrate.fit import Fit, fit_line
from convgen.calibrate.links import message, patterns
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.team import Call, Team

SIZES = tuple(64 << 4 * k for k in range(5))  # bytes: 64 to 4 Mi
LAPS, LEAST_S = 9, 10e-3  # the processor's seconds in a lap, at least: its clock's ticks are small beside them
MOST_REPEATS = 100


def measure_processor(team: Team, nodes: Nodes) -> Fit | None:
    """The line through the processor's seconds by size, for messages that each rank sends while it receives one; None
    where every rank has a core left for them, or where no processor carries them (on GPUs)."""
    everyone = team.gather(sorted(os.sched_getaffinity(0)))
    here = team.rank // nodes.ranks * nodes.ranks
    left = cores_left(everyone[here : here + nodes.ranks], torch.get_num_threads())
    if team.device.type != "cpu" or all(team.gather(left)):
        return None
    chosen = patterns(nodes)
    pattern = chosen.get("inside") or chosen["across"]
    out, back = (torch.zeros(SIZES[-1], dtype=torch.uint8) for _ in range(2))
    with ThreadPoolExecutor(1) as lane:
        taken = [_seconds(team, lane, message(team, pattern, out[:size], back[:size])) for size in SIZES]
    return fit_line(SIZES, taken, "the processor's time of messages")


def _seconds(team: Team, lane: Executor, run: Call | None) -> float:
    """The processor's seconds for one message, on the rank that takes most: the least of laps, since other work only
    adds to them."""
    assert run is not None  # all ranks send

    def lap(count: int) -> float:
        team.barrier()
        start = time.process_time()
        for _ in range(count):
            lane.submit(run).result()
        return (time.process_time() - start) / count

    def least(laps: list[float]) -> float:
        found: list[float] = team.most(torch.tensor(laps, dtype=torch.float64)).tolist()
        return min(found)

    first = least([lap(1) for _ in range(3)])
    count = max(1, min(MOST_REPEATS, int(LEAST_S / max(first, 1e-6))))
    return least([lap(count) for _ in range(LAPS)])


def cores_left(cores: Sequence[Sequence[int]], threads: int) -> bool:
    """Whether each rank of a node has a core that none of its threads computes on.

    Args:
        cores: for each rank, the cores that it may run on.
        threads: how many threads a rank computes with.

    Example:
        >>> cores_left([[0, 1], [0, 1]], 1), cores_left([[0, 1], [2, 3]], 1)
        (False, True)
    """
    return len({core for some in cores for core in some}) // len(cores) > threads
