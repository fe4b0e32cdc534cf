# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network as torch.nn.Module."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from convgen.operations.dropout import EVALUATION

from .any_size import AnySize, low_of
from .blocks import Block, fits_ddp
from .checkpoints import is_kept_elsewhere, kept
from .checks import refuse_forward_mode, refuse_vmap
from .clipping import local
from .copies import compare_copies, compares, refuse_nans
from .envelope import enter, sampled
from .foreseen import walk
from .handed_on import NONE, Boxes
from .inside import InsideAll
from .listing import Steps
from .net import Extents, Net, gathered
from .parameters import as_dtensor, as_held
from .region import Called, run_steps
from .regions import Where
from .scopes import Known, Scope, of_kind
from .splits import block_of
from .steps import GraphedStep
from .surrounded import HALO, taken_from
from .tf32 import taken
from .travel import RowHere

LOOKS = 100  # calls of whole tensors, of which ranks compare the values once
MASKS = 4096  # calls whose backward pass may be to come
HINTS = {
    "values of inputs": "every rank is to give the same whole tensors here, samples of all ranks together; "
    "parallelize(..., whole=False) takes and gives each rank's blocks: model(package.scatter(name, x, mesh))",
}
DRAWN = "convgen"  # where the metadata of a state dict has the seed and the step of what is drawn


