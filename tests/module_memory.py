"""An oracle: memory that a layer's schedule takes on every rank, added up from its steps, exact by index sets.

Counted are the tensors that a module's functions make: each step's result, and what a step takes besides while it runs.

| step | makes | besides, while it runs |
|---|---|---|
| conv | its result | on a GPU copies of operands that are slices |
| add_bias | nothing: it adds in place | |
| sum_bias | its result | |
| slice | nothing: a view, which keeps its source alive | |
| slice that adds rows of padding, or is a result | its result | |
| all_gather | the received elements, or, where those are not in memory order, its result | the received elements |
| reduce_scatter | its result, as received | packed pieces of the source, where they are not in memory order |
| all_reduce | its result, as received | |
| all_gather as parts | the received elements | |
| reduce_scatter of parts | its result, as received | |
| exchange as rim | the received elements | what is sent, packed |
| all_to_all, exchange | its result | what is sent, packed, with what is received; then that with the result |

A source with gaps (a slice) is copied before it is handed to a collective. A value goes after its last reader; what
backward reads stays. Not counted: the arguments, ATen's workspaces (a result that ATen makes in another memory format
than the layer's is a second copy for a moment; a tensor that only tells it a shape is never touched), and what a
transport takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.index_sets import Box, volume
from convgen.algebra.layout import Layout
from convgen.algebra.space import Space
from convgen.program.forms import groups_of
from convgen.program.liveness import GRADIENTS, Stretch, backward_stretches, forward_stretch
from convgen.program.nodes import GIVEN, PHASES, Compute, Convert, Phase, Schedule, Step, is_convolution

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Memory:
    """Elements on every rank, in mesh order.

    `peak` is the most that each phase has at once of the tensors that it makes, results and what an earlier
    backward phase left included; `held` what forward keeps for backward besides x and w.
    """

    peak: dict[Phase, Counts]
    held: Counts


def memory(
    schedule: Schedule, space: Space, *, channels_last: bool = False, gradients: Iterable[str] = GRADIENTS
) -> Memory:
    """What the schedule's module takes.

    Args:
        channels_last: the memory format; it decides which pieces lie side by side.
        gradients: the ones asked for, of dx, dw and db; steps that none of them needs do not run.
    """
    wanted = set(gradients)
    forward = _Ledger(schedule, space, channels_last)
    forward.run(forward_stretch(schedule))
    backward = _Ledger(schedule, space, channels_last)
    for stretch in backward_stretches(schedule):
        if wanted & set(stretch.needed):
            backward.run(stretch)
    held = forward.now({v: refs for v, refs in forward.values.items() if v in schedule.held()})
    return Memory({phase: forward.peak[phase] + backward.peak[phase] for phase in PHASES}, held)


@dataclass
class _Value:
    """A value on every rank: whose storage it lies in (several values' where ranks differ), and where in it."""

    storages: dict[str, Mask]
    root: Box  # the box of the storage
    box: Box  # its own


@dataclass
class _Ledger:
    """Runs stretches of steps and notes the most elements alive in each phase."""

    schedule: Schedule
    space: Space
    channels_last: bool
    values: dict[str, _Value] = field(default_factory=dict[str, _Value])
    sizes: dict[str, Counts] = field(default_factory=dict[str, Counts])
    peak: dict[Phase, Counts] = field(default_factory=dict[Phase, Counts])

    def __post_init__(self) -> None:
        self.forms = self.schedule.forms()
        self.types = self.schedule.types()
        self.owned = self.schedule.owned()
        self.phases = self.schedule.defined_in()
        self.none = np.zeros(self.space.grid.ranks, dtype=np.int64)
        self.all = np.ones(self.space.grid.ranks, dtype=np.bool_)
        self.peak = dict.fromkeys(PHASES, self.none)
        for name in (*GIVEN, *self.schedule.held()):
            if name in self.types:
                self._define(name, self.none)

    def run(self, stretch: Stretch) -> None:
        for step, dropped in zip(stretch.steps, stretch.dropped, strict=True):
            before = self.now(self.values)
            besides = self._step(step)
            phase = self.phases[step.result]
            self.peak[phase] = np.maximum(self.peak[phase], np.maximum(before + besides, self.now(self.values)))
            for name in dropped:
                del self.values[name]

    def now(self, values: dict[str, _Value]) -> Counts:
        """Elements of the storages that these values keep alive."""
        alive = dict[str, Mask]()
        for value in values.values():
            for storage, where in value.storages.items():
                alive[storage] = alive.get(storage, ~self.all) | where
        return sum((self.sizes[s] * where for s, where in alive.items()), start=self.none)

    def _define(self, name: str, size: Counts) -> None:
        """A value in a storage of its own."""
        frame = self.space.frame(self.types[name])
        self.sizes[name] = size
        self.values[name] = _Value({name: self.all}, frame, frame)

    def _step(self, step: Step) -> Counts:
        """Define a step's result; the most elements that it takes while it runs, beside what was alive before."""
        elements = self.space.elements(step.type)
        match step:
            case Compute(operation="add_bias"):
                self.values[step.result] = self.values[step.inputs[0]]
                return self.none
            case Compute():
                copied = self._sliced(step) if is_convolution(step) and self.space.virtual_padding else self.none
                self._define(step.result, elements)
                return elements + copied
            case Convert(kind="slice"):
                return self._slice(step)
            case Convert():
                besides, size = self._collective(step)
                self._define(step.result, size)
                return besides

    def _sliced(self, step: Compute) -> Counts:
        """Copies of operands with gaps: kernels read tensors without."""
        slices = (v for v in step.inputs if self.values[v].root is not self.values[v].box)
        return sum(
            (self._gaps(v, self.values[v].box) * self.space.elements(self.types[v]) for v in slices), start=self.none
        )

    def _slice(self, step: Convert) -> Counts:
        source, layout = self.values[step.source], step.type
        frame, held, own = self.space.frame(layout), self.space.held(layout), self.space.frame(self.types[step.source])
        made = self.space.elements(layout)
        inside = np.stack([np.maximum(own, held)[..., 0], np.minimum(own, held)[..., 1]], axis=-1)
        view = _same(frame, held) & _same(inside, held)
        if step.result in self.owned:
            self._define(step.result, made)
            return made * np.where(view, 1, 2)
        name = step.result
        self.sizes[name] = made
        self.values[name] = _Value(
            {name: ~view, **{s: where & view for s, where in source.storages.items()}},
            np.where(view[:, None, None], source.root, frame),
            frame,
        )
        return made * ~view

    def _collective(self, step: Convert) -> tuple[Counts, Counts]:
        """(the most that it takes, elements of the storage that its result keeps)."""
        space, src, dst = self.space, self.types[step.source], step.type
        own, whole = space.elements(src), space.elements(dst)
        frame, held = space.frame(src), space.held(src)
        members = groups_of(space, step.over)
        match step.kind:
            case "all_gather":
                sent = self._gaps(step.source, held) * volume(held) * space.weight(src.tensor)
                received = (volume(held) * space.weight(src.tensor))[members].sum(axis=1)
                if step.form == "parts":
                    return sent + received, received
                as_is = self._consecutive(held[members], space.frame(dst), src)
                return np.maximum(sent + received, received + whole * ~as_is), np.where(as_is, received, whole)
            case "reduce_scatter" if self.forms.get(step.source) == "parts":
                return whole, whole
            case "reduce_scatter":
                as_is = self._consecutive(space.frame(dst)[members], frame, src)
                packed = np.where(as_is, self._gaps(step.source, frame) * own, own)
                return packed + whole, whole
            case "all_reduce":
                return self._gaps(step.source, frame) * own + whole, whole
            case "all_to_all" | "exchange" | "slice":
                moves = space.moves(src, dst)
                sent, received = moves.sum(axis=1), moves.sum(axis=0)
                if step.form == "rim":
                    return sent + received, received
                return np.maximum(sent + received, received + whole), whole

    def _gaps(self, name: str, part: Box) -> Mask:
        """Where a part of a value does not lie side by side in memory."""
        root = self.values[name].root
        tensor = self.types[name].tensor
        inner, outer = _extents(part), _extents(root)
        gap, several = ~self.all, ~self.all  # a gap comes up where a dimension outside of a cut one has several
        for d in reversed(self._memory_order(tensor)):
            taps = self.space.weight(tensor) if d < 0 else 1
            gap |= several & ((taps if d < 0 else inner[:, d]) > 1)
            several |= (inner[:, d] < outer[:, d]) if d >= 0 else False
        return gap & (inner.prod(axis=1) > 0)

    def _memory_order(self, tensor: str) -> tuple[int, ...]:
        """Dimensions of a tensor, slowest first; -1 are the kernel's taps."""
        dims = len(self.space.conv.dims(tensor))
        taps = (-1,) if tensor == "w" else ()
        if self.channels_last and dims > 1:
            return (0, *range(2, dims), *taps, 1)
        return (*range(dims), *taps)

    def _consecutive(self, pieces: Box, whole: Box, layout: Layout) -> Mask:
        """Where the pieces, in order, are the whole in memory order, so that nothing is copied."""
        order = self._memory_order(layout.tensor)
        cut = (pieces != whole[:, None]).any(axis=(1, 3))
        extent = _extents(whole)
        found = ~self.all
        for i, d in enumerate(order):
            if d < 0 or (-1 in order[:i] and self.space.weight(layout.tensor) > 1):
                continue
            starts, ends = pieces[:, :, d, 0], pieces[:, :, d, 1]
            joined = (starts[:, 0] == whole[:, d, 0]) & (ends[:, -1] == whole[:, d, 1])
            joined &= (starts[:, 1:] == ends[:, :-1]).all(axis=1)
            outer = [o for o in order[:i] if o >= 0]
            found |= joined & cut[:, d] & (extent[:, outer] == 1).all(axis=1)
        return found & (cut.sum(axis=1) == 1)


def _extents(box: Box) -> Counts:
    return np.maximum(box[:, :, 1] - box[:, :, 0], 0)


def _same(a: Box, b: Box) -> Mask:
    return (a == b).all(axis=(1, 2))
