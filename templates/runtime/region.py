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
from .blocks import Function, Unmapped
from .checks import refuse_vmap
from .linked import Forward, Linked, execute, execute_noted
from .travel import dense


class Called:
    """A call of a network.

    Args:
        names: of tensors that want gradients, which stand in `slots`; `others`: by slot what is given beside them.
        nans: takes the words for the first row that makes a NaN, where these are looked for.

    Attributes:
        kept: what backward reads, where its tensors are kept elsewhere.
    """

    def __init__(
        self, linked: Linked, names: tuple[str, ...], slots: tuple[str, ...], others: Mapping[str, Tensor],
        nans: list[str] | None,
    ) -> None:  # fmt: skip
        self.linked, self.names, self.slots, self.others, self.nans = linked, names, slots, others, nans
        self.kept: list[Any] = []

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """Outputs, and what backward reads."""
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


def run_steps(call: Called, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs; autograd goes through, to `tensors`, of which the last is a link to all others."""
    if not tensors:
        with torch.no_grad():
            outputs, own = call.run(())[0], {*map(id, call.others.values())}
            return [t.view_as(t) if id(t) in own else t for t in outputs]  # not the very buffer
    of = Transformed if torch._C._are_functorch_transforms_active() else Region
    return list(of.apply(call, *tensors)[: len(call.linked.steps.outputs)])


def _through_steps(
    call: Called, link: Tensor, asked: Sequence[bool], dys: Sequence[Tensor | None], kept: list[Any]
) -> list[Any]:
    """Gradients of what wants them, and none of the link."""
    refuse_vmap(call.linked.ctx.name)  # of jacrev, and of is_grads_batched
    names = tuple([n for n, a in zip(call.names, asked, strict=False) if a])
    code = call.linked.backward(call.names, names, tuple([d is not None for d in dys]))
    slots: list[Any] = [None] * code.size
    for n, value in zip(code.kept, kept, strict=True):
        slots[n] = value
    kept.clear()
    for n, dy in zip(code.given, dys, strict=True):
        slots[n] = None if dy is None else dense(dy)
    del dys
    ctx = call.linked.ctx
    with torch.no_grad(), torch.autocast(ctx.device, enabled=False), ctx.net.products:
        execute(code.codes, slots)
    found = [slots[code.found[n]] if n in code.found else None for n in call.names]
    if torch.is_grad_enabled():
        found = [g if g is None else Once.apply(link, g, call.linked.ctx.name) for g in found]
    return [*found, None]


class Region(Unmapped):
    """Outputs of tensors that want gradients."""

    @staticmethod
    def forward(ctx: Any, call: Called, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = call.run(tensors[:-1])
        flat: list[Tensor] = []
        ctx.call, ctx.link = call, tensors[-1]
        ctx.shape = [_flattened(value, flat) for value in kept]
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)
        own, made = {id(t) for t in (*tensors, *call.others.values())}, list[Tensor]()
        call.others = {}  # what backward reads of it is kept
        for t in outputs:  # an input that is an output, or an output twice, is one more tensor to autograd
            made.append(t.view_as(t) if id(t) in own else t)
            own.add(id(t))
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        kept = [_unflattened(one, saved) for one in ctx.shape]
        del saved
        asked = ctx.needs_input_grad[1:]
        if not keeps_graph():
            ctx.maybe_clear_saved_tensors()
            ctx.shape = []
        return None, *_through_steps(ctx.call, ctx.link, asked, dys, kept)


class Transformed(Unmapped):
    """The same under torch.func, which takes what is kept as results that have no gradient."""

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
    """A gradient that has none: steps of backward say nothing of what moves for theirs. Whoever asks comes here, since
    the link leads to what it is asked of."""

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
    """What is kept, without its tensors."""
    if isinstance(value, Tensor):
        flat.append(value)
        return A_TENSOR
    if not value:  # as most rows keep
        return value
    if type(value) is tuple:
        return tuple([_flattened(one, flat) for one in cast(Sequence[Any], value)])
    if isinstance(value, Rimmed):
        return Rimmed(_flattened(value.own, flat), _flattened(value.rim, flat), value.around)
    return value


def _unflattened(value: Any, flat: Iterator[Tensor]) -> Any:
    """What is kept, with its tensors."""
    if value is A_TENSOR:
        return next(flat)
    if type(value) is tuple:
        return tuple([_unflattened(one, flat) for one in value])
    if isinstance(value, Rimmed):
        return Rimmed(_unflattened(value.own, flat), _unflattened(value.rim, flat), value.around)
    return value
