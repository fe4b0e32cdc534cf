# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network as torch.nn.Module."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .blocks import Around, Block, Function, fits_ddp
from .checks import agree, identify, refuse_forward_mode, refuse_vmap
from .clipping import local
from .conv_module import refuse_whole_state
from .conversions import all_gather, copy_parts
from .layout import Box
from .mesh import Place, make_mesh, place_key, places
from .parameters import as_dtensor, as_held, find_placements
from .rows import ENTRY, Row, RowHere, Split, block_of
from .transport import Transport

MASKS = 4096  # calls whose backward pass may be to come
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

    @torch._disable_dynamo
    def scatter(self, name: str, value: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's block of an input that every rank has whole; no communication but for a gradient of it."""
        layout = self._activation(name, value.shape)
        return ScatterValue.apply(value, layout, self.here(mesh))

    @torch._disable_dynamo
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
        several = [(n, sized((size,), 1)[0]) for n, size in zip(shape, pattern, strict=False) if isinstance(size, str)]
        batch = several[0][0] // several[0][1] if several else self.batch
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

    def checkpoint(self, function: Any, *operands: Tensor) -> Any:
        """torch.utils.checkpoint of a block's function, for a network.py edited by hand: `run.checkpoint(layer1, x)` in
        place of `layer1(run, x)`; all ranks compute again at the same place, those too that keep nothing of it."""
        from torch.utils.checkpoint import checkpoint

        def called(*operands: Tensor) -> Any:
            return kept(function(self, *operands))

        return checkpoint(called, *operands, use_reentrant=False)

    def update(self, name: str, value: Tensor) -> None:
        """A buffer's new value."""
        if self.training:
            if self[name].shape != value.shape:  # copy_ would spread it
                sizes = f"{list(self[name].shape)} here, its new value {list(value.shape)}"
                raise RuntimeError(f"{self.name}: {self.prefix}{name} is {sizes}")
            with torch.no_grad():
                self[name].copy_(value)

    def batch_norm(self, rows: BatchNorm, label: str, x: Tensor, name: str) -> Tensor:
        """Batch norm of a module of the source, by statistics of the whole batch, or running ones in evaluation."""
        blocks, module = self.of.blocks, f"{self.prefix}{name}".removesuffix(".")
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        w, b, mean, variance, counted = [blocks.get(f"{module}.{n}") for n in names]
        own = self.training or mean is None
        stand = rows.moments.stand(self, f"{self.start}{label}_moments")
        of = cast(Any, stand.operation).of
        if self.training and of.count == 1:
            shape = list(of.shape)
            raise ValueError(
                f"{self.name}: {module}: expected more than 1 value per channel when training, got input size {shape}"
            )
        if self.training and counted is not None:
            counted.add_(1)
        coefficients = rows.coefficients.stand(self, f"{self.start}{label}_coefficients")
        centred = rows.centred.stand(self, f"{self.start}{label}")
        if not stand.store[0] and x.numel() and centred.is_silent and coefficients.is_silent:
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
    def forward(name: str, *of: Any) -> tuple[Tensor, ...]:
        blocks = (t._block if isinstance(t, Block) else t._local_tensor if isinstance(t, DTensor) else t for t in of)
        return tuple([t.view_as(t) for t in blocks])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, *of = inputs
        ctx.places = [(t.held, t.of) if isinstance(t, Block) else getattr(t, "_spec", None) for t in of]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            gradients = tuple([g if g is None else Once.apply(g, ctx.name) for g in gradients])
        pairs = zip(gradients, ctx.places, strict=True)
        return None, *[g if g is None or p is None else Around.apply(g, p) for g, p in pairs]

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, *of: Any) -> Any:
        refuse_vmap(name)


class Once(Function):
    """A gradient that has none: rows of gradients say nothing of what moves for theirs."""

    @staticmethod
    def forward(gradient: Tensor, name: str) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.name = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name}: gradients of a network's gradients are not supported; those of layers are")

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor, name: str) -> Any:
        refuse_vmap(name)


