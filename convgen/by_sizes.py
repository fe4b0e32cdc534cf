"""Modelled seconds of a network's layouts at given sizes: `serve` chooses among layouts by these (docs/serving.md).

A package's schedule.txt has every step of its program. Read back, with its rows at some sizes, it is the program that
ranks run at these sizes, and its price is the timeline's (cost/timeline.py): local work, what is sent, and what
overlaps. So a program has one price, whoever asks for it; it is a function of files and sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convgen.algebra.involved import NAME, Side, one_tensor
from convgen.algebra.layout import Layout
from convgen.algebra.tensors import Dim
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import price_on
from convgen.cost.timeline import forget, simulate
from convgen.network_compiler import CompiledNetwork, compile_text
from convgen.plan.program.edited import read_text
from convgen.program.network import Program, Value
from convgen.program.other_sizes import program_like
from convgen.spec.aten.describe import describe
from convgen.spec.graph import Graph
from convgen.spec.target import Target

SCHEDULE = "schedule.txt"
REMEMBERED = 32  # sizes whose steps and prices are remembered


@dataclass(frozen=True)
class LayoutPrices:
    """What calls of a network take in each of its layouts.

    Attributes:
        compiled: by layout, the network compiled for it; all are of one graph.
        asked: has an entry for each size asked for since others were forgotten.
        whole: whether a call ends with outputs whole on every rank, which its price includes.
    """

    graph: Graph
    compiled: Mapping[str, CompiledNetwork]
    machine: Machine
    whole: bool
    asked: list[int] = field(default_factory=list[int])

    @staticmethod
    def read(graph: Graph, texts: Mapping[str, str], target: Target, machine: Machine, *, whole: bool) -> LayoutPrices:
        """The prices of packages' layouts, from the texts of their programs.

        Raises:
            InputError: a text is another network's, or another version's.
        """
        read = {name: compile_text(graph, read_text(text, SCHEDULE), target=target) for name, text in texts.items()}
        return LayoutPrices(graph, read, machine, whole)

    def programs(self, sizes: Mapping[str, int]) -> dict[str, Program]:
        """By layout, the program that ranks run at these sizes."""
        device = next(iter(self.compiled.values())).target.device
        at = describe(self.graph.at(sizes), device)
        return {name: program_like(one.program, at) for name, one in self.compiled.items()}

    def picoseconds(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """By layout, the price of a call, in whole picoseconds, so that equal layouts are equal on every rank."""
        self.asked.append(1)
        if len(self.asked) > REMEMBERED:  # any number of sizes takes bounded memory
            self.asked.clear()
            forget()
        return {
            name: call_picoseconds(one, self.machine, self.compiled[name].dtype, whole=self.whole)
            for name, one in self.programs(sizes).items()
        }


def call_picoseconds(program: Program, machine: Machine, dtype: str, *, whole: bool = False) -> int:
    """The price of a forward pass on the slowest rank.

    Args:
        whole: whether outputs are gathered on every rank, each once all outputs are there.
    """
    seconds = simulate(program, machine, dtype, alike=True, trains=False).end_s
    outputs = [program.values[value] for _, value in program.outputs] if whole else []
    return round(seconds * PICOSECONDS) + sum(_gathered(one, program, machine, dtype) for one in outputs)


def _gathered(value: Value, program: Program, machine: Machine, dtype: str) -> int:
    """Picoseconds that it takes to gather an output's blocks on every rank."""
    price = price_on(program.grid, machine, dtype).of(program.types[value.name])
    sides = tuple([Side(Dim(f"d{d}", n)) for d, n in enumerate(value.shape)])
    sets = one_tensor(program.grid.axes, sides)
    return price.moves.chain(sets, Layout(NAME, value.stored), Layout(NAME, ((),) * len(value.shape)))


def least(
    layouts: Sequence[str], picoseconds: Mapping[str, int], peaks: Mapping[str, int], limit: int | None
) -> list[str]:
    """Layouts by price, those that fit into a limit first; of equal prices the layout that is named first."""
    fits = {name: limit is None or peaks[name] <= limit for name in layouts}
    return sorted(layouts, key=lambda name: (not fits[name], picoseconds[name], layouts.index(name)))
