"""What each cause in the model of Table 2 is worth: errors of held-out cells without it, or with another form of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

from convgen.sw26010.conv.cost import Terms, conv_terms
from convgen.sw26010.conv.explicit_plan import ExplicitPlan
from convgen.sw26010.machine.rates import FITTED, Rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.table2.cells import FIT_LAYERS, Cell, cells, held_out, plan_of, score
from convgen.sw26010.table2.fit import determines, fit
from convgen.sw26010.table2.report import FIT_PAIRS

Change = Callable[[Cell, Rates], Terms]


def _without(*names: str) -> Change:
    def change(cell: Cell, rates: Rates) -> Terms:
        return replace(cell.terms, fixed=tuple(part for part in cell.terms.fixed if part[0] not in names))

    return change


def _scaled(name: str, factor: Callable[[Cell], float]) -> Change:
    def change(cell: Cell, rates: Rates) -> Terms:
        parts = ((part, seconds * (factor(cell) if part == name else 1.0)) for part, seconds in cell.terms.fixed)
        return replace(cell.terms, fixed=tuple(parts))

    return change


def _fitted(*names: str) -> Change:
    """The seconds of each of these causes are multiplied by a fitted constant."""

    def change(cell: Cell, rates: Rates) -> Terms:
        moved = tuple(part for part in cell.terms.fixed if part[0] in names)
        return replace(_without(*names)(cell, rates), counts=(*cell.terms.counts, *moved))

    return change


def _uncounted_col2im(cell: Cell, rates: Rates) -> Terms:
    if cell.phase != "backward_data":
        return cell.terms
    return replace(cell.terms, counts=tuple(c for c in cell.terms.counts if c[0] != "im2col_operation_s"))


def _library_everywhere(cell: Cell, rates: Rates) -> Terms:
    return conv_terms(plan_of(cell.problem, cell.phase, cell.kind, rates), rates, library=True)


def _by_outputs(cell: Cell, rates: Rates) -> Terms:
    """A constant of an output element in forward alone, where the library is; its row's seconds left out."""
    plan = plan_of(cell.problem, cell.phase, cell.kind, rates)
    large = isinstance(plan, ExplicitPlan) and "library" in dict(cell.terms.fixed)
    if not large:
        return cell.terms
    p = cell.problem
    outputs = ((OUTPUT, float(p.n * p.f * p.h_out * p.w_out)),) if cell.phase == "forward" else ()
    return replace(_without("library")(cell, rates), counts=(*cell.terms.counts, *outputs))


def _by_outputs_and_copies(cell: Cell, rates: Rates) -> Terms:
    return _fitted("copies")(replace(cell, terms=_by_outputs(cell, rates)), rates)


def _whole(cell: Cell) -> float:
    """How many times as much is copied if the part of a plane that fits into LDM is copied, too."""
    plane = cell.problem.h_out * cell.problem.w_out
    return 1 / max(1 - 65536 / (8 * plane), 1e-9) if 8 * plane > 65536 else 1.0


OUTPUT = "an output element"
CAUSES: tuple[tuple[str, Change, tuple[str, ...]], ...] = (
    ("as it is", _without(), ()),
    ("weights not repacked for every image", _without("repacked weights"), ()),
    ("col2im's operations not counted", _uncounted_col2im, ()),
    ("no copies of large planes' operands", _without("copies"), ()),
    ("copies of whole operands", _scaled("copies", _whole), ()),
    ("no library", _without("library"), ()),
    ("the library for all planes", _library_everywhere, ()),
    ("an output element forward in its place, fitted", _by_outputs, (OUTPUT,)),
    ("the same, and copies fitted", _by_outputs_and_copies, (OUTPUT, "copies")),
    ("library and copies fitted", _fitted("library", "copies"), ("library", "copies")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Worth:
    """Mean errors of held-out cells. `fits`: the constants beyond FITTED, fitted to all cells, by what is taken."""

    name: str
    constants: int
    held_out: float
    large: float
    median_of_ten: float
    pairs: int
    median_of_all: float
    fits: tuple[tuple[str, float], ...]


def worths(taken: Rates) -> list[Worth]:
    """What each cause is worth."""
    return [
        _worth(name, [replace(c, terms=change(c, taken)) for c in cells(taken)], more) for name, change, more in CAUSES
    ]


def _worth(name: str, given: Sequence[Cell], more: tuple[str, ...]) -> Worth:
    constants = (*FITTED, *more)

    def error(layers: Sequence[str], *, large: bool = False) -> float:
        chosen = fit((c for c in given if set(c.layers) & set(layers)), constants)
        rest = held_out(given, layers)
        return score((c for c in rest if not large or (c.kind == "explicit" and c.problem.h > 56)), chosen).mean

    shapes = list(dict.fromkeys(min(cell.layers) for cell in given))
    pairs = [
        pair for pair in combinations(shapes, 2)
        if determines((c for c in given if set(c.layers) & set(pair)), constants)
    ]  # fmt: skip
    overall = fit(given, constants)
    return Worth(
        name, len(constants), error(FIT_LAYERS), error(FIT_LAYERS, large=True),
        median(error(pair) for pair in FIT_PAIRS), len(pairs), median(error(pair) for pair in pairs),
        tuple((extra, overall[extra]) for extra in more),
    )  # fmt: skip


def causes_json(taken: Rates) -> list[dict[str, Any]]:
    """The same as dictionaries."""
    return [{**asdict(worth), "fits": dict(worth.fits)} for worth in worths(taken)]


def causes_text(taken: Rates) -> str:
    """A line for every cause."""
    head = (
        "model",
        "constants",
        "held out",
        "R >= 112",
        "median of ten",
        "of all pairs",
        "pairs",
        "fitted to all cells",
    )
    rows = [
        [w.name, str(w.constants), f"{w.held_out:.1%}", f"{w.large:.1%}", f"{w.median_of_ten:.1%}",
         f"{w.median_of_all:.1%}", str(w.pairs), _said(w)]
        for w in worths(taken)
    ]  # fmt: skip
    title = f"mean errors of held-out cells: fitted to {' and '.join(FIT_LAYERS)}, and over choices of two layers"
    return f"{title}\n\n{table(head, rows)}"


def _said(worth: Worth) -> str:
    parts = (f"{v * 1e9:.2f} ns {name}" if name == OUTPUT else f"{name} x {v:.2f}" for name, v in worth.fits)
    return ", ".join(parts)
