"""Which rows of a network are better one row, with one wider or earlier halo: by the timeline, chain by chain.

A chain of rows is cut where the sum of its parts' times, each alone, is least; a part is one row as it is, or several
as one up to a halo. A batch norm's moments are timed with the part that begins with its last row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from convgen.cost.machine import Machine
from convgen.passes.widen_halos import WidenHalos, halos_of
from convgen.plan.program.alone import alone
from convgen.program.network import Program, label
from convgen.program.norms import norms
from convgen.program.wide import Group, chains

MOST_HALOS = 4  # halos for which one wider halo may stand


def worth_widening(program: Program, machine: Machine, dtype: str, *, of_inputs: bool = False) -> Program:
    """The program with those rows as one that are faster so; the program itself where none are."""
    wanted = program.differentiable(of_inputs=of_inputs)
    times = _Times(program, machine, dtype, wanted)
    pairs: list[str] = []
    for chain in chains(program):
        pairs += [f"{first}:{last}" for first, last in times.best(chain)]
    return WidenHalos(",".join(pairs)).run(program) if pairs else program


class _Times:
    def __init__(self, program: Program, machine: Machine, dtype: str, wanted: Collection[str]) -> None:
        self.program, self.machine, self.dtype, self.wanted = program, machine, dtype, wanted
        self.moments = {norm.centred: (first, norm.coefficients) for first, norm in norms(program)[0].items()}
        self.known: dict[object, float] = {}

    def best(self, chain: Group) -> Iterator[tuple[str, str]]:
        """Labels of the first and the last row of each part that is several rows as one."""
        halos = halos_of(self.program, chain)
        if not any(halos):  # none, or that of the first row alone
            return
        least: list[tuple[float, int]] = [(0.0, 0)]  # up to each row: seconds, and where the last part begins
        for end in range(1, len(chain) + 1):
            found = [(least[end - 1][0] + self.of(chain[end - 1 : end]), end - 1)]
            few: list[int] = []
            if end - 1 in halos:  # from a row with a halo, or a batch norm's
                starts = halos[: halos.index(end - 1)] + [0] * (chain[0] in self.moments)
                few = [start for start in starts if sum(start <= n < end for n in halos) <= MOST_HALOS]
            found += [(least[start][0] + self.of(chain[start:end]), start) for start in few]
            least.append(min(found, key=lambda pair: pair[0]))
        end = len(chain)
        while end:
            start = least[end][1]
            if end - start > 1:
                yield label(self.program.rows[chain[start]]), label(self.program.rows[chain[end - 1]])
            end = start

    def of(self, part: Group) -> float:
        """Seconds of a part alone, forward and backward; infinitely many where it can't be one."""
        numbers = [*self.moments.get(part[0], ()), *part]
        rows = tuple(self.program.rows[i] for i in numbers)
        key = tuple((r.bound.operation, r.way, r.roles, r.reads, r.makes, self._asked(r.bound.reads)) for r in rows)
        if key not in self.known:
            plain = self.program.part(rows)
            one = WidenHalos(f"{label(rows[-len(part)])}:{label(rows[-1])}").run(plain) if len(part) > 1 else plain
            failed = len(part) > 1 and one is plain
            self.known[key] = float("inf") if failed else alone(one, self.wanted, self.machine, self.dtype)
        return self.known[key]

    def _asked(self, reads: Collection[str]) -> tuple[bool, ...]:
        return tuple(v in self.wanted for v in reads)
