"""Fitting the constants to cells of Table 2: least squares of relative errors, no constant negative."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.machine.rates import FITTED
from convgen.sw26010.table2.cells import Cell

Reals = NDArray[np.float64]
IMPLICIT = ("implicit_kernel_slowdown",)  # of FITTED; the others are of explicit plans


def fit(selected: Iterable[Cell], constants: Sequence[str] = FITTED) -> dict[str, float]:
    """Constants that fit the cells best; those that no cell has are 0.

    Implicit and explicit cells share no constant, so they are fitted apart.

    Raises:
        InputError: no cells.
    """
    chosen = list(selected)
    if not chosen:
        raise InputError("nothing to fit the constants to", hint="layers of [SW] Table 2, such as conv1_2 and conv4_1")
    found: dict[str, float] = dict.fromkeys(constants, 0.0)
    for kind in ("implicit", "explicit"):
        mine = [cell for cell in chosen if cell.kind == kind]
        names = [name for name in constants if any(name in dict(cell.terms.counts) for cell in mine)]
        if names:
            found.update(zip(names, _fit_kind(mine, names), strict=True))
    return found


def _fit_kind(selected: Sequence[Cell], names: Sequence[str]) -> list[float]:
    matrix = np.array([[dict(c.terms.counts).get(name, 0.0) / c.published_s for name in names] for c in selected])
    wanted = np.array([1 - c.terms.fixed_s / c.published_s for c in selected])
    return non_negative_least_squares(matrix, wanted).tolist()


def non_negative_least_squares(matrix: Reals, wanted: Reals) -> Reals:
    """x >= 0 that minimises |matrix x - wanted|; columns are brought to one size first.

    Args:
        matrix: [rows, columns]; wanted: [rows].
    """
    optimize: Any = import_module("scipy.optimize")  # it ships no types
    scale = np.abs(matrix).max(axis=0)
    found, _ = optimize.nnls(matrix / scale, wanted)
    return np.asarray(found, dtype=np.float64) / scale


def leave_one_layer_out(all_cells: Sequence[Cell]) -> list[tuple[Cell, dict[str, float]]]:
    """Every cell with constants fitted to the cells of all layers of another shape."""
    shapes = dict.fromkeys(cell.layers for cell in all_cells)
    fits = {layers: fit(cell for cell in all_cells if cell.layers != layers) for layers in shapes}
    return [(cell, fits[cell.layers]) for cell in all_cells]


def determines(selected: Iterable[Cell], constants: Sequence[str] = FITTED) -> bool:
    """Whether these cells say what each constant is: as many independent columns as there are constants."""
    chosen = list(selected)
    for kind in ("implicit", "explicit"):
        mine = [dict(cell.terms.counts) for cell in chosen if cell.kind == kind]
        names = IMPLICIT if kind == "implicit" else tuple(name for name in constants if name not in IMPLICIT)
        matrix = np.array([[counts.get(name, 0.0) for name in names] for counts in mine]).reshape(-1, len(names))
        scaled = matrix / np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-300)
        if int(np.linalg.matrix_rank(scaled, tol=1e-6)) < len(names):
            return False
    return True
