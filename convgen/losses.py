"""Losses and metrics on ranks' blocks of a network's outputs: a module of the outputs, compiled to take their blocks.

    loss = convgen.criterion(torch.nn.CrossEntropyLoss(), model, labels)
    loss(model(x), target).backward()      # of this rank's blocks; one number, equal on all ranks

No loss is written for ranks. A loss is a network whose inputs are stored as another network's outputs are; its rows say
what its sums, softmaxes and windows need of other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convgen.errors import InputError
from convgen.exports.entry import Question, question_of
from convgen.parallel import How, on_mesh, ranks_of, target_of, together
from convgen.spec.placement import build_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axes = tuple[tuple[str, ...], ...]
Of = tuple[tuple[int, ...], Axes]  # a value: its extents, and the axes that split its dimensions


def criterion(
    loss: torch.nn.Module | Callable[..., Any],
    model: torch.nn.Module,
    *targets: Tensor,
    outputs: str | Sequence[str] = (),
    name: str | None = None,
) -> torch.nn.Module:
    """A loss, or a metric, of a network's blocks. Every rank calls this.

    Args:
        loss: a module or a function of the network's outputs, and of targets behind them. It gives a number, or
            anything else that can be computed from them.
        model: the network on its mesh: from `parallelize(..., whole=False)`, or a package's `Network(mesh)`.
        targets: whole examples, of which only shapes and types count: `torch.zeros(()).expand(shape)` takes no memory.
            A dimension is split as the output's of the same extent, matched from the last one on; the first ones are
            samples.
        outputs: names or numbers of outputs, in the order in which `loss` takes them; by default all outputs.
        name: the package's; by default the loss's.
    Returns:
        A Network as from `parallelize(..., whole=False)`, with the weights and buffers of `loss`. It is called with
        this rank's blocks of outputs and targets, and with `batch=` if their number of samples is not the network's.
        Its `package` has `scatter`, `region` and `block` for targets, and `convgen.data.Blocks` reads them.
    Raises:
        InputError: the model gives whole tensors, has no such output, or a target is no tensor; as in `parallelize`.
    Example:
        >>> import torch, convgen
        >>> from convgen.verify.virtual import VirtualTransport, World
        >>> net = convgen.from_torch(torch.nn.Conv2d(1, 2, 3), (torch.zeros(2, 1, 6, 6),), grid="H=1")
        >>> model = net.Network(net.init_mesh("cpu", transport=VirtualTransport(World(1), 0)))
        >>> mse = criterion(torch.nn.functional.mse_loss, model, torch.zeros(2, 2, 4, 4))
        >>> mse(torch.zeros(2, 2, 4, 4), torch.ones(2, 2, 4, 4))
        tensor(1.)
    """
    question, how, names = asked(loss, model, targets, outputs, name)
    net, mesh = _network(model)
    made = on_mesh(question.module, together(question, how, ranks_of(mesh, net.grid, None)), how, mesh)
    _refuse_other_blocks(net, made, names)
    return made


def asked(
    loss: torch.nn.Module | Callable[..., Any],
    model: torch.nn.Module,
    targets: Sequence[Tensor] = (),
    outputs: str | Sequence[str] = (),
    name: str | None = None,
) -> tuple[Question, How, list[str]]:
    """What to export, how to compile it, and which outputs it takes; arguments are those of `criterion`."""
    import torch

    module = loss if isinstance(loss, torch.nn.Module) else _of_function(loss)
    net, mesh = _network(model)
    known: list[str] = [*net.steps.outputs]
    wanted = [str(n) for n in ([outputs] if isinstance(outputs, str) else outputs)] or known
    names = [known[int(n)] if n not in known and n.isdecimal() and int(n) < len(known) else n for n in wanted]
    if unknown := [n for n in names if n not in known]:
        raise InputError(f"{net.name} gives no output {unknown[0]!r}", hint=f"outputs= of {', '.join(known)}")
    if wrong := [t for t in targets if not isinstance(t, torch.Tensor)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        fact = f"targets are example tensors, and one is a {type(wrong[0]).__name__}"
        raise InputError(fact, hint="what is no tensor is built into the loss")
    ofs: list[Of] = [(net.extents(n, net.batch), net.values[n][1].axes) for n in names]
    kinds = [getattr(torch, made) if (made := _types(model).get(n)) else net.dtype for n in names]
    examples = [torch.zeros((), dtype=kind).expand(shape) for (shape, _), kind in zip(ofs, kinds, strict=True)]
    stored = (*(axes for _, axes in ofs), *(beside(tuple(t.shape), ofs) for t in targets))
    axes = {axis: build_size(axis, given) for axis, given in net.sizes.items()}
    how = How(axes, None, None, "global", "", "", (), target_of(mesh), "", stored)
    return question_of(module, (*examples, *targets), name), how, names


def _network(model: Any) -> tuple[Any, Any]:
    """A package's description of its network, and the mesh."""
    if not hasattr(model, "_net"):
        fact = f"a {type(model).__name__} is no network on ranks"
        raise InputError(fact, hint="parallelize(..., whole=False), or the Network of a package")
    if getattr(model, "gives_whole", False):
        fact = f"{model._net.name} gives whole tensors, of which any loss is right as it is"
        raise InputError(fact, hint="call it so; or parallelize(..., whole=False)")
    return model._net, model._mesh


def _types(model: Any) -> Mapping[str, str]:
    return model._made


def beside(shape: Sequence[int], outputs: Sequence[Of]) -> Axes:
    """How a target is split: samples as an output's, other dimensions, the last first, as one of like extent."""
    found: list[tuple[str, ...]] = [()] * len(shape)
    for of, axes in outputs:
        if shape and of and shape[0] == of[0]:
            found[0] = found[0] or axes[0]
        left = len(of)
        for d in range(len(shape) - 1, 0, -1):
            at = next((k for k in range(left - 1, 0, -1) if of[k] == shape[d]), None)
            if at is not None:
                found[d], left = found[d] or axes[at], at
    taken = [a for axes in found for a in axes]
    return tuple(axes if all(taken.count(a) == 1 for a in axes) else () for axes in found)


def _refuse_other_blocks(net: Any, made: Any, names: Sequence[str]) -> None:
    """Raises InputError: the loss's inputs aren't the blocks of the network's outputs."""
    for name, own in zip(names, made._inputs, strict=False):
        for batch in (net.batch, net.batch + 1):
            if made._net.regions(own, made._mesh, batch=batch) != net.regions(name, made._mesh, batch=batch):
                fact = f"{net.name} stores {name} as {net.values[name][1]}, and {made._net.name} can't take it so"
                raise InputError(fact, hint="gather it, or compute the loss within the network")


def _of_function(function: Callable[..., Tensor]) -> torch.nn.Module:
    """A module that computes a function; the names of the function's arguments are those of its inputs."""
    import torch

    class OfFunction(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forward = function

    OfFunction.__name__ = OfFunction.__qualname__ = getattr(function, "__name__", "loss").strip("<>")
    return OfFunction()
