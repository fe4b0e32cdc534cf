"""What ranks have to agree on before a module runs on them: program, weights, and the seed of its random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from convgen.errors import InputError
from convgen.spec.exported_state import as_pairs
from convgen.spec.text import shown

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("same", "rank 0")
PIECE = 1 << 24  # bytes of weights that travel at a time


class Start(NamedTuple):
    """What a rank begins with, as a message of fixed size that ranks compare.

    Args:
        form: hash of the program, and of names, shapes and dtypes.
        values: hash of the weights.
        weights: place of its weights= in WEIGHTS.
        given: whether the caller gave the seed.
    """

    form: bytes
    values: bytes
    weights: int
    given: bool
    seed: int

    @property
    def raw(self) -> bytes:
        return self.form + self.values + bytes([self.weights, self.given]) + self.seed.to_bytes(8, "little")

    @staticmethod
    def of(raw: bytes) -> Start:
        return Start(raw[:32], raw[32:64], raw[64], bool(raw[65]), int.from_bytes(raw[66:74], "little"))


def check_weights(weights: str, seed: int | None) -> None:
    """Raises InputError: there is no such weights=, or no such seed."""
    if weights not in WEIGHTS:
        raise InputError(f"weights can't be {shown(weights)}", hint=" or ".join(map(repr, WEIGHTS)))
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise InputError(f"seed can't be {shown(seed)}", hint="an int from 0 to 2**63 - 1, or None")


@dataclass(frozen=True)
class Met:
    """What ranks begin with, once they have agreed.

    Args:
        differ: whether their weights differ, so that the first rank's are taken.
        seed: the seed of the program's random numbers.
    """

    device: str
    place: Any
    group: Any
    differ: bool
    seed: int

    def of_first(self, value: Tensor) -> Tensor:
        """The first rank's tensor, on all ranks; this rank's own, where all have the same."""
        import torch

        if not self.differ:
            return value
        mine, found = _bytes_of(value), torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
        whole, first = _bytes_of(found), self.place.me == 0
        for start in range(0, len(mine), PIECE):
            part = mine[start : start + PIECE].to(self.device)
            splits = [len(part)] + [0] * (len(self.group.ranks) - 1)
            part = part if first else part[:0]
            whole[start : start + splits[0]] = self.place.transport.all_gather(part, splits, self.group).cpu()
        return found

    def fill(self, model: Any, values: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
        """Give a new model its blocks of the weights, and the seed.

        Args:
            values: this rank's weights.
            known: weights that are the first rank's already.
        """
        import torch

        with torch.no_grad():
            for name in model._known:
                if name in known:
                    model._fill(name, known[name])
                elif model._buffered.get(name) == "seed":
                    model._fill(name, torch.tensor([self.seed, 0]))
                else:
                    model._fill(name, self.of_first(as_pairs(values[name].detach())))


def meet(package: Any, mesh: Any, graph: str, values: Mapping[str, Tensor], weights: str, seed: int | None) -> Met:
    """Compare what the ranks begin with, by one message.

    Args:
        graph: its text.
        values: the module's state, and constants, by name.
        weights: whose weights are taken: "same": every rank's own, which have to be equal; "rank 0": those of the
            mesh's first rank.
        seed: by default drawn from torch's generator, on the mesh's first rank, where the program draws.
    Raises:
        InputError: ranks differ.
    """
    import torch

    net = package.NET
    place, group = net.place(mesh), net.here(mesh).group(tuple(net.grid))
    draws = any(how == "seed" for *_, how, _ in net.state.values())
    drawn = int(torch.randint((1 << 63) - 1, (), device="cpu")) if draws and seed is None else seed or 0
    if len(place.ranks) == 1:
        return Met(net.device, place, group, False, drawn)
    said = [graph, package.SCHEDULE, *((name, str(t.dtype), tuple(t.shape)) for name, t in values.items())]
    form = hashlib.sha256(repr(said).encode()).digest()
    mine = Start(form, _digest(values), WEIGHTS.index(weights), seed is not None, drawn)
    raw = torch.frombuffer(bytearray(mine.raw), dtype=torch.uint8).to(net.device)
    found = place.transport.all_gather(raw, [len(raw)] * len(group.ranks), group).view(len(group.ranks), -1)
    starts = [Start.of(bytes(one.tolist())) for one in found.cpu()]
    _check(package.NAME, group.ranks, starts)
    return Met(net.device, place, group, len({one.values for one in starts}) > 1, starts[0].seed)


def _digest(values: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(name.encode() + _bytes_of(value.cpu()).numpy().tobytes())
    return digest.digest()


def _bytes_of(value: Tensor) -> Tensor:
    import torch

    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _check(name: str, ranks: Iterable[int], starts: list[Start]) -> None:
    """Raises InputError, on all ranks alike: ranks differ in what has to be equal."""

    def others(what: list[Any]) -> list[int]:
        return [rank for rank, one in zip(ranks, what, strict=True) if one != what[0]]

    first = next(iter(ranks))
    if found := others([one.form for one in starts]):
        fact = (
            f"{name}: the modules of ranks {found} have other programs, parameters or shapes than that of rank {first}"
        )
        raise InputError(fact, hint="the same module, example inputs and arguments on all ranks")
    if found := others([one.weights for one in starts]):
        fact = f"{name}: weights= is {WEIGHTS[starts[0].weights]!r} on rank {first}, another on ranks {found}"
        raise InputError(fact, hint="the same on all ranks")
    seeds = [one.seed if one.given else None for one in starts]
    if found := others(seeds):
        theirs = ", ".join(f"{seed} on rank {rank}" for rank, seed in zip(ranks, seeds, strict=True) if rank in found)
        raise InputError(
            f"{name}: seed= is {seeds[0]} on rank {first}, {theirs}", hint="the same on all ranks, or none"
        )
    found = others([one.values for one in starts])
    if found and not starts[0].weights:
        fact = f"{name}: the modules of ranks {found} have other weights than that of rank {first}"
        hint = "torch.manual_seed alike on all ranks before the module is made, or one state dict"
        raise InputError(fact, hint=f"weights='rank 0', which takes that rank's; or {hint}")
