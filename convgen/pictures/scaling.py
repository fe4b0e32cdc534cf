"""Strong and weak scaling of plans: modelled seconds a step over ranks, beside samples split alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from convgen.pictures.figures import matplotlib, save_figure

PLANNED, SAMPLE = "#0072b2", "#d55e00"  # Okabe and Ito's blue and vermilion
GIB = 1 << 30
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Point:
    """Modelled seconds of a step; None where there is no such step, or where it does not fit (`fits`)."""

    seconds: float | None
    fits: bool = True


@dataclass(frozen=True)
class Scaling:
    """What is drawn.

    Attributes:
        planned, sample: a point for (ranks, samples), by a plan and by samples split alone.
        budget_bytes: bytes that a rank may take.
    """

    name: str
    machine: str
    batch: int
    planned: Callable[[int, int], Point]
    sample: Callable[[int, int], Point]
    budget_bytes: int | None = None


def draw_scaling(of: Scaling, ranks: int, file: Path, told: Callable[[str], None] = lambda _: None) -> None:
    """Draw two panels of modelled seconds a step over ranks, on one scale: the batch fixed, and growing with the ranks.

    Plans that don't fit the budget, and more ranks than samples without a plan, are left out.

    Args:
        ranks: the most ranks; their half is drawn too, and its half, while these are whole.
        told: is told what is planned.
    Raises:
        InputError: matplotlib is missing, or the file can't be written.
    """
    figure = matplotlib().figure.Figure(figsize=(9, 3.8), layout="constrained")
    counts = _halves(ranks)
    strong = _series(of, [(p, of.batch) for p in counts], told)
    # As many samples a rank as with all ranks, which may be a fraction: several ranks a sample.
    share = Fraction(of.batch, ranks)
    weak = _series(of, [(p, int(share * p)) for p in counts if (share * p).denominator == 1], told)
    panels: Any = figure.subplots(1, 2, sharey=True)
    _draw(panels[0], strong, counts, f"{of.name}: {_said(of.batch, 'sample')} (strong scaling)", of.budget_bytes)
    each = f"{_said(share, 'sample')} a rank" if share >= 1 else f"{_said(1 / share, 'rank')} a sample"
    _draw(panels[1], weak, counts, f"{of.name}: {each} (weak scaling)", of.budget_bytes)
    _scale(panels, [s * 1e3 for found in (strong, weak) for points in found[:2] for _, s in points])
    figure.supylabel(f"ms a step, modelled on {of.machine}", fontsize=10)
    save_figure(figure, file, 150)


@dataclass(frozen=True)
class Curves:
    """Points over ranks: seconds of steps that fit, bytes on the fullest rank of all steps, and standard deviations of
    seconds where they are known."""

    seconds: Points
    memory_bytes: Points
    deviations: Points


def draw_ranks(title: str, machine: str, planned: Curves, sample: Curves, budget: int | None, file: Path) -> None:
    """Draw modelled seconds a step with their deviations, and the fullest rank's memory, over ranks, for a fixed batch.

    Args:
        title: the network, and its samples.
        budget: bytes that a rank may take, drawn as a line.
    Raises:
        InputError: matplotlib is missing, or the file can't be written.
    """
    figure = matplotlib().figure.Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({p for one in (planned, sample) for points in (one.seconds, one.memory_bytes) for p, _ in points})
    times = [[(p, s * 1e3) for p, s in one.seconds] for one in (planned, sample)]
    _curves(left, times, counts, title)
    left.set_ylabel(f"ms a step, modelled on {machine}")
    ends = [s for points in times for _, s in points]
    for one, colour in ((sample, SAMPLE), (planned, PLANNED)):
        ends += _bars(left, one, colour)
    _scale([left], ends)
    _curves(right, [[(p, b / GIB) for p, b in one.memory_bytes] for one in (planned, sample)], counts, "memory")
    right.set_ylabel("GiB on the fullest rank")
    right.set_ylim(bottom=0)
    if budget is not None:
        right.axhline(budget / GIB, color="#555555", linewidth=0.8, linestyle="--")
        right.annotate("what a rank has", (1, budget / GIB), xycoords=("axes fraction", "data"), fontsize=8,
                       xytext=(-3, 3), textcoords="offset points", ha="right", color="#555555")  # fmt: skip
    save_figure(figure, file, 150)


def _bars(panel: Any, of: Curves, colour: str) -> list[float]:
    """Draw a standard deviation up and down of each step that has one; give the bars' upper ends, in milliseconds."""
    seconds = dict(of.seconds)
    bars = [(p, seconds[p] * 1e3, off * 1e3) for p, off in of.deviations if p in seconds]
    if bars:
        counts, middle, off = zip(*bars, strict=True)
        panel.errorbar(counts, middle, yerr=off, fmt="none", ecolor=colour, elinewidth=1, capsize=3)
    return [at + off for _, at, off in bars]


