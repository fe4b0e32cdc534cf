# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A rank's block as part of a whole tensor: a DTensor where DTensor can say the layout, else a Block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .blocks import CHANGED, DATA, Block, Held, Inside, fits_ddp
from .checks import as_count, check, layout_text, refuse_forward_mode, unlike_dense
from .envelope import enter
from .gradients import ConvolutionFunction
from .here import Here, frame_at
from .layout import Layout
from .mesh import coordinates, members, places, shared

if TYPE_CHECKING:
    from .layer import Layer


def find_placements(layer: Layer, layout: Layout, axes: tuple[str, ...], batch: int) -> list[Shard | Replicate] | None:
    """DTensor's placements on a mesh with these axes, if it has any: every split must be even, and the axes of a
    dimension must nest in the mesh's order."""
    grid = layer.grid
    for position in range(math.prod(grid.values())):
        at, frame = coordinates(layer, position), frame_at(layer, layout, position, batch)
        for extent, split, mine in zip(layer.extents(layout.tensor, batch), layout.axes, frame, strict=True):
            parts, index = math.prod(grid[a] for a in split), 0
            for axis in axes:
                index = index * grid[axis] + at[axis] if axis in split else index
            if extent % parts or mine != (index * extent // parts, (index + 1) * extent // parts):
                return None
    dims = [[d for d, split in enumerate(layout.axes) if axis in split] for axis in axes]
    return [Shard(d[0]) if d else Replicate() for d in dims]


def sharding(layer: Layer, name: str, mesh: DeviceMesh, batch: int) -> list[Shard | Replicate] | None:
    """Layer.placements for this number of samples."""
    layout = layer.stored[name]
    split = math.prod([layer.grid[a] for a in layout.axes[0]]) if layout.tensor in ("x", "y") else 1
    return layer.placements(name, mesh) if batch % split == 0 else None


def as_dtensor(block: Tensor, name: str, mesh: DeviceMesh, batch: int, layer: Layer) -> DTensor | None:
    """The DTensor that has this block on this rank; None where DTensor can't say the layout."""
    placed, layout = sharding(layer, name, mesh, batch), layer.stored[name]
    if placed is None:
        return None
    if torch.compiler.is_compiling():
        return DTensor.from_local(block, mesh, placed, run_check=False)  # every split is even
    shared["meshes"].add(mesh)
    shape = layer.whole_shape(layout, batch)
    stride = torch.empty(shape, device="meta", memory_format=layer.format(layout.tensor)).stride()
    return DTensor.from_local(block, mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride)


def number(op: Any, args: Any, kwargs: Any) -> Any:
    """The number in a DTensor, over all ranks: torch (2.13) gives this rank's part of a partial sum or norm instead."""
    given = args[0]
    return op(given._local_tensor if all(p.is_replicate() for p in given.placements) else given.full_tensor())


# For every DTensor of the process, since item() of a norm that differs from rank to rank is right for none.
DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._local_scalar_dense.default, number)


def any_true(op: Any, args: Any, kwargs: Any) -> Any:
    """Answer torch's anomaly mode, which asks whether any element of a gradient is true."""
    return op(args[0].full_tensor())


DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._is_any_true.default, any_true)


def set_data(self: DTensor, value: Tensor) -> None:
    """Do `p.data = q`, which torch (2.13) accepts for a DTensor and then leaves the values as they were."""
    if not isinstance(value, DTensor) or (value._spec.mesh, value.placements) != (self._spec.mesh, self.placements):
        raise RuntimeError(
            f".data of a DTensor on {self._spec.mesh}, {self.placements}, is set to a DTensor there; "
            "distribute_tensor makes one of a whole tensor"
        )
    DATA.__set__(self, value)
    self._local_tensor, self._spec = value._local_tensor.detach(), value._spec


def get_data(self: DTensor) -> Tensor:
    return DATA.__get__(self)


