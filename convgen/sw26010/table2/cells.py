"""[SW] Table 2: published seconds, predictions, and how good they are."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from convgen.errors import InternalError
from convgen.program.nodes import Phase
from convgen.resources import data_file
from convgen.sw26010.conv.cost import Plan, Terms, conv_terms, explicit_plan
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.support import implicit_supported
from convgen.sw26010.machine.rates import Rates

Kind = Literal["implicit", "explicit"]
KINDS: tuple[Kind, ...] = ("implicit", "explicit")
ORDER: tuple[Phase, ...] = ("forward", "backward_filter", "backward_data")  # the table's
FIT_LAYERS = ("conv1_2", "conv4_1")
BATCH = 128
TIE = 0.03  # published times closer than this can't be told apart: equal layers differ by more


@dataclass(frozen=True, slots=True)
class Row:
    """A layer of the table. `published_s` has what is printed; a missing key is a dash or NA."""

    name: str
    problem: ConvProblem
    published_s: Mapping[tuple[Phase, Kind], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """A distinct problem, phase and kind of plan: layers of one shape are one cell, with their mean time."""

    layers: tuple[str, ...]
    problem: ConvProblem
    phase: Phase
    kind: Kind
    published_s: float
    terms: Terms


@cache
def read_table2() -> tuple[Row, ...]:
    """The 13 layers, N=128, one core group."""
    text = data_file("tuning", "sw26010", "table2.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(
        Row(
            row["name"],
            ConvProblem.square(BATCH, int(row["C"]), int(row["H"]), int(row["H"]), int(row["F"])),
            {
                (phase, kind): float(row[f"{phase}_{kind}"])
                for phase in ORDER
                for kind in KINDS
                if row[f"{phase}_{kind}"]
            },
        )
        for row in rows
    )


def plan_of(problem: ConvProblem, phase: Phase, kind: Kind, taken: Rates) -> Plan:
    return implicit_plan(problem, phase) if kind == "implicit" else explicit_plan(problem, phase, taken)


@cache
def cells(taken: Rates) -> tuple[Cell, ...]:
    """The 46 distinct cells that the paper has a number for."""
    shapes: dict[tuple[ConvProblem, Phase, Kind], list[tuple[str, float]]] = {}
    for row in read_table2():
        for (phase, kind), seconds in row.published_s.items():
            shapes.setdefault((row.problem, phase, kind), []).append((row.name, seconds))
    return tuple(
        Cell(
            tuple(name for name, _ in layers),
            problem,
            phase,
            kind,
            sum(seconds for _, seconds in layers) / len(layers),
            conv_terms(plan_of(problem, phase, kind, taken), taken),
        )
        for (problem, phase, kind), layers in shapes.items()
    )


@dataclass(frozen=True, slots=True)
class Score:
    """Mean and largest absolute error, as parts of the published time."""

    cells: int
    mean: float
    largest: float


def score(selected: Iterable[Cell], constants: Mapping[str, float]) -> Score:
    """Errors of cells with the same constants. Raises InternalError: no cells."""
    return score_of((cell, constants) for cell in selected)


def score_of(selected: Iterable[tuple[Cell, Mapping[str, float]]]) -> Score:
    """Errors of cells, each with constants of its own. Raises InternalError: no cells."""
    errors = [abs(cell.terms.seconds(constants) / cell.published_s - 1) for cell, constants in selected]
    if not errors:
        raise InternalError("a score of no cells")
    return Score(len(errors), sum(errors) / len(errors), max(errors))


@dataclass(frozen=True, slots=True)
class Winners:
    """Pairs of implicit and explicit times: how often the faster one is predicted."""

    pairs: int
    right: int
    clear_pairs: int  # published times at least 3 % apart
    clear_right: int
    always_implicit: int  # right when implicit is always chosen
    wrong: tuple[str, ...]


def winners(taken: Rates, constants: Mapping[str, float]) -> Winners:
    predicted = {
        (name, cell.phase, cell.kind): cell.terms.seconds(constants) for cell in cells(taken) for name in cell.layers
    }
    right: list[tuple[bool, bool, bool, str]] = []
    for row in read_table2():
        for phase in ORDER:
            published = [row.published_s.get((phase, kind)) for kind in KINDS]
            if published[0] is None or published[1] is None:
                continue
            implicit_won = published[0] < published[1]
            implicit_wins = predicted[row.name, phase, "implicit"] < predicted[row.name, phase, "explicit"]
            clear = abs(published[0] / published[1] - 1) >= TIE
            right.append((implicit_wins == implicit_won, clear, implicit_won, f"{row.name} {phase}"))
    return Winners(
        pairs=len(right),
        right=sum(ok for ok, *_ in right),
        clear_pairs=sum(clear for _, clear, *_ in right),
        clear_right=sum(ok and clear for ok, clear, *_ in right),
        always_implicit=sum(won for _, _, won, _ in right),
        wrong=tuple(what for ok, _, _, what in right if not ok),
    )


def support_right() -> tuple[int, int]:
    """(right, slots): the rule says implicit is possible where the paper has a number, over all layers and phases.

    The first layer needs no backward-data (NA), so that slot does not count.
    """
    slots = [
        implicit_supported(row.problem, phase) == ((phase, "implicit") in row.published_s)
        for row in read_table2()
        for phase in ORDER
        if (phase, "explicit") in row.published_s
    ]
    return sum(slots), len(slots)


def held_out(all_cells: Sequence[Cell], layers: Sequence[str]) -> tuple[Cell, ...]:
    """Cells of no layer that is fitted."""
    return tuple(cell for cell in all_cells if not set(cell.layers) & set(layers))
