# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""A network's rows on an SW26010. A rank is a core group, whose emulated mesh runs the rows' programs. A row without a
program runs as a loop of the management core, and is counted as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from convgen.operations.row import At, Operation
from convgen.sw26010.network.core_group import CoreGroup
from convgen.sw26010.network.nodes import nodes_of

from .clipping import local
from .mesh import Place
from .nodes import NodesTransport
from .rows import Stand

ON_MESH = "on mesh"  # the first entry of what a program of the mesh keeps for backward


def core_group(place: Place) -> CoreGroup:
    """The core group of this rank."""
    known: dict[Any, Any] = place.known
    return known.setdefault("core group", CoreGroup())


def arrays(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Tensors as arrays, which the mesh takes; Nones are left out."""
    return [t.detach().contiguous().numpy() for t in tensors if t is not None]


class CoreGroups:
    """Runs a package's rows on core groups, in the place of ATen's local code."""

    def stand(self, stand: Stand, place: Place) -> Stand:
        """A row whose local code is a program of the mesh."""
        made = copy(stand)
        made.operation = OnMesh(stand.operation, core_group(place), stand.label)  # type: ignore[assignment]
        return made

    def adds(self, key: str, place: Place) -> Any:
        """The function of a step that adds two gradients of one value."""
        group = core_group(place)

        def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            if a is None or b is None or not a.numel():
                return b if a is None else a
            return torch.from_numpy(group.add(key, *arrays((a, b)))).view(a.shape)

        return add

    def place(self, place: Place, grid: Mapping[str, int]) -> Place:
        """The place with a transport whose sums are made as core groups and nodes make them."""
        end = NodesTransport(place.transport, place.ranks, nodes_of(grid), core_group(place))
        return place._replace(transport=end)

    def report(self, net: Any, mesh: DeviceMesh) -> Any:
        """The account of what this rank's core group did since it was last cleared."""
        return core_group(net.place(mesh)).account


class SGD(torch.optim.Optimizer):
    """torch.optim.SGD of a network's parameters, on its core groups: v = momentum v + g + weight_decay w, w = w - lr v.

    Args:
        model: the package's Network on its mesh.
    Raises:
        ValueError: a learning rate, momentum or weight decay that is no finite number from 0.
    """

    def __init__(self, model: Any, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        given: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in given.items():
            if not isinstance(value, (int, float, Tensor)) or not 0 <= float(value) < inf:
                raise ValueError(f"SGD: {name} is a finite number from 0, got {value!r}")
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        super().__init__([p for _, p in named], {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._names = {p: n for n, p in named}
        self._group = core_group(model._net.place(model._mesh))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step; `closure` computes the loss again, with gradients."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            settings = group["lr"], group["momentum"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is not None and local(p).numel():
                    self._renew(p, settings)
        return loss

    def _renew(self, p: Tensor, settings: tuple[float, float, float]) -> None:
        w, g, of_p = local(p), local(p.grad), self.state[p]  # type: ignore[arg-type]
        moves = settings[1] != 0
        if moves and "momentum_buffer" not in of_p:
            of_p["momentum_buffer"] = torch.zeros_like(w)
        v = [of_p["momentum_buffer"]] if moves else []
        made = self._group.update(self._names[p], settings, *[t.reshape(-1) for t in arrays((w, *v, g))])
        for t, new in zip((w, *v), made, strict=True):
            t.copy_(torch.from_numpy(new).view(t.shape))


class OnMesh:
    """An operation whose local code runs on a core group: the same calls, with arrays of the mesh behind them."""

    bias_along = None  # biases are programs of their own

    def __init__(self, operation: Operation, group: CoreGroup, label: str) -> None:
        self._own, self._group, self._label = operation, group, label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _row(self, way: int, at: At, tensors: Sequence[Tensor | None]) -> Any:
        kinds = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
        return self._group.row(self._own, way, at, str(kinds[0]).removeprefix("torch.")) if kinds else None

    def local(self, way: int, at: At, *operands: Tensor) -> tuple[Tensor, ...]:
        return self.kept(way, at, (False,) * len(operands), *operands)[0]

    def local_over(self, way: int, at: At, *operands: Tensor) -> tuple[Tensor, ...]:
        return self.local(way, at, *operands)

    def has_vjp(self, way: int, at: At, *operands: Tensor) -> bool:
        return True

    def kept_over(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        return self.kept(way, at, wanted, *operands)

    def kept(
        self, way: int, at: At, wanted: Sequence[bool], *operands: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        own, row = self._own, self._row(way, at, operands)
        given = operands
        if row is not None and hasattr(own, "mask"):
            given = operands[0], cast(Any, own).mask(at, operands[1], operands[0])
        read = arrays(given) if row is not None else []
        if row is not None and row.takes(*read):
            made, kept = self._group.compute(self._label, row, *read)
            results = tuple([torch.from_numpy(t) for t in made])
            return results, (ON_MESH, *(None if t is None else torch.from_numpy(t) for t in kept))
        if any(wanted) and own.has_vjp(way, at, *operands):
            results, kept = own.kept(way, at, wanted, *operands)
        else:
            results, kept = own.local(way, at, *operands), operands
        self._group.loop(self._label, "forward", type(own).__name__, *arrays((*operands, *results)))
        return results, kept

    def vjp(
        self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        own, row = self._own, self._row(way, at, dys)
        if row is not None and kept and isinstance(kept[0], str):
            read = [None if t is None else t.detach().contiguous().numpy() for t in kept[1:]]
            found = self._group.gradients(self._label, row, wanted, read, *arrays(dys))
            return tuple([None if g is None else torch.from_numpy(g) for g in found])
        if own.has_vjp(way, at, *[t for t in kept if isinstance(t, Tensor)]):
            found = own.vjp(way, at, wanted, kept, *dys)
        else:
            found = self._differentiated(way, at, wanted, kept, dys)
        self._group.loop(self._label, "backward", type(own).__name__, *arrays((*dys, *found)))
        return found

    def _differentiated(
        self, way: int, at: At, wanted: Sequence[bool], operands: Sequence[Tensor], dys: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The vjp by torch, which computes forward again for it."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if w else t for t, w in zip(operands, wanted, strict=True)]
            made = self._own.local(way, at, *leaves)
        pairs = [(y, dy) for y, dy in zip(made, dys, strict=True) if dy is not None and y.requires_grad]
        asked = [t for t, w in zip(leaves, wanted, strict=True) if w]
        roots, given = [y for y, _ in pairs], [dy for _, dy in pairs]
        found = iter(torch.autograd.grad(roots, asked, given, allow_unused=True) if pairs else [None] * len(asked))
        each = [next(found) if w else None for w in wanted]
        of = zip(each, operands, wanted, strict=True)
        return tuple([torch.zeros_like(t) if g is None and w else g for g, t, w in of])
