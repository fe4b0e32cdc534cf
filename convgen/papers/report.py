"""`convgen papers`: every figure and table, and each number of the texts beside the models'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.errors import InputError
from convgen.papers import integrated, layers, steps, taihulight
from convgen.papers.figure import Figure
from convgen.papers.fit import fit, fit_text
from convgen.papers.statements import Statement, statements
from convgen.spec.text import aligned

WITHIN = 0.25
Rows = int | None
FIGURES: dict[str, Callable[[Rows], Figure]] = {
    "cf.fig3": lambda _: layers.local_scaling(),
    "cf.fig4": lambda _: layers.segmented(),
    "cf.fig5": lambda _: layers.strong(),
    "cf.fig6": lambda _: layers.weak(),
    "cf.fig7": lambda rows: steps.cf_scaling("cf.fig7", {"resnet50": (32, (2, 4))}, rows),
    "cf.fig8": lambda rows: steps.cf_scaling("cf.fig8", {"wrn50_2": (16, (8,)), "wrn50_4": (8, (8,))}, rows),
    "cf.table1": steps.cf_table,
    "sp.fig2": lambda _: layers.spatial(
        "fig2", ((("resnet50", "conv1"), "conv1"), (("resnet50", "res3b_branch2a"), "res3b_branch2a")), (1, 4, 32)
    ),
    "sp.fig3": lambda _: layers.spatial(
        "fig3", ((("mesh2k_assumed", "conv1_1"), "conv1_1"), (("mesh2k_assumed", "conv6_1"), "conv6_1")), (1, 2, 4)
    ),
    "sp.table1": lambda rows: steps.sp_table(1, rows),
    "sp.table2": lambda rows: steps.sp_table(2, rows),
    "sp.table3": lambda rows: steps.sp_table(3, rows),
    "int.fig4": lambda _: integrated.batches(),
    **{f"int.fig{n}": lambda _, n=n: integrated.scaling(f"fig{n}") for n in (6, 7, 8, 9)},
    "sw.fig2": lambda _: taihulight.mesh(),
    "sw.fig6": lambda _: taihulight.messages(),
    "sw.table2": lambda _: taihulight.table2(),
    "sw.table3": lambda _: taihulight.table3(),
    "sw.fig8": lambda _: taihulight.by_layer("fig8"),
    "sw.fig9": lambda _: taihulight.by_layer("fig9"),
    "sw.fig10": lambda _: taihulight.scaling("fig10"),
    "sw.fig11": lambda _: taihulight.scaling("fig11"),
}
TEXTS: dict[str, Callable[[], str]] = {
    "cf.choice": layers.choice_text,
    "int.readings": integrated.readings_text,
    "fit": lambda: fit_text(fit()),
}
# Rows that constants are fitted to: they are shown, and don't count.
FITTED = re.compile(
    r"sp\.table1\.4\.|sp\.table2\.2\.|sp\.table3\.128\.|sw\.table2\.(conv1_2|conv4_1)\.|sw\.63\.resnet50\.32\."
    r"|sp\.vib2\.four"
)
# Why a number is not met, by the beginning of its name.
CAUSES = {
    "cf.": "sums over 1,024 GPUs are rings one behind the other here, with more latency than NCCL's side by side",
    "cf.table1": "whole trainings, with reading and a framework; and rings of small sums have more latency here",
    "cf.fig4": "at 1,024 GPUs hops' latencies are most of a ring's time here, and two segments leave half of the hops",
    "cf.fig7.x": "rows first and stationary-x behind is no named algorithm; the layout by price is cf.fig7.xy",
    "sp.": "on several nodes halos and sums hide less in the text, more so with more GPUs, than they do here",
    "sp.table2": "on 2,048 GPUs messages of halos are too many to be priced one by one: a bound from above",
    "int.fig4.best": "a roofline never gets slower with more samples; what the text measured does above 256",
    "int.fig6": "computing by a roofline, which the text measured",
    "int.4.ratio": "Eqs. 2 and 3 have three sums against two, which the text's quotient leaves out",
    "sw.3": "buses as wide and fast as the text's clock says; it measured 6/7 of that",
    "sw.6.m": "counted by bytes alone",
    "sw.6.pcie": "16 lanes of PCI-E 3 take 0.4 % of the step; what else reads and decodes is in no text",
    "sw.table2": "equal layers differ by 26 % in the text; large planes' explicit plans have copies that it leaves out",
    "sw.table3": "a CPU and a K40m are modelled from data sheets, of which networks reach 5 to 32 % in the text",
    "sw.table3.alexnet_bn": "measured with later code than the public profiles, by which Caffe's layers are counted",
    "sw.63": "the public code's trees of messages, with one constant",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A statement beside the models' value; None where no figure has one."""

    statement: Statement
    ours: float | None
    figure: str

    @property
    def ratio(self) -> float | None:
        value = self.statement.value
        return None if self.ours is None or not value else self.ours / value

    @property
    def fitted(self) -> bool:
        return FITTED.match(self.statement.name) is not None

    @property
    def met(self) -> bool:
        """Whether ours is within a quarter of the text's, or at least as much where the text says a least number."""
        if self.ratio is None:
            return False
        return self.ratio >= 1 if self.statement.sign == ">=" else abs(self.ratio - 1) <= WITHIN

    @property
    def cause(self) -> str:
        if self.met:
            return ""
        if self.ours is None:
            return CAUSES.get(self.statement.name, "no figure has it: not modelled")
        found = [text for start, text in CAUSES.items() if self.statement.name.startswith(start)]
        return found[-1] if found else "?"

    def json(self) -> dict[str, Any]:
        s = self.statement
        return {"name": s.name, "paper": s.paper, "where": s.where, "says": s.says, "sign": s.sign, "unit": s.unit,
                "published": s.value, "modelled": self.ours, "ratio": self.ratio, "fitted": self.fitted,
                "met": self.met, "cause": self.cause, "command": f"convgen papers {self.figure}"}  # fmt: skip