def draw_measured(panels: Mapping[str, tuple[Points, Points]], device: str, file: Path) -> None:
    """Draw seconds a step over ranks, measured and simulated, in a panel for each title.

    Raises:
        InputError: matplotlib is missing, or the file can't be written.
    """
    figure = matplotlib().figure.Figure(figsize=(4.7 * len(panels), 3.8), layout="constrained")
    drawn: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, (title, series) in zip(drawn, panels.items(), strict=True):
        counts = sorted({p for points in series for p, _ in points})
        times = [[(p, s * 1e3) for p, s in points] for points in series]
        _curves(panel, times, counts, title, ("measured", "simulated"))
    _scale(drawn, [s * 1e3 for series in panels.values() for points in series for _, s in points])
    figure.supylabel(f"ms a step on {device}", fontsize=10)
    save_figure(figure, file, 150)


def _halves(ranks: int) -> list[int]:
    found = [ranks]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found[::-1]


def _series(of: Scaling, at: Sequence[tuple[int, int]], told: Callable[[str], None]) -> tuple[Points, Points, bool]:
    """Points of plans and of samples split alone, without those that can't be or don't fit; whether some don't fit."""
    missing = False
    found: tuple[Points, Points] = ([], [])
    for ranks, batch in at:
        told(f"planning {_said(ranks, 'rank')} and {_said(batch, 'sample')}")
        for points, one in zip(found, (of.planned(ranks, batch), of.sample(ranks, batch)), strict=True):
            missing |= not one.fits
            if one.fits and one.seconds is not None:
                points.append((ranks, one.seconds))
    return *found, missing


def _said(count: int | Fraction, what: str) -> str:
    return f"{float(count):g} {what}{'s' * (count != 1)}"


def _draw(
    panel: Any, found: tuple[Points, Points, bool], counts: Sequence[int], title: str, budget: int | None
) -> None:
    *series, missing = found
    milliseconds = [[(p, s * 1e3) for p, s in points] for points in series]
    _curves(panel, milliseconds, counts, title)
    if budget is not None and missing:
        said = "left out: what does not fit" if any(series) else "nothing fits"
        panel.text(0.03, 0.04, f"{said} {budget / GIB:.4g} GiB", transform=panel.transAxes, fontsize=9)


def _curves(
    panel: Any,
    series: Sequence[Points],
    counts: Sequence[int],
    title: str,
    names: tuple[str, str] = ("planned", "samples split, nothing else"),
) -> None:
    """Draw two curves over ranks, the first one on top of the second."""
    for points, colour, name, mark in ((series[1], SAMPLE, names[1], "s"), (series[0], PLANNED, names[0], "o")):
        if points:
            panel.plot(*zip(*points, strict=True), mark + "-", color=colour, label=name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(p) for p in counts])
    panel.minorticks_off()
    panel.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
    if any(series):
        panel.legend(frameon=False, fontsize=9, loc="best")
    panel.set_xlabel("ranks")
    panel.set_title(title, fontsize=10)
    panel.grid(True, linewidth=0.4, alpha=0.5)


def _scale(panels: Any, milliseconds: Sequence[float]) -> None:
    """Give all panels one logarithmic scale, so that heights compare."""
    panels[0].set_yscale("log")
    if not milliseconds:
        panels[0].set_yticks([])
        return
    low, high = min(milliseconds), max(milliseconds)
    ticks = _ticks(low, high)
    panels[0].set_yticks(ticks, [f"{t:g}" for t in ticks])
    panels[0].set_ylim(low / 1.4, high * 1.4)
    panels[0].minorticks_off()


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten in reach; more where these are few."""
    found: list[float] = []
    for mantissas in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [m * 10.0**e for e in range(-6, 9) for m in mantissas if low / 1.4 <= m * 10.0**e <= high * 1.4]
        if len(found) >= 4:
            break
    return found