class Last(Function):
    """An output that keeps a tensor, though an empty one: the last that checkpointing sees kept and the first that it
    is asked for. So all ranks compute again at the same place and to the end, also those that have nothing to keep."""

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output.detach().flatten()[:0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        return gradient


def kept(made: Any) -> Any:
    """Outputs, each with a Last."""
    if isinstance(made, dict):
        return {name: kept(y) for name, y in made.items()}
    if isinstance(made, tuple):
        return tuple([kept(y) for y in made])
    return Last.apply(made) if made.requires_grad else made


def is_kept_elsewhere() -> bool:
    """Whether hooks take what autograd keeps, as those of activation checkpointing do."""
    ask = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(True) is not None


class Known(torch.nn.Module):
    """A module whose tensors may be Blocks."""

    _of: str

    def _refuse_whole(self) -> None:
        if any(isinstance(t, Block) for t in (*self._parameters.values(), *self._buffers.values())):
            refuse_whole_state(self._of, "model.full_state_dict()")

    def named_parameters(self, *args: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self._refuse_whole()
        return super().named_parameters(*args, **how)

    def named_buffers(self, *args: Any, **how: Any) -> Iterator[tuple[str, Tensor]]:
        self._refuse_whole()
        return super().named_buffers(*args, **how)


def never_called(self: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"{self._of} is a name of parameters in a network, no call: hooks are for the Network itself")


class Scope(Known):
    """A module of the source, for its parameters' names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of = name

    forward = register_forward_hook = register_forward_pre_hook = never_called
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = never_called


class NetworkModule(Known):
    """The network: of every parameter and buffer this rank has its block, under the source's names.

    Args:
        seed: of the initialisation, torch's default of each kind of layer.
        parameters: dtensors, or Blocks where DTensor can't say the layout; or blocks: Blocks throughout.
    """

    _net: ClassVar[Net]
    _aliases: ClassVar[Mapping[str, str]] = {}
    _inputs: ClassVar[tuple[str, ...]]
    _types: ClassVar[tuple[str, ...]]
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
        self._masks: dict[int, Tensor | None] = {}  # by a number that torch draws: see _mask
        self._repeated = set[int]()
        net, here = self._net, self._net.here(mesh)
        self._of, device = net.name, "meta" if torch.get_default_device().type == "meta" else net.device
        for name in self._learnt:
            block = torch.empty(here.shape(net.stored[name]), dtype=net.dtype, device=device)
            value = torch.nn.Parameter(self._as_known(name, block, parameters))
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_parameter(leaf, value)
        for name, (how, dtype) in self._buffered.items():
            block = torch.zeros(here.shape(net.stored[name]), dtype=getattr(torch, dtype), device=device)
            value = self._as_known(name, block, parameters) if block.dim() else block
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_buffer(leaf, value, persistent=how != "constant")  # no state dict of the source has those
        for name, same in self._aliases.items():
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, self._known[same])
        self._wanted = {
            n: (tuple(net.placements(n, mesh) or ()), here.frame(net.stored[n]), here.shape(net.stored[n]))
            for n in self._owners
        }
        self._scopes = [m for m in self.modules() if m is not self]
        if device != "meta":
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
                here.add_module(part, Scope(f"{self._net.name}: {'.'.join(path[: path.index(part) + 1])}"))
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
            wanted = self._net.stored[name].extents
            if name in state and tuple(state[name].shape) != wanted:
                got = tuple(state[name].shape)
                raise ValueError(f"{self._net.name}: {name} has shape {wanted}, got {got}")
        for name in own:
            if name in state:
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
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{net.name}: an exported program would hold this rank's place on the mesh as a constant; export the "
                "original network, and compile its copies with convgen"
            )
        return self._outside(given, batch)

    @torch._disable_dynamo  # rows are opaque to a compiler: what is around a network is compiled
    def _outside(self, given: Sequence[Tensor], batch: int | None) -> Any:
        net = self._net
        refuse_forward_mode(net.name)
        refuse_vmap(net.name)
        mode = "train" if self.training else "eval"
        if mode not in self._modes:
            hint = f"import it in {mode} mode too" if mode == "train" else "import it again with --eval"
            raise RuntimeError(f"{net.name}: compiled for {self._modes[0]} mode alone, the graphs differ; {hint}")
        count, here, known = net.batch if batch is None else batch, net.here(self._mesh), self._known
        faults = [*self._misfits(known), *self._wrong(given, count, batch is None, here)][:1]
        if os.environ.get("CONVGEN_AGREE") == "1":
            faults += [
                ValueError(f"{net.name}: on rank {here.at}: {text}") for text in agree(here, [*map(str, faults)])
            ]
        if faults:
            raise faults[0]
        identify(here)
        if torch.is_autocast_enabled(net.device):  # as in layers: it is taken in the network's type
            given = tuple([t.to(getattr(torch, wide)) for t, wide in zip(given, self._types, strict=True)])
            with torch.autocast(net.device, enabled=False):
                return self._run(given, known, count, here)
        return self._run(given, known, count, here)

    def _misfits(self, known: Mapping[str, Any]) -> Iterator[Exception]:
        """What has become of parameters, buffers and modules that a network can't run with."""
        name = self._net.name
        for scope in self._scopes:
            if scope.training != self.training:
                modes = [("evaluation", "training")[m] for m in (scope.training, self.training)]
                yield RuntimeError(
                    f"{scope._of} is in {modes[0]}, the network in {modes[1]}: it has one mode, that "
                    "of model.train() or model.eval()"
                )
        for n, t in known.items():
            placements, box, shape = self._wanted[n]
            if isinstance(t, DTensor):
                fits, plain = t._spec.placements == placements and t._spec.mesh == self._mesh, t._local_tensor
            elif isinstance(t, Block):
                fits_ddp(t)
                fits, plain = t.held is not None and t.held.box == box, t._block
            else:
                fits, plain = True, t
            if not fits:
                got = getattr(t, "placements", getattr(t, "held", None))
                yield ValueError(f"{name}: {n} is stored {self._net.values[n][1]} here, {list(box)}; got {got}")
            elif tuple(plain.shape) != shape:
                yield ValueError(f"{name}: this rank's block of {n} is {list(box)}, got the shape {tuple(plain.shape)}")
            elif n in self._learnt and plain.dtype != self._net.dtype:
                yield ValueError(f"{name}: {n} is {self._net.dtype}, got {plain.dtype}; --dtype compiles for another")

    def _wrong(self, given: Sequence[Tensor], count: int, guessed: bool, here: RowHere) -> Iterator[Exception]:
        """What is wrong with the inputs."""
        net = self._net
        if len(given) != len(self._inputs):
            yield TypeError(f"{net.name}: takes {', '.join(self._inputs)}, got {len(given)} tensors")
            return
        for name, value, kind in zip(self._inputs, given, self._types, strict=True):
            other = value.is_floating_point() != getattr(torch, kind).is_floating_point
            narrow = f"torch.{kind}" != str(value.dtype) and not torch.is_autocast_enabled(net.device)
            if other or (value.is_floating_point() and narrow):
                yield ValueError(f"{net.name}: {name} is torch.{kind}, got {value.dtype}")
            wanted = here.shape(net.split(name, count))
            if tuple(value.shape) != wanted:
                hint = "; batch= tells the number of samples, if it is another one" if guessed else ""
                got = tuple(value.shape)
                yield ValueError(f"{net.name}: this rank's block of {name} has shape {wanted}, got {got}{hint}")

    def _run(self, given: Sequence[Tensor], known: Mapping[str, Any], count: int, here: RowHere) -> Any:
        net = self._net
        inputs = [i for i, t in enumerate(given) if torch.is_grad_enabled() and t.requires_grad]
        given = list(given)
        for i, t in zip(inputs, InsideAll.apply(net.name, *(given[i] for i in inputs)) if inputs else (), strict=True):
            given[i] = t
        blocks = {n: local(t) for n, t in known.items()}
        learns = [n for n in self._learnt if known[n].requires_grad]
        inside = InsideAll.apply(net.name, *(known[n] for n in learns)) if learns else ()
        blocks |= zip(learns, inside, strict=True)
        drawn = next((blocks[n] for n, (how, _) in self._buffered.items() if how == "seed"), None)
        mask = None if drawn is None else self._mask(drawn)
        made = self.compute(Run(Called(self, here.place, count, blocks, mask)), *given)
        return kept(made) if torch.is_grad_enabled() and is_kept_elsewhere() else made

    def _mask(self, drawn: Tensor) -> Tensor:
        """The seed and the step of this call. A call inside of a backward pass is one that activation checkpointing
        repeats: it has the step of the first one, which is found by torch's random state, as that is brought back."""
        now = drawn.clone()
        again = torch._C._current_graph_task_id() != -1
        if not self.training:
            return now
        if again or not torch.is_grad_enabled() or is_kept_elsewhere():
            key = int(torch.randint(2**62, (), device="cpu"))
            if again:
                found = self._masks.get(key)
                if found is None:
                    raise RuntimeError(
                        f"{self._net.name}: a call in a backward pass would draw other dropout masks than the "
                        "first one: checkpoint wants preserve_rng_state=True, and no seeding alike between calls"
                    )
                self._masks[key] = found
                self._repeated.add(key)
                return found
            twice = key in self._masks and key not in self._repeated
            self._repeated.discard(key)
            self._masks[key] = None if twice else now
            while len(self._masks) > MASKS:
                self._masks.pop(next(iter(self._masks)))
        drawn[1] += 1
        return now

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
