"""Drop axes of one rank, and the conversions over them.

    schedule s on grid(N=2, C=2, F=1)
      %x_gathered = all_gather %x dim=C over=F : x[N, C, *, *]
      %y = conv_forward %x_gathered, %w        : y[N, F, *, *]     --->     %y = conv_forward %x, %w : y[N, *, *, *]

Needs:  nothing: it may run anywhere.
Sound:  an axis with one rank splits nothing, copies nothing and sums nothing, so a type without it says the same of
        every rank. What a chain of conversions turns into what stays; where the axis hid a simpler way, as an outer
        axis does that makes an exchange of an all-to-all, the chain is found again from its two ends.
Leaves: the grid itself, whose mesh still has its axes of size 1; and every other conversion as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import redistribute
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.passes.contract import Context, SchedulePass
from convgen.passes.names import named, renamed
from convgen.program.nodes import PHASES, RESULTS, Convert, Schedule, Step, is_convolution, reads


@dataclass(frozen=True)
class DropSingleRank(SchedulePass):
    """The schedule without the axes that have one rank."""

    name: ClassVar[str] = "drop-single-rank"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        single = frozenset(name for name, size in schedule.grid.axes if size == 1)
        if not single & _used(schedule):
            return schedule
        return named(_fitting_forms(_Dropped(schedule, context.space, single).schedule()))


def without(roles: Roles, dropped: frozenset[str]) -> Roles:
    """The same roles where the dropped axes have one rank each."""
    nests = ((role, tuple(a for a in axes if a not in dropped)) for role, axes in roles.nests)
    return Roles(tuple((role, axes) for role, axes in nests if axes), roles.rows)


def _used(schedule: Schedule) -> set[str]:
    """Every axis that a type, a role or a conversion names."""
    layouts = [layout for _, layout in schedule.stored] + [step.type for _, step in schedule.steps()]
    used = {a for layout in layouts for a in (*layout.used, *layout.partial)}
    used |= {a for _, roles in schedule.roles for _, axes in roles.nests for a in axes}
    return used | {a for _, step in schedule.steps() if isinstance(step, Convert) for a in step.over}


class _Dropped:
    """A schedule whose single axes are taken out, section by section; names and forms are settled afterwards."""

    def __init__(self, schedule: Schedule, space: Space, single: frozenset[str]) -> None:
        self.old, self.space, self.single = schedule, space, single
        self.types = schedule.types()
        self.read = Counter(value for _, step in schedule.steps() for value in reads(step))
        self.same: dict[str, str] = {}  # a value -> the one that it is, where no step lies between them

    def schedule(self) -> Schedule:
        forward, data, filter_ = (tuple(self._section(self.old.section(phase))) for phase in PHASES)
        bare = replace(
            self.old,
            stored=tuple((name, self._bare(layout)) for name, layout in self.old.stored),
            roles=tuple((phase, without(roles, self.single)) for phase, roles in self.old.roles),
            forward=forward,
            backward_data=data,
            backward_filter=filter_,
        )
        return renamed(bare, {name: self._root(name) for name in self.same})

    def _root(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def _bare(self, layout: Layout) -> Layout:
        """A type without the axes; a window of rows that they alone had split is that of all rows."""
        bare = layout.without(self.single)
        windows = tuple(
            self.space.window(layout.tensor, d, ()) if window is not None and held and not axes else window
            for d, (window, held, axes) in enumerate(zip(layout.windows, layout.axes, bare.axes, strict=True))
        )
        return replace(bare, windows=windows)

    def _section(self, steps: Sequence[Step]) -> Iterator[Step]:
        """Its steps; a chain of conversions stands where its last one stood."""
        chain: list[Convert] = []
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            if not isinstance(step, Convert):
                yield replace(step, type=self._bare(step.type))
                continue
            chain.append(step)
            goes_on = isinstance(following, Convert) and following.source == step.result
            if not (goes_on and self.read[step.result] == 1 and step.result not in RESULTS):
                yield from self._chain(chain)
                chain = []

    def _chain(self, chain: Sequence[Convert]) -> Iterator[Step]:
        """What a chain comes to: itself where no single axis is in it, else the conversions between its ends."""
        source, result = chain[0].source, chain[-1].result
        before, after = self.types[source], chain[-1].type
        layouts = (before, *(step.type for step in chain))
        if all(layout == self._bare(layout) for layout in layouts) and not self.single & {
            a for step in chain for a in step.over
        }:
            yield from chain
            return
        found = redistribute(self.space, self._bare(before), self._bare(after))
        if not found:
            root = self._root(source)
            kept, gone = (result, root) if result in RESULTS else (root, result)
            self.same[gone] = kept
        for i, c in enumerate(found):
            last = i == len(found) - 1
            name = result if last else f"{result}:{i}"
            form = chain[0].form if len(chain) == len(found) == 1 and chain[0].kind == c.kind else "whole"
            yield Convert(result=name, type=c.dst, kind=c.kind, source=source, over=c.over, form=form)
            source = name


def _fitting_forms(schedule: Schedule) -> Schedule:
    """Without the rims and parts whose conversions are gone."""
    made = {step.result: step for _, step in schedule.steps()}
    scattered = {s.source for _, s in schedule.steps() if isinstance(s, Convert) and s.kind == "reduce_scatter"}

    def fitting(step: Step) -> Step:
        if not is_convolution(step):
            return step
        rims = (made[v] for v in step.inputs if v in made)
        own = tuple(s.source for s in rims if isinstance(s, Convert) and s.form == "rim")
        form = step.form if step.result in scattered else "whole"
        return replace(step, own=own, form=form)

    forward, data, filter_ = (tuple(map(fitting, schedule.section(phase))) for phase in PHASES)
    return replace(schedule, forward=forward, backward_data=data, backward_filter=filter_)
