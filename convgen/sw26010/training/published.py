"""What [SW] says of whole networks: Table 3, and 6.3 on 1024 nodes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from convgen.resources import data_file


@dataclass(frozen=True, slots=True)
class Speed:
    """A row of Table 3: images a second of one node."""

    network: str
    paper: str
    batch: int
    images_per_s: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """A point of 6.3: so many times as fast as one node, and the share of communication.

    The share is 1 - speedup / nodes in four of the five points: it is whatever doesn't scale.
    """

    network: str
    batch: int
    nodes: int
    speedup: float
    share: float


def csv_rows(name: str) -> list[dict[str, str]]:
    """The rows of a file in tuning/sw26010, without its comments."""
    text = data_file("tuning", "sw26010", name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@cache
def read_table3() -> dict[str, Speed]:
    """By the network's name."""
    return {
        r["network"]: Speed(r["network"], r["paper"], int(r["batch"]), float(r["images_per_s"]))
        for r in csv_rows("table3.csv")
    }


@cache
def read_scaling() -> tuple[Scaling, ...]:
    """In the order of the text."""
    return tuple(
        Scaling(r["network"], int(r["batch"]), int(r["nodes"]), float(r["speedup"]), float(r["share"]))
        for r in csv_rows("scaling.csv")
    )


def beyond_one_node_s(point: Scaling) -> float:
    """Seconds that a step of many nodes takes more than one of a single node, by the text's speedup and Table 3."""
    alone = point.batch / read_table3()[point.network].images_per_s
    return alone * (point.nodes / point.speedup - 1)
