"""A step of training in time: what every rank computes, what travels meanwhile, and who waits for what.

Each rank computes one thing after the other; a collective begins when the last of the ranks has come to it. A
collective that is waited for at once stops all ranks. One that is started goes on beside, in a lane of its own
(cost/link.py), and stops a rank only where the rank waits for it before it is over.

Prices are the program's (cost/rows.py): local work by rank, conversions by the busiest rank, with latencies apart, as
these slow no other lane down. Where the machine's file says what an overlapped conversion takes of the processor, the
ranks lose that time. A row in pieces costs a launch for each piece, and a copy of its result; a chunk costs a launch of
a layer's module.

Source: docs/overlap.md; [SP] V-B ("greedily overlapping as much computation as possible with an allreduce").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import volume
from convgen.algebra.involved import one_tensor, sides_of
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Signature
from convgen.cost.link import Link, Share, Transfer
from convgen.cost.links import collective_seconds
from convgen.cost.local import rows_flops_per_s
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS, Moves
from convgen.cost.network import bucket_record
from convgen.cost.routes import forget_routes
from convgen.cost.rows import Price, computed_on, price_on
from convgen.cost.work import taken_back, work_by_rank
from convgen.operations.row import Operation
from convgen.program.chunks import shares
from convgen.program.early import boundary_pieces, interior_rows
from convgen.program.flow import Flow, Local, Start, Wait, backward, forward, is_of_operand
from convgen.program.network import Bucket, Moved, Program
from convgen.program.rows import PlacedRow, Roles, index_sets

Seconds = NDArray[np.float64]
MAIN = "in order"  # the lane of collectives that are waited for at once


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    Attributes:
        rank: the rank that takes it; -1 for what all ranks take part in.
        lane: "compute", or a lane of the link.
        because: number of the span before whose end it could not begin; -1 for none.
    """

    name: str
    lane: str
    rank: int
    start_s: float
    end_s: float
    because: int = -1

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Travelled:
    """A collective and its cost.

    Attributes:
        seconds: what it takes alone.
        exposed_s: how long the last of the ranks stood still for it, and what it took of the processor meanwhile.
    """

    name: str
    kind: str
    phase: str
    seconds: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of its seconds that costs nothing."""
        return 1 - min(self.exposed_s / self.seconds, 1.0) if self.seconds else 1.0


@dataclass(frozen=True)
class Timeline:
    """A step of training on ranks.

    Attributes:
        computing_s: seconds of the rank that computes most.
        serial_s: seconds of computing and moving one after the other, each by its slowest rank.
    """

    ranks: int
    spans: tuple[Span, ...]
    travelled: tuple[Travelled, ...]
    end_s: float
    forward_s: float
    computing_s: float
    serial_s: float

    @property
    def moving_s(self) -> float:
        return sum(one.seconds for one in self.travelled)

    @property
    def exposed_s(self) -> float:
        return sum(one.exposed_s for one in self.travelled)

    @property
    def hidden(self) -> float:
        """The share of all collectives' seconds that costs nothing."""
        return 1 - min(self.exposed_s / self.moving_s, 1.0) if self.moving_s else 1.0

    def critical_path(self) -> list[Span]:
        """The spans that led to the end, in order: each could not begin before the one in front of it was over."""
        found: list[Span] = []
        here = max(range(len(self.spans)), key=lambda i: self.spans[i].end_s, default=-1)
        while here >= 0:
            found.append(self.spans[here])
            here = self.spans[here].because
        return found[::-1]


Flying = tuple[Transfer, str, int, float]  # transfer, kind, number of the span before it, seconds of the processor