def as_pairs(tensor: Tensor) -> Tensor:
    """A complex tensor with a last dimension of real and imaginary part."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


class NetworkModule(AnySize, Known):
    """The network: of every parameter and buffer this rank has its block, under the source's names.

    Args:
        seed: of the initialisation, torch's default of each kind of layer.
        parameters: dtensors, or Blocks where DTensor can't say the layout; or blocks: Blocks throughout.
    """

    _net: ClassVar[Net]
    _steps: ClassVar[Steps]
    _aliases: ClassVar[Mapping[str, str]] = {}
    _frozen: ClassVar[tuple[str, ...]] = ()  # of parameters: what the source does not train
    # Modules of the source: paths, in order, with the number of their kind or the path of the same one before; and the
    # kinds: a class of torch.nn, if any, and plain attributes.
    _paths: ClassVar[Mapping[str, int | str]] = {}
    _kinds: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    _norms: ClassVar[tuple[str, ...]] = ()  # whose mode is their own
    _moded: ClassVar[tuple[str, ...]] = ()  # others that compute in training what they don't in evaluation
    _pairs: ClassVar[tuple[str, ...]] = ()  # complex in the source: here with a last dimension of both parts
    _inputs: ClassVar[tuple[str, ...]]
    _types: ClassVar[tuple[str, ...]]
    _made: ClassVar[Mapping[str, str]] = {}  # types of outputs that are not of the network's
    _modes: ClassVar[tuple[str, ...]] = ("train", "eval")
    # Of a source that asks values for their types, by autocast's type why it can't run under it, or "".
    _asks: ClassVar[Mapping[str, str]] = {}
    _noise: ClassVar[bool] = False  # it draws in evaluation, too
    _constants: ClassVar[Mapping[str, Tensor]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_steps" in vars(cls):  # a package's, and none made of it
            cls._net.steps = cls._steps
            cls._net.types |= {n: getattr(torch, kind) for n, kind in zip(cls._inputs, cls._types, strict=True)}

    def __init__(self, mesh: DeviceMesh, *, seed: int = 0, parameters: str = "dtensors") -> None:
        super().__init__()
        if parameters not in ("dtensors", "blocks"):
            raise ValueError(f"{self._net.name}: parameters= is dtensors or blocks, got {parameters!r}")
        self._mesh = mesh
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._learnt = {n: how for n, (*_, how, learnt) in self._net.state.items() if learnt}
        self._buffered = {n: how for n, (*_, how, learnt) in self._net.state.items() if not learnt}
        self._masks: dict[int, Tensor | None] = {}  # by a number that torch draws: see _mask
        self._repeated = set[int]()
        self._calls = self._looks = 0
        self._handed: tuple[str, ...] = ()  # outputs of the last call that have come with their halos
        self._taken: dict[str, object] = {}  # what a call of whole tensors says of them
        net, here = self._net, self._net.here(mesh)
        made = here.place.known["made", net.identity] = here.place.known.get(("made", net.identity), 0) + 1
        self._instance, self._copied_from = f"instance {made}", ""  # alike on all ranks
        self._of, device = net.name, "meta" if torch.get_default_device().type == "meta" else net.device
        self._said = self._kinds[0][1] if self._kinds else {}
        for path in self._paths:
            self._owner(f"{path}.")
        for name in self._learnt:
            shape, memory = here.shape(net.stored[name]), net.format(name)
            block = torch.empty(shape, dtype=net.types[name], device=device, memory_format=memory)
            value = torch.nn.Parameter(self._as_known(name, block, parameters), requires_grad=name not in self._frozen)
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_parameter(leaf, value)
        for name, how in self._buffered.items():
            block = torch.zeros(here.shape(net.stored[name]), dtype=net.types[name], device=device)
            value = self._as_known(name, block, parameters) if block.dim() else block
            owner, leaf = self._owners[name] = self._owner(name)
            owner.register_buffer(leaf, value, persistent=how != "constant")  # no state dict of the source has those
        for name, same in self._aliases.items():
            owner, leaf = self._owner(name)
            if same in self._buffered:
                owner.register_buffer(leaf, self._known[same])
            else:
                owner.register_parameter(leaf, self._known[same])
        self._wanted = {
            n: (tuple(net.placements(n, mesh) or ()), here.frame(net.stored[n]), here.shape(net.stored[n]))
            for n in self._owners
        }
        self._scopes = {path: m for path, m in self.named_modules(remove_duplicate=False) if path}
        norms = {self._scopes[path] for path in self._norms}
        self._own_mode = {path: one for path, one in self._scopes.items() if one in norms}
        self._tied = {self._nearest(path) for path in self._moded}
        if device != "meta":
            self.reset_parameters(seed)
        if self._modes == ("eval",):
            self.eval()

    @property
    def _known(self) -> dict[str, Any]:
        """Parameters and buffers by name, as the modules have them now."""
        every = ((name, owner, leaf, owner._parameters.get(leaf)) for name, (owner, leaf) in self._owners.items())
        return {name: getattr(owner, leaf) if plain is None else plain for name, owner, leaf, plain in every}

    def _as_known(self, name: str, block: Tensor, parameters: str) -> Tensor:
        net, mesh = self._net, self._mesh
        dtensors = parameters == "dtensors"
        known = as_dtensor(block, name, mesh, net.batch, net) if dtensors else None  # type: ignore[arg-type]
        return as_held(block, name, net.stored[name], net.here(mesh)) if known is None else known  # type: ignore[arg-type]

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        here: torch.nn.Module = self
        *path, leaf = name.split(".")
        for depth, part in enumerate(path):
            if part not in here._modules:
                here._modules[part] = self._scope(".".join(path[: depth + 1]))
            here = here._modules[part]  # type: ignore[assignment]
        return here, leaf

    def _scope(self, path: str) -> torch.nn.Module:
        known = self._paths.get(path)
        if isinstance(known, str):
            return self._owner(f"{known}.")[0]
        kind, said = ("", {}) if known is None else self._kinds[known]
        return of_kind(Scope, kind)(f"{self._net.name}: {path}", said)

    def _nearest(self, path: str) -> torch.nn.Module:
        while path and path not in self._scopes:
            path = path.rpartition(".")[0]
        return self._scopes.get(path, self)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """This rank's blocks of what torch draws for each kind of layer, from a seed a parameter."""
        for number, (name, how) in enumerate(self._learnt.items()):
            self._fill(name, initial(how, self._net.stored[name].extents, seed, number))
        for name, how in self._buffered.items():
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
        """This rank's blocks of a whole state dict of the source; and the seed and step of what is drawn at random, of
        one of `full_state_dict`.

        Raises:
            KeyError: a name is missing, or not the network's.
        """
        drawn = getattr(state, "_metadata", {}).get(DRAWN, {})
        own = [n for n in (*self._learnt, *self._buffered) if n not in self._seeds]
        missing = [n for n in own if n not in state and n not in self._constants]
        unknown = [n for n in state if n not in self._known and n not in self._aliases]
        if missing or unknown:
            text = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(unknown)}"] * bool(unknown)
            raise KeyError(f"{self._net.name}: {'; '.join(text)}")
        state = {n: as_pairs(t) if self._aliases.get(n, n) in self._pairs else t for n, t in state.items()}
        for name in own:
            wanted = self._net.stored[name].extents
            if name in state and tuple(state[name].shape) != wanted:
                got = tuple(state[name].shape)
                raise ValueError(f"{self._net.name}: {name} has shape {wanted}, got {got}")
        taken = hashlib.sha256("".join(f"{n} {sampled(state[n])}\n" for n in own if n in state).encode())
        self._enter("load_full", self._net.here(self._mesh), {"values of the state": taken.hexdigest()[:8]})()
        for name in own:
            if name in state:
                self._fill(name, state[name].detach())
        for name in self._seeds:
            if "seed" in drawn:
                self._fill(name, torch.tensor([drawn["seed"], drawn["step"]]))
            elif name in state:  # of `state_dict`
                self._fill(name, local(state[name]))

    def take_from(self, other: Any) -> None:
        """Have another network's parameters and buffers, those of the same names, in the place of one's own: the same
        tensors, in the same memory, whose gradients come from both. Every rank calls it.

        Args:
            other: a network on the same mesh, of this package or of another.
        Raises:
            ValueError: one of them has another shape, type or layout there.
        """
        here, own, shared = self._net.here(self._mesh), other._known, list[str]()
        fault: Exception | None = None
        if other._net.place(other._mesh).key != here.place.key:
            fault = ValueError(f"{self._net.name}: {other._net.name} is on another mesh")
        for name in self._owners:
            if name not in own or name in self._seeds:
                continue
            mine, theirs = (n.stored[name] for n in (self._net, other._net))
            what = [(list(s.extents), s.axes, n.types[name]) for s, n in ((mine, self._net), (theirs, other._net))]
            if what[0] != what[1] and fault is None:
                said = [f"{kind} {shape} split {axes}" for shape, axes, kind in what]
                fact = f"{self._net.name}: {name} is {said[0]}, and {said[1]} in {other._net.name}"
                fault = ValueError(f"{fact}; the same grid and named algorithm lay both out alike")
            shared.append(name)
        self._enter("take_from", here, {"of": other._net.name, "tensors": len(shared)}, fault)()
        self.share(other, shared)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The source's state dict, whole, on every rank; every rank calls it.

        Its `_metadata`, which torch.save and copy.deepcopy keep, and `dict(...)` doesn't, has the seed and the step of
        what the network draws at random, so that `load_full` of it goes on as this one would.
        """
        here = self._net.here(self._mesh)
        self._enter("full_state_dict", here, {})()
        found = {
            name: self._as_source(name, gathered(local(value), self._net.stored[name], here))
            for name, value in self._known.items()
            if self._buffered.get(name) not in ("seed", "constant")
        }
        state: Any = OrderedDict(found | {name: found[same] for name, same in self._aliases.items()})
        state._metadata = OrderedDict()
        for name in self._seeds:
            state._metadata[DRAWN] = dict(zip(("seed", "step"), local(self._known[name]).tolist(), strict=True))
        return state

    @property
    def _seeds(self) -> list[str]:
        return [n for n, how in self._buffered.items() if how == "seed"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """As any module does; of whole tensors, as of the source's state dict, this rank's blocks are taken."""
        here, all_known = self._net.here(self._mesh), self._known
        for name in (*self._owners, *self._aliases):
            own, key = self._aliases.get(name, name), f"{prefix}{name}"
            known, given = all_known[own], cast(Any, state_dict.get(key))
            if isinstance(known, (Block, DTensor)) and type(given) in (Tensor, torch.nn.Parameter):
                whole, split = as_pairs(given) if own in self._pairs else given, self._net.stored[own]
                if tuple(whole.shape) == split.extents:
                    block = block_of(whole.detach(), split, self._net, here.place)
                    block = block.to(self._net.device, copy=True, memory_format=torch.contiguous_format)
                    state_dict[key] = self._as_known(own, block, "blocks" if isinstance(known, Block) else "dtensors")
            elif given is None and name in self._seeds:
                state_dict[key] = known.detach()  # the source has none
        super()._load_from_state_dict(state_dict, prefix, *others)

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradient of each parameter that has one, on every rank; every rank calls it."""
        here = self._net.here(self._mesh)
        grads = {n: self._known[n].grad for n in self._learnt}
        without = ", ".join(n for n, g in grads.items() if g is None) or "none"
        self._enter("full_gradients", here, {"parameters without a gradient": without})()
        return {
            n: self._as_source(n, gathered(local(g), self._net.stored[n], here))
            for n, g in grads.items()
            if g is not None
        }

    def _as_source(self, name: str, whole: Tensor) -> Tensor:
        return torch.view_as_complex(whole.contiguous()) if name in self._pairs else whole

    def graphed(self, loss: Callable[..., Any] | None, *examples: Tensor, batch: int | None = None) -> GraphedStep:
        """A step as one CUDA graph, recorded from a step whose changes are taken back: `step = model.graphed(loss, x,
        target)`, then `value = step(x, target)` for `value = loss(model(x), target); value.backward()`.

        Args:
            loss: takes what the model makes and the examples behind its inputs, and returns a number, or a tuple that
                begins with it. Its buffers are kept where it is a module. None: forward alone, without gradients.
            examples: blocks as every call has them.
        """
        return GraphedStep(self, loss, examples, batch)

    def compile_kernels(
        self, *given: Tensor, batch: int | None = None, sizes: Mapping[str, int] | None = None, processes: int = 0
    ) -> Any:
        """Compile a GPU's kernels that a call like this one launches, in this mode, and its backward pass where
        gradients are on: in processes beside, into Triton's cache. No communication; ranks of one node that do it at
        once share the list. It may take seconds and processors; a first call without it compiles kernels one by one.

        Args:
            given: blocks as the call has them; none are like those that it was compiled for, and have no gradient.
            batch, sizes: as of the call.
            processes: on this rank; by default the node's cores, shared among its ranks.
        Returns:
            How many were compiled by this rank, and how many were found in Triton's cache.
        Raises:
            RuntimeError: it is not for a GPU, there is none, or a kernel does not compile.
        """
        net, place = self._net, self._net.place(self._mesh)
        if net.ahead is None:
            raise RuntimeError(f"{net.name}: has no kernels to compile: it is for {net.device}, not for --target cuda")
        count = net.opened(batch, sizes)
        known, unmet = self._known, ValueError(net.unmet(count)) if net.unmet(count) else None
        wrong = self._wrong(given, count, batch is None, net.here(self._mesh), (), NONE) if given else ()
        if (fault := next(chain(self._misfits(known), wrong, self._elsewhere(given, known)), unmet)) is not None:
            raise fault
        like, apart, low = dict(zip(self._inputs, given, strict=False)), self._apart(), low_of(net.device)
        grads, training = torch.is_grad_enabled(), self.training
        learns = (*(n for n, t in like.items() if grads and t.requires_grad), *self._learning)
        trains: Callable[[str], bool] = lambda name: training != (name in apart)  # noqa: E731
        with net.products:
            launches = net.ahead.of_call(lambda: walk(net, place, place.me, count, trains, low, learns, like=like))
        return net.ahead.compiled(launches, processes, says=place.me == 0)

    def region(
        self, name: str, *, batch: int | None = None, sizes: Mapping[str, int] | None = None, halo: bool = False
    ) -> Where:
        """Where this rank's block of an input, output, parameter or buffer lies in the whole: a slice for each
        dimension; as of the package's `region`."""
        return self._net.region(self._aliases.get(name, name), self._mesh, batch=batch, sizes=sizes, halo=halo)

    def forward(
        self, *given: Tensor, batch: int | None = None, sizes: Mapping[str, int] | None = None, halo: Sequence[str] = ()
    ) -> Any:
        """This rank's blocks of the outputs, of its blocks of the inputs.

        Args:
            batch: the number of samples, where it is not the compiled one.
            sizes: other extents that are known at run time only, by letter, where they aren't the compiled ones.
            halo: inputs that are given with the rows around their blocks, as the package's `block(..., halo=True)` has
                them; nothing is sent for these, and they can't require gradients.
        """
        net = self._net
        if torch.compiler._is_exporting_flag:  # is_exporting() is true under torch.compile of torch 2.11
            raise RuntimeError(
                f"{net.name}: an exported program would hold this rank's place on the mesh as a constant; export the "
                "original network, and compile its copies with convgen"
            )
        return self._outside(given, batch, sizes, tuple(sorted({halo} if isinstance(halo, str) else {*halo})))

    def handing_on(
        self, given: Sequence[Tensor], batch: Extents, halo: Sequence[str], around: Mapping[str, Boxes]
    ) -> tuple[Any, tuple[str, ...]]:
        """Outputs, of which some have the rows around this rank's block that another call's readers fetch; without
        gradients.

        Args:
            given, halo: as of `forward`; batch: the number of samples, and other sizes that are known at run time.
            around: by output, the boxes in which that call takes it, by rank (`halos` of its package's Net).
        Returns:
            The outputs, and the names of those that are given so: alike on all ranks. Of the others something would
            have to be sent for it, and they are blocks.
        """
        with torch.no_grad():
            made = self._outside(given, batch, None, tuple(sorted(halo)), around)
        return made, self._handed

    @torch._disable_dynamo  # rows are opaque to a compiler: what is around a network is compiled
    def _outside(
        self,
        given: Sequence[Tensor],
        batch: int | Extents | None,
        sizes: Mapping[str, int] | None,
        wide: tuple[str, ...],
        around: Mapping[str, Boxes] = NONE,
    ) -> Any:
        net = self._net
        refuse_forward_mode(net.name)
        refuse_vmap(net.name)
        here, known, count, fault = net.here(self._mesh), self._known, net.open, None
        try:
            count = net.opened(batch, sizes)
        except ValueError as error:
            fault = error
        if fault is None:
            wrong = self._wrong(given, count, batch is None, here, wide, around)
            fault = next(chain(self._misfits(known), wrong, self._elsewhere(given, known)), None)
        facts = {} if fault else self._facts(given, known, count)
        if wide:
            facts["inputs with halos"] = ", ".join(wide)
        if around:
            facts["outputs with halos"] = ", ".join(around)
        read = self._enter("forward", here, facts, fault)
        if (low := low_of(net.device)) is not None:
            with torch.autocast(net.device, enabled=False):  # steps know what it casts
                made = self._run(given, known, count, here, wide, around, low)
        else:
            made = self._run(given, known, count, here, wide, around)
        read()
        return made

    def _facts(self, given: Sequence[Tensor], known: Mapping[str, Any], count: Extents) -> dict[str, object]:
        """What must be alike on all ranks when a call begins."""
        grads = torch.is_grad_enabled()
        learns = [name for name, t in zip(self._inputs, given, strict=False) if grads and t.requires_grad]
        frozen = [name for name in self._learnt if not known[name].requires_grad]
        facts: dict[str, object] = {
            **self._net.said(count),
            "mode": self._mode_text(),
            "gradients": "on" if grads else "off",
            "inputs that require gradients": ", ".join(learns) or "none",
            "frozen parameters": ", ".join(frozen) or "none",
        }
        if (low := low_of(self._net.device)) is not None:
            facts["autocast"] = low
        facts |= self._products()
        taken, self._taken = self._taken, {}
        return facts | taken

    def _products(self) -> dict[str, object]:
        """What takes TF32 by torch's switches, where they are asked."""
        return {"TF32": taken()} if self._net.tf32 == "switches" else {}

    def _looks_at(self, whole: Mapping[str, Tensor]) -> None:
        """Of whole tensors, which all ranks give: let the call that begins compare some elements, at times."""
        self._looks += 1
        if self._looks == 1 or self._looks % LOOKS == 0:
            said = ", ".join(f"{name} {sampled(t)}" for name, t in whole.items())
            self._taken = {"values of inputs": said}

    def _refuse(self, fault: Exception) -> None:
        """Let all ranks refuse a call whose arguments are wrong on this one."""
        self._enter("forward", self._net.here(self._mesh), {}, fault)

    def _enter(
        self, entry: str, here: RowHere, facts: Mapping[str, object], fault: Exception | None = None
    ) -> Callable[[], None]:
        """Begin an entry of this instance."""
        if self._copied_from:
            what = f"copies of {self._copied_from}", self._net.identity
            number = here.place.known[what] = here.place.known.get(what, 0) + 1
            self._instance, self._copied_from = f"copy {number} of {self._copied_from}", ""
        return enter(here, entry, facts, instance=self._instance, fault=fault, hints=HINTS)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._copied_from = self._copied_from or self._instance

    def _apart(self) -> frozenset[str]:
        """Batch norms in the other mode than the network, by all of their paths."""
        return frozenset([path for path, one in self._own_mode.items() if one.training != self.training])

    def _mode_text(self) -> str:
        """The network's mode, and which modules compute in the other one: what is to be alike on all ranks."""
        names, apart = ("eval", "train"), ", ".join(sorted(self._apart()))
        return names[self.training] + (f", but {names[not self.training]}: {apart}" if apart else "")

    def _misfits(self, known: Mapping[str, Any]) -> Iterator[Exception]:
        """What has become of parameters, buffers and modules that a network can't run with."""
        name, mode, both = self._net.name, "train" if self.training else "eval", len(self._modes) > 1
        if mode not in self._modes:
            hint = f"import it in {mode} mode too" if mode == "train" else "import it again with --eval"
            yield RuntimeError(f"{name}: compiled for {self._modes[0]} mode alone, the graphs differ; {hint}")
        for path, scope in self._scopes.items():
            if scope.training == self.training or path in self._own_mode or (both and scope not in self._tied):
                continue
            modes = [("evaluation", "training")[m] for m in (scope.training, self.training)]
            yield RuntimeError(
                f"{scope._of} is in {modes[0]}, the network in {modes[1]}: batch norms may be, as bn.eval() has them; "
                "the others have one mode, that of model.train() or model.eval()"
            )
        for n, t in known.items():
            placements, box, shape = self._wanted[n]
            if isinstance(t, DTensor):
                spec, mesh, plain = t._spec, self._mesh, t._local_tensor
                fits = spec.placements == placements and (spec.mesh is mesh or spec.mesh == mesh)
            elif isinstance(t, Block):
                fits_ddp(t)
                fits, plain = t.held is not None and t.held.box == box, t._block
            else:
                fits, plain = True, t
            if not fits:
                got = getattr(t, "placements", getattr(t, "held", None))
                yield ValueError(f"{name}: {n} is stored {self._net.values[n][1]} here, {list(box)}; got {got}")
            elif plain.shape != shape:
                yield ValueError(f"{name}: this rank's block of {n} is {list(box)}, got the shape {tuple(plain.shape)}")
            elif plain.dtype != self._net.types[n]:
                yield ValueError(f"{name}: {n} is {self._net.types[n]}, got {plain.dtype}; dtype= compiles for another")

    def _wrong(
        self, given: Sequence[Tensor], count: Extents, guessed: bool, here: RowHere, wide: tuple[str, ...],
        around: Mapping[str, Boxes],
    ) -> Iterator[Exception]:  # fmt: skip
        """What is wrong with the inputs."""
        net = self._net
        low = low_of(net.device)
        if low is not None and (why := self._asks.get(str(low).removeprefix("torch."))):
            yield RuntimeError(f"{net.name}: not under autocast of {low}: {why}; run it outside, enabled=False")
        if unmet := net.unmet(count):
            yield ValueError(unmet)
            return
        if fault := self.too_much(count):
            yield ValueError(fault)
            return
        unknown = [name for name in wide if name not in self._inputs]
        if unknown:
            yield ValueError(f"{net.name}: halo= names inputs, {', '.join(self._inputs)}; got {', '.join(unknown)}")
            return
        try:
            linked = self._linked(here.place, count, low, wide, around)
        except (ValueError, IndexError, RuntimeError) as error:  # on this rank alone, perhaps
            yield error
            return
        if linked.lacks:
            hint = "compile the network for these sizes alone"
            yield ValueError(f"{net.name}: {linked.lacks} for {net.said(count)}; {hint}")
            return
        boxes = linked.boxes
        if len(given) != len(self._inputs):
            yield TypeError(f"{net.name}: takes {', '.join(self._inputs)}, got {len(given)} tensors")
            return
        for name, value, kind in zip(self._inputs, given, self._types, strict=True):
            if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                yield TypeError(f"{net.name}: {name} is to be this rank's block, a tensor, got {type(value).__name__}")
                return
            other = value.is_floating_point() != getattr(torch, kind).is_floating_point
            narrow = f"torch.{kind}" != str(value.dtype) and (low is None or bool(self._asks))
            if other or (value.is_floating_point() and narrow):
                yield ValueError(f"{net.name}: {name} is torch.{kind}, got {value.dtype}")
            wanted = net.shape(boxes[name], name) if name in boxes else here.shape(net.split(name, count))
            if name in boxes and value.requires_grad and torch.is_grad_enabled():
                yield ValueError(f"{net.name}: {name} comes with its halo, and has no gradient; detach it, or halo=()")
            if tuple(value.shape) != wanted:
                hint = "; batch= tells the number of samples, if it is another one" if guessed else ""
                got = tuple(value.shape)
                yield ValueError(f"{net.name}: this rank's block of {name} has shape {wanted}, got {got}{hint}")

    def _elsewhere(self, given: Sequence[Tensor], known: Mapping[str, Any]) -> Iterator[Exception]:
        """Inputs that are on another device than parameters; numbers may be anywhere, as torch has them."""
        name, device = self._net.name, self._net.device
        there = next((t.device for t in known.values()), None)
        if there is not None and there.type != device:
            yield ValueError(f"{name}: is for {device}, and its parameters are on {there}; model.to({device!r})")
            return
        for n, t in zip(self._inputs, given, strict=False):
            if t.dim() and (t.device != there if there is not None else t.device.type != device):
                wanted = str(device if there is None else there)
                hint = f"{n}.to({wanted!r}); scatter({n!r}, whole, mesh) brings a block there by itself"
                yield ValueError(f"{name}: {n} is on {t.device}, and the network on {wanted}; {hint}")

    def _run(
        self, given: Sequence[Tensor], known: Mapping[str, Any], count: Extents, here: RowHere, wide: tuple[str, ...],
        around: Mapping[str, Boxes], low: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        net, grads = self._net, torch.is_grad_enabled()
        learns = {n: t for n, t in zip(self._inputs, given, strict=True) if grads and t.requires_grad}
        count_of_inputs = len(learns)
        learns |= {n: known[n] for n in self._learnt if grads and known[n].requires_grad}
        tensors = InsideAll.apply(net.name, *learns.values()) if learns else ()
        slots = dict(zip(self._inputs, given, strict=True))
        slots |= {f"[{n}]": local(t) for n, t in known.items() if n not in learns}
        drawn = next((slots[f"[{n}]"] for n in self._seeds), None)
        if drawn is not None:
            mask = self._mask(drawn)
            slots |= {f"[{n}]": mask for n in self._seeds}
        self._calls += 1
        nans: list[str] | None = [] if compares(self._calls) else None
        names = tuple(learns)
        own = (*names[:count_of_inputs], *(f"[{n}]" for n in names[count_of_inputs:]))
        linked = self._linked(here.place, count, low, wide, around)
        self._handed = linked.handed_on
        for name, box in linked.boxes.items():
            surrounded = slots[f"{name}{HALO}"] = slots[name]
            if name in linked.forward(names).given:
                slots[name] = taken_from(surrounded, box, here.held(net.split(name, count)))
        call = Called(linked, names, own, slots, nans)
        made = self._as_given(run_steps(call, tensors))
        if nans is not None:
            refuse_nans(here, "".join(nans))
            compare_copies(here, {n: (t, net.stored[n]) for n, t in known.items()}, "parameters and buffers")
        return kept(made) if grads and is_kept_elsewhere() else made

    def _as_given(self, made: list[Tensor]) -> Any:
        """Outputs as the source has them: one, by names, or a tuple."""
        names = list(self._steps.outputs)
        if names == ["output"]:
            return made[0]
        return tuple(made) if all(n.isdecimal() for n in names) else dict(zip(names, made, strict=True))

    def _mask(self, drawn: Tensor) -> Tensor:
        """The seed and the step of this call; calls in evaluation are counted apart, above the 32 bits of those in
        training, and are steps from EVALUATION on. A call inside of a backward pass is one that activation
        checkpointing repeats: it has the step of the first one, which is found by torch's random state, as that is
        brought back."""
        now = drawn.clone()
        again = torch._C._current_graph_task_id() != -1
        if not self.training:
            if not self._noise:
                return now
            now[1] = (now[1] >> 32) % EVALUATION + EVALUATION
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
        drawn[1] += 1 if self.training else 1 << 32
        return now


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
