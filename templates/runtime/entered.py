# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""The checks before a call of a network, or before another entry that every rank makes, begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .any_size import AnySize, low_of
from .blocks import Block, fits_ddp
from .checks import unlike_block
from .envelope import enter, sampled
from .handed_on import Boxes
from .net import Extents
from .scopes import Known
from .tf32 import taken
from .travel import RowHere

LOOKS = 100  # ranks compare the values of whole tensors at one of so many calls
HINTS = {
    "values of inputs": "every rank is to give the same whole tensors here, samples of all ranks together; "
    "parallelize(..., whole=False) takes and gives each rank's blocks: model(package.scatter(name, x, mesh))",
}


class Entered(AnySize, Known):
    """A network's module, as far as its entries are checked.

    Raises:
        RuntimeError, ValueError, TypeError: on all ranks, where one is given what the network can't run with, or ranks
            differ in what must be alike.
    """

    _inputs: ClassVar[tuple[str, ...]]
    _types: ClassVar[tuple[str, ...]]
    _modes: ClassVar[tuple[str, ...]] = ("train", "eval")
    # By autocast's type, why a source that asks values for their types can't run under it, or "".
    _asks: ClassVar[Mapping[str, str]] = {}
    _frozen: ClassVar[tuple[str, ...]] = ()  # the parameters that the source does not train
    _instance: str
    _copied_from: str
    _looks: int
    _taken: dict[str, object]  # the facts of a call's whole tensors, for the envelope
    _scopes: dict[str, torch.nn.Module]
    _own_mode: dict[str, torch.nn.Module]
    _tied: set[torch.nn.Module]

    def _facts(self, given: Sequence[Tensor], known: Mapping[str, Any], count: Extents) -> dict[str, object]:
        """The facts that must be alike on all ranks when a call begins."""
        grads = torch.is_grad_enabled()
        learns = [name for name, t in zip(self._inputs, given, strict=False) if grads and t.requires_grad]
        frozen = [name for name in self._learnt if not known[name].requires_grad]
        each = zip(self._inputs, given, self._types, strict=True)  # whole numbers may be of any type
        others = [f"{name} {t.dtype}" for name, t, kind in each if t.dtype != getattr(torch, kind)]
        facts: dict[str, object] = {
            **self._net.said(count),
            "mode": self._mode_text(),
            "gradients": "on" if grads else "off",
            "types of inputs": ", ".join(others) or "as compiled",
            "inputs that require gradients": ", ".join(learns) or "none",
            "frozen parameters": ", ".join(frozen) or "none",
        }
        if (low := low_of(self._net.device)) is not None:
            facts["autocast"] = low
        facts |= self._products()
        taken, self._taken = self._taken, {}
        return facts | taken

    def _products(self) -> dict[str, object]:
        """The fact which products take TF32, where torch's switches decide that."""
        return {"TF32": taken()} if self._net.tf32 == "switches" else {}

    def _looks_at(self, whole: Mapping[str, Tensor]) -> None:
        """Let one call in LOOKS compare some elements of the whole tensors, which all ranks give alike."""
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
        """All paths of the batch norms that are in the other mode than the network."""
        return frozenset([path for path, one in self._own_mode.items() if one.training != self.training])

    def _mode_text(self) -> str:
        """The network's mode, and which modules compute in the other one; this must be alike on all ranks."""
        names, apart = ("eval", "train"), ", ".join(sorted(self._apart()))
        return names[self.training] + (f", but {names[not self.training]}: {apart}" if apart else "")

    def _misfits(self, known: Mapping[str, Any]) -> Iterator[Exception]:
        """Errors for parameters, buffers and modules that were changed so that the network can't run with them."""
        name, mode, both = self._net.name, "train" if self.training else "eval", len(self._modes) > 1
        if mode not in self._modes:
            again = "convgen import" + " --eval" * (mode == "eval")
            yield RuntimeError(
                f"{name}: compiled for {self._modes[0]} mode alone, the graphs differ; compile the source once more "
                f"behind module.{mode}(), or by {again}"
            )
        for path, scope in self._scopes.items():
            if scope.training == self.training or path in self._own_mode or (both and scope not in self._tied):
                continue
            modes = [("evaluation", "training")[m] for m in (scope.training, self.training)]
            yield RuntimeError(
                f"{scope._of} is in {modes[0]}, the network in {modes[1]}: batch norms may be, as bn.eval() has them; "
                "the others have one mode, that of model.train() or model.eval()"
            )
        learns = [n for n in self._frozen if known[n].requires_grad] if torch.is_grad_enabled() else []
        if learns:
            yield RuntimeError(
                f"{name}: {', '.join(learns)} {'require' if len(learns) > 1 else 'requires'} a gradient, which no step "
                "makes: the source was frozen there when it was compiled; requires_grad_(False), or compile the source "
                "as it learns and freeze the network's parameters"
            )
        mesh, wanted = self._mesh, self._wanted
        for n, t in known.items():
            placements, box, shape, kind = wanted[n]
            if isinstance(t, DTensor):
                spec, plain = t._spec, t._local_tensor
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
            elif plain.dtype != kind:
                yield ValueError(f"{name}: {n} is {kind}, got {plain.dtype}; dtype= compiles for another")

    def _wrong(
        self, given: Sequence[Tensor], count: Extents, guessed: bool, here: RowHere, wide: tuple[str, ...],
        around: Mapping[str, Boxes],
    ) -> Iterator[Exception]:  # fmt: skip
        """Errors for inputs that are wrong."""
        net = self._net
        low = low_of(net.device)
        asks = self._asks.get(str(low).removeprefix("torch."), "")
        why = asks if net.programs is None else "an SW26010 computes in double, whatever memory holds"
        if low is not None and why:
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
            if got := unlike_block(value):
                yield TypeError(f"{net.name}: {name} is to be this rank's block, a dense tensor, got {got}")
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
        """Errors for inputs on another device than the parameters; single numbers may be anywhere, as in torch."""
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
