"""What `convgen sw26010 table2` prints: text for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from statistics import median
from typing import Any

from convgen.sw26010.machine.rates import FITTED, Rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.table2.cells import (
    KINDS,
    ORDER,
    Cell,
    Kind,
    Score,
    cells,
    held_out,
    read_table2,
    score,
    support_right,
    winners,
)
from convgen.sw26010.table2.fit import determines, fit

# A layer with large planes and one without.
FIT_BIG, FIT_SMALL = ("conv1_2", "conv2_2"), ("conv3_1", "conv3_2", "conv4_1", "conv4_2", "conv5_1")
FIT_PAIRS = tuple((big, small) for big in FIT_BIG for small in FIT_SMALL)


def scores(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str]) -> dict[str, Score]:
    """Errors of fitted and held-out cells, by kind."""
    everything = cells(taken)
    rest = held_out(everything, fitted_layers)
    named: dict[str, list[Cell]] = {
        "fitted": [c for c in everything if c not in rest],
        "held out": list(rest),
        "held out, implicit": [c for c in rest if c.kind == "implicit"],
        "held out, explicit": [c for c in rest if c.kind == "explicit"],
        "  56 pixels or fewer": [c for c in rest if c.kind == "explicit" and c.problem.h <= 56],
        "  112 pixels or more": [c for c in rest if c.kind == "explicit" and c.problem.h > 56],
    }
    return {name: score(chosen, constants) for name, chosen in named.items() if chosen}


def choices(taken: Rates) -> list[tuple[tuple[str, str], dict[str, float], dict[str, Score]]]:
    """Every pair of layers of different shapes that determines all constants: the layers, constants, and scores."""
    everything = cells(taken)
    shapes = list(dict.fromkeys(min(cell.layers) for cell in everything))
    found: list[tuple[tuple[str, str], dict[str, float], dict[str, Score]]] = []
    for layers in combinations(shapes, 2):
        chosen = [cell for cell in everything if set(cell.layers) & set(layers)]
        if determines(chosen):
            constants = fit(chosen)
            found.append((layers, constants, scores(taken, constants, layers)))
    return found


def choices_text(taken: Rates) -> str:
    """What every choice of two fitted layers gives: constants, and errors of the cells that are held out."""
    made = choices(taken)
    head = (
        "fitted layers", "held out", "implicit", "explicit", "R <= 56", "R >= 112", "largest",
        "slowdown", "im2col op us", "col2im ns",
    )  # fmt: skip
    names = ("held out", "held out, implicit", "held out, explicit", "  56 pixels or fewer", "  112 pixels or more")
    units = (1.0, 1e6, 1e9)
    rows = [
        [" ".join(layers), *(f"{found[name].mean:.1%}" for name in names), f"{found['held out'].largest:.1%}",
         *(f"{constants[name] * unit:.3f}" for name, unit in zip(FITTED, units, strict=True))]
        for layers, constants, found in made
    ]  # fmt: skip
    middle = [f"{median(found[name].mean for _, _, found in made):.1%}" for name in names]
    rows.append(["median", *middle, f"{median(found['held out'].largest for _, _, found in made):.1%}", *[""] * 3])
    return f"{len(made)} choices of two layers that determine all constants\n\n{table(head, rows)}"


def choices_json(taken: Rates) -> list[dict[str, Any]]:
    """The same as dictionaries."""
    return [
        {"fitted_layers": list(layers), "constants": constants,
         "scores": {name.strip(): asdict(one) for name, one in found.items()}}
        for layers, constants, found in choices(taken)
    ]  # fmt: skip


def fit_range(taken: Rates) -> dict[str, tuple[float, float, float]]:
    """Lowest, middle and highest mean error of held-out cells over pairs of layers to fit."""
    everything = cells(taken)
    found: dict[str, list[float]] = {}
    for layers in FIT_PAIRS:
        constants = fit(cell for cell in everything if set(cell.layers) & set(layers))
        for name, one in scores(taken, constants, layers).items():
            found.setdefault(name, []).append(one.mean)
    return {name: (min(means), median(means), max(means)) for name, means in found.items() if name != "fitted"}


def table2_json(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str], left_out: Score) -> Any:
    """Constants, every cell, and the scores."""
    won = winners(taken, constants)
    return {
        "fitted_layers": list(fitted_layers),
        "constants": constants,
        "cells": [
            {
                "layers": list(c.layers), "phase": c.phase, "kind": c.kind,
                "published_s": c.published_s, "predicted_s": c.terms.seconds(constants),
            }
            for c in cells(taken)
        ],
        "scores": {
            name: {"cells": s.cells, "mean": s.mean, "largest": s.largest}
            for name, s in (*scores(taken, constants, fitted_layers).items(), ("leave one layer out", left_out))
        },
        "winners": {
            "pairs": won.pairs, "right": won.right, "clear_pairs": won.clear_pairs, "clear_right": won.clear_right,
            "always_implicit": won.always_implicit, "wrong": list(won.wrong),
        },
        "held_out_over_pairs_of_fitted_layers": {name: list(bounds) for name, bounds in fit_range(taken).items()},
        "support": dict(zip(("right", "slots"), support_right(), strict=True)),
    }  # fmt: skip


def table2_text(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str], left_out: Score) -> str:
    """The table with predictions beside it, the constants and the scores."""
    predicted = {
        (name, c.phase, c.kind): c.terms.seconds(constants) for c in cells(taken) for name in c.layers
    }  # fmt: skip

    def entry(name: str, phase: Any, kind: Kind, published: float | None) -> str:
        return "-" if published is None else f"{published:.2f}/{predicted[name, phase, kind]:.2f}"

    head = ["layer", *(f"{phase.replace('backward_', '')} {kind}" for phase in ORDER for kind in KINDS)]
    rows = [
        [row.name + "*" * (row.name in fitted_layers)]
        + [entry(row.name, phase, kind, row.published_s.get((phase, kind))) for phase in ORDER for kind in KINDS]
        for row in read_table2()
    ]
    won = winners(taken, constants)
    right, slots = support_right()
    found = [*scores(taken, constants, fitted_layers).items(), ("leave one layer out", left_out)]
    ranges = fit_range(taken).items()
    lines = [
        "Table 2, seconds published/predicted; layers with * are fitted, the others held out",
        "",
        table(head, rows),
        "",
        table(("constant", "fitted"), [(name, f"{constants[name]:.4g}") for name in FITTED]),
        "",
        table(
            ("absolute error", "cells", "mean", "largest"),
            [(name, str(s.cells), f"{s.mean:.1%}", f"{s.largest:.1%}") for name, s in found],
        ),
        "",
        f"faster plan right in {won.right} of {won.pairs} pairs, "
        f"{won.clear_right} of the {won.clear_pairs} that differ by 3 %; always implicit: {won.always_implicit}",
        f"wrong: {', '.join(won.wrong) or 'none'}",
        f"implicit possible or not: right in {right} of {slots}",
        "",
        f"{len(FIT_PAIRS)} choices of the two fitted layers, of {', '.join(FIT_BIG)} and {', '.join(FIT_SMALL)}:",
        *(f"  {name}: mean {low:.1%} to {high:.1%}, median {mid:.1%}" for name, (low, mid, high) in ranges),
    ]
    return "\n".join(lines)
