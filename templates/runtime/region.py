# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network as one node of autograd's graph: its steps forward, and backward when autograd comes to it.

What backward reads goes through `save_for_backward`, so that torch's version checks, hooks of saved tensors and
checkpoints see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from convgen.operations.rimmed import Rimmed

from .actions import keeps_graph
from .blocks import CHANGED, Function, Unmapped
from .checkpoints import is_kept_elsewhere
from .checks import refuse_vmap
from .inside import own_memory
from .linked import Forward, Linked, execute, execute_noted
from .travel import dense

Watched = tuple[str, Any, int]  # a parameter or a buffer: its name, itself, and its version


class Called:
    """A call of a network.

    Args:
        names: the tensors that want gradients; `slots`: their slots; `others`: by slot, the other tensors that are
            given.
        nans: a list that takes the words for the first row that makes a NaN; None where nobody looks for NaNs.
        stored: parameters and buffers that steps read as they are, by name.

    Attributes:
        kept: what backward reads, without its tensors, which autograd keeps.
    """

    def __init__(
        self, linked: Linked, names: tuple[str, ...], slots: tuple[str, ...], others: Mapping[str, Tensor],
        nans: list[str] | None, stored: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.linked, self.names, self.slots, self.others, self.nans = linked, names, slots, others, nans
        self.kept: list[Any] = []
        self.stored = stored

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """Run forward; the outputs, and what backward reads."""
        forward: Forward = self.linked.forward(self.names)
        slots: list[Any] = [None] * forward.size
        given = {**self.others, **dict(zip(self.slots, tensors, strict=True))}
        for name, n in forward.given.items():
            slots[n] = given[name]
        del given
        with self.linked.ctx.net.products:
            if self.nans is not None:
                execute_noted(forward.codes, slots, self.nans)
            else:
                execute(forward.codes, slots)
        return [slots[n] for n in forward.outputs], [slots[n] for n in forward.kept]

    def watched(self, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Watched]:
        """The parameters and buffers that backward reads where they lie, as they are now. Changes in place of a DTensor
        or a Block are counted there, and not in the block that it holds, which is what autograd keeps.

        Args:
            kept: the tensors that backward reads.
        """
        if is_kept_elsewhere():
            return []
        known = self.linked.read_in_place
        if self.names not in known:
            there = {t.untyped_storage()._cdata for t in kept}
            given = {**self.others, **dict(zip(self.slots, tensors, strict=True))}
            blocks = {n: given[f"[{n}]"] for n in self.stored if f"[{n}]" in given}
            known[self.names] = [n for n, t in blocks.items() if t.untyped_storage()._cdata in there]
        found = ((n, self.stored[n]) for n in known[self.names])
        return [(n, t, t._version) for n, t in found if not t.is_inference()]

    def refuse_changed(self, watched: Sequence[Watched]) -> None:
        """Refuse to make gradients of values that are there no more."""
        if changed := [name for name, t, version in watched if t._version != version]:
            raise RuntimeError(
                f"{self.linked.ctx.name}: {CHANGED.format(', '.join(changed))}, or call the network again"
            )


def run_steps(call: Called, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run forward; the outputs, through which autograd reaches `tensors`, whose last one is a link to all others."""
    if not tensors:
        with torch.no_grad():
            outputs, own = call.run(())[0], {*map(id, call.others.values())}
            return [t.view_as(t) if id(t) in own else t for t in outputs]  # never the buffer itself
    of = Transformed if torch._C._are_functorch_transforms_active() else Region
    return list(of.apply(call, *tensors)[: len(call.linked.steps.outputs)])


def _through_steps(
    call: Called, link: Tensor, asked: Sequence[bool], dys: Sequence[Tensor | None], kept: list[Any]
) -> list[Any]:
    """Run backward; the gradients of the tensors that want them, and None for the link."""
    refuse_vmap(call.linked.ctx.name)  # as jacrev and is_grads_batched call it
    names = tuple([n for n, a in zip(call.names, asked, strict=False) if a])
    code = call.linked.backward(call.names, names, tuple([d is not None for d in dys]))
    slots: list[Any] = [None] * code.size
    for n, value in zip(code.kept, kept, strict=True):
        slots[n] = value
    kept.clear()
    for n, dy in zip(code.given, dys, strict=True):
        slots[n] = None if dy is None else dense(dy)
    ctx = call.linked.ctx
    with torch.no_grad(), torch.autocast(ctx.device, enabled=False), ctx.net.products:
        execute(code.codes, slots)
    found = [slots[code.found[n]] if n in code.found else None for n in call.names]
    if torch.is_grad_enabled():
        found = [g if g is None else Once.apply(link, g, call.linked.ctx.name) for g in found]
    else:
        found = own_memory(found, dys)
    return [*found, None]


class Region(Unmapped):
    """A call whose tensors want gradients, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: Called, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = call.run(tensors[:-1])
        flat: list[Tensor] = []
        ctx.call, ctx.link = call, tensors[-1]
        ctx.shape = [_flattened(value, flat) for value in kept]
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)
        ctx.watched, call.stored = call.watched(tensors[:-1], flat), {}
        own, made = {id(t) for t in (*tensors, *call.others.values())}, list[Tensor]()
        call.others = {}  # backward's share of them is in what is kept
        for t in outputs:  # an input that is an output, or an output twice, is one more tensor to autograd
            made.append(t.view_as(t) if id(t) in own else t)
            own.add(id(t))
        learns = call.linked.forward(call.names).learns
        ctx.mark_non_differentiable(
            *(t for t, has in zip(made, learns, strict=True) if not (has and t.is_floating_point()))
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        kept = [_unflattened(one, saved) for one in ctx.shape]
        del saved
        asked = ctx.needs_input_grad[1:]
        ctx.call.refuse_changed(ctx.watched)
        if not keeps_graph():
            ctx.maybe_clear_saved_tensors()
            ctx.shape = []
        return None, *_through_steps(ctx.call, ctx.link, asked, dys, kept)


class Transformed(Unmapped):
    """A call under torch.func: what it keeps for backward is further results without gradients."""

    @staticmethod
    def forward(call: Called, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = call.run(tensors[:-1])
        flat: list[Tensor] = []
        call.kept = [_flattened(value, flat) for value in kept]
        return tuple([t.clone() for t in outputs] + [t.clone() for t in flat])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, *_, ctx.link = inputs
        ctx.count = len(ctx.call.linked.steps.outputs)
        ctx.save_for_backward(*output[ctx.count :])
        ctx.mark_non_differentiable(*output[ctx.count :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        kept = [_unflattened(one, saved) for one in ctx.call.kept]
        return None, *_through_steps(ctx.call, ctx.link, ctx.needs_input_grad[1:], dys[: ctx.count], kept)


class Once(Function):
    """A gradient of a network, which has no gradient itself: backward's steps don't say what would move for one.
    Whoever asks for it comes here by the link, and is refused."""

    @staticmethod
    def forward(link: Tensor, gradient: Tensor, name: str) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name}: gradients of a network's gradients are not supported; those of layers are")

    @staticmethod
    def vmap(info: Any, in_dims: Any, link: Tensor, gradient: Tensor, name: str) -> Any:
        refuse_vmap(name)


A_TENSOR = object()  # stands in what is kept where a tensor was


def _flattened(value: Any, flat: list[Tensor]) -> Any:
    """What a step keeps with each tensor replaced by A_TENSOR; the tensors go to `flat`."""
    if isinstance(value, Tensor):
        flat.append(value)
        return A_TENSOR
    if not value:  # most rows keep nothing
        return value
    if type(value) is tuple:
        return tuple([_flattened(one, flat) for one in cast(Sequence[Any], value)])
    if isinstance(value, Rimmed):
        return Rimmed(_flattened(value.own, flat), _flattened(value.rim, flat), value.around)
    return value


def _unflattened(value: Any, flat: Iterator[Tensor]) -> Any:
    """What a step keeps with its tensors back in their places."""
    if value is A_TENSOR:
        return next(flat)
    if type(value) is tuple:
        return tuple([_unflattened(one, flat) for one in value])
    if isinstance(value, Rimmed):
        return Rimmed(_unflattened(value.own, flat), _unflattened(value.rim, flat), value.around)
    return value
