"""What was measured of local kernels, as tables: rooflines, ratios to ATen's times by regime, by ways and by family."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from convgen.cost.machines import load_machine
from convgen.kernels.families import FAMILIES
from convgen.kernels.partition import SPLITS

PHASES = ("forward", "backward_data", "backward_filter")
DTYPES = ("bfloat16", "tfloat32", "float32")
REGIMES = ("floor", "memory", "compute")
NAMES = tuple(f.NAME for f in FAMILIES)
GOAL = 0.85  # share of the roofline that a row should reach


@dataclass(frozen=True)
class Roofline:
    flops_per_s: dict[str, float]
    bytes_per_s: float

    def times(self, dtype: str, flops: float, moved: float, floor_us: float) -> dict[str, float]:
        """Microseconds that each regime allows no less than."""
        return {
            "floor": floor_us,
            "memory": moved / self.bytes_per_s * 1e6,
            "compute": flops / self.flops_per_s[dtype] * 1e6,
        }


def assumed() -> tuple[Roofline, float]:
    """The data sheet's, from tuning/machines/cuda.yaml, and its launch floor in microseconds."""
    machine = load_machine("cuda")
    return Roofline(dict(machine.peak_flops), machine.memory_bytes_per_s), machine.launch_s * 1e6


@dataclass(frozen=True)
class Row:
    """A problem's figures: the best of ATen and of convgen's own kernels, ATen as a family apart."""

    record: dict[str, Any]
    aten_us: float
    kernel_us: float
    best: str
    floor_us: float
    regime: str = ""
    bound_us: float = 0.0

    @property
    def ratio(self) -> float:
        return self.aten_us / self.kernel_us


def row_of(record: dict[str, Any], runs: list[dict[str, Any]] | None) -> Row | None:
    """None where there is nothing to compare."""
    if "failed" in record:
        return None
    raced = {n: k["us"] for n, k in record["kernels"].items() if k["raced"] and k["family"] != "aten"}
    baseline = [a["us"] for a in record["aten"].values() if a["raced"]]
    if not raced or not baseline:
        return None
    best = min(raced, key=lambda n: raced[n])
    floor = record["floor"]["us"]
    if runs is None:
        return Row(record, min(baseline), raced[best], best, floor)
    run = runs[record["run"]]
    times = Roofline(run["flops_per_s"], run["bytes_per_s"]).times(
        record["dtype"], record["flops"], record["bytes"], floor
    )
    regime = max(times, key=lambda r: times[r])
    return Row(record, min(baseline), raced[best], best, floor, regime, times[regime])


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def cell(values: Sequence[float]) -> str:
    """A geometric mean, and of how many."""
    return f"{geomean(values):.2f} ({len(values)})" if values else "-"


def show_table(devices: Mapping[str, Any], console: Console) -> None:
    """Every device's results apart."""
    for name, part in devices.items():
        console.print(f"\n{name}", highlight=False)
        rows = [row for record in part["problems"].values() if (row := row_of(record, part["runs"]))]
        for i, one in enumerate(part["runs"]):
            if any(row.record["run"] == i for row in rows):
                flops = ", ".join(f"{d} {v / 1e12:.0f}" for d, v in one["flops_per_s"].items())
                console.print(
                    f"{one['date']}: measured ceilings {flops} TFLOP/s (IEEE float32 products"
                    f" {one['float32_ieee_flops_per_s'] / 1e12:.0f}), {one['bytes_per_s'] / 1e12:.2f} TB/s",
                    highlight=False,
                )
        failed = [r["failed"] for r in part["problems"].values() if "failed" in r]
        console.print(
            f"{len(part['problems'])} problems measured, {len(rows)} compared, {len(failed)} failed;"
            f" from {len({r['sources'] for r in part['problems'].values()})} states of the sources"
        )
        if rows:
            console.print(regime_table(rows), scaling_table(rows), family_table(part["problems"].values()))


