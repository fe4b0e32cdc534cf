# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Parameters that torch's tools understand, or that refuse them."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from .layout import Box
from .reductions import REDUCTIONS, found_infinite, numbers_of, reduces_to_one, said_by_name
from .transport import shared


class Held(NamedTuple):
    """Where a block lies in its tensor, and which ranks of the mesh hold what; kernel dimensions included."""

    name: str  # the layer's and the tensor's
    key: str  # the mesh's
    whole: tuple[int, ...]
    box: Box
    ranks: tuple[int, ...]  # the mesh's
    device: str
    copies: tuple[int, ...]  # the ranks with this very block
    blocks: tuple[int, ...]  # ranks that together hold every block once, this one among them


DATA: Any = torch.Tensor.data  # its getter and setter
DETACH: Any = torch.ops.aten.detach.default
# Words for what autograd doesn't see: a DTensor or a Block counts its changes, and not the block that it holds.
CHANGED = "backward reads {}, changed in place since the forward pass: let optimizers step behind backward()"


class Block(torch.Tensor):
    """A rank's block of a parameter, or of something as large, that knows its place: what DTensor can't say.

    Its shape is the block's. Pointwise operations, optimizers and DCP work on it; its norm, sum, mean, largest and
    smallest element are those of the whole tensor, for which its ranks send each other a number; parts, joins and
    reshapings of blocks can be copied and sent between ranks that hold copies, as DDP and FSDP2 do. Anything else would
    take a part for the whole, or change blocks that differ: it is refused.
    """

    held: Held | None  # None: a rearrangement, of elements of the blocks in `of`
    of: frozenset[Held]
    _block: Tensor
    _uncut: bool  # whether it has all elements of its block
    _is_param: bool = False
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    # These give the same elements elsewhere, or fill them; so do torch's pointwise operations, and of its operations
    # on lists all but some. Operations that draw random numbers are not here: copies would become different.
    ALIKE = frozenset({
        "detach", "alias", "lift_fresh", "copy_", "_to_copy", "zero_", "fill_", "masked_fill", "masked_fill_",
        "empty_like", "zeros_like", "ones_like", "full_like",
    })  # fmt: skip
    FUSED = frozenset({"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"})
    NOT_POINTWISE = frozenset({"_foreach_norm", "_foreach_powsum", "_foreach_max", "_foreach_mm"})
    OF_GRAD_SCALER = "_amp_foreach_non_finite_check_and_unscale_"
    REARRANGED = frozenset({
        "view", "_unsafe_view", "as_strided", "slice", "split", "split_with_sizes", "select", "narrow", "cat",
        "_chunk_cat", "chunk_cat", "chunk_cat_mixed_dtype", "split_with_sizes_copy", "new_zeros", "new_empty",
        "new_empty_strided", "unsqueeze", "squeeze", "permute", "t", "transpose",
    })  # fmt: skip
    SAME_ELEMENTS = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze", "permute", "t", "transpose"})

    @staticmethod
    def __new__(cls: Any, block: Tensor, held: Held | None, of: frozenset[Held] = frozenset()) -> Block:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            block.shape,
            strides=block.stride(),
            storage_offset=block.storage_offset(),
            dtype=block.dtype,
            device=block.device,
            requires_grad=block.requires_grad,
        )
        made._block, made.held, made.of = block, held, of | ({held} if held else set())
        made._uncut = held is not None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DETACH:  # autograd detaches each gradient, and the general way costs a tenth of a step of small rows
            return args[0]._like(args[0]._block.detach())
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Block)]
        of = frozenset[Held]().union(*(t.of for t in given))
        if func.namespace in ("c10d", "_c10d_functional"):
            may_share(of, process_group_among(args))
            return func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        name = func.overloadpacket.__name__
        if func.namespace == "convgen" and name.endswith("_inside"):
            return given[0]._block.view_as(given[0]._block)
        if name == "_is_any_true":  # torch's anomaly mode asks it of each rank's gradient
            return func(given[0]._block)
        if name in REDUCTIONS and all(t.held for t in given):
            said = said_by_name(func, args, kwargs)
            if DTensor in types:
                return NotImplemented  # parameters.py has a way for both
            if reduces_to_one(func, name, said):
                return cls._numbers(func, name, said, args)
        if name == cls.OF_GRAD_SCALER and all(t.held for t in given):
            if DTensor in types:
                return NotImplemented  # mixed.py has a way for both
            func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
            return found_infinite(given, args[1])
        many = name.startswith("_foreach_") or name in cls.FUSED
        makes_blocks = cls._may(func, name, many, args, given)
        result = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if result is None or func._schema.is_mutable:
            return result if result is None else kwargs.get("out", args[0])
        if not makes_blocks:
            return result
        if many:
            lists = [a for a in args if isinstance(a, (list, tuple))]
            places = [next((a[i] for a in lists if isinstance(a[i], Block)), None) for i in range(len(result))]
            return [t if at is None else Block(t, at.held, at.of) for t, at in zip(result, places, strict=True)]
        same = isinstance(result, Tensor) and result.shape == given[0].shape and name not in cls.REARRANGED
        if name == "as_strided" and (result.shape, result.stride()) == (given[0].shape, given[0].stride()):
            same = True
        if name == "new_empty_strided" and result.shape == given[0].shape:
            same = True  # autograd's copy of a gradient whose strides are not the parameter's, as empty_like

        uncut = (same or name in cls.SAME_ELEMENTS) and all(t._uncut for t in given)

        def as_block(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            made = Block(t, given[0].held if same else None, of)
            made._uncut |= uncut
            return made

        return tree_map(as_block, result)

    def _like(self, block: Tensor) -> Block:
        """A Block of the same place with this plain block."""
        made = Block(block, self.held, self.of)
        made._uncut = self._uncut
        return made

    @classmethod
    def _numbers(cls, func: Any, name: str, said: dict[str, Any], args: Any) -> Any:
        """Numbers of Blocks' whole tensors; ordinary tensors in a list get torch's."""
        several = isinstance(args[0], (list, tuple))
        tensors = list(args[0]) if several else [args[0]]
        places = [i for i, t in enumerate(tensors) if isinstance(t, Block)]
        others = [t for t in tensors if not isinstance(t, Block)]
        if torch.is_grad_enabled():
            for t in [tensors[i] for i in places if tensors[i].requires_grad]:
                t.keep_place(name)
        plain = iter(func(others, *args[1:]) if others else ())
        found = dict(zip(places, numbers_of(name, [tensors[i] for i in places], said), strict=True))
        made = [found[i] if i in found else next(plain) for i in range(len(tensors))]
        return made if several else made[0]

    def keep_place(self, name: str) -> None:
        """Make a Block of the gradient that comes through a number of all elements: torch makes a plain tensor of this
        shape."""
        held = cast(Held, self.held)
        if name == "mean" and self.shape != held.whole:
            raise RuntimeError(
                f"{held.name}: the gradient of mean() would be divided by what this rank holds, {list(held.box)} of "
                f"{held.whole}; sum() / {math.prod(held.whole)} has the right one"
            )
        if not any(isinstance(hook, KeepPlace) for hook in (self._backward_hooks or {}).values()):
            self.register_hook(KeepPlace(held, self.of))

    @classmethod
    def _may(cls, func: Any, name: str, many: bool, args: Any, given: list[Block]) -> bool:
        """Refuse an operation that would take parts for whole tensors. True where it makes Blocks again; False where
        all blocks are whole tensors, so that it makes the same plain tensor on all ranks."""
        alike = (many or torch.Tag.pointwise in func.tags or name in cls.ALIKE) and name not in cls.NOT_POINTWISE
        parts = any(t.held is None for t in given)
        if name == "cat" and cls._whole(given):
            return False
        if name in cls.REARRANGED or (name == "copy_" and parts):
            return True
        lists = [[t for t in a if isinstance(t, Tensor)] for a in args if isinstance(a, (list, tuple))]
        together = zip(*lists, strict=False) if many else [given]  # operations on lists go element by element
        if alike and all(len({t.place for t in row if isinstance(t, Block)}) < 2 for row in together):
            return True
        draws = torch.Tag.nondeterministic_seeded in func.tags  # each rank draws its own: copies would become different
        if not (many or draws) and cls._whole(given):
            return False
        held = next((t.held for t in given if t.held), None) or min(given[0].of)
        why = "mix blocks of different places" if alike else "take blocks for whole tensors"
        # Not a TypeError: torch's operators replace that by one of their own.
        raise RuntimeError(
            f"{held.name}: {name} would {why}; this rank holds {list(held.box)} of {held.whole}. gather(...) gives the "
            "whole tensor, differentiably; norm(), sum(), mean(), max() and min() of all elements are right; "
            ".to_local() is the plain block; reset_parameters and load_full fill it"
        )

    @staticmethod
    def _whole(given: list[Block]) -> bool:
        """Whether these blocks are whole tensors: then every rank has the same, and makes the same of it."""
        return all(t._uncut and h.box == tuple((0, n) for n in h.whole) for t in given for h in t.of)

    def size(self, dim: int | None = None) -> Any:
        """The block's size, as in torch; but the whole tensor's for DCP, which compares it with the size that it has
        stored."""
        if dim is not None or self.held is None or not called_by("torch.distributed.checkpoint."):
            return self.shape if dim is None else self.shape[dim]
        return torch.Size(self.held.whole)

    def numel(self) -> int:
        """The number of elements of the whole tensor, which norm and sum are of; `shape` is that of this rank's
        block."""
        return self._block.numel() if self.held is None else math.prod(self.held.whole)

    nelement = numel

    @property
    def place(self) -> Any:
        """What two blocks must have in common to be added or copied: the same part of a tensor of the same shape."""
        return None if self.held is None else (self.held.whole, self.held.box)

    def _set_data(self, value: Tensor) -> None:
        if not isinstance(value, Block) or value.place != self.place:
            held = self.held or min(self.of)
            raise RuntimeError(
                f"{held.name}: .data is set to a Block of the same place; this rank holds {list(held.box)} of "
                f"{held.whole}. load_full takes whole tensors, p.to_local().copy_(...) a plain block"
            )
        DATA.__set__(self, value)
        self._block = value._block.detach()

    data: Any = property(DATA.__get__, _set_data)  # torch's own setter would leave `_block` as it was

    def to_local(self) -> Tensor:
        """The plain block; autograd goes through."""
        return Inside.apply(self)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_block"], (self.held, self.of)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], place: Any, size: Any, stride: Any) -> Block:
        return Block(inner["_block"], *place)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Block({self._block}, {self.held or [h.name for h in self.of]})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle looks functions up by name: in a module that is there, should the first be loaded again or forgotten.
        there = (getattr(sys.modules.get(name), "rebuild_block", None) for name in shared["homes"])
        rebuild = next(filter(None, there), rebuild_block)
        held, of = self.held and tuple(self.held), tuple(sorted(map(tuple, self.of)))
        return rebuild, (self._block.detach(), held, of, self.requires_grad, self._is_param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = rebuild_block(self._block.detach().clone(), self.held, self.of, self.requires_grad, self._is_param)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    # torch.distributed.checkpoint's protocol: which part of the whole tensor is here.

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.held is None:
            names = ", ".join(sorted(h.name for h in self.of))
            what = "a part of a block can't be stored; store the module before it is wrapped in FSDP2"
            raise RuntimeError(f"{names}: {what}")
        box = self.held.box
        chunk = ChunkStorageMetadata(torch.Size([lo for lo, _ in box]), torch.Size([hi - lo for lo, hi in box]))
        return [chunk] if self._block.numel() else []

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        kind, chunks = WriteItemType.SHARD, self.__create_chunk_list__()
        properties, whole = TensorProperties.create_from_tensor(self._block), torch.Size(cast(Held, self.held).whole)
        return [
            WriteItem(MetadataIndex(fqn, c.offsets), kind, tensor_data=TensorWriteData(c, properties, whole))
            for c in chunks
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._block.detach()

    # FSDP2's protocol: gather the pieces, if the ranks that it has cut the block over hold the same one.

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        may_share(self.of, mesh.get_group())
        for sharded in module.parameters(recurse=False):
            if getattr(sharded, "_local_tensor", None) is self and not sharded._post_accumulate_grad_hooks:
                sharded.register_post_accumulate_grad_hook(keep_blocks)
        rows = -(-size[0] // mesh.size())
        padded = self._block.new_zeros(rows, *self.shape[1:])
        padded[: self.shape[0]] = self._block
        return (padded,), (self.of, size[0])

    def fsdp_post_all_gather(self, outputs: Any, place: Any, dtype: Any, *, out: Block | None = None) -> Any:
        (of, rows), (data,) = place, outputs
        return None if out is not None else (Block(data[:rows], next(iter(of))), (data,))


class KeepPlace(NamedTuple):
    """A Block's hook that makes its gradient a Block of the same place."""

    held: Held
    of: frozenset[Held]

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or isinstance(gradient, Block):
            return gradient
        return Around.apply(gradient.contiguous(), tuple(self))


def keep_blocks(sharded: Any) -> None:
    """Make Blocks of FSDP2's gradients: it makes plain ones, whose norm would be a part's without a word."""
    gradient = sharded.grad
    if not isinstance(gradient._local_tensor, Block):
        part = Block(gradient._local_tensor, None, sharded._local_tensor.of)
        sharded.grad = DTensor(part, gradient._spec, requires_grad=False)


def fits_ddp(block: Block) -> None:
    """Refuse to run under a DDP that would mix up blocks, or make gradients that are plain parts."""
    wrapper = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is not None:
        may_share(block.of, wrapper.process_group)
        if wrapper.gradient_as_bucket_view:
            raise RuntimeError(
                f"{min(block.of).name}: DDP with gradient_as_bucket_view=True would leave plain gradients, of which a "
                "norm is that of a part; leave it False"
            )


def rebuild_block(block: Tensor, held: Any, of: Any, requires_grad: bool, is_param: bool) -> Tensor:
    made = Block(block, held and Held(*held), frozenset(Held(*one) for one in of))
    return torch.nn.Parameter(made, requires_grad) if is_param else made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild_block])  # so that a plain torch.load reads a file of Blocks


def called_by(package: str) -> bool:
    """Whether the function that calls the asking one is of this package."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(package)


def _inside(t: Any) -> Any:
    return t._block if isinstance(t, Block) else t


def process_group_among(arguments: Any) -> Any:
    """The process group that one of torch.distributed's own operations is given: an object, or a name."""
    for argument in reversed(arguments):
        if isinstance(argument, torch.ScriptObject):
            with suppress(Exception):  # a reduction's kind is such an object, too
                return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            return dist.distributed_c10d._resolve_process_group(cast(Any, argument))
    return None


def may_share(of: frozenset[Held], group: Any) -> None:
    """Refuse a collective of torch's among ranks whose blocks differ, before it moves anything.

    Ranks of one mesh know what the others hold. Where some are of other meshes (copies of a whole model, DDP over
    them), all say what they hold: one all_gather of 32 bytes, the first time.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if all(r in held.ranks for r in ranks for held in of):
        differ = {r for r in ranks for held in of if r not in held.copies}
    elif (of, ranks) in (agreed := shared.setdefault("agreed", set())):
        return
    else:
        mine = digest(sorted((held.name, held.whole, held.box) for held in of)).to(next(iter(of)).device)
        all_of_them = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(all_of_them, mine, group=group)
        differ = {r for r, other in zip(ranks, all_of_them, strict=True) if not torch.equal(mine, other)}
        agreed |= set() if differ else {(of, ranks)}
    if differ:
        held = min(of)
        raise RuntimeError(
            f"{held.name}: ranks {sorted(differ)} hold other blocks of it than this one, {list(held.box)} of "
            f"{held.whole}, so a collective of ranks {list(ranks)} would mix them up. DDP and FSDP2 are right over "
            f"ranks that hold copies: {list(held.copies)}, or over meshes of the same layer, position by position"
        )


def digest(what: object) -> Tensor:
    """A hash of 32 bytes, by which two ranks find out whether they have the same."""
    return torch.frombuffer(bytearray(hashlib.sha256(repr(what).encode()).digest()), dtype=torch.uint8).clone()


class Function(torch.autograd.Function):
    """torch.autograd.Function with a quicker apply: torch's asks for forward's signature at every call, this one
    once."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in cls.__dict__:  # else it is torch's own
            cls.forward.__signature__ = inspect.signature(cls.forward)


class Unmapped(Function):
    """A Function of a network, which vmap can't map: it would send a message for each of its members."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        raise TypeError("vmap over a network is not supported")

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return cast(Any, super(torch.autograd.Function, cls)).apply(*args)  # bare: no defaults to put in


class Inside(Function):
    """The plain block of a DTensor or a Block; autograd goes through."""

    @staticmethod
    def forward(of: Any) -> Tensor:
        plain = of._block if isinstance(of, Block) else of._local_tensor
        return plain.view_as(plain)  # autograd marks what is returned, which must not be the tensor's own

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (of,) = inputs
        ctx.place = (of.held, of.of) if isinstance(of, Block) else of._spec

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Around.apply(gradient, ctx.place)

    @staticmethod
    def vmap(info: Any, in_dims: Any, of: Any) -> Any:
        raise TypeError("vmap maps over plain blocks, not over the members of a DTensor or a Block")


def in_memory_as(strides: tuple[int, ...], block: Tensor) -> Tensor:
    """The block with its dimensions in these strides' order. Autograd has plain gradients and Blocks lie as their
    parameters do; of a DTensor it sees the strides of the whole, and fused steps go over memory as it comes."""
    if block.stride() == strides:
        return block
    order = sorted(range(block.dim()), key=lambda d: -strides[d])
    return block.permute(order).contiguous().permute([order.index(d) for d in range(block.dim())])


class Around(Function):
    """A plain block as a DTensor or a Block of this place; autograd goes through."""

    @staticmethod
    def forward(block: Tensor, place: Any) -> Any:
        if isinstance(place, tuple):
            return Block(block, *place)
        # Not by calling the class: its `__init__` takes longer and does nothing.
        own = in_memory_as(place.stride, block.detach())
        return cast(Any, DTensor).__new__(DTensor, own, place, requires_grad=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.place = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if not isinstance(ctx.place, tuple) and gradient.placements != ctx.place.placements:
            gradient = gradient.redistribute(ctx.place.mesh, ctx.place.placements)
        return Inside.apply(gradient), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, block: Tensor, place: Any) -> Any:
        raise TypeError("vmap maps over plain blocks, not over the members of a DTensor or a Block")


# One class for all modules of a process, so that their parameters mix in one optimizer.
Held, Block = shared.setdefault("blocks 1", (Held, Block))
shared.setdefault("homes", {})[__name__] = True
