# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Clipping and scaling of lists in which DTensors, Blocks and ordinary tensors mix, which torch refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .mesh import shared

# torch.nn.utils takes norms of gradients, stacks them, and multiplies or clamps gradients. DTensor's dispatcher has no
# way for lists that are not of DTensors on one mesh alone. Such lists get one here: each tensor's norm is taken as if
# it were alone, numbers are stacked as plain tensors, and each kind of tensor is multiplied, or for GradScaler searched
# for infinities, by itself. Any other list goes to torch, as does one without a DTensor on a generated module's mesh.


def is_mixed(tensors: Any) -> bool:
    """Whether DTensors of generated modules are among other tensors, or on several meshes."""
    meshes = {t.device_mesh if isinstance(t, DTensor) else None for t in tensors}
    return len(meshes) > 1 and any(m in shared["meshes"] for m in meshes if m is not None)


def as_torch_has_it(op: Any, args: Any, kwargs: Any) -> Any:
    """Do what DTensor's dispatcher does itself."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    made = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(made, info.output_sharding.output_spec)


def plain_number(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def norms_of_mixed(op: Any, args: Any, kwargs: Any) -> Any:
    tensors, *others = args
    if not is_mixed(tensors):
        return as_torch_has_it(op, args, kwargs)
    rest = [t for t in tensors if not isinstance(t, DTensor)]
    found = iter(op(rest, *others, **kwargs) if rest else ())
    ways = dict(zip(("ord", "dtype"), others, strict=False)) | kwargs
    return [torch.linalg.vector_norm(t, **ways) if isinstance(t, DTensor) else next(found) for t in tensors]


def stack_of_mixed(op: Any, args: Any, kwargs: Any) -> Any:
    tensors, *others = args
    if not is_mixed(tensors) or any(t.dim() for t in tensors):
        return as_torch_has_it(op, args, kwargs)
    return op([plain_number(t) for t in tensors], *others, **kwargs)


def by_mesh(tensors: Any) -> dict[Any, list[Any]]:
    """The tensors by the mesh that they are on; ordinary tensors and Blocks are under None."""
    kinds: dict[Any, list[Any]] = {}
    for t in tensors:
        kinds.setdefault(t.device_mesh if isinstance(t, DTensor) else None, []).append(t)
    return kinds


def each_kind_in_place(op: Any, args: Any, kwargs: Any) -> None:
    tensors, *others = args
    if not is_mixed([*tensors, *(t for t in others if isinstance(t, DTensor))]):
        return as_torch_has_it(op, args, kwargs)
    for alike in by_mesh(tensors).values():
        op(alike, *map(plain_number, others), **kwargs)


def infinities_of_each_kind(of_torch: Any, op: Any, args: Any, kwargs: Any) -> None:
    """Look for infinities on all ranks along the axes that any gradient is split over; torch (2.13) takes the first
    gradient's axes alone."""
    gradients, found, *others = args
    kinds = by_mesh(gradients)
    if not any(mesh in shared["meshes"] for mesh in kinds if mesh is not None):
        return of_torch(op, args, kwargs)
    for mesh, alike in kinds.items():
        op([getattr(t, "_local_tensor", t) for t in alike], found, *others, **kwargs)
        for axis in range(mesh.ndim if mesh else 0):
            if not all(t.placements[axis].is_replicate() for t in alike):
                dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(axis))


def handle_infinities(handlers: Any) -> None:
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    if handlers[op].__module__.startswith("torch."):  # else another generated module has been here
        handlers[op] = partial(infinities_of_each_kind, handlers[op])


DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._foreach_norm.Scalar, norms_of_mixed)
DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.stack.default, stack_of_mixed)
DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._foreach_mul_.Tensor, each_kind_in_place)
DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._foreach_clamp_min_.Scalar, each_kind_in_place)
DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._foreach_clamp_max_.Scalar, each_kind_in_place)
handle_infinities(DTensor._op_dispatcher._custom_op_handlers)
