"""A machine, as the cost model knows it; machines.py has those that there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Protocol

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Kind
from convgen.algebra.space import Space
from convgen.cost.collectives import RINGS, Collectives
from convgen.cost.machine_measured import Misfit, Probe, efficiency_like, measured_as, over_model
from convgen.cost.measured_steps import NONE, MeasuredSteps
from convgen.cost.tiles import Tiles

Operands = tuple[Layout, Layout, Layout]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links of one level: between ranks of one unit (a socket, a node, a rack, the machine) in different smaller units.

    Attributes:
        name: the unit's.
        ranks: how many one unit has; None for the whole machine.
        latency_s: alpha, of one message.
        bytes_per_s: 1/beta: what one rank sends over these links, while it receives as much.
        shared_bytes_per_s: what all ranks of one unit of the level below (a node's, through its adapters) send over
            these links together, while they receive as much; None where only bytes_per_s limits them.
    """

    name: str
    ranks: int | None = None
    latency_s: float
    bytes_per_s: float
    shared_bytes_per_s: float | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.ranks, self.latency_s, self.bytes_per_s, self.shared_bytes_per_s))

    def __hash__(self) -> int:  # levels are keys of caches
        return self._hash


class LocalTimes(Protocol):
    """Local convolutions as they were measured."""

    @property
    def pads_virtually(self) -> bool:
        """Whether rows of zeros are not among the rows that were convolved."""
        ...

    def __call__(self, space: Space, operands: Operands) -> float | None:
        """Seconds on the slowest rank, or None where it knows none.

        Args:
            operands: layouts of a convolution's two inputs and its output, whose tensor says the phase.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal ranks, numbered node by node, and the links between them by level.

    Attributes:
        device: what one rank computes on, for the reader.
        ranks_per_node: ranks of a node, which is one of the levels where there are several.
        levels: innermost first; the last holds any number of ranks.
        memory_bytes: memory of one rank's device; None where the file doesn't say.
        memory_bytes_per_s: what one rank's device reads and writes.
        peak_flops: (dtype, flop/s) of one rank's device.
        efficiency: share of that peak that convolutions reach; with tiles, that whole tiles reach which fill the
            device.
        launch_s: overhead of one local operation of a layer's module; of a network's too, without a number of its own.
        network_launch_s: overhead of one local operation of a network's package; None where it was not measured.
        message_processor_s, processor_s_per_byte: seconds that an overlapped message takes of a rank's computing, while
            it receives one as long, where no core is left for messages.
        collectives: the algorithms that the machine's library uses.
        misfits: collectives as they were measured; empty where the model is all that is known.
        probes: convolutions by shape; empty where none were measured.
        tiles: a GPU's loss by small blocks; without tiles and probes all convolutions have one efficiency.
        timed: seconds of single convolutions, where they were measured.
        steps: seconds of packages' steps, measured where the model was off.
        uncertainty: (computing or links, one standard deviation of its seconds as a share of them); empty: not said.
        hides_gradients: whether sums of parameters' gradients take no time, as if backward hid them all ([CF] 5 and
            [SP] VI overlap them).
        adds_biases: whether a product of a network adds its bias as it computes, where nothing moves between.
    """

    name: str
    device: str = ""
    ranks_per_node: int
    levels: tuple[Level, ...]
    memory_bytes: float | None = None
    memory_bytes_per_s: float
    peak_flops: tuple[tuple[str, float], ...]
    efficiency: float
    launch_s: float
    network_launch_s: float | None = None
    message_processor_s: float = 0.0
    processor_s_per_byte: float = 0.0
    collectives: Collectives = RINGS
    misfits: tuple[Misfit, ...] = ()
    probes: tuple[Probe, ...] = ()
    tiles: Tiles | None = None
    timed: LocalTimes | None = None
    steps: MeasuredSteps = NONE
    uncertainty: tuple[tuple[str, float], ...] = ()
    hides_gradients: bool = False
    adds_biases: bool = True

    @property
    def by_shape(self) -> bool:
        """Whether the rate of a convolution depends on its shape."""
        return bool(self.probes) or self.tiles is not None

    @property
    def rows_launch_s(self) -> float:
        """Overhead of one local operation of a network."""
        return self.launch_s if self.network_launch_s is None else self.network_launch_s

    @property
    def computing(self) -> Machine:
        """The machine without its links: on machines that are equal in this, ranks compute equally long."""
        return replace(
            self,
            name="", levels=(), collectives=RINGS, misfits=(), steps=self.steps.computing, uncertainty=(),
            message_processor_s=0.0, processor_s_per_byte=0.0, hides_gradients=False,
        )  # fmt: skip

    @property
    def without_bytes(self) -> Machine:
        """The machine with links that take latencies alone."""
        levels = tuple(
            replace(one, bytes_per_s=inf, shared_bytes_per_s=one.shared_bytes_per_s and inf) for one in self.levels
        )
        return replace(self, levels=levels, memory_bytes_per_s=inf, steps=NONE)

    @property
    def processor(self) -> Machine | None:
        """The machine with links that take what messages take of the processor; None where that is nothing."""
        if not (self.message_processor_s or self.processor_s_per_byte):
            return None
        rate = 1 / self.processor_s_per_byte if self.processor_s_per_byte else inf
        levels = tuple(
            replace(one, latency_s=self.message_processor_s, bytes_per_s=rate, shared_bytes_per_s=None)
            for one in self.levels
        )
        return replace(self, levels=levels, misfits=(), steps=NONE)

    def flops_per_s(self, dtype: str) -> float:
        """The flop/s of convolutions in this dtype; where their shape decides, the most."""
        return dict(self.peak_flops)[dtype] * self.efficiency

    def over_model(self, kind: Kind, ranks: int, sent_bytes: float) -> float:
        """Measured over modelled seconds of a collective of so many ranks that send so many bytes."""
        return over_model(self.misfits, kind, ranks, float(sent_bytes)) if self.misfits else 1.0

    def short_bytes(self, kind: Kind, ranks: int) -> float:
        """Bytes up to which a collective of so many ranks goes a quicker way; 0 where there is none."""
        found = measured_as(self.misfits, kind, ranks)
        return 0.0 if found is None else found.short_bytes

    def convolution_flops_per_s(self, dtype: str, phase: str, shape: tuple[float, ...]) -> float:
        """The flop/s of a convolution. `shape`: channels and filters of a group, taps, pixels of y, groups, step."""
        if self.probes:
            return dict(self.peak_flops)[dtype] * efficiency_like(self.probes, phase, shape)
        if self.tiles is None:
            return self.flops_per_s(dtype)
        peaks = dict(self.peak_flops)
        return self.flops_per_s(dtype) * self.tiles.share(phase, shape, peaks[dtype] / max(peaks.values()))

    @property
    def add_s_per_byte(self) -> float:
        """gamma: adding a received byte reads two bytes and writes one."""
        return 3 / self.memory_bytes_per_s