@dataclass
class _Clock:
    """How far each rank has come, and the span that brought it there."""

    price: Price
    link: Link
    at: Seconds
    last: list[int]
    spans: list[Span] = field(default_factory=list[Span])
    travelled: list[Travelled] = field(default_factory=list[Travelled])
    flying: dict[str, Flying] = field(default_factory=dict[str, Flying])
    lanes: dict[str, int] = field(default_factory=dict[str, int])  # by lane, number of its last span

    @property
    def slowest(self) -> int:
        return int(self.at.argmax())

    def span(self, name: str, lane: str, rank: int, start: float, end: float, because: int) -> int:
        self.spans.append(Span(name, lane, rank, start, end, because))
        return len(self.spans) - 1

    def compute(self, name: str, seconds: Seconds) -> None:
        for rank, taken in enumerate(seconds.tolist()):
            start = float(self.at[rank])
            self.last[rank] = self.span(name, "compute", rank, start, start + taken, self.last[rank])
        self.at = self.at + seconds

    def stop(self, name: str, kind: str, phase: str, seconds: float, latency: float) -> None:
        """Run a collective that all ranks wait for."""
        slowest, start = self.slowest, float(self.at.max())
        end = self.link.finish(self.link.add(name, MAIN, seconds, start, latency))
        mine = self.span(name, MAIN, -1, start, end, self.last[slowest])
        self.travelled.append(Travelled(name, kind, phase, seconds, end - start))
        self.at, self.last = np.full_like(self.at, end), [mine] * len(self.last)

    def start(self, name: str, lane: str, kind: str, seconds: float, latency: float, processor: float) -> None:
        transfer = self.link.add(name, lane, seconds, float(self.at.max()), latency)
        self.flying[name] = transfer, kind, self.last[self.slowest], processor
        if processor:
            self.compute(f"{name} (processor)", np.full_like(self.at, processor))

    def wait(self, name: str, phase: str) -> None:
        """Bring ranks to the end of what was started."""
        transfer, kind, because, processor = self.flying.pop(name)
        end, latest = self.link.finish(transfer), float(self.at.max())
        before = self.lanes.get(transfer.lane, -1)
        waited = transfer.start_s > transfer.asked_s and before >= 0  # it waited for its lane's transfer before it
        mine = self.span(name, transfer.lane, -1, transfer.start_s, end, before if waited else because)
        self.lanes[transfer.lane] = mine
        self.travelled.append(Travelled(name, kind, phase, transfer.seconds, max(end - latest, 0.0) + processor))
        late = self.at < end
        self.at = np.maximum(self.at, end)
        self.last = [mine if is_late else last for last, is_late in zip(self.last, late.tolist(), strict=True)]


def simulate(
    program: Program,
    machine: Machine,
    dtype: str,
    *,
    links: Share = "shared",
    of_inputs: bool = False,
    alike: bool = False,
    trains: bool = True,
) -> Timeline:
    """A step of training on a machine, forward and backward; or forward alone.

    Args:
        links: whether collectives of several lanes share each rank's link, or have one each.
        of_inputs: whether inputs want gradients, too.
        alike: whether one rank stands for all that take as long in every step; spans are then of such ranks alone.
        trains: whether there is a backward pass.
    """
    price, grid = price_on(program.grid, machine, dtype), program.grid
    phases = {"forward": _timed(program, price, forward(program))}
    if trains:
        phases["backward"] = _timed(program, price, backward(program, of_inputs=of_inputs))
    ranks = _distinct([one for steps in phases.values() for one in steps]) if alike else np.arange(grid.ranks)
    clock = _Clock(price, Link(links), np.zeros(len(ranks)), [-1] * len(ranks))
    computing, serial = np.zeros(len(ranks)), 0.0
    ends: list[float] = []
    for phase, steps in phases.items():
        for step, taken in steps:
            match step:
                case Local():
                    seconds = taken[ranks]
                    computing += seconds
                    serial += float(seconds.max())
                    clock.compute(step.title, seconds)
                case Moved():
                    if step.conversion.kind != "slice":
                        seconds, latency = (moved_seconds(program, one, step) for one in (price, price.latencies))
                        clock.stop(step.step, step.conversion.kind, phase, seconds, latency)
                case Start():
                    first = step.moved[0]
                    several = step.bucket is not None
                    kind = "all_reduce" if several else first.conversion.kind
                    seconds, latency = (started_seconds(program, one, step) for one in (price, price.latencies))
                    busy = started_seconds(program, price.processor, step) if price.processor else 0.0
                    clock.start(step.name, step.lane, kind, seconds, latency, busy)
                case Wait():
                    clock.wait(step.name, phase)
        ends.append(float(clock.at.max()))
    moving = sum(one.seconds for one in clock.travelled)
    return Timeline(
        grid.ranks,
        tuple(clock.spans),
        tuple(clock.travelled),
        ends[-1],
        ends[0],
        float(computing.max()),
        serial + moving,
    )


def _timed(program: Program, price: Price, steps: Iterable[Flow]) -> list[tuple[Flow, Seconds]]:
    """Steps, each with its seconds by rank, 0 if it is not local."""
    none = np.zeros(price.grid.ranks)
    return [
        (one, local_seconds(price_of(program, price, one), one) if isinstance(one, Local) else none) for one in steps
    ]


def price_of(program: Program, price: Price, local: Local) -> Price:
    """The price in the type in which a row, or a gradient's row, computes."""
    row, types = program.rows[local.row], program.row_types[local.row]
    own = next((k for k, one in row.derived if one is local.placed), None)
    return price.of(types.local if own is None else types.of(row.signature.inputs[own].name).local)


