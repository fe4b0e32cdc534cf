# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private)
"""A network at sizes that are known at run time only: steps are kept ready for them, and a call's memory is
foreseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from .foreseen import Foreseen, Manner, foresee
from .handed_on import NONE, Boxes
from .layout import Box
from .linked import Linked
from .listing import Steps
from .mesh import Place
from .net import KEPT, Extents, Net, Sized
from .recent import Recent


class AnySize:
    """A network's module, as far as it depends on sizes.

    Attributes:
        keeps_shapes: for how many sizes steps are kept ready: the sizes of the last calls.
        limit_bytes: the most bytes of tensors that a call may have at a time on this rank; a call that takes more is
            refused before it begins.
    """

    keeps_shapes: int = KEPT
    limit_bytes: int | None = None
    training: bool
    _net: ClassVar[Net]
    _steps: ClassVar[Steps]
    _mesh: DeviceMesh
    _learnt: dict[str, str]
    _owners: dict[str, tuple[torch.nn.Module, str]]
    _aliases: ClassVar[Mapping[str, str]]
    _wanted: dict[str, tuple[Any, Box, tuple[int, ...], torch.dtype]]
    gives_whole: bool = False  # it takes and gives whole tensors (convgen's whole.py)

    @property
    def _known(self) -> dict[str, Any]:
        raise NotImplementedError

    def _apart(self) -> frozenset[str]:
        raise NotImplementedError

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        raise NotImplementedError

    @property
    def blocks_wanted(self) -> dict[str, tuple[Box, tuple[int, ...]]]:
        """By parameter and buffer, the box of this rank's block and the block's shape."""
        return {name: (box, shape) for name, (_, box, shape, _) in self._wanted.items()}

    def share(self, other: Any, names: Iterable[str]) -> None:
        """Take another network's parameters and buffers of these names, whose blocks are the same, in the place of its
        own; no communication."""
        theirs = other._known
        for name in names:
            for path in (name, *(alias for alias, same in self._aliases.items() if same == name)):
                owner, leaf = self._owner(path)
                (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = theirs[name]

    def _linked(
        self, place: Place, count: Extents, low: torch.dtype | None, wide: tuple[str, ...],
        around: Mapping[str, Boxes] = NONE,
    ) -> Linked:  # fmt: skip
        """The steps in this mode, for so many samples, under autocast of this type or without, with these inputs' halos
        given, and these outputs' handed on."""
        net, apart = self._net, self._apart()
        known: Recent = cast(Any, place.known).setdefault(("linked", net.identity), Recent())

        def made() -> Linked:
            training = self.training  # as it is now
            trains: Callable[[str], bool] = lambda name: training != (name in apart)  # noqa: E731
            return Linked(self._steps, Sized(net, count, low), place, trains, wide, around)

        return known.of((count, self.training, apart, low, wide, tuple(around.items())), made, self.keeps_shapes)

    def foreseen(self, count: Extents, me: int | None = None, manner: Manner | None = None) -> Foreseen:
        """The memory that a call takes on this rank, or on the one at a position, with its backward pass where
        gradients are on."""
        if manner is None:
            manner = Manner(frozenset(self._net.values if self.gives_whole else ()))
        net, place, low = self._net, self._net.place(self._mesh), low_of(self._net.device)
        training, apart, position = self.training, self._apart(), place.me if me is None else me
        learns = self._learning
        recent: Recent = cast(Any, place.known).setdefault(("foreseen", net.identity), Recent())
        return recent.of(
            (count, position, training, apart, low, learns, manner.whole, manner.wide, tuple(manner.around)),
            lambda: foresee(net, place, position, count, lambda name: training != (name in apart), low, learns, manner),
            KEPT * len(place.ranks),
        )

    def peak_bytes(self, *, batch: int | None = None, **sizes: int) -> int:
        """The most bytes of tensors that a call would have at a time on this rank; nothing is allocated to find out.

        Outputs count, and where gradients are on, the backward pass with gradients of outputs and of parameters;
        inputs, parameters and buffers don't. No communication.

        Args:
            batch, sizes: the number of samples and other open extents by letter, as `H=64`; by default those that the
                network was compiled for.
        Raises:
            ValueError: there is no such letter, or the network computes something else for such sizes.
        """
        count = self._net.opened(batch, sizes)
        if unmet := self._net.unmet(count):
            raise ValueError(unmet)
        return self.foreseen(count).peak_bytes

    def warm_up(self, shapes: Iterable[Mapping[str, int]]) -> None:
        """Make steps ready for these sizes, given by letter, in the present mode; they are kept like those of the last
        calls.

        Raises:
            ValueError: as of `peak_bytes`.
        """
        every = [self._net.opened(None, sizes) for sizes in shapes]
        for unmet in filter(None, map(self._net.unmet, every)):
            raise ValueError(unmet)
        self.keeps_shapes = max(self.keeps_shapes, len({*every}))
        for count in every:
            self.ready(count)

    def ready(self, count: Extents, wide: tuple[str, ...] = (), around: Mapping[str, Boxes] = NONE) -> Linked:
        """The steps of a call, ready to run."""
        linked = self._linked(self._net.place(self._mesh), count, low_of(self._net.device), wide, around)
        linked.forward(self._learning)
        return linked

    def too_much(self, count: Extents) -> str:
        """Why a call of these sizes is refused by `limit_bytes`; "" where it fits."""
        taken = None if self.limit_bytes is None else self.foreseen(count).peak_bytes
        if taken is None or self.limit_bytes is None or taken <= self.limit_bytes:
            return ""
        sizes = ", ".join(f"{letter}={n}" for letter, n in zip(self._net.letters, count, strict=True))
        return (
            f"{self._net.name}: {sizes} takes {taken:,} bytes of tensors at a time on this rank, beside parameters and "
            f"inputs, and limit_bytes is {self.limit_bytes:,}; smaller extents, or more ranks"
        )

    @property
    def _learning(self) -> tuple[str, ...]:
        """The parameters whose gradients a call would make now."""
        known = self._known if torch.is_grad_enabled() else {}
        return tuple([n for n in self._learnt if n in known and known[n].requires_grad])


def low_of(device: str) -> torch.dtype | None:
    """Autocast's type; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
