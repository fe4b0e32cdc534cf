# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network as torch.nn.Module."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .blocks import Around, Block, Function
from .checks import identify, refuse_forward_mode
from .clipping import local
from .conversions import all_gather, copy_parts
from .layout import Box
from .mesh import Place, make_mesh, place_key, places
from .parameters import as_dtensor, as_held, find_placements
from .rows import ENTRY, Row, RowHere, Split, block_of
from .transport import Transport

Size = int | str  # of a dimension; "N", "2*N": so many times the samples


def sized(shape: Sequence[Size], batch: int) -> tuple[int, ...]:
    """A shape for so many samples."""
    return tuple(n if isinstance(n, int) else int(n.removesuffix("N").removesuffix("*") or 1) * batch for n in shape)


class Net:
    """What a package says of its network.

    Args:
        spec, schedule: the network in a graph file's keys, and its program's text; alike on all ranks of a mesh.
        batch: the number of samples that it was compiled for.
        values: inputs and outputs: shape and layout, `[N * H *]`.
        state: parameters and buffers: the same, how torch fills them, and a buffer's dtype ("" for a parameter).
    """

    channels_last = False
    copy = staticmethod(copy_parts)

    def __init__(
        self,
        name: str,
        *,
        file: str,
        grid: dict[str, int],
        batch: int,
        dtype: torch.dtype,
        device: str,
        sums: str,
        identity: str,
        values: Mapping[str, tuple[Sequence[Size], str]],
        state: Mapping[str, tuple[Sequence[Size], str, str, str]],
    ) -> None:
        self.name, self.file, self.grid, self.batch = name, file, grid, batch
        self.dtype, self.device, self.sums, self.state = dtype, device, sums, state
        self.values = {**values, **{n: (shape, text) for n, (shape, text, _, _) in state.items()}}
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.identity = hashlib.sha256(identity.encode()).digest()
        self.stored = {n: self.split(n, batch) for n in self.values}
        self._placements: dict[Any, list[Shard | Replicate] | None] = {}

    def split(self, name: str, batch: int) -> Split:
        shape, text = self.values[name]
        entries = [ENTRY.fullmatch(e) for e in text[1:-1].split(" ") if e]
        axes = tuple(() if e[1] == "*" else tuple(e[1].strip("()").split(",")) for e in entries if e)
        return Split(name, sized(shape, batch), axes)

    # ---- What conversions and parameters ask of a layer ----

    def extents(self, tensor: str, batch: int) -> tuple[int, ...]:
        return sized(self.values[tensor][0], batch)

    def whole_shape(self, layout: Split, batch: int) -> tuple[int, ...]:
        return layout.extents

    def size(self, box: Box, tensor: str) -> int:
        return math.prod(hi - lo for lo, hi in box)

    def shape(self, box: Box, tensor: str) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in box)

    def format(self, tensor: str) -> torch.memory_format:
        return torch.contiguous_format

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
    ) -> DeviceMesh:
        """A DeviceMesh with the network's grid axes, in order, size-1 axes included; as of a layer."""
        return make_mesh(self, device_type or self.device, ranks, transport, timeout)  # type: ignore[arg-type]

    def place(self, mesh: DeviceMesh) -> Place:
        return places[place_key(self, mesh)]  # type: ignore[arg-type]

    def here(self, mesh: DeviceMesh) -> RowHere:
        return RowHere(self, self.place(mesh), 0)  # type: ignore[arg-type]

    def scatter(self, name: str, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's block of an input that every rank has whole; no communication but for a gradient of it."""
        layout = self._activation(name, value.shape)
        return ScatterValue.apply(value, layout, self.here(mesh))

    def gather(self, name: str, value: Tensor, mesh: DeviceMesh, *, batch: int | None = None) -> Tensor:
        """The whole of an output, on every rank, from the ranks' blocks; its gradient is this rank's part."""
        known = self._known(name)
        layout, here = self.split(known, self.batch if batch is None else batch), self.here(mesh)
        wanted = here.shape(layout)
        if tuple(value.shape) != wanted:
            hint = "; batch= tells the number of samples" if batch is None else ""
            raise ValueError(f"{self.name}: this rank's block of {name} is {wanted}, got {tuple(value.shape)}{hint}")
        return GatherValue.apply(value, layout, here)

    def _known(self, name: str | int) -> str:
        if str(name) not in self.values:
            raise ValueError(f"{self.name}: no value {name!r}; there are {', '.join(self.values)}")
        return str(name)

    def _activation(self, name: str, shape: Sequence[int]) -> Split:
        known = self._known(name)
        pattern = self.values[known][0]
        batch = next((n for n, size in zip(shape, pattern, strict=False) if size == "N"), self.batch)
        layout = self.split(known, batch)
        if tuple(shape) != layout.extents:
            raise ValueError(f"{self.name}: the whole {name} has shape {list(pattern)}, got {tuple(shape)}")
        return layout


class ScatterValue(Function):
    """This rank's block of a whole tensor; the gradient is gathered."""

    @staticmethod
    def forward(value: Tensor, layout: Split, here: RowHere) -> Tensor:
        return block_of(value, layout, here.layer, here.place).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return GatherValue.apply(gradient.contiguous(), *ctx.where), None, None


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
    identify(here)
    if not axes:
        return value.clone()
    whole = Split(layout.tensor, layout.extents, ((),) * len(layout.extents))
    return all_gather(layout.tensor, value.contiguous(), layout, whole, axes, here)  # type: ignore[arg-type]


class BatchNorm(NamedTuple):
    """Rows of a batch norm over the whole batch: moments, coefficients of them, and what is made with these."""

    moments: Row
    coefficients: Row
    centred: Row
    momentum: float
    eps: float


class Called(NamedTuple):
    """A call of a network: this rank's plain blocks of parameters and buffers, and of the seed as it was."""

    module: NetworkModule
    place: Place
    batch: int
    blocks: dict[str, Tensor]
    seed: Tensor | None


class Run:
    """A network's parameters and rows for one call; `within` a module of the source.

    Attributes:
        prefix: of names of parameters; `start` of names of values.
    """

    def __init__(self, of: Called, prefix: str = "", start: str = "") -> None:
        self.of, self.prefix, self.start = of, prefix, start
        self.net, self.place, self.batch = of.module._net, of.place, of.batch
        self.training, self.seed = of.module.training, of.seed
        self.name, self.grid, self.sums = self.net.name, self.net.grid, self.net.sums
        self.dtype, self.wide, self.device = self.net.dtype, self.net.wide, self.net.device

    def within(self, prefix: str, start: str) -> Run:
        return Run(self.of, prefix, start)

    @property
    def whole(self) -> Run:
        """The whole network, for parameters of other modules."""
        return self.within("", self.start)

    def __getitem__(self, name: str) -> Tensor:
        """This rank's plain block of a parameter or buffer."""
        return self.of.blocks[f"{self.prefix}{name}"]

    def __call__(self, row: Row, label: str, *operands: Tensor) -> Any:
        """What a row makes."""
        made = row.stand(self, f"{self.start}{label}").run(self.place, operands)
        (first, *others) = made
        return made if others else first

    def update(self, name: str, value: Tensor) -> None:
        """A buffer's new value."""
        if self.training:
            with torch.no_grad():
                self[name].copy_(value)

    def batch_norm(self, rows: BatchNorm, label: str, x: Tensor, name: str) -> Tensor:
        """Batch norm of a module of the source, by statistics of the whole batch, or running ones in evaluation."""
        blocks, module = self.of.blocks, f"{self.prefix}{name}"
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        w, b, mean, variance, counted = [blocks.get(f"{module}.{n}") for n in names]
        own = self.training or mean is None
        if self.training and counted is not None:
            counted.add_(1)
        stand = rows.moments.stand(self, f"{self.start}{label}_moments")
        if not stand.store[0] and x.numel() and rows.centred.stand(self, f"{self.start}{label}").is_silent:
            return torch.nn.functional.batch_norm(x, mean, variance, w, b, own, rows.momentum, rows.eps)
        if own:
            (m,) = stand.run(self.place, [x])
            if self.training and mean is not None and variance is not None:
                count, new, m2 = m.detach()
                mean.lerp_(new.to(mean.dtype), rows.momentum)
                variance.lerp_((m2 / (count - 1)).to(variance.dtype), rows.momentum)
        else:
            assert mean is not None and variance is not None
            m = torch.stack([torch.ones_like(mean), mean, variance])
        vectors = [v for v in (w, b) if v is not None]
        return self(rows.centred, label, x, self(rows.coefficients, f"{label}_coefficients", m, *vectors))


class InsideAll(Function):
    """Plain blocks of DTensors and Blocks, all in one node of autograd's graph."""

    @staticmethod
    def forward(*of: Any) -> tuple[Tensor, ...]:
        blocks = (t._block if isinstance(t, Block) else t._local_tensor if isinstance(t, DTensor) else t for t in of)
        return tuple([t.view_as(t) for t in blocks])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.places = [(t.held, t.of) if isinstance(t, Block) else getattr(t, "_spec", None) for t in inputs]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        pairs = zip(gradients, ctx.places, strict=True)
        return tuple([g if g is None or p is None else Around.apply(g, p) for g, p in pairs])


class Scope(torch.nn.Module):
    """A module of the source, for its parameters' names."""


class NetworkModule(torch.nn.Module):
    """The network: of every parameter and buffer this rank has its block, under the source's names.

    Args:
        seed: of the initialisation, torch's default of each kind of layer.
        parameters: dtensors, or Blocks where DTensor can't say the layout; or blocks: Blocks throughout.
    """

    _net: ClassVar[Net]
    _aliases: ClassVar[Mapping[str, str]] = {}
    _inputs: ClassVar[tuple[str, ...]]
    _modes: ClassVar[tuple[str, ...]] = ("train", "eval")
    _constants: ClassVar[Mapping[str, Tensor]] = {}

    def __init__(self, mesh: DeviceMesh, *, seed: int = 0, parameters: str = "dtensors") -> None:
        super().__init__()
        if parameters not in ("dtensors", "blocks"):
            raise ValueError(f"{self._net.name}: parameters= is dtensors or blocks, got {parameters!r}")
        self._mesh = mesh
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._learnt = {n: how for n, (_, _, how, dtype) in self._net.state.items() if not dtype}
        self._buffered = {n: (how, dtype) for n, (_, _, how, dtype) in self._net.state.items() if dtype}
        net, here = self._net, self._net.here(mesh)
        for name in self._learnt:
            block = torch.empty(here.shape(net.stored[name]), dtype=net.dtype, device=net.device)
            value = torch.nn.Parameter(self._as_known(name, block, parameters))
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_parameter(leaf, value)
        for name, (how, dtype) in self._buffered.items():
            block = torch.zeros(here.shape(net.stored[name]), dtype=getattr(torch, dtype), device=net.device)
            value = self._as_known(name, block, parameters) if block.dim() else block
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_buffer(leaf, value, persistent=how != "constant")  # no state dict of the source has those
        for name, same in self._aliases.items():
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, self._known[same])
        self.reset_parameters(seed)
        if self._modes == ("eval",):
            self.eval()

    @property
    def _known(self) -> dict[str, Any]:
        """Parameters and buffers by name, as the modules have them now."""
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._owners.items()}

    def _as_known(self, name: str, block: Tensor, parameters: str) -> Tensor:
        net, mesh = self._net, self._mesh
        dtensors = parameters == "dtensors"
        known = as_dtensor(block, name, mesh, net.batch, net) if dtensors else None  # type: ignore[arg-type]
        return as_held(block, name, net.stored[name], net.here(mesh)) if known is None else known  # type: ignore[arg-type]

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        here: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in here._modules:
                here.add_module(part, Scope())
            here = here._modules[part]  # type: ignore[assignment]
        return here, leaf

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """This rank's blocks of what torch draws for each kind of layer, from a seed a parameter."""
        for number, (name, how) in enumerate(self._learnt.items()):
            self._fill(name, initial(how, self._net.stored[name].extents, seed, number))
        for name, (how, _) in self._buffered.items():
            if how == "seed":
                self._fill(name, torch.tensor([seed, 0]))
            elif how not in ("given", "constant"):
                self._fill(name, initial(how, self._net.stored[name].extents, seed, 0))
        for name, value in self._constants.items():
            if name in self._known:
                self._fill(name, value)

    def _fill(self, name: str, whole: Tensor) -> None:
        here = self._net.here(self._mesh)
        local(self._known[name]).copy_(block_of(whole, self._net.stored[name], self._net, here.place))

    @torch.no_grad()
    def load_full(self, state: Mapping[str, Tensor]) -> None:
        """This rank's blocks of a whole state dict of the source.

        Raises:
            KeyError: a name is missing, or not the network's.
        """
        own = [n for n in (*self._learnt, *self._buffered) if self._buffered.get(n, ("", ""))[0] != "seed"]
        missing = [n for n in own if n not in state and n not in self._constants]
        unknown = [n for n in state if n not in self._known and n not in self._aliases]
        if missing or unknown:
            text = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(unknown)}"] * bool(unknown)
            raise KeyError(f"{self._net.name}: {'; '.join(text)}")
        for name in own:
            if name in state:
                wanted = self._net.stored[name].extents
                if tuple(state[name].shape) != wanted:
                    got = tuple(state[name].shape)
                    raise ValueError(f"{self._net.name}: {name} has shape {wanted}, got {got}")
                self._fill(name, state[name].detach())

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The source's state dict, whole, on every rank; every rank calls it."""
        here = self._net.here(self._mesh)
        found = {
            name: gathered(local(value), self._net.stored[name], here)
            for name, value in self._known.items()
            if self._buffered.get(name, ("", ""))[0] not in ("seed", "constant")
        }
        return found | {name: found[same] for name, same in self._aliases.items()}

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradient of each parameter that has one, on every rank; every rank calls it."""
        here = self._net.here(self._mesh)
        grads = {n: self._known[n].grad for n in self._learnt}
        return {n: gathered(local(g), self._net.stored[n], here) for n, g in grads.items() if g is not None}

    def forward(self, *given: Tensor, batch: int | None = None) -> Any:
        """This rank's blocks of the outputs, of its blocks of the inputs.

        Args:
            batch: the number of samples, where it is not the compiled one.
        """
        net = self._net
        refuse_forward_mode(net.name)
        mode = "train" if self.training else "eval"
        if mode not in self._modes:
            hint = f"import it in {mode} mode too" if mode == "train" else "import it again with --eval"
            raise RuntimeError(f"{net.name}: compiled for {self._modes[0]} mode alone, the graphs differ; {hint}")
        count = net.batch if batch is None else batch
        here = net.here(self._mesh)
        if len(given) != len(self._inputs):
            raise TypeError(f"{net.name}: takes {', '.join(self._inputs)}, got {len(given)} tensors")
        for name, value in zip(self._inputs, given, strict=True):
            wanted = here.shape(net.split(name, count))
            if tuple(value.shape) != wanted:
                hint = "; batch= tells the number of samples, if it is another one" if batch is None else ""
                got = tuple(value.shape)
                raise ValueError(f"{net.name}: this rank's block of {name} has shape {wanted}, got {got}{hint}")
        identify(here)
        known = self._known
        blocks = dict(zip(self._learnt, InsideAll.apply(*(known[n] for n in self._learnt)), strict=True))
        blocks |= {n: local(known[n]) for n in self._buffered}
        drawn = next((blocks[n] for n, (how, _) in self._buffered.items() if how == "seed"), None)
        called = Called(self, here.place, count, blocks, None if drawn is None else drawn.clone())
        made = self.compute(Run(called), *given)
        if drawn is not None and self.training:
            drawn[1] += 1
        return made

    def compute(self, run: Run, *given: Tensor) -> Any:
        raise NotImplementedError


def initial(how: str, shape: tuple[int, ...], seed: int, number: int) -> Tensor:
    """What torch fills a parameter with: ones, zeros, fill:0.25, normal, kaiming_uniform:FAN_IN, uniform:FAN_IN."""
    kind, _, value = how.partition(":")
    generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + number)
    whole = torch.empty(shape, dtype=torch.float64)
    match kind:
        case "ones":
            return whole.fill_(1)
        case "zeros" | "given":
            return whole.zero_()
        case "fill":
            return whole.fill_(float(value))
        case "normal":
            return whole.normal_(generator=generator)
        case "kaiming_uniform":
            bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(int(value)))
        case _:
            bound = 1 / math.sqrt(int(value))
    return whole.uniform_(-bound, bound, generator=generator)