DTensor.data = vars(DTensor).get("data") or property(get_data, set_data)  # pyright: ignore[reportAttributeAccessIssue]


def deep_copied(self: DTensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a DTensor, of views too: there, as for gradients in a bucket, torch (2.13) looks for a storage,
    which a DTensor hasn't. `copy.deepcopy` itself knows what has been copied before; an export may read this function,
    so it doesn't ask `id`."""
    if not self.storage_offset() or not self.is_leaf:
        return Tensor.__deepcopy__(self, memo)
    made: Any = self.detach().clone().requires_grad_(self.requires_grad)
    made = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
    made.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
    return made


DTensor.__deepcopy__ = vars(DTensor).get("__deepcopy__") or deep_copied  # pyright: ignore[reportAttributeAccessIssue]


def as_held(block: Tensor, name: str, layout: Layout, here: Here) -> Block:
    """The Block that has this block on this rank."""
    layer, place, grid = here.layer, here.place, here.layer.grid
    box, whole = here.frame(layout), layer.whole_shape(layout, here.batch)
    split = tuple(a for a in grid if any(a in dim for dim in layout.axes) and grid[a] > 1)
    same = tuple(a for a in grid if a not in split)
    copies, blocks = (tuple(place.ranks[p] for p in members(layer, place.me, axes)) for axes in (same, split))
    box += tuple((0, n) for n in whole[len(box) :])
    return Block(block, Held(f"{layer.name} {name}", place.key, whole, box, place.ranks, layer.device, copies, blocks))


def plain_block(layer: Layer, name: str, given: Any, mesh: DeviceMesh, key: str, batch: int) -> Any:
    """The plain block of an operand, which may be a DTensor, a Block or a plain block already."""
    if name not in layer.stored or not isinstance(given, (Block, DTensor)):
        return given
    layout = layer.stored[name]
    if isinstance(given, Block):
        if not torch.compiler.is_compiling():
            fits_ddp(given)
        own = layer.own_box(name, key)
        # Numbers one by one: Dynamo of torch 2.11 can't compare these tuples.
        pairs = () if given.held is None else zip(given.held.box, own, strict=False)
        if given.held is None or any(a != b for one, other in pairs for a, b in zip(one, other, strict=True)):
            raise ValueError(
                f"{layer.name}: this rank's block of {stored_as(layer, name, batch)} is {own}, got {given.held}"
            )
        return in_graph(layer.ops.inside, Inside)(given)
    placed, line = sharding(layer, name, mesh, batch), ""
    if placed is None:
        block = f"layer.scatter({name!r}, {name}.full_tensor(), mesh)"
        line = f"DTensor has no placements for it: pass this rank's block, {block}"
    elif given.device_mesh != mesh:
        line = f"its mesh is {given.device_mesh}, mesh= is {mesh}"
    elif tuple(given.shape) != layer.whole_shape(layout, batch):
        line = f"its shape is {tuple(given.shape)}; batch= tells the global number of samples, if it is another one"
    elif tuple(given.placements) != tuple(placed):
        line = f"its placements are {given.placements}: pass {name}.redistribute(mesh, {placed})"
    if line:
        what = f"{layer.name}: the layer stores {stored_as(layer, name, batch)} on {layer.grid}"
        raise ValueError(f"{what}, got a DTensor; {line}")
    return given.to_local() if torch.compiler.is_compiling() else Inside.apply(given)


def stored_as(layer: Layer, name: str, batch: int) -> str:
    layout = layer.stored[name]
    return f"{name} as {layout_text(layout)} {layer.whole_shape(layout, batch)}"


def in_graph(op: Any, function: Any) -> Any:
    """The op, with first gradients alone, under torch.compile; else the function, whose gradients have gradients,
    too."""
    return op if torch.compiler.is_compiling() else function.apply


def dense_block(layer: Layer, name: str, given: Any, mesh: DeviceMesh, key: str, batch: int) -> Any:
    """The same, and a refusal of what torch would not take to the ops' own checks: no tensor, or one that has no
    memory or isn't dense."""
    block = plain_block(layer, name, given, mesh, key, batch)
    if torch.compiler.is_compiling():
        return block
    if got := unlike_dense(block):
        raise TypeError(f"{layer.name}: {name}, this rank's block, wants a dense tensor on {layer.device}, got {got}")
    if block.is_meta:
        check(Here(layer, places[key], batch), {name: (block, layer.stored.get(name))})
    return block


def samples_of(layer: Layer, batch: Any) -> int:
    """The number of samples of a call."""
    if torch.compiler.is_compiling():
        return batch
    count = as_count(batch)
    if not -1 < count < 2**63:
        raise ValueError(f"{layer.name}: batch= wants the global number of samples, got {batch!r}")
    return count


def told_to_all(make: Callable[[], Any], layer: Layer, key: str, batch: int, entry: str) -> Any:
    """What `make` makes of this rank's arguments; where they are wrong on a rank, all ranks refuse the call."""
    try:
        return make()
    except Exception as error:
        if not torch.compiler.is_compiling():
            enter(Here(layer, places[key], batch), entry, {}, fault=error)
        raise


def refuse_changed(layer: Layer, read: dict[str, Any], node: Any) -> None:
    """Let a node of autograd's graph refuse to make gradients once an operand that it reads is changed in place."""
    versions = {name: t._version for name, t in read.items() if not t.is_inference()}

    def check(_: Any) -> None:
        if changed := [name for name, version in versions.items() if read[name]._version != version]:
            raise RuntimeError(f"{layer.name}: {CHANGED.format(', '.join(changed))}, or call the layer again")

    if versions:
        node.register_prehook(check)


def convolve(layer: Layer, x: Any, w: Any, bias: Any, mesh: DeviceMesh, key: str, batch: int) -> Any:
    """Layer.conv, and ConvModule's forward."""
    if torch.compiler._is_exporting_flag:  # is_exporting() is true under torch.compile of torch 2.11
        raise RuntimeError(
            f"{layer.name}: an exported program would hold this rank's place on the mesh and this number of samples as "
            "constants; export the original layer, and compile its copies with convgen"
        )
    whole = isinstance(x, DTensor)

    def blocks() -> list[Any]:
        if not torch.compiler.is_compiling():
            refuse_forward_mode(layer.name)
        count = samples_of(layer, batch)
        if whole and sharding(layer, "y", mesh, count) is None:
            raise ValueError(
                f"{layer.name}: DTensor has no placements for y as {layout_text(layer.stored['y'])} "
                f"{layer.extents('y', count)} on {layer.grid}; "
                "pass this rank's block of x, x.to_local(): then y is a block, too"
            )
        given = ("x", x), ("w", w), ("bias", bias)
        found = [None if t is None else dense_block(layer, name, t, mesh, key, count) for name, t in given]
        return [*found, count]

    outer = {n: t for n, t in (("x", x), ("w", w)) if isinstance(t, (Block, DTensor))}
    x, w, bias, batch = told_to_all(blocks, layer, key, batch, "conv")
    if torch.is_autocast_enabled(layer.device):
        x, w, bias = (t.to(layer.dtype) if t is not None and t.dtype != torch.float64 else t for t in (x, w, bias))
    if torch.compiler.is_compiling():
        made = layer.ops.forward(x, w, bias, key, batch)
    else:
        made = ConvolutionFunction.apply(x, w, bias, layer, key, batch)
    y = made[0] if layer.ops.held else made
    if outer and not torch.compiler.is_compiling() and y.grad_fn is not None:
        refuse_changed(layer, {n: t for n, t in outer.items() if (w if n == "x" else x).requires_grad}, y.grad_fn)
    return as_dtensor(y, "y", mesh, batch, layer) if whole else y
