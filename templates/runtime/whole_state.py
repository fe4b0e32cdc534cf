# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network's parameters and buffers as whole tensors: initialised, loaded, given, and shared."""

from __future__ import annotations

import hashlib
import math
import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .blocks import Block
from .clipping import local
from .entered import Entered
from .envelope import sampled
from .net import gathered
from .splits import block_of

DRAWN = "convgen"  # the key in a state dict's metadata of the seed and the step of random draws


def as_pairs(tensor: Tensor) -> Tensor:
    """A complex tensor as a real one, with a last dimension of real and imaginary part."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


class WholeState(Entered):
    """A network's module, as far as its state is whole."""

    _pairs: ClassVar[tuple[str, ...]] = ()  # tensors that are complex in the source and pairs of real numbers here
    _constants: ClassVar[Mapping[str, Tensor]] = {}
    _buffered: dict[str, str]  # by buffer, how it begins; as `_learnt` has for parameters

    def _as_known(self, name: str, block: Tensor, parameters: str) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Fill this rank's blocks with what torch draws for each kind of layer; each parameter has a seed of its
        own."""
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
        """Take this rank's blocks of a whole state dict of the source; of one that `full_state_dict` gave, also the
        seed and the step of random draws.

        Raises:
            KeyError: a name is missing, or not the network's.
        """
        own = [n for n in (*self._learnt, *self._buffered) if n not in self._seeds]
        facts: dict[str, object] = {}
        drawn: dict[str, Tensor] = {}
        fault: Exception | None = None
        try:
            metadata = getattr(state, "_metadata", None)
            state = self._checked(state, own)
            taken = hashlib.sha256("".join(f"{n} {sampled(state[n])}\n" for n in own if n in state).encode())
            drawn = self._drawn(state, metadata)
            facts = {"values of the state": taken.hexdigest()[:8]}
            facts |= {f"{n} and step": pair.tolist() for n, pair in drawn.items()}
        except Exception as error:  # whatever it is that one rank has in the place of a state
            fault = error
        self._enter("load_full", self._net.here(self._mesh), facts, fault)()
        for name in own:
            if name in state:
                self._fill(name, state[name].detach())
        for name, pair in drawn.items():
            self._fill(name, pair)

    def _drawn(self, state: Mapping[str, Tensor], metadata: Any) -> dict[str, Tensor]:
        """The seed and the step of random draws that a whole state dict has, if it has them."""
        said = (metadata or {}).get(DRAWN)
        if said is None:  # perhaps as in `state_dict`
            return {n: local(state[n]).detach().cpu() for n in self._seeds if n in state}
        try:
            pair = torch.tensor([operator.index(said[key]) for key in ("seed", "step")])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            fact = f"{self._net.name}: the state's metadata has {said!r} in the place of a seed and a step"
            raise ValueError(f"{fact}, whole numbers; full_state_dict gives these") from error
        return dict.fromkeys(self._seeds, pair)

    def _checked(self, state: Mapping[str, Tensor], own: Sequence[str]) -> Mapping[str, Tensor]:
        """A whole state dict, complex values as pairs; refused where it is not the source's."""
        if not (hasattr(state, "items") and hasattr(state, "__contains__")):
            raise TypeError(f"{self._net.name}: load_full takes a state dict, got {type(state).__name__}")
        missing = [n for n in own if n not in state and n not in self._constants]
        unknown = [n for n in state if n not in self._known and n not in self._aliases]
        if missing or unknown:
            text = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(unknown)}"] * bool(unknown)
            raise KeyError(f"{self._net.name}: {'; '.join(text)}")
        for n, t in state.items():
            if not isinstance(t, Tensor) or t.is_meta:  # pyright: ignore[reportUnnecessaryIsInstance]
                got = "one on meta" if isinstance(t, Tensor) else type(t).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{self._net.name}: {n} is to be a whole tensor, got {got}")
        state = {n: as_pairs(t) if self._aliases.get(n, n) in self._pairs else t for n, t in state.items()}
        for name in (*own, *self._seeds):
            wanted = self._net.stored[name].extents
            if name in state and tuple(state[name].shape) != wanted:
                got = tuple(state[name].shape)
                raise ValueError(f"{self._net.name}: {name} has shape {wanted}, got {got}")
        return state

    def take_from(self, other: Any) -> None:
        """Use another network's parameters and buffers in the place of those of the same names here: the same tensors,
        in the same memory, whose gradients come from both networks. Every rank calls it.

        Args:
            other: a network on the same mesh, of this package or of another.
        Raises:
            ValueError: one of them has another shape, type or layout there.
        """
        here, shared = self._net.here(self._mesh), list[str]()
        facts: dict[str, object] = {}
        fault: Exception | None = None
        try:
            shared = self._common(other)
            facts = {"of": other._net.name, "tensors": len(shared)}
        except Exception as error:  # perhaps this rank alone has it
            fault = error
        self._enter("take_from", here, facts, fault)()
        self.share(other, shared)

    def _common(self, other: Any) -> list[str]:
        """Names of what another network stores alike; refused where it is no network on this mesh, or stores a tensor
        of the same name otherwise."""
        if not hasattr(other, "_net"):
            raise TypeError(f"{self._net.name}: take_from takes a network, got {type(other).__name__}")
        if other._net.place(other._mesh).key != self._net.place(self._mesh).key:
            raise ValueError(f"{self._net.name}: {other._net.name} is on another mesh")
        found = [name for name in self._owners if name in other._known and name not in self._seeds]
        for name in found:
            mine, theirs = (n.stored[name] for n in (self._net, other._net))
            what = [(list(s.extents), s.axes, n.types[name]) for s, n in ((mine, self._net), (theirs, other._net))]
            if what[0] != what[1]:
                said = [f"{kind} {shape} split {axes}" for shape, axes, kind in what]
                fact = f"{self._net.name}: {name} is {said[0]}, and {said[1]} in {other._net.name}"
                raise ValueError(f"{fact}; the same grid and named algorithm lay both out alike")
        return found

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
        found |= {name: found[same] for name, same in self._aliases.items()}
        order = [n for n in self.state_dict() if n in found]  # the source's
        state: Any = OrderedDict((n, found[n]) for n in dict.fromkeys((*order, *found)))
        state._metadata = OrderedDict()
        for name in self._seeds:
            state._metadata[DRAWN] = dict(zip(("seed", "step"), local(self._known[name]).tolist(), strict=True))
        return state

    @property
    def _seeds(self) -> list[str]:
        return [n for n, how in self._buffered.items() if how == "seed"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load a state dict as any module does; where it has whole tensors, as the source's has, take this rank's
        blocks."""
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
                state_dict[key] = known.detach()  # the source's state dict lacks it
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


def initial(how: str, shape: tuple[int, ...], seed: int, number: int) -> Tensor:
    """A tensor filled as torch fills a parameter: ones, zeros, fill:0.25, normal, kaiming_uniform:FAN_IN or
    uniform:FAN_IN."""
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