def _distinct(steps: Sequence[tuple[Flow, Seconds]]) -> NDArray[np.intp]:
    """One rank for each set of ranks that compute equally long in every step."""
    each = {id(seconds): seconds for one, seconds in steps if isinstance(one, Local)}
    times = {seconds.tobytes(): seconds for seconds in each.values() if (seconds != seconds[0]).any()}
    if not times:
        return np.arange(1)
    return np.sort(np.unique(np.stack(list(times.values())), axis=1, return_index=True)[1])


def moved_seconds(program: Program, price: Price, moved: Moved) -> float:
    """Seconds of a conversion on the busiest rank."""
    return _conversion_seconds(_moves(program, price, moved), moved.placed.signature, moved.conversion)


def _moves(program: Program, price: Price, moved: Moved) -> Moves:
    return price.of(program.dtype_of(moved)).moves


@lru_cache(maxsize=1 << 13)
def _conversion_seconds(moves: Moves, signature: Signature, conversion: Conversion) -> float:
    return moves.conversion(index_sets(signature, moves.grid), conversion) / PICOSECONDS


def started_seconds(program: Program, price: Price, start: Start) -> float:
    """Seconds of what a Start sends: a bucket, a chunk, or a conversion."""
    if start.bucket is not None:
        return bucket_seconds(program, price, start.bucket, start.moved)
    (moved,) = start.moved
    if start.chunk:
        moves = _moves(program, price, moved)
        return _chunk_seconds(moves, moved.placed, moved.conversion, is_of_operand(moved), start.chunk - 1)
    return moved_seconds(program, price, moved)


@lru_cache(maxsize=1 << 13)
def _chunk_seconds(moves: Moves, row: PlacedRow, c: Conversion, of_operand: bool, number: int) -> float:
    """Seconds of a chunk: the whole's latency, and a part of its bytes' seconds, as far off the model as collectives of
    so many bytes are. All chunks together take no less than the whole, as no link rests between them, unless a chunk
    goes a quicker way than the whole."""
    machine, grid, how = moves.machine, moves.grid, moves.machine.collectives.of(c.kind)
    least = collective_seconds(grid, machine.levels, c.kind, c.over, 0, machine.add_s_per_byte, how)[0]
    share = float(shares(row, of_operand, grid)[number].max())
    whole = moves.moved(index_sets(row.signature, grid), c)
    sent = [n * moves.element_bytes for n in (whole.sent, whole.sent * share)]
    over = [machine.over_model(c.kind, grid.over(c.over), n) for n in sent]
    seconds = whole.ps / PICOSECONDS
    own = (least + max(seconds / over[0] - least, 0.0) * share) * over[1]
    short = machine.short_bytes(c.kind, grid.over(c.over))
    return own if sent[1] <= short < sent[0] else max(seconds * share, own)


