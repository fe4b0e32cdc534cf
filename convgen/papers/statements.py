"""One list of what [CF], [SP], [INT] and [SW] say in numbers of time, speed-up or efficiency.

The list was written before any of its numbers was computed here. Statements of the texts are rows of
tuning/papers/statements.csv; each cell of a table is a statement, from the table's own file. Speed-ups that tables
print beside times are the times' quotients here, which have more digits.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from convgen.resources import data_file

Sign = Literal["=", ">=", "again", "given", "words", "picture"]
ASKED: tuple[Sign, ...] = ("=", ">=")  # what a model can be asked for
EPOCHS, IMAGES = 90, 1281167  # [CF] 6.3; ImageNet-1k


@dataclass(frozen=True, slots=True)
class Statement:
    """A number of a text.

    Attributes:
        name: paper, place and what, with dots between.
        where: section, table or figure of the paper.
        sign: whether it is a number, a least number, one said before, a constant for models, words or a picture.
        value: in `unit`; None where there is none.
        says: in our words.
    """

    name: str
    paper: str
    where: str
    sign: Sign
    value: float | None
    unit: str
    says: str

    @property
    def asked(self) -> bool:
        return self.sign in ASKED


def rows_of(*parts: str) -> list[dict[str, str]]:
    """The rows of a table of tuning/, without its comments."""
    text = data_file("tuning", *parts).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@cache
def statements() -> tuple[Statement, ...]:
    """All statements, paper by paper."""
    found = [*_texts(), *_cf_table(), *_sp_tables(), *_sw_table2(), *_sw_table3(), *_sw_scaling()]
    assert len({s.name for s in found}) == len(found), "two statements of one name"
    order = ("CF", "SP", "INT", "SW")
    return tuple(sorted(found, key=lambda s: order.index(s.paper)))


def _texts() -> Iterator[Statement]:
    for r in rows_of("papers", "statements.csv"):
        value = float(r["value"]) if r["value"] else None
        yield Statement(r["name"], r["paper"], r["where"], r["sign"], value, r["unit"], r["says"])  # type: ignore[arg-type]


def _cf_table() -> Iterator[Statement]:
    for r in rows_of("papers", "cf_table1.csv"):
        name, which = f"cf.table1.{r['network']}", f"{r['network']} with {r['N']} samples"
        alone, ours = float(r["sample"]), float(r["minutes"])
        yield Statement(f"{name}.sample", "CF", "Table 1", "=", alone, "min", f"{which} a step by samples alone")
        yield Statement(
            f"{name}.ways", "CF", "Table 1", "=", ours, "min", f"{which} by {r['algorithm']}, {r['ways']} ways"
        )
        yield Statement(f"{name}.speedup", "CF", "Table 1", "=", alone / ours, "times", f"{which}: the quotient")


def _sp_tables() -> Iterator[Statement]:
    what = {
        "1": "GPUs a sample of the 1K mesh",
        "2": "GPUs a sample of the 2K mesh",
        "3": "GPUs for 32 samples of ResNet-50",
    }
    for number, said in what.items():
        for r in rows_of("papers", f"sp_table{number}.csv"):
            n, *cells = r.items()
            first = float(cells[0][1])
            for ways, seconds in cells:
                if seconds:
                    name, which = f"sp.table{number}.{n[1]}.{ways}", f"{ways} {said} with {n[1]} samples"
                    where = f"Table {'I' * int(number)}"
                    yield Statement(name, "SP", where, "=", float(seconds), "s", which)
                    if ways != cells[0][0]:
                        gain = first / float(seconds)
                        yield Statement(
                            f"{name}.speedup", "SP", where, "=", gain, "times", f"{which} over {cells[0][0]}"
                        )


def _sw_table2() -> Iterator[Statement]:
    for r in rows_of("sw26010", "table2.csv"):
        for phase in ("forward", "backward_filter", "backward_data"):
            for kind, unit in (("implicit", "s"), ("explicit", "s"), ("gflops", "Gflop/s")):
                if value := r[f"{phase}_{kind}"]:
                    name = f"sw.table2.{r['name']}.{phase}.{kind}"
                    said = "of the faster plan" if kind == "gflops" else f"by {kind} GEMM"
                    yield Statement(name, "SW", "Table 2", "=", float(value), unit, f"{r['name']} {phase} {said}")


def _sw_table3() -> Iterator[Statement]:
    for r in rows_of("sw26010", "table3.csv"):
        ours, name = float(r["images_per_s"]), f"sw.table3.{r['network']}"
        for column, said in (("images_per_s", "an SW26010"), ("cpu", "a CPU of 12 cores"), ("k40m", "a K40m")):
            value = float(r[column])
            yield Statement(
                f"{name}.{column}", "SW", "Table 3", "=", value, "images/s", f"{r['paper']} in training on {said}"
            )
            if column != "images_per_s":
                text = f"{r['paper']}: an SW26010 over {said}"
                yield Statement(f"{name}.over_{column}", "SW", "Table 3", "=", ours / value, "times", text)


def _sw_scaling() -> Iterator[Statement]:
    for r in rows_of("sw26010", "scaling.csv"):
        name, which = (
            f"sw.63.{r['network']}.{r['batch']}",
            f"{r['network']} on {r['nodes']} nodes with {r['batch']} a node",
        )
        yield Statement(
            f"{name}.speedup", "SW", "6.3 of Fig. 10", "=", float(r["speedup"]), "times", f"{which} over one node"
        )
        share = 100 * float(r["share"])
        yield Statement(f"{name}.share", "SW", "6.3 of Fig. 11", "=", share, "percent", f"{which}: communication")