def regime_table(rows: Sequence[Row]) -> Table:
    table = Table(title="ATen's time over convgen's by what bounds: geometric mean (rows); shares of the roofline")
    for column in ("type", "phase", *REGIMES, "all", "convgen of roofline", "ATen", f"rows from {GOAL:.0%} on"):
        table.add_column(column, justify="left" if column in ("type", "phase") else "right")
    kinds = [(d, f) for f in (False, True) for d in DTYPES]
    for dtype, fused in kinds:
        for phase in (*PHASES, "all"):
            some = [
                r for r in rows
                if (r.record["dtype"], r.record["fused"]) == (dtype, fused) and phase in (r.record["phase"], "all")
            ]  # fmt: skip
            if some:
                reached = sum(r.bound_us / r.kernel_us >= GOAL for r in some) / len(some)
                table.add_row(
                    dtype + (" with copies" if fused else ""),
                    phase,
                    *(cell([r.ratio for r in some if r.regime == regime]) for regime in REGIMES),
                    cell([r.ratio for r in some]),
                    f"{geomean(r.bound_us / r.kernel_us for r in some):.0%}",
                    f"{geomean(r.bound_us / r.aten_us for r in some):.0%}",
                    f"{reached:.0%}",
                    end_section=phase == "all",
                )
    return table


def scaling_table(rows: Sequence[Row]) -> Table:
    """Time against ways, of the layers that were measured for every way. [CF] Fig. 3"""
    times: dict[tuple[str, str, str], dict[tuple[str, str], dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if not row.record["fused"]:
            for network, name, split, ways in row.record["uses"]:
                times[row.record["dtype"], split, row.record["phase"]][network, name][ways] = row
    every = sorted({w for layers in times.values() for ways in layers.values() for w in ways})
    table = Table(
        title="Time against ways ([CF] Fig. 3): ATen / convgen in us, geometric means of layers with all ways"
    )
    for column in ("type", "split", "phase", "layers", *(f"{w} ways" for w in every), "last over first"):
        table.add_column(column, justify="left" if column in ("type", "split", "phase") else "right")
    for dtype, split, phase in sorted(
        times, key=lambda t: (DTYPES.index(t[0]), SPLITS.index(t[1]), PHASES.index(t[2]))
    ):
        layers = times[dtype, split, phase]
        shown = sorted({w for ways in layers.values() for w in ways})
        full = [ways for ways in layers.values() if len(ways) == len(shown)]
        if not full:
            continue
        aten = {w: geomean(ways[w].aten_us for ways in full) for w in shown}
        ours = {w: geomean(ways[w].kernel_us for ways in full) for w in shown}
        cells = [f"{aten[w]:.1f} / {ours[w]:.1f}" if w in aten else "-" for w in every]
        first, last = shown[0], shown[-1]
        gain = f"x{aten[first] / aten[last]:.2f} / x{ours[first] / ours[last]:.2f}"
        table.add_row(dtype, split, phase, str(len(full)), *cells, gain, end_section=phase == PHASES[-1])
    return table


def family_table(records: Iterable[dict[str, Any]]) -> Table:
    """Each family's best candidate against ATen's best; what was left out, and why."""
    ratios: dict[str, list[float]] = defaultdict(list)
    wins: Counter[str] = Counter()
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for label, text in record.get("left_out", {}).items():
            causes[label.split()[0]][text.split(":")[0][:40]] += 1
        baseline = min((a["us"] for a in record.get("aten", {}).values() if a["raced"]), default=0.0)
        best: dict[str, float] = {}
        for kernel in record.get("kernels", {}).values():
            if kernel["raced"]:
                best[kernel["family"]] = min(kernel["us"], best.get(kernel["family"], math.inf))
        if baseline and best:
            wins[min(best, key=lambda f: best[f])] += 1
            for family, us in best.items():
                ratios[family].append(baseline / us)
    table = Table(title="Families: ATen's time over theirs, how often they are the fastest, candidates left out")
    for column in ("family", "over ATen (rows)", "fastest", "left out"):
        table.add_column(column, justify="left" if column in ("family", "left out") else "right")
    for family in (*NAMES, "ATen"):
        if ratios[family] or causes[family]:
            said = ", ".join(f"{n} {text}" for text, n in causes[family].most_common(4))
            table.add_row(family, cell(ratios[family]), str(wins[family]), said)
    return table


def verdict(record: dict[str, Any]) -> str:
    """One line of a problem's result."""
    if "failed" in record:
        return record["failed"]
    row = row_of(record, None)
    left = f", {len(record['left_out'])} left out" if record["left_out"] else ""
    if row is None:
        return f"nothing to compare{left}"
    times = (
        f"ATen {row.aten_us:.1f} us, {row.best} {row.kernel_us:.1f} us, x{row.ratio:.2f}, floor {row.floor_us:.1f} us"
    )
    return times + left
