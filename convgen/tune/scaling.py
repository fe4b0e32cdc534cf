"""Time against ways of partitioning a layer, for ATen and for the tuned kernels ([CF] Fig. 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.kernels.partition import SPLITS
from convgen.pictures.figures import save_figure
from convgen.program.nodes import PHASES
from convgen.tune.database import Entry
from convgen.tune.tuner import Outcome

Points = dict[tuple[str, str], dict[int, Entry]]
INK, TUNED, ATEN, IDEAL = "#222222", "#1b6ca8", "#c8553d", "#999999"


def points(outcomes: Sequence[Outcome]) -> Points:
    """The entries by phase and split, then by number of ways."""
    found: Points = defaultdict(dict[int, Entry])
    for outcome in outcomes:
        for use in outcome.wanted.uses:
            if use.split is not None and outcome.entry is not None:
                found[use.phase, use.split][use.ways] = outcome.entry
    return found


def plot(outcomes: Sequence[Outcome], device: str, file: Path) -> None:
    """Draw a panel for each phase and split: milliseconds against ways, both axes logarithmic. Bars go from the 20th to
    the 80th percentile; dashes are the first point divided by the ways.

    Raises:
        InputError: nothing was measured, or the file can't be written.
    """
    found = points(outcomes)
    if not found:
        raise InputError("--plot: nothing was measured", hint="more --budget")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    splits = [s for s in SPLITS if any(split == s for _, split in found)]
    every = sorted({w for some in found.values() for w in some})
    phases = [p for p in PHASES if any(phase == p for phase, _ in found)]
    size = (3.4 * len(splits) + 0.6, 2.5 * len(phases) + 0.9)
    drawing: Any = pyplot
    figure, axes = drawing.subplots(len(phases), len(splits), figsize=size, squeeze=False, sharex=True, sharey="row")
    for row, phase in enumerate(phases):
        for column, split in enumerate(splits):
            ax: Any = axes[row][column]
            some = found.get((phase, split), {})
            ways = sorted(some)
            ours = [some[w].ms for w in ways]
            low = [some[w].ms - some[w].p20 for w in ways]
            high = [some[w].p80 - some[w].ms for w in ways]
            aten = [(w, e) for w in ways if (e := some[w].aten_ms) is not None]
            if ways:
                ax.plot(ways, [ours[0] * ways[0] / w for w in ways], "--", color=IDEAL, lw=1, label="ideal")
                ax.plot([w for w, _ in aten], [e for _, e in aten], "s-", color=ATEN, lw=1.6, ms=4, label="ATen")
                ax.errorbar(ways, ours, (low, high), fmt="o-", color=TUNED, lw=1.6, ms=4, capsize=2, label="tuned")
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                ax.set_xticks(every, [str(w) for w in every])
                ax.yaxis.set_major_formatter(ScalarFormatter())
                ax.yaxis.set_minor_formatter(NullFormatter())
            ax.grid(True, which="major", color="#e6e6e6", lw=0.6)
            ax.set_axisbelow(True)
            for side in ("top", "right"):
                ax.spines[side].set_visible(False)
            if row == 0:
                ax.set_title(f"split by {split}", fontsize=10, color=INK)
            if column == 0:
                ax.set_ylabel(f"{phase.replace('_', '-')}\nms", fontsize=9, color=INK)
            if row == len(phases) - 1:
                ax.set_xlabel("ranks that share the layer", fontsize=9, color=INK)
    layer = outcomes[0].wanted.uses[0].layer
    figure.suptitle(f"{layer}: local convolution of one rank, {device}", fontsize=11, color=INK)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    try:
        save_figure(figure, file, 140)
    finally:
        drawing.close(figure)
