# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network as torch.nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from convgen.operations.dropout import EVALUATION

from .any_size import low_of
from .checkpoints import is_kept_elsewhere, kept
from .checks import refuse_forward_mode, refuse_vmap
from .clipping import within_reach
from .copies import compare_copies, compares, refuse_nans
from .foreseen import walk
from .handed_on import NONE, Boxes
from .inside import InsideAll
from .listing import Steps
from .net import Extents, Net
from .parameters import as_dtensor, as_held
from .region import Called, run_steps
from .regions import Where
from .scopes import Scope, of_kind
from .steps import GraphedStep
from .surrounded import HALO, taken_from
from .travel import RowHere
from .whole_state import WholeState

MASKS = 4096  # the masks of so many calls are kept, as their backward passes may still come


class NetworkModule(WholeState):
    """The network: this rank has its block of every parameter and buffer, under the source's names.

    Args:
        seed: of the initialisation, torch's default of each kind of layer.
        parameters: dtensors, or Blocks where DTensor can't say the layout; or blocks: Blocks throughout.
    """

    _net: ClassVar[Net]
    _steps: ClassVar[Steps]
    _aliases: ClassVar[Mapping[str, str]] = {}
    # Modules of the source: paths, in order, with the number of their kind or the path of the same one before; and the
    # kinds: a class of torch.nn, if any, and plain attributes.
    _paths: ClassVar[Mapping[str, int | str]] = {}
    _kinds: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]] = ()
    _norms: ClassVar[tuple[str, ...]] = ()  # batch norms, whose mode is their own
    _moded: ClassVar[tuple[str, ...]] = ()  # other modules that compute something else in training than in evaluation
    _made: ClassVar[Mapping[str, str]] = {}  # by output, its type where it isn't the network's
    _noise: ClassVar[bool] = False  # whether it draws random numbers in evaluation, too

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_steps" in vars(cls):  # a package's class, not a class that was derived from one
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
        self._masks: dict[int, Tensor | None] = {}  # by a random number of torch's: see _mask
        self._repeated = set[int]()
        self._calls = self._looks = 0
        self._handed: tuple[str, ...] = ()  # outputs of the last call that have come with their halos
        self._taken: dict[str, object] = {}  # the facts of a call's whole tensors, for the envelope
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
            owner.register_buffer(leaf, value, persistent=how != "constant")  # the source's state dict lacks them
        for name, same in self._aliases.items():
            owner, leaf = self._owner(name)
            if same in self._buffered:
                owner.register_buffer(leaf, self._known[same])
            else:
                owner.register_parameter(leaf, self._known[same])
        self._wanted = {
            n: (
                tuple(net.placements(n, mesh) or ()),
                here.frame(net.stored[n]),
                here.shape(net.stored[n]),
                net.types[n],
            )
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
        found: dict[str, Any] = {}
        for name, (owner, leaf) in self._owners.items():
            held: Mapping[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            found[name] = held[leaf] if leaf in held else getattr(owner, leaf)
        return found

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

    def graphed(self, loss: Callable[..., Any] | None, *examples: Tensor, batch: int | None = None) -> GraphedStep:
        """A step as one CUDA graph: after `step = model.graphed(loss, x, target)`, `value = step(x, target)` does
        `value = loss(model(x), target); value.backward()`. It is recorded from a step whose changes are taken back.

        Args:
            loss: takes the model's outputs and the examples behind the model's inputs, and returns a number, or a tuple
                that begins with it. If it is a module, recording leaves its buffers as they were, like the model's.
                None: forward alone, without gradients.
            examples: blocks like those of every call.
        """
        return GraphedStep(self, loss, examples, batch)

    def compile_kernels(
        self, *given: Tensor, batch: int | None = None, sizes: Mapping[str, int] | None = None, processes: int = 0
    ) -> Any:
        """Compile the kernels that a call like this one launches on a GPU, in the present mode, and where gradients are
        on its backward pass: in separate processes, into Triton's cache. No communication; ranks of one node that do it
        at once share the list. It may take seconds and processors; a first call without it compiles kernels one by one.

        Args:
            given: blocks as the call has them; without any, blocks are taken to be as compiled for, without gradients.
            batch, sizes: as for the call.
            processes: how many this rank starts; by default the node's cores, shared among its ranks.
        Returns:
            How many kernels this rank compiled, and how many it found in Triton's cache.
        Raises:
            RuntimeError: the package is not for a GPU, there is none, or a kernel does not compile.
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
        dimension; as the package's `region` gives it."""
        return self._net.region(self._aliases.get(name, name), self._mesh, batch=batch, sizes=sizes, halo=halo)

    def forward(
        self, *given: Tensor, batch: int | None = None, sizes: Mapping[str, int] | None = None, halo: Sequence[str] = ()
    ) -> Any:
        """This rank's blocks of the outputs, from its blocks of the inputs.

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
        try:
            wide = {halo} if isinstance(halo, str) else {*map(str, halo)}
        except TypeError:  # no names: refused with what else is wrong
            wide = {str(halo)}
        return self._outside(given, batch, sizes, tuple(sorted(wide)))

    def handing_on(
        self, given: Sequence[Tensor], batch: Extents, halo: Sequence[str], around: Mapping[str, Boxes]
    ) -> tuple[Any, tuple[str, ...]]:
        """Outputs, some of them with the rows around this rank's block that the readers in another call fetch; without
        gradients.

        Args:
            given, halo: as for `forward`; batch: the number of samples, and other sizes that are known at run time.
            around: by output, the boxes in which that call takes it, by rank (`halos` of its package's Net).
        Returns:
            The outputs, and the names of those that have such rows, which are the same on all ranks. The others are
            plain blocks: their rows would have to be sent.
        """
        with torch.no_grad():
            made = self._outside(given, batch, None, tuple(sorted(halo)), around)
        return made, self._handed

    @torch._disable_dynamo  # torch.compile compiles what is around a network; rows are opaque to it
    def _outside(
        self,
        given: Sequence[Tensor],
        batch: int | Extents | None,
        sizes: Mapping[str, int] | None,
        wide: tuple[str, ...],
        around: Mapping[str, Boxes] = NONE,
    ) -> Any:
        net = self._net
        here, known, count, fault = net.here(self._mesh), self._known, net.open, None
        try:
            refuse_forward_mode(net.name)
            refuse_vmap(net.name)
            count = net.opened(batch, sizes)
            wrong = self._wrong(given, count, batch is None, here, wide, around)
            fault = next(chain(self._misfits(known), wrong, self._elsewhere(given, known)), None)
        except Exception as error:  # whatever it is that this rank alone has, perhaps
            fault = error
        facts = {} if fault else self._facts(given, known, count)
        if wide:
            facts["inputs with halos"] = ", ".join(wide)
        if around:
            facts["outputs with halos"] = ", ".join(around)
        read = self._enter("forward", here, facts, fault)
        if (low := low_of(net.device)) is not None:
            with torch.autocast(net.device, enabled=False):  # steps cast themselves what autocast would
                made = self._run(given, known, count, here, wide, around, low)
        else:
            made = self._run(given, known, count, here, wide, around)
        read()
        return made

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
        slots |= {f"[{n}]": within_reach(t) for n, t in known.items() if n not in learns}
        drawn = next((slots[f"[{n}]"] for n in self._seeds), None)
        if drawn is not None:
            mask = self._mask(drawn)
            slots |= {f"[{n}]": mask for n in self._seeds}
        read = known if drawn is None else {n: t for n, t in known.items() if n not in self._seeds}  # mask is a copy
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
        call = Called(linked, names, own, slots, nans, read)
        made = self._as_given(run_steps(call, tensors))
        if nans is not None:
            refuse_nans(here, "".join(nans))
            compare_copies(here, {n: (t, net.stored[n]) for n, t in known.items()}, "parameters and buffers")
        return kept(made) if grads and is_kept_elsewhere() else made

    def _as_given(self, made: list[Tensor]) -> Any:
        """Outputs as the source gives them: one, a dict by names, or a tuple."""
        names = list(self._steps.outputs)
        if names == ["output"]:
            return made[0]
        return tuple(made) if all(n.isdecimal() for n in names) else dict(zip(names, made, strict=True))

    def _mask(self, drawn: Tensor) -> Tensor:
        """The seed and the step by which this call draws masks. Calls in evaluation are counted apart, above the 32
        bits of those in training, and their steps begin at EVALUATION. A call inside of a backward pass is one that
        activation checkpointing repeats: it has the first call's step, which is found by torch's random state, as
        checkpointing brings that back."""
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
