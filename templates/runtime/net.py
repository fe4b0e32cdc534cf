# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""What a package says of its network."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .actions import Actions
from .blocks import Function
from .conversions import all_gather
from .copies import compare_copies, compares
from .envelope import code_of, enter
from .here import frame_at
from .layout import AxisSize, Box, ranks_of
from .mesh import Place, make_mesh, place_key, places
from .parameters import find_placements
from .regions import Where, as_slices, read_region
from .splits import Distribution, Plain, Split, block_of
from .tf32 import TAKEN
from .transport import Transport
from .travel import RowHere

Size = int | str  # of a dimension; "N", "2*N": so many times the samples


def sized(shape: Sequence[Size], batch: int) -> tuple[int, ...]:
    """A shape for so many samples."""
    return tuple(n if isinstance(n, int) else int(n.removesuffix("N").removesuffix("*") or 1) * batch for n in shape)


class Net(Plain):
    """What a package says of its network.

    Attributes:
        steps: those of the package's Network.
        types: of parameters, buffers and inputs.

    Args:
        spec, schedule: the network in a graph file's keys, and its program's text; alike on all ranks of a mesh.
        batch: the number of samples that it was compiled for.
        values: inputs and outputs: shape, and how they are laid out.
        state: parameters and buffers: the same, the dtype, how torch fills them, and whether it is a parameter.
        mixes: whether values are of several types of floats.
        tf32: when float32 is multiplied as TF32: never, where torch's switches say so (switches), or always.
        programs: what local code is in the place of ATen's calls.
    """

    steps: Any

    def __init__(
        self,
        name: str,
        *,
        file: str,
        grid: dict[str, AxisSize],
        batch: int,
        dtype: torch.dtype,
        device: str,
        sums: str,
        identity: str,
        values: Mapping[str, tuple[Sequence[Size], Distribution]],
        state: Mapping[str, tuple[Sequence[Size], Distribution, str, str, bool]],
        mixes: bool = False,
        tf32: str = "never",
        programs: Any = None,
    ) -> None:
        self.name, self.file, self.sizes, self.batch = name, file, grid, batch
        self.grid = ranks_of(grid)
        self.dtype, self.device, self.sums, self.state = dtype, device, sums, state
        self.values = {**values, **{n: (shape, there) for n, (shape, there, *_) in state.items()}}
        self.mixes, self.tf32, self.programs = mixes, tf32, programs
        self.types: dict[str, torch.dtype] = {n: getattr(torch, kind) for n, (_, _, kind, *_) in state.items()}
        folder = Path(file).parent
        files = [path for ending in ("*.py", "*.pt") for path in sorted(folder.glob(ending))]
        code = code_of(*map(str, files), __file__)
        self.identity = hashlib.sha256(identity.encode() + code).digest()
        self.stored = {n: self.split(n, batch) for n in self.values}
        self._placements: dict[Any, list[Shard | Replicate] | None] = {}
        self._surrounded: dict[tuple[str, str, int], Box] = {}
        self._gathers = 0
        self._last: tuple[Callable[[], object], str] = (lambda: None, "")  # a mesh, and the key of the place on it

    def split(self, name: str, batch: int) -> Split:
        shape, there = self.values[name]
        return Split(name, sized(shape, batch), there.axes)

    @property
    def products(self) -> AbstractContextManager[None]:
        """Inside of it steps run."""
        return TAKEN if self.tf32 == "always" else nullcontext()

    # ---- What conversions and parameters ask of a layer ----

    def extents(self, tensor: str, batch: int) -> tuple[int, ...]:
        return sized(self.values[tensor][0], batch)

    def whole_shape(self, layout: Split, batch: int) -> tuple[int, ...]:
        return layout.extents

    def placements(self, name: str, mesh: DeviceMesh) -> list[Shard | Replicate] | None:
        """DTensor's placements for a parameter, if any."""
        key = (name, tuple(mesh.mesh_dim_names or ()))
        if key not in self._placements:
            self._placements[key] = find_placements(self, self.stored[name], key[1], self.batch)  # type: ignore[arg-type]
        return self._placements[key]

    # ---- For users ----

    def init_mesh(
        self,
        device_type: str | None = None,
        *,
        ranks: Sequence[int] | None = None,
        transport: Transport | None = None,
        timeout: float | None = None,
        process_group: Any = None,
    ) -> DeviceMesh:
        """A DeviceMesh with the network's grid axes, in order, size-1 axes included; as of a layer."""
        return make_mesh(self, device_type or self.device, ranks, transport, timeout, process_group)  # type: ignore[arg-type]

    def place(self, mesh: DeviceMesh) -> Place:
        of, key = self._last
        if of() is not mesh or key not in places:
            self._last = of, key = weakref.ref(mesh), place_key(self, mesh)  # type: ignore[arg-type]
        return places[key] if self.programs is None else self.programs.place(places[key], self.grid)

    def here(self, mesh: DeviceMesh) -> RowHere:
        return RowHere(self, self.place(mesh), 0)  # type: ignore[arg-type]

    @torch._disable_dynamo
    def scatter(self, name: str, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's block of an input that every rank has whole, on the network's device; no communication but for a
        gradient of it."""
        layout = self._activation(name, value.shape)
        return ScatterValue.apply(value, layout, self.here(mesh))

    @torch._disable_dynamo
    def gather(self, name: str, value: Tensor, mesh: DeviceMesh, *, batch: int | None = None) -> Tensor:
        """The whole of an output, on every rank, from the ranks' blocks; its gradient is this rank's part."""
        known, count = self._known(name), self.batch if batch is None else batch
        layout, here = self.split(known, count), self.here(mesh)
        wanted, fault = here.shape(layout), None
        if tuple(value.shape) != wanted:
            hint = "; batch= tells the number of samples" if batch is None else ""
            fault = ValueError(f"{self.name}: this rank's block of {name} is {wanted}, got {tuple(value.shape)}{hint}")
        learns = torch.is_grad_enabled() and value.requires_grad
        read = enter(here, f"gather of {known}", {"samples": count, "requires gradients": learns}, fault=fault)
        whole = GatherValue.apply(value, layout, here)
        read()
        self._gathers += 1
        if compares(self._gathers):
            everywhere = Split(known, layout.extents, ((),) * len(layout.extents))
            compare_copies(here, {known: (whole, everywhere)}, "gathered outputs")
        return whole

    def region(self, name: str, mesh: DeviceMesh, *, batch: int | None = None, halo: bool = False) -> Where:
        """Where this rank's block of a value lies in the whole: a slice for each dimension; no communication.

        Args:
            name: of an input, an output, a parameter or a buffer.
            batch: the number of samples, where it is not the compiled one.
            halo: with the rows around it that the steps that read this input want here; `model(..., halo=[name])`
                takes it, and then nothing is sent for them.
        """
        known, count = self._known(name), self.batch if batch is None else batch
        if halo:
            return as_slices(self.surrounded(known, self.place(mesh), count))
        return as_slices(self.here(mesh).frame(self.split(known, count)))

    def block(self, name: str, array: Any, mesh: DeviceMesh, *, batch: int | None = None, halo: bool = False) -> Tensor:
        """This rank's block of a value, as `scatter` gives it, of which nothing but the block is read.

        Args:
            array: the whole value: anything with a shape and slices, as numpy's and torch's arrays, mapped ones, and
                those of h5py, zarr and others. Its numbers are converted to the input's type.
            batch: the number of samples; the array's by default.
            halo: as of `region`.
        """
        known = self._known(name)
        count = self.samples(known, array.shape) if batch is None else batch
        if tuple(array.shape) != (wanted := self.extents(known, count)):
            raise ValueError(f"{self.name}: the whole {name} has shape {list(wanted)}, got {tuple(array.shape)}")
        return self.read(array, self.region(name, mesh, batch=count, halo=halo), known).to(self.device)

    def read(self, array: Any, where: Where, name: str) -> Tensor:
        """What lies at a region of an array, in the type of the value of this name."""
        return read_region(array, where, f"{self.name}: {name}", self.types.get(name))

    def regions(self, name: str, mesh: DeviceMesh, *, batch: int | None = None) -> list[Where]:
        """`region` of each rank, in the grid's order."""
        split = self.split(self._known(name), self.batch if batch is None else batch)
        count, here = len(self.place(mesh).ranks), self.here(mesh)
        return [as_slices(frame_at(here.layer, split, p, 0)) for p in range(count)]  # type: ignore[arg-type]

    def agree(self, what: str, mesh: DeviceMesh, facts: Mapping[str, object], fault: Exception | None = None) -> None:
        """Meet all ranks of the mesh, and raise on all of them where facts differ, or one has a fault."""
        enter(self.here(mesh), what, facts, fault=fault)()

    def samples(self, known: str, shape: Sequence[int]) -> int:
        """The number of samples of a whole value of this shape."""
        pairs = zip(shape, self.values[known][0], strict=False)
        several = [(n, sized((size,), 1)[0]) for n, size in pairs if isinstance(size, str)]
        return several[0][0] // several[0][1] if several else self.batch

    def surrounded(self, known: str, place: Place, batch: int) -> Box:
        """Where an input's block lies, with the rows that those who read it fetch."""
        if known in self.state or known not in self.types:
            raise ValueError(f"{self.name}: halo=True is of inputs, and {known} is none")
        key = known, place.key, batch
        if key not in self._surrounded:  # each batch that is read asks
            steps: Any = self.steps
            actions = Actions(steps, Sized(self, batch), place, lambda _: True)
            self._surrounded[key] = actions.surrounded(known, (*steps.forward, *steps.backward))
        return self._surrounded[key]

    def _known(self, name: str | int) -> str:
        if str(name) not in self.values:
            raise ValueError(f"{self.name}: no value {name!r}; there are {', '.join(self.values)}")
        return str(name)

    def _activation(self, name: str, shape: Sequence[int]) -> Split:
        known = self._known(name)
        pattern = self.values[known][0]
        several = [(n, sized((size,), 1)[0]) for n, size in zip(shape, pattern, strict=False) if isinstance(size, str)]
        batch = several[0][0] // several[0][1] if several else self.batch
        layout = self.split(known, batch)
        if tuple(shape) != layout.extents:
            raise ValueError(f"{self.name}: the whole {name} has shape {list(pattern)}, got {tuple(shape)}")
        return layout


class Sized:
    """What rows ask of a network in a call: of so many samples, and of autocast's type, if it is on."""

    def __init__(self, net: Net, batch: int, low: torch.dtype | None = None) -> None:
        self.net, self.batch, self.low, self.mixes = net, batch, low, net.mixes or low is not None
        self.name, self.grid, self.sizes, self.sums, self.device = net.name, net.grid, net.sizes, net.sums, net.device
        self.dtype = net.dtype


class ScatterValue(Function):
    """This rank's block of a whole tensor; the gradient is gathered."""

    @staticmethod
    def forward(value: Tensor, layout: Split, here: RowHere) -> Tensor:
        block = block_of(value, layout, here.layer, here.place)
        return block.to(here.layer.device, copy=True, memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        value, *ctx.where = inputs
        ctx.device = value.device

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return GatherValue.apply(gradient.contiguous(), *ctx.where).to(ctx.device), None, None


class GatherValue(Function):
    """A whole tensor, of the ranks' blocks; the gradient is this rank's part."""

    @staticmethod
    def forward(value: Tensor, layout: Split, here: RowHere) -> Tensor:
        return gathered(value, layout, here)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ScatterValue.apply(gradient, *ctx.where), None, None


def gathered(value: Tensor, layout: Split, here: RowHere) -> Tensor:
    """The whole tensor, of the ranks' blocks."""
    grid = here.layer.grid
    axes = tuple(a for a in grid if any(a in dim for dim in layout.axes) and grid[a] > 1)
    if not axes:
        return value.clone()
    whole = Split(layout.tensor, layout.extents, ((),) * len(layout.extents))
    return all_gather(layout.tensor, value.contiguous(), layout, whole, axes, here)  # type: ignore[arg-type]
