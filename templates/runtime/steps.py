# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A step of a network as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .blocks import Block
from .clipping import local
from .graphs import fault_of, lies, misfit, own_copy, recorded, refuse_graphs, refuse_moved, rehearsed
from .inside import own_memory

if TYPE_CHECKING:
    from .network import NetworkModule


class GraphedStep:
    """`loss(model(inputs), others)` and its backward pass as one CUDA graph, or the forward pass alone. It is called
    with inputs and others.

    Like the step that it was recorded from, it adds to `grad` of everything that the loss depends on, and changes
    buffers. What it returns has no graph of autograd. Gradients are left where the CUDA graph writes them, and the next
    call writes there; a gradient that is still in `grad` then is kept and added to.
    """

    def __init__(
        self, model: NetworkModule, loss: Callable[..., Any] | None, examples: Sequence[Tensor], batch: int | None
    ) -> None:
        net = model._net
        self.name, self._model, self._loss, self._batch = net.name, model, loss, batch
        self._names = [*model._inputs, *(f"argument {i + 1} of loss" for i in range(len(examples)))][: len(examples)]
        place = net.place(model._mesh)
        refuse_graphs(net.name, net.device, place)
        if len(examples) < len(model._inputs) or (loss is None and len(examples) > len(model._inputs)):
            raise TypeError(f"{net.name}: takes {', '.join(model._inputs)}, got {len(examples)} tensors")
        for name, t in zip(self._names, examples, strict=True):
            if isinstance(t, (Block, DTensor)):
                raise TypeError(f"{net.name}: {name} is to be this rank's plain block, got a {type(t).__name__}")
        self._refuse_hooks()
        self._inputs = [own_copy(t) for t in examples]
        masks, repeated = dict(model._masks), set(model._repeated)
        try:
            rehearsed(self._run, [local(b) for b in self._buffers()])
            self._graph, (self._made, self._leaves, self._gradients) = recorded(net.name, self._run, place)
        finally:
            model._masks, model._repeated = masks, repeated
        self._recorded_at, self._mode = lies(self._held()), self._modes()

    def _run(self) -> tuple[Any, list[Tensor], Sequence[Tensor]]:
        """Run the step: what it returns, the leaves of autograd's graph that the loss depends on, and their
        gradients."""
        count = len(self._model._inputs)
        with torch.set_grad_enabled(self._loss is not None):
            made = self._model(*self._inputs[:count], batch=self._batch)
            if self._loss is None:
                return made, [], ()
            made = self._loss(made, *self._inputs[count:])
            value = made[0] if isinstance(made, tuple) else made
            if not isinstance(value, Tensor) or value.numel() != 1 or value.grad_fn is None:
                raise TypeError(
                    f"{self.name}: loss is to return one number that depends on parameters, or a tuple that "
                    f"begins with it, got {value if isinstance(value, Tensor) else type(value).__name__}"
                )
            leaves = [*leaves_of(value)]
            found = torch.autograd.grad(value, leaves)
        own = own_memory([None if isinstance(g, (Block, DTensor)) else g for g in found])
        found = [g if mine is None else mine for g, mine in zip(found, own, strict=True)]
        return tree_map_only(Tensor, Tensor.detach, made), leaves, found

    # ---- What it was recorded with ----

    def _own(self) -> torch.nn.Module | None:
        return self._loss if isinstance(self._loss, torch.nn.Module) else None

    def _buffers(self) -> list[Any]:
        known, own = self._model._known, self._own()
        return [*(known[n] for n in self._model._buffered), *(own.buffers() if own else ())]

    def _held(self) -> list[Any]:
        own = self._own()
        return [*self._model._known.values(), *([*own.parameters(), *own.buffers()] if own else ())]

    def _modes(self) -> tuple[Any, ...]:
        own = self._own()
        return (
            self._model._mode_text(),
            own is not None and own.training,
            torch.is_autocast_enabled(self._model._net.device),
            self._model._products(),
        )

    def _refuse_hooks(self) -> None:
        """Refuse hooks: they would run once, while the graph is recorded, and never again."""
        model = self._model
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        of_model = any(getattr(model, kind) for kind in kinds)
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if of_model or any(getattr(t, kind, None) for t in model._known.values() for kind in kinds):
            raise RuntimeError(
                f"{self.name}: hooks of modules and parameters would run while a graph is recorded, and "
                "never again: remove them"
            )

    # ---- A step ----

    def __call__(self, *given: Tensor) -> Any:
        model, fault = self._model, fault_of(self._check, *given)
        here = model._net.here(model._mesh)
        read = model._enter("graphed step", here, {"mode": model._mode_text()}, fault)
        for there, t in zip(self._inputs, given, strict=True):
            there.detach().copy_(t.detach())
        of_inputs = {id(there): t for there, t in zip(self._inputs, given, strict=True)}
        leaves: list[Any] = [of_inputs.get(id(t), t) for t in self._leaves]
        for t, g in zip(leaves, self._gradients, strict=True):
            if t.grad is g:  # left by the call before; the graph writes its memory next
                t.grad = g.clone()
        self._graph.replay()
        with torch.no_grad():
            for t, g in zip(leaves, self._gradients, strict=True):
                if t.grad is None:
                    t.grad = g
                else:
                    t.grad.add_(g)
        read()
        return tree_map_only(Tensor, Tensor.clone, self._made)

    def _check(self, *given: Tensor) -> None:
        if len(given) != len(self._names):
            raise TypeError(f"{self.name}: takes {', '.join(self._names)}, got {len(given)} tensors")
        for name, t, there in zip(self._names, given, self._inputs, strict=True):
            with torch.enable_grad():
                wrong = misfit(t, there)
            if not wrong and t.requires_grad and not t.is_leaf:
                wrong = "has been computed from what requires gradients, which a graph of a step can't go back to"
            if wrong:
                raise ValueError(f"{self.name}: {name} {wrong}")
        if self._modes() != self._mode:
            raise RuntimeError(
                f"{self.name}: the graph was recorded in another mode (train or eval, autocast, TF32); record one "
                "for each"
            )
        refuse_moved(self.name, self._held(), self._recorded_at)
        self._refuse_hooks()


def leaves_of(value: Tensor) -> Iterator[Tensor]:
    """The leaves of autograd's graph that a value depends on."""
    seen, todo = set[Any](), [value.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        todo += [after for after, _ in node.next_functions]
