# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""What a package says of its network."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from convgen.operations.views import MANY

from .actions import Actions
from .blocks import Function
from .checks import as_count, refuse_tangent, refuse_vmap, unlike_block
from .conversions import all_gather
from .copies import compare_copies, compares
from .envelope import code_of, enter
from .here import frame_at, held_at
from .layout import AxisSize, Box, ranks_of
from .mesh import OnGrid, Place, place_key, places
from .parameters import find_placements
from .recent import Recent
from .regions import Where, as_slices, read_region
from .splits import Distribution, Plain, Split, block_of
from .tf32 import TAKEN
from .travel import CHANNELS_LAST, RowHere

EMPTY: dict[str, int] = {}
KEPT = 32  # steps are kept ready for so many sizes of calls
PROBES = (MANY,), (MANY + 1,)


class By(NamedTuple):
    """A size that depends on sizes known at run time only: an expression of their letters, and a function of their
    values."""

    text: str
    at: Callable[..., int]

    def __repr__(self) -> str:
        return self.text


Size = int | str | By  # a dimension's; "N" or "2*H": so many times a letter
Extents = tuple[int, ...]  # the number of samples, then the other letters' values


def times(size: str) -> tuple[int, str]:
    """The factor and the letter of a size like "2*H"."""
    count, _, letter = size.rpartition("*")
    return int(count or 1), letter


class Condition(NamedTuple):
    """A condition that sizes must fulfil, as the source computes something else for others."""

    text: str
    holds: Callable[..., bool]


