"""`bucket-statistics`: running statistics of all batch norms are summed together, while forward goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.layout import Axes
from convgen.passes.contract import NetworkPass
from convgen.program.network import Bucket, Program
from convgen.program.norms import summed_statistics


@dataclass(frozen=True)
class BucketStatistics(NetworkPass):
    """Pack the all-reduces of running statistics, over the same axes and of one type, into one.

        %a_statistics = all_reduce %a_statistics over=N
        %a_mean, %a_var = running_statistics ...            ...
        ...                                           --->  %statistics_1 = start all_reduce %a_.., %b_.. over=N
        %b_statistics = all_reduce %b_statistics over=N     ...                     (what is left of forward)
        %b_mean, %b_var = running_statistics ...            wait %statistics_1
        ...                                                 %a_mean, %a_var = running_statistics ...
                                                            %b_mean, %b_var = running_statistics ...

    Needs:  batch norms with statistics of parts of the batch, whose running ones are averages of the parts'.
    Sound:  only the renewal of buffers reads running statistics in a step, and nothing in a step reads those buffers.
        Elements are added rank by rank as before: the same numbers to the last bit.
    Leaves: statistics of a batch norm that is called again in the same step and reads what its first call renewed.
    """

    name: ClassVar[str] = "bucket-statistics"

    def run(self, program: Program) -> Program:
        buckets = tuple(_buckets(program))
        return program if buckets == program.forward_buckets else replace(program, forward_buckets=buckets)


def _buckets(program: Program) -> Iterator[Bucket]:
    alike: dict[tuple[Axes, str], list[str]] = {}
    for m in summed_statistics(program):
        alike.setdefault((m.conversion.over, program.dtype_of(m)), []).append(m.step)
    for n, ((over, dtype), steps) in enumerate(alike.items(), 1):
        yield Bucket(f"statistics_{n}", over, dtype, tuple(steps))