def bucket_seconds(program: Program, price: Price, bucket: Bucket, moved: Sequence[Moved]) -> float:
    """Seconds of a bucket's all-reduce.

    Packing has no price, as what other collectives copy beside their messages has none: where collectives were measured
    it is in what they take over the model, and a GPU's kernels write gradients where the message takes them.
    """
    machine = price.machine
    sent = max(bucket_record(program, bucket, moved)["bytes_sent_per_rank"])
    how = machine.collectives.of("all_reduce")
    over, gamma = bucket.over, machine.add_s_per_byte
    moves = price.of(bucket.dtype).moves
    if (known := moves.measured("all_reduce", over, sent // moves.element_bytes)) is not None:
        return known
    modelled = collective_seconds(price.grid, machine.levels, "all_reduce", over, sent, gamma, how)[0]
    return modelled * machine.over_model("all_reduce", price.grid.over(over), sent)


@lru_cache(maxsize=1 << 13)
def local_seconds(price: Price, local: Local) -> Seconds:
    """Seconds by rank of a local step. The array is shared: don't write to it."""
    row = local.placed
    if local.rides and price.machine.adds_biases:
        return np.zeros(price.grid.ranks)
    derived = tuple(k for k, _ in row.derived if k in local.operands)
    busy, launches = _busy_seconds(price, row.bound.operation, row.way, row.roles, local.operands, derived)
    launch, apart = (seconds * launches for seconds in (price.machine.rows_launch_s, price.machine.launch_s))
    copy_s = 2 * price.element_bytes / price.machine.memory_bytes_per_s  # of an element
    if local.part == "chunk" and row.chunks is not None:
        return (busy + _copied(row, price) * copy_s) / row.chunks.count + apart
    if local.part == "whole" or row.early is None:
        return busy + launch
    share, pieces = _interior(row, price.grid)
    if local.part == "interior":
        return busy * share + launch
    return busy * (1 - share) + launch * pieces + _held_result(row, price.grid) * copy_s  # pieces are joined, or cut


def rank_seconds(
    price: Price, operation: Operation, way: int, roles: Roles, operands: tuple[int, ...], derived: tuple[int, ...]
) -> Seconds:
    """Seconds by rank of an operation, or of its gradients, launches included.

    Args:
        operands: those of the vjp; none for the operation itself.
        derived: those among them whose gradients rows of their own make.
    """
    busy, launches = _busy_seconds(price, operation, way, roles, operands, derived)
    return busy + launches * price.machine.rows_launch_s


@lru_cache(maxsize=1 << 13)
def _busy_seconds(
    price: Price, operation: Operation, way: int, roles: Roles, operands: tuple[int, ...], derived: tuple[int, ...]
) -> tuple[Seconds, int]:
    """Seconds by rank in whole picoseconds, without launches; and the number of launches.

    Args:
        operands: those of the vjp.
        derived: those among them whose gradients rows of their own make.
    """
    machine, total = price.machine, np.zeros(price.grid.ranks)
    there = work_by_rank(operation, way, tuple(sorted(roles)), price.grid, undone=bool(operands))
    done = [*taken_back(there, operands or None, derived)]
    for n, one in done:
        flops, elements = (
            np.broadcast_to(np.asarray(k, dtype=np.float64), price.grid.ranks)
            for k in (one.work.flops, one.work.elements)
        )
        most = int(flops.max())
        rate = rows_flops_per_s(machine, price.dtype, one.operation, dict(roles), price.grid, most)
        busy = np.maximum(flops / rate, elements * price.element_bytes / machine.memory_bytes_per_s)
        total += n * np.rint(busy * PICOSECONDS) / PICOSECONDS
    launches = sum(n for n, one in done if not one.operation.rides)
    known = price.measured_s(operation, way, dict(roles), operands or None, derived)
    if known is None:
        return total, launches
    busy, most = (
        known - launches * machine.rows_launch_s,
        float(total.max()),
    )  # the busiest rank's, the others' in its share
    return (total * (busy / most) if most else np.full_like(total, busy)), launches


@lru_cache(maxsize=1 << 12)
def _copied(row: PlacedRow, price: Price) -> Seconds:
    """By rank, elements that chunks copy: of the result, and of an operand whose rows several chunks read."""
    assert row.chunks is not None
    sets, found = index_sets(row.signature, price.grid), _held_result(row, price.grid)
    k = row.chunks.operand
    if k is not None and any(m.relation for m in row.signature.inputs[k].dims if row.chunks.index in m.indices):
        name = row.signature.inputs[k].name
        found = found + volume(sets.held(row.fetch[k][-1].dst if row.fetch[k] else Layout(name, row.reads[k])))
    return found


@lru_cache(maxsize=1 << 12)
def _held_result(row: PlacedRow, grid: Grid) -> Seconds:
    """By rank, elements of the result that it makes."""
    (result,) = row.signature.results
    layout = row.store[0][0].src if row.store[0] else Layout(result.name, row.makes[0])
    return volume(index_sets(row.signature, grid).held(layout)).astype(np.float64)


@lru_cache(maxsize=1 << 12)
def _interior(row: PlacedRow, grid: Grid) -> tuple[Seconds, NDArray[np.int64]]:
    """By rank the interior's share, and how many pieces the boundary has."""
    assert row.early is not None
    return interior_rows(row, row.early, grid), boundary_pieces(row, row.early, grid)


def forget() -> None:
    """Forget steps and prices, as of sizes that nobody asks for again."""
    for known in (_conversion_seconds, _chunk_seconds, local_seconds, _busy_seconds, _copied, _held_result, _interior):
        known.cache_clear()
    for known in (price_on, computed_on, index_sets, one_tensor, sides_of):
        known.cache_clear()
    forget_routes()


def exposed(timeline: Timeline) -> Iterator[Travelled]:
    """Collectives, the most exposed first."""
    yield from sorted(timeline.travelled, key=lambda one: -one.exposed_s)


def by_kind(spans: Iterable[Travelled]) -> dict[str, tuple[int, float, float]]:
    """By kind of collective: how many, their seconds, and their exposed seconds."""
    found: dict[str, tuple[int, float, float]] = {}
    for one in spans:
        n, seconds, out = found.get(one.kind, (0, 0.0, 0.0))
        found[one.kind] = n + 1, seconds + one.seconds, out + one.exposed_s
    return found
