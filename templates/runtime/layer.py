# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""What a module says of its layer, and what users call."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .checks import claim, refuse_forward_mode
from .conversions import copy_parts
from .envelope import code_of
from .gradients import Gather, Scatter
from .here import Here
from .layout import AxisSize, Box, Layout, SpatialRows, ranks_of
from .mesh import OnGrid, place_key, places
from .ops import Ops, PhaseCode, define_ops
from .parameters import convolve, dense_block, find_placements, samples_of, told_to_all
from .regions import Where, as_slices, read_region


class Layer(OnGrid):
    """One layer, as the functions of the runtime know it.

    Args:
        spec, schedule: the layer in a layer file's keys, and its schedule's text; both are the same on all ranks of a
            mesh.
        file: the module's.
        stored: layouts of x, w, y and bias, and of their gradients by their names.
        copy: packs pieces of tensors and unpacks them, as copy_parts does.
    """

    ops: Ops
    add: Callable[[Tensor, int], Tensor] | None = None  # ordered sums' kernel, as a Group has it

    def __init__(
        self,
        spec: dict[str, Any],
        schedule: str,
        *,
        file: str,
        device: str,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        spatial: tuple[SpatialRows, ...],
        stored: dict[str, Layout],
        copy: Callable[..., None] = copy_parts,
    ) -> None:
        self.spec, self.schedule, self.file = spec, schedule, file
        code = code_of(file, __file__)
        self.identity = hashlib.sha256(repr((spec, schedule, code)).encode()).digest()
        self.name: str = spec["name"]
        self.transposed = str(spec["layer"]).startswith("conv_transpose")
        self.fine = "y" if self.transposed else "x"
        self.sizes: dict[str, AxisSize] = spec["grid"]
        self.grid = ranks_of(self.sizes)
        self.sums: str = spec["options"]["sums"]
        self.batch, self.channels = (int(n) for n in spec["input"][:2])
        self.filters, self.groups = int(spec["out_channels"]), int(spec["groups"])
        self.device, self.dtype, self.memory_format, self.copy = device, dtype, memory_format, copy
        self.channels_last = memory_format != torch.contiguous_format
        self.spatial = spatial
        self.kernel = tuple(s.kernel for s in spatial)
        self.stride, self.dilation = [s.stride for s in spatial], [s.dilation for s in spatial]
        self.stored = stored
        self.learnt = {n: stored[t] for n, t in (("weight", "w"), ("bias", "bias")) if t in stored}
        self._placements: dict[Any, list[Shard | Replicate] | None] = {}

    # ---- Shapes ----

    def extents(self, tensor: str, batch: int) -> tuple[int, ...]:
        """Global extents of the dimensions that may be split."""
        if tensor == "x":
            return batch, self.channels, *(s.x for s in self.spatial)
        if tensor == "y":
            return batch, self.filters, *(s.y for s in self.spatial)
        read, made = (self.filters, self.channels) if self.transposed else (self.channels, self.filters)
        return (made, read // self.groups) if tensor == "w" else (self.filters,)

    def other(self, activation: str) -> str:
        """y for x, and x for y."""
        return "y" if activation == "x" else "x"

    def whole_shape(self, layout: Layout, batch: int) -> tuple[int, ...]:
        return self.extents(layout.tensor, batch) + (self.kernel if layout.tensor == "w" else ())

    def shape(self, box: Box, tensor: str) -> tuple[int, ...]:
        """Shape of a piece, kernel dimensions included."""
        return tuple(max(hi - lo, 0) for lo, hi in box) + (self.kernel if tensor == "w" else ())

    def size(self, box: Box, tensor: str) -> int:
        """Elements of a piece."""
        return math.prod(self.shape(box, tensor))

    def format(self, tensor: str) -> torch.memory_format:
        return torch.contiguous_format if tensor == "bias" else self.memory_format

    # ---- Ranks ----

    def here(self, key: str, batch: int) -> Here:
        """This rank on the mesh that has this key."""
        if key not in places:
            raise RuntimeError(f"{self.name}: no mesh {key!r} in this process")
        refuse_forward_mode(self.name)
        return Here(self, places[key], batch)

    # For the eyes of torch.compile constants.

    @torch.compiler.assume_constant_result
    def mesh_key(self, mesh: DeviceMesh) -> str:
        """The key by which the ops find this rank's place on a mesh."""
        return place_key(self, mesh)

    @torch.compiler.assume_constant_result
    def placements(self, name: str, mesh: DeviceMesh) -> list[Shard | Replicate] | None:
        """DTensor's placements for a stored tensor, if it has any; the number of samples is taken to be one that splits
        evenly."""
        key = (name, tuple(mesh.mesh_dim_names or ()))
        if key not in self._placements:
            samples = math.prod(self.grid.values())
            self._placements[key] = find_placements(self, self.stored[name], key[1], samples)
        return self._placements[key]

    @torch.compiler.assume_constant_result
    def own_box(self, name: str, key: str) -> Box:
        """This rank's block of a parameter, as a box."""
        return self.here(key, self.batch).frame(self.stored[name])

    # ---- For users ----

    def conv(
        self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, mesh: DeviceMesh, batch: int | None = None
    ) -> Tensor:
        """This rank's block of y from its blocks of x, w and bias; autograd gives its blocks of the gradients.

        Each may be a plain block or a DTensor, w and bias a Block, too; y is a DTensor exactly if x is one.

        Args:
            mesh: a DeviceMesh with this layer's axes; init_mesh makes one.
            batch: the global number of samples, where it is not the compiled one.
        """
        return convolve(self, x, w, bias, mesh, self.mesh_key(mesh), self.batch if batch is None else batch)

    def scatter(self, name: str, value: Tensor, mesh: DeviceMesh, *, batch: int | None = None) -> Tensor:
        """This rank's block of a tensor that every rank has whole. No communication forward; where the value requires a
        gradient, backward gathers the whole gradient on every rank.

        Args:
            name: x, w, bias or y; dx, dw, dbias or dy.
            value: the global tensor; its type and device are converted to the layer's.
        """
        batch = self.batch if batch is None else batch
        self._refuse_part(name, value.shape, batch)
        key = self.mesh_key(mesh)
        if torch.compiler.is_compiling():
            return self.ops.scatter(value, name, key, batch)
        return Scatter.apply(value, name, self, key, batch)

    def gather(self, name: str, value: Tensor, mesh: DeviceMesh, *, batch: int | None = None) -> Tensor:
        """The whole tensor on every rank, from the ranks' blocks; every rank of the mesh calls it.

        Its gradient is this rank's part of the gradient that comes back. Nothing is added up: every rank computes the
        same from the whole tensor.
        """
        batch = self.batch if batch is None else batch
        key = self.mesh_key(mesh)
        make = partial(self._to_gather, name, value, mesh, key, batch)
        block, batch = told_to_all(make, self, key, batch, f"gather of {name}")
        if torch.compiler.is_compiling():
            return self.ops.gather(block, name, key, batch)
        return Gather.apply(block, name, self, key, batch)

    def _to_gather(self, name: str, value: Tensor, mesh: DeviceMesh, key: str, batch: int) -> tuple[Tensor, int]:
        if not torch.compiler.is_compiling():
            refuse_forward_mode(self.name)
        self._layout_of(name)
        count = samples_of(self, batch)
        return dense_block(self, name, value, mesh, key, count), count

    def region(self, name: str, mesh: DeviceMesh, *, batch: int | None = None) -> Where:
        """Where this rank's block of a tensor lies in the whole: a slice for each dimension; no communication.

        Args:
            name: x, w, bias or y; dx, dw, dbias or dy.
            batch: the global number of samples, where it is not the compiled one.
        """
        layout, batch = self._layout_of(name), samples_of(self, self.batch if batch is None else batch)
        taps = tuple((0, k) for k in self.kernel) if layout.tensor == "w" else ()
        here = self.here(self.mesh_key(mesh), batch)
        return as_slices((*here.held(layout), *taps))

    def block(self, name: str, array: Any, mesh: DeviceMesh, *, batch: int | None = None) -> Tensor:
        """This rank's block of a tensor, as `scatter` gives it; nothing but the block is read of the array.

        Args:
            array: the whole tensor: anything that has a shape and takes slices, as arrays of numpy and torch, mapped
                ones, and those of h5py, zarr and others. Its numbers are converted to the layer's type.
        """
        batch = samples_of(self, self.batch if batch is None else batch)
        self._refuse_part(name, array.shape, batch)
        found = read_region(array, self.region(name, mesh, batch=batch), f"{self.name}: {name}", self.dtype)
        return found.to(self.device, memory_format=self.format(self._layout_of(name).tensor))

    def _refuse_part(self, name: str, shape: Sequence[int], batch: int) -> None:
        whole = self.whole_shape(self._layout_of(name), batch)
        if tuple(shape) != whole:
            raise ValueError(f"{self.name}: the whole {name} has shape {whole}, got {tuple(shape)}")

    def _layout_of(self, name: str) -> Layout:
        if name not in self.stored:
            raise ValueError(f"{self.name}: no tensor {name!r}; there are {', '.join(self.stored)}")
        return self.stored[name]

    def define_ops(
        self,
        forward: PhaseCode,
        backward: PhaseCode,
        like_forward: PhaseCode,
        *,
        saved: tuple[str, ...],
        held: tuple[str, ...],
    ) -> None:
        """The ops that conv, scatter and gather run, from the schedule's functions."""
        claim(self)
        self.ops = define_ops(self, forward, backward, like_forward, saved, held)