def figures(names: Iterable[str], rows: Rows = None, told: Callable[[str], None] = lambda _: None) -> list[Figure]:
    """The figures of these names.

    Args:
        rows: how many rows of tables, and mini-batches of scaling, from the first on; by default all.
    Raises:
        InputError: no figure has one of the names.
    """
    found: list[Figure] = []
    for name in names:
        if name not in FIGURES:
            raise InputError(f"no figure {name}", hint=f"one of {', '.join((*FIGURES, *TEXTS))}")
        told(name)
        found.append(FIGURES[name](rows))
    return found


def rows_of_figures(found: Sequence[Figure], *, every: bool) -> list[Row]:
    """Statements that the figures answer; with `every` also those that none does."""
    values = {name: (value, figure.name) for figure in found for name, value in figure.found.items()}
    asked = {s.name: s for s in statements() if s.asked}
    if missing := values.keys() - asked.keys():
        raise AssertionError(f"no statements: {missing}")
    return [Row(s, *values.get(s.name, (None, ""))) for s in asked.values() if every or s.name in values]


def rows_text(rows: Sequence[Row]) -> str:
    """A line for each statement."""
    lines = [["statement", "says", "the text", "the models", "ratio", ""]]
    for r in rows:
        s = r.statement
        published = f"{'at least ' * (s.sign == '>=')}{s.value:.4g} {s.unit}"
        ours = "" if r.ours is None else f"{r.ours:.4g}"
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        lines.append([s.name, s.says, published, ours, ratio, "fitted" if r.fitted else r.cause])
    return "\n".join(aligned(lines, (2, 3, 4)))


def summary_text(rows: Sequence[Row]) -> str:
    """A line for each table or figure, and the causes of numbers that are not met."""
    places = dict.fromkeys((r.statement.paper, r.statement.where) for r in rows)
    lines = [["", "numbers", "fitted", "held out", "met", "least", "most"]]
    for paper, where in places:
        mine = [r for r in rows if (r.statement.paper, r.statement.where) == (paper, where)]
        lines.append([f"[{paper}] {where}", *_counts(mine)])
    lines.append(["all", *_counts(rows)])
    text = "\n".join(aligned(lines, range(1, 7)))
    held = [r for r in rows if not r.fitted]
    met = sum(r.met for r in held)
    text += f"\n{met} of {len(held)} numbers that nothing is fitted to are met: {met / max(1, len(held)):.1%}"
    causes: dict[str, list[Row]] = {}
    for r in held:
        if not r.met:
            causes.setdefault(r.cause, []).append(r)
    for cause, of in causes.items():
        names = ", ".join(r.statement.name for r in of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
        text += f"\n{len(of):4} not met ({names}): {cause}"
    return text


def _counts(rows: Sequence[Row]) -> list[str]:
    held = [r for r in rows if not r.fitted]
    ratios = [r.ratio for r in held if r.ratio is not None]
    ends = [f"{min(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["", ""]
    return [str(len(rows)), str(len(rows) - len(held)), str(len(held)), str(sum(r.met for r in held)), *ends]
