# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private)
"""The memory that a call takes, before it takes it: a rank's steps run on tensors without memory, and nothing is sent.

Steps, their order and the lives of slots are a call's (linked.py), so tensors that live together here live together
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.operations.autocast import ASKED

from .handed_on import NONE, Boxes
from .linked import Linked, execute
from .mesh import Place
from .net import Extents, Net, Sized, gathered
from .surrounded import HALO, taken_from
from .transport import Group, Splits, ordered_sum, wide_type
from .travel import RowHere

NOTHING_LIKE: dict[str, Tensor] = {}


class Foreseen(NamedTuple):
    """The memory of a call on one rank.

    Attributes:
        peak_bytes: the most bytes at a time of tensors that the call makes; parameters, buffers and inputs don't count.
    """

    peak_bytes: int


def leaves_nothing(outputs: Mapping[str, Tensor], boxed: Sequence[str]) -> None:
    """What lives on with outputs that nobody takes further: nothing."""


class Manner(NamedTuple):
    """What a call is beside plain: blocks in, blocks out.

    Attributes:
        whole: inputs of which each rank takes its block of a whole tensor, and outputs that are put together.
        wide: inputs that come with the rows around their blocks; around: by output, the boxes in which another call
            takes it, by rank.
        then: is told the outputs by name, and which of them have such boxes; what it gives lives on with the outputs.
    """

    whole: frozenset[str] = frozenset()
    wide: tuple[str, ...] = ()
    around: Mapping[str, Boxes] = NONE
    then: Callable[[Mapping[str, Tensor], Sequence[str]], object] = leaves_nothing


PLAIN = Manner()


class Nowhere:
    """A transport that sends nothing: collectives make tensors of the right shapes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        return tensor.new_empty(sum(splits))

    def reduce_scatter(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        mine = splits[group.ranks.index(self.rank)]
        if group.sums != "ordered":
            return tensor.new_empty(mine)
        return ordered_sum(tensor.new_empty(mine * len(splits)), len(splits), group)

    def all_reduce(self, tensor: Tensor, splits: Splits, group: Group) -> Tensor:
        in_order = group.sums == "ordered" and (len(splits) > 2 or tensor.dtype != wide_type(tensor.dtype))
        if in_order and len(splits) == 2:
            return ordered_sum(self.all_gather(tensor, (tensor.numel(),) * 2, group), 2, group)
        if in_order:
            return self.all_gather(self.reduce_scatter(tensor, splits, group), splits, group)
        return tensor.clone()

    def exchange(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        return tensor.new_empty(sum(splits[1]))

    def all_to_all(self, tensor: Tensor, splits: tuple[Splits, Splits], group: Group) -> Tensor:
        return self.exchange(tensor, splits, group)


def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


# How tensors are made of operators that torch doesn't run without memory.
WITHOUT_META: dict[Any, Callable[..., Any]] = {torch.ops.aten.batch_norm_update_stats.default: _statistics}


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of storages that are made inside of it: those that live, and the most at a
    time."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(t.untyped_storage() for t in given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = WITHOUT_META.get(func)
        made = func(*args, **(kwargs or {})) if known is None else known(*args, **(kwargs or {}))
        several = made if isinstance(made, (tuple, list)) else (made,)
        for t in several:
            if isinstance(t, Tensor) and t.is_meta and (storage := t.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._change(size := storage.nbytes())
                weakref.finalize(storage, self._change, -size)
        return made

    def _change(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def foresee(
    net: Net, place: Place, me: int, count: Extents, trains: Callable[[str], bool], low: torch.dtype | None,
    learns: tuple[str, ...] = (), manner: Manner = PLAIN,
) -> Foreseen:  # fmt: skip
    """The memory that a call takes on the rank at a position, with its backward pass where something learns, and with
    outputs' gradients.

    Args:
        count: the number of samples and other sizes.
        trains: says of a module whether it is in training; low: autocast's type.
        learns: names of parameters that want gradients.
    """
    asked, ASKED.types = ASKED.types, True  # kernels need memory; ATen's operators make the same shapes
    try:
        return Foreseen(walk(net, place, me, count, trains, low, learns, manner))
    finally:
        ASKED.types = asked


def walk(
    net: Net, place: Place, me: int, count: Extents, trains: Callable[[str], bool], low: torch.dtype | None,
    learns: tuple[str, ...], manner: Manner = PLAIN, like: Mapping[str, Tensor] = NOTHING_LIKE,
) -> int:  # fmt: skip
    """Run a call, and its backward pass where something learns, on tensors without memory; the most bytes at a time.

    Args:
        learns: names of inputs and parameters that want gradients; others: as for `foresee`.
        like: inputs whose memory format is taken; other inputs are contiguous.
    """
    end: Any = Nowhere(place.ranks[me], len(place.ranks))
    ctx = Sized(net, count, low, "meta", alone=True)  # apart: what was called or foreseen before changes nothing
    dry = Place(f"{place.key} foreseen", place.ranks, me, end, None, {})
    linked = Linked(net.steps, ctx, dry, trains, manner.wide, manner.around)
    forward = linked.forward(learns)
    slots: list[Any] = [None] * forward.size
    here: Any = RowHere(net, dry, 0)  # type: ignore[arg-type]
    for slot, n in forward.given.items():
        name = slot[1:-1] if slot.startswith("[") else slot.removesuffix(HALO)
        box, memory = linked.boxes.get(name), net.format(name)
        shape = here.shape(net.split(name, count)) if box is None else net.shape(box, name)
        slots[n] = torch.empty(shape, dtype=net.types[name], device="meta", memory_format=memory)
        if slot in like:
            slots[n] = torch.empty_like(like[slot], device="meta")
    with torch.no_grad(), Ledger([t for t in slots if t is not None]) as ledger:
        blocks = [torch.empty_like(slots[n]) for slot, n in forward.given.items() if slot in manner.whole]
        for name, box in linked.boxes.items():
            if (n := forward.given.get(name)) is not None:
                slots[n] = taken_from(slots[n], box, here.held(net.split(name, count)))
                blocks.append(slots[n])  # a call keeps what it is given
        execute(forward.codes, slots)
        outputs, kept = [slots[n] for n in forward.outputs], [slots[n] for n in forward.kept]
        slots.clear()
        made = dict(zip(net.steps.outputs, outputs, strict=True))
        # Inputs' blocks live as long as outputs do.
        blocks += [gathered(y, net.split(n, count), here) for n, y in made.items() if n in manner.whole]
        also = manner.then(made, linked.handed_on)
        del made, also
        if learns:
            dys: list[Tensor | None] = [torch.empty_like(y) if y.is_floating_point() else None for y in outputs]
            backward = linked.backward(learns, learns, tuple([dy is not None for dy in dys]))
            slots = [None] * backward.size
            for n, value in (*zip(backward.kept, kept, strict=True), *zip(backward.given, dys, strict=True)):
                slots[n] = value
            kept.clear()
            execute(backward.codes, slots)
    return ledger.peak_bytes
