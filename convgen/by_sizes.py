"""The modelled seconds of a network's layouts, by its sizes: `serve` chooses among them by these (docs/serving.md).

A package prints its program, every step of it, in schedule.txt. Read again, and with its rows at some sizes, it is what
ranks run at these, and its price is the timeline's (cost/timeline.py): of local work, of what is sent, and of what
travels meanwhile. So there is one price of a program, whoever asks; it is a function of files and sizes alone.
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
REMEMBERED = 32  # sizes


@dataclass(frozen=True)
class LayoutPrices:
    """What calls of a network take in each of its layouts.

    Attributes:
        compiled: by layout, of one graph.
        asked: a number for each size since steps of others were let go.
        whole: a call ends with outputs whole on every rank, which is a part of its price.
    """

    graph: Graph
    compiled: Mapping[str, CompiledNetwork]
    machine: Machine
    whole: bool
    asked: list[int] = field(default_factory=list[int])

    @staticmethod
    def read(graph: Graph, texts: Mapping[str, str], target: Target, machine: Machine, *, whole: bool) -> LayoutPrices:
        """Of packages, by their programs' texts.

        Raises:
            InputError: a text is of another network, or of another version's.
        """
        read = {name: compile_text(graph, read_text(text, SCHEDULE), target=target) for name, text in texts.items()}
        return LayoutPrices(graph, read, machine, whole)

    def programs(self, sizes: Mapping[str, int]) -> dict[str, Program]:
        """What ranks run at these sizes, by layout."""
        device = next(iter(self.compiled.values())).target.device
        at = describe(self.graph.at(sizes), device)
        return {name: program_like(one.program, at) for name, one in self.compiled.items()}

    def picoseconds(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of a call, by layout; whole numbers, so that layouts that take as long do so on every rank."""
        self.asked.append(1)
        if len(self.asked) > REMEMBERED:  # any number of sizes takes bounded memory
            self.asked.clear()
            forget()
        return {
            name: call_picoseconds(one, self.machine, self.compiled[name].dtype, whole=self.whole)
            for name, one in self.programs(sizes).items()
        }


def call_picoseconds(program: Program, machine: Machine, dtype: str, *, whole: bool = False) -> int:
    """Of a forward pass, on the slowest rank.

    Args:
        whole: outputs are put together on every rank, each once all of them are there.
    """
    seconds = simulate(program, machine, dtype, alike=True, trains=False).end_s
    outputs = [program.values[value] for _, value in program.outputs] if whole else []
    return round(seconds * PICOSECONDS) + sum(_gathered(one, program, machine, dtype) for one in outputs)


def _gathered(value: Value, program: Program, machine: Machine, dtype: str) -> int:
    """Picoseconds from an output's blocks to the whole of it on every rank."""
    price = price_on(program.grid, machine, dtype).of(program.types[value.name])
    sides = tuple([Side(Dim(f"d{d}", n)) for d, n in enumerate(value.shape)])
    sets = one_tensor(program.grid.axes, sides)
    return price.moves.chain(sets, Layout(NAME, value.stored), Layout(NAME, ((),) * len(value.shape)))


def least(
    layouts: Sequence[str], picoseconds: Mapping[str, int], peaks: Mapping[str, int], limit: int | None
) -> list[str]:
    """Layouts by price, those that fit into a limit first; of two that take as long that which is named first."""
    fits = {name: limit is None or peaks[name] <= limit for name in layouts}
    return sorted(layouts, key=lambda name: (not fits[name], picoseconds[name], layouts.index(name)))