class Net(OnGrid, Plain):
    """A package's network: its grid, sizes, values and state.

    Attributes:
        steps: those of the package's Network.
        types: the types of parameters, buffers and inputs, by name.
        ahead: compiles kernels before they are launched, if the package has some.

    Args:
        spec, schedule: the network in a graph file's keys, and its program's text; both are the same on all ranks of a
            mesh.
        batch: the number of samples that it was compiled for.
        opened: by letter, the other extents that are known at run time only, with the values that it was compiled for.
        probes: two sets of values of these sizes, which no other extent of the network has.
        conditions: what sizes must fulfil.
        values: by input and output, the shape and the layout.
        state: by parameter and buffer, the shape, the layout, the dtype, how torch fills it, and whether it is a
            parameter.
        mixes: whether values are of several types of floats.
        tf32: when float32 is multiplied as TF32: never, where torch's switches say so (switches), or always.
        programs: runs rows as programs of an SW26010 in the place of ATen's calls; None elsewhere.
        add: a kernel for ordered sums, as in Group.
        last: whether parameters of images and volumes, and their gradients, lie with channels last, as kernels read
            them.
    """

    steps: Any
    ahead: Any = None

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
        opened: Mapping[str, int] = EMPTY,
        probes: tuple[Extents, Extents] = PROBES,
        conditions: Sequence[Condition] = (),
        state: Mapping[str, tuple[Sequence[Size], Distribution, str, str, bool]],
        mixes: bool = False,
        tf32: str = "never",
        programs: Any = None,
        add: Callable[[Tensor, int], Tensor] | None = None,
        last: bool = False,
    ) -> None:
        self.name, self.file, self.sizes, self.batch = name, file, grid, batch
        self.letters, self.open = ("N", *opened), (batch, *opened.values())
        self.probes, self.conditions = probes, conditions
        self.grid = ranks_of(grid)
        self.dtype, self.device, self.sums, self.state = dtype, device, sums, state
        self.values = {**values, **{n: (shape, there) for n, (shape, there, *_) in state.items()}}
        self.mixes, self.tf32, self.programs, self.add, self.last = mixes, tf32, programs, add, last
        self.types: dict[str, torch.dtype] = {n: getattr(torch, kind) for n, (_, _, kind, *_) in state.items()}
        folder = Path(file).parent
        files = [path for ending in ("*.py", "*.pt") for path in sorted(folder.glob(ending))]
        code = code_of(*map(str, files), __file__)
        self.identity = hashlib.sha256(identity.encode() + code).digest()
        self.stored = {n: self.split(n, batch) for n in self.values}
        self._placements: dict[Any, list[Shard | Replicate] | None] = {}
        self._surrounded = Recent()
        self._gathers = 0
        self._last: tuple[Callable[[], object], str] = (lambda: None, "")  # the last mesh, and the key of its place

    def split(self, name: str, batch: int | Extents) -> Split:
        shape, there = self.values[name]
        return Split(name, self.sized(shape, batch), there.axes)

    def opened(self, batch: int | Extents | None, sizes: Mapping[str, int] | None = None) -> Extents:
        """The sizes that are known at run time only: the number of samples and the other letters' values; the compiled
        ones by default."""
        if isinstance(batch, tuple):
            return batch
        found = dict(zip(self.letters, self.open, strict=True)) | dict(sizes or {})
        if batch is not None:
            found["N"] = batch
        if len(found) > len(self.letters):
            unknown = [letter for letter in found if letter not in self.letters]
            raise ValueError(f"{self.name}: sizes= are of {', '.join(self.letters)}; got {', '.join(unknown)}")
        for letter, n in found.items():
            if isinstance(n, torch.SymInt):
                continue
            found[letter] = as_count(n)
            if found[letter] < 0:
                what = "batch= is the number of samples"
                if letter != "N":
                    what = f"sizes= have a whole number from 0 on for {letter}"
                raise ValueError(f"{self.name}: {what}, got {n!r}")
        return tuple(found.values())

    def sized(self, shape: Sequence[Size], batch: int | Extents) -> tuple[int, ...]:
        """A shape with the number of samples and the other sizes filled in."""
        known = self.opened(batch)
        of = dict(zip(self.letters, known, strict=True))
        return tuple([n if isinstance(n, int) else n.at(*known) if isinstance(n, By) else _many(n, of) for n in shape])

    def seen(self, known: str, shape: Sequence[int]) -> dict[str, int]:
        """The open sizes, by letter, that follow from a whole value's shape."""
        found: dict[str, int] = {}
        for n, size in zip(shape, self.values[known][0], strict=False):
            if isinstance(size, str):
                count, letter = times(size)
                found.setdefault(letter, n // count)
        return found

    def unmet(self, known: Extents) -> str:
        """Words for the condition that these sizes don't fulfil; "" if they fulfil all."""
        for text, holds in self.conditions:
            if not holds(*known):
                given = ", ".join(f"{letter}={n}" for letter, n in zip(self.letters, known, strict=True))
                return f"{self.name}: {text} is not so for {given}, and for such sizes the source computes otherwise"
        return ""

    @property
    def products(self) -> AbstractContextManager[None]:
        """The context in which steps run: with TF32 where the network always takes it."""
        return TAKEN if self.tf32 == "always" else nullcontext()

    # ---- What conversions and parameters ask of a layer ----

    def extents(self, tensor: str, batch: int | Extents) -> tuple[int, ...]:
        return self.sized(self.values[tensor][0], batch)

    def whole_shape(self, layout: Split, batch: int) -> tuple[int, ...]:
        return layout.extents

    def format(self, tensor: str) -> torch.memory_format:
        """The memory format of a parameter, or of any other named value."""
        learnt = self.last and tensor in self.state and self.state[tensor][4]
        dims = len(self.values[tensor][0]) if learnt else 0
        return CHANNELS_LAST.get(dims, torch.contiguous_format)

    def placements(self, name: str, mesh: DeviceMesh) -> list[Shard | Replicate] | None:
        """DTensor's placements for a parameter, if it has any."""
        key = (name, tuple(mesh.mesh_dim_names or ()))
        if key not in self._placements:
            self._placements[key] = find_placements(self, self.stored[name], key[1], self.batch)  # type: ignore[arg-type]
        return self._placements[key]

    # ---- For users ----

    def place(self, mesh: DeviceMesh) -> Place:
        of, key = self._last
        if of() is not mesh or key not in places:
            self._last = of, key = weakref.ref(mesh), place_key(self, mesh)
        return places[key] if self.programs is None else self.programs.place(places[key], self.grid)

    def here(self, mesh: DeviceMesh) -> RowHere:
        return RowHere(self, self.place(mesh), 0)  # type: ignore[arg-type]

    @torch._disable_dynamo
    def scatter(self, name: str, value: Tensor, mesh: DeviceMesh, *, sizes: Mapping[str, int] | None = None) -> Tensor:
        """This rank's block of an input that every rank has whole, on the network's device. No communication forward;
        the gradient is gathered.

        Args:
            sizes: open extents by letter, where the value's shape doesn't say them.
        Raises:
            TypeError, ValueError: it is no dense tensor of the whole value's shape.
        """
        if got := unlike_block(value) or "one on meta" * value.is_meta:
            raise TypeError(f"{self.name}: scatter takes the whole {name}, a dense tensor, got {got}")
        layout = self._activation(name, value.shape, sizes)
        return ScatterValue.apply(value, layout, self.here(mesh))

    @torch._disable_dynamo
    def gather(
        self, name: str, value: Tensor, mesh: DeviceMesh, *, batch: int | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The whole of an output, on every rank, gathered from the ranks' blocks; its gradient is this rank's part.

        Args:
            batch, sizes: the number of samples, and other open extents by letter, where they aren't the compiled ones.
        """
        here = self.here(mesh)
        try:
            known, layout, facts = self._to_gather(name, value, here, batch, sizes)
        except Exception as error:  # whatever it is that this rank alone has, perhaps
            enter(here, f"gather of {name}", fault=error)()
            raise
        read = enter(here, f"gather of {known}", facts)
        whole = GatherValue.apply(value, layout, here)
        read()
        self._gathers += 1
        if compares(self._gathers):
            everywhere = Split(known, layout.extents, ((),) * len(layout.extents))
            compare_copies(here, {known: (whole, everywhere)}, "gathered outputs")
        return whole

    def _to_gather(
        self, name: str, value: Any, here: RowHere, batch: int | None, sizes: Mapping[str, int] | None
    ) -> tuple[str, Split, dict[str, object]]:
        """Of what is to be gathered the name, how it lies, and what must be alike on all ranks.

        Raises:
            TypeError, ValueError: there is no such value, or it is not this rank's block of it.
        """
        refuse_vmap(self.name)
        known, count = self._known(name), self.opened(batch, sizes)
        layout = self.split(known, count)
        if got := unlike_block(value) or "one on meta" * value.is_meta:
            raise TypeError(f"{self.name}: {name} is to be this rank's block, a dense tensor, got {got}")
        refuse_tangent(self.name, value)
        if tuple(value.shape) != (wanted := here.shape(layout)):
            hint = "; batch= tells the number of samples" if batch is None else ""
            hint += "; sizes= tells other open extents" if len(self.letters) > 1 and sizes is None else ""
            raise ValueError(f"{self.name}: this rank's block of {name} is {wanted}, got {tuple(value.shape)}{hint}")
        learns = torch.is_grad_enabled() and value.requires_grad
        return known, layout, {**self.said(count), "requires gradients": learns, "type": value.dtype}

    def said(self, known: Extents) -> dict[str, object]:
        """Sizes by the words that refusals have for them, as ranks tell them to each other."""
        return dict(zip(("samples", *self.letters[1:]), known, strict=True))

    def region(
        self, name: str, mesh: DeviceMesh, *, batch: int | None = None, sizes: Mapping[str, int] | None = None,
        halo: bool = False,
    ) -> Where:  # fmt: skip
        """Where this rank's block of a value lies in the whole: a slice for each dimension; no communication.

        Args:
            name: an input's, an output's, a parameter's or a buffer's.
            batch, sizes: the number of samples, and other open extents by letter, where they aren't the compiled ones.
            halo: whether to include the rows around the block that the steps that read this input want here;
                `model(..., halo=[name])` takes such a block, and then nothing is sent for these rows.
        """
        known, count = self._known(name), self.opened(batch, sizes)
        if halo:
            return as_slices(self.surrounded(known, self.place(mesh), count))
        return as_slices(self.here(mesh).frame(self.split(known, count)))

    def block(
        self, name: str, array: Any, mesh: DeviceMesh, *, batch: int | None = None,
        sizes: Mapping[str, int] | None = None, halo: bool = False,
    ) -> Tensor:  # fmt: skip
        """This rank's block of a value, as `scatter` gives it; nothing but the block is read of the array.

        Args:
            array: the whole value: anything that has a shape and takes slices, as arrays of numpy and torch, mapped
                ones, and those of h5py, zarr and others. Its numbers are converted to the input's type.
            batch, sizes: the number of samples and other open extents; the array's by default.
            halo: as for `region`.
        """
        known = self._known(name)
        if not hasattr(array, "shape"):
            raise TypeError(f"{self.name}: block reads {name} from an array with a shape, got {type(array).__name__}")
        found = self.seen(known, array.shape) | dict(sizes or {})
        count = self.opened(batch, found)
        if tuple(array.shape) != (wanted := self.extents(known, count)):
            raise ValueError(f"{self.name}: the whole {name} has shape {list(wanted)}, got {tuple(array.shape)}")
        where = self.region(name, mesh, sizes=dict(zip(self.letters, count, strict=True)), halo=halo)
        return self.read(array, where, known).to(self.device)

    def read(self, array: Any, where: Where, name: str) -> Tensor:
        """The part of an array at a region, in the type of the value of this name."""
        return read_region(array, where, f"{self.name}: {name}", self.types.get(name))

    def regions(self, name: str, mesh: DeviceMesh, *, batch: int | None = None) -> list[Where]:
        """Each rank's `region`, in the grid's order."""
        split = self.split(self._known(name), self.opened(batch))
        count, here = len(self.place(mesh).ranks), self.here(mesh)
        return [as_slices(frame_at(here.layer, split, p, 0)) for p in range(count)]  # type: ignore[arg-type]

    def agree(self, what: str, mesh: DeviceMesh, facts: Mapping[str, object], fault: Exception | None = None) -> None:
        """Meet all ranks of the mesh, and raise on all of them where facts differ or a rank has a fault."""
        enter(self.here(mesh), what, facts, fault=fault)()

    def samples(self, known: str, shape: Sequence[int]) -> int:
        """The number of samples of a whole value of this shape."""
        return self.seen(known, shape).get("N", self.batch)

    def surrounded(self, known: str, place: Place, batch: Extents) -> Box:
        """The box of this rank's block of an input with the rows around it that the input's readers fetch."""
        if known in self.state or known not in self.types:
            raise ValueError(f"{self.name}: halo=True is of inputs, and {known} is none")
        steps: Any = self.steps

        def found() -> Box:
            actions = Actions(steps, Sized(self, batch), place, lambda _: True)
            return actions.surrounded(known, (*steps.forward, *steps.backward))

        return self._surrounded.of((known, place.key, batch), found, KEPT)  # asked for each batch that is read

    def halos(self, names: Sequence[str], mesh: DeviceMesh, batch: Extents) -> dict[str, tuple[Box, ...]]:
        """By input, the boxes of all ranks' blocks with the rows around them that the input's readers fetch. Inputs of
        which nobody fetches such rows, or somebody fetches more than rows, are left out."""
        steps: Any = self.steps
        place, found = self.place(mesh), dict[str, tuple[Box, ...]]()
        actions, ranks = Actions(steps, Sized(self, batch), place, lambda _: True), range(len(place.ranks))
        for name in names:
            own = tuple([held_at(self, self.split(name, batch), p, 0) for p in ranks])  # type: ignore[arg-type]
            with suppress(ValueError):
                boxes = tuple([actions.surrounded(name, (*steps.forward, *steps.backward), p) for p in ranks])
                if boxes != own:
                    found[name] = boxes
        return found

    def _known(self, name: str | int) -> str:
        if str(name) not in self.values:
            raise ValueError(f"{self.name}: no value {name!r}; there are {', '.join(self.values)}")
        return str(name)

    def _activation(self, name: str, shape: Sequence[int], sizes: Mapping[str, int] | None = None) -> Split:
        known = self._known(name)
        pattern = self.values[known][0]
        layout = self.split(known, self.opened(None, self.seen(known, shape) | dict(sizes or {})))
        if tuple(shape) != layout.extents:
            hint = "; sizes= tells open extents" if any(isinstance(n, By) for n in pattern) else ""
            raise ValueError(f"{self.name}: the whole {name} has shape {list(pattern)}, got {tuple(shape)}{hint}")
        return layout


def _many(size: str, of: Mapping[str, int]) -> int:
    count, letter = times(size)
    return count * of[letter]


class Sized:
    """What rows ask of a network in a call: at the call's sizes, and in autocast's type if it is on.

    Args:
        alone: rows' tables are made for it alone, and not shared with other calls of these sizes.
    """

    def __init__(
        self, net: Net, known: Extents, low: torch.dtype | None = None, device: str = "", *, alone: bool = False
    ) -> None:
        self.net, self.open, self.low, self.mixes = net, known, low, net.mixes or low is not None
        self.apart = object() if alone else None
        self.boxes_at: dict[Any, Any] = {}  # blocks' boxes at these sizes, shared by all rows (here.py)
        self.operations: dict[Any, Any] = {}  # by their expressions
        self.probes = net.probes
        self.name, self.grid, self.sizes, self.sums, self.device = (
            net.name,
            net.grid,
            net.sizes,
            net.sums,
            device or net.device,
        )
        self.dtype, self.add = net.dtype, net.add


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
