"""What ranks have to agree on before a module runs on them: the program, its weights, and the seed of what it draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from convgen.errors import InputError
from convgen.spec.exported_state import as_pairs
from convgen.spec.text import shown

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("same", "rank 0")
PIECE = 1 << 24  # bytes of weights that are on their way at a time


class Start(NamedTuple):
    """What a rank begins with, and is compared: a message of fixed size.

    Args:
        form: hash of the program, and of names, shapes and dtypes.
        values: hash of weights.
        weights: place in WEIGHTS.
        given: whether the seed was.
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
    """Raises InputError: no such weights=, no such seed."""
    if weights not in WEIGHTS:
        raise InputError(f"weights can't be {shown(weights)}", hint=" or ".join(map(repr, WEIGHTS)))
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise InputError(f"seed can't be {shown(seed)}", hint="an int from 0 to 2**63 - 1, or None")


def set_up(model: Any, package: Any, mesh: Any, values: Mapping[str, Tensor], weights: str, seed: int | None) -> None:
    """Give a new model its weights and its seed, the same on all ranks.

    Args:
        values: the module's state, and constants, by canonical name.
        weights: whose: "same": every rank's own, which have to be alike; "rank 0": of the mesh's first rank.
        seed: by default drawn from torch's generator, on the mesh's first rank.
    Raises:
        InputError: ranks differ.
    """
    import torch

    net = package.NET
    place, group = net.place(mesh), net.here(mesh).group(tuple(net.grid))
    draws = [name for name, (_, _, how, _) in net.state.items() if how == "seed"]
    drawn = int(torch.randint((1 << 63) - 1, (), device="cpu")) if draws and seed is None else seed or 0
    starts = [Start(b"", b"", WEIGHTS.index(weights), seed is not None, drawn)]
    if len(place.ranks) > 1:
        mine = starts[0]._replace(form=_form(package, values), values=_digest(values))
        raw = torch.frombuffer(bytearray(mine.raw), dtype=torch.uint8).to(net.device)
        found = place.transport.all_gather(raw, [len(raw)] * len(group.ranks), group).view(len(group.ranks), -1)
        starts = [Start.of(bytes(one.tolist())) for one in found.cpu()]
        _check(package.NAME, group.ranks, starts)
    values = {name: as_pairs(value.detach()) for name, value in values.items()}
    sent: dict[str, Tensor] = {}
    with torch.no_grad():
        differ = len({one.values for one in starts}) > 1
        for name in model._known:
            if name in values:
                value = _from_first(values[name], net.device, place, group) if differ else values[name]
                model._fill(name, value)
                if differ and name in model._constants:
                    sent[name] = value
        for name in draws:
            model._fill(name, torch.tensor([starts[0].seed, 0]))
    if sent:
        model._constants = {**model._constants, **sent}  # what reset_parameters fills in


def _form(package: Any, values: Mapping[str, Tensor]) -> bytes:
    said = [(name, str(t.dtype), tuple(t.shape)) for name, t in values.items()]
    return hashlib.sha256(package.NET.identity + repr(said).encode()).digest()


def _digest(values: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(name.encode() + _bytes_of(value.cpu()).numpy().tobytes())
    return digest.digest()


def _bytes_of(value: Tensor) -> Tensor:
    import torch

    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def _check(name: str, ranks: Iterable[int], starts: list[Start]) -> None:
    """Raises InputError: on all ranks alike, where they differ in what can't be."""

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
        hint = (
            'weights="rank 0" takes that rank\'s; or torch.manual_seed alike on all ranks before the module is made, '
        )
        raise InputError(fact, hint=f"{hint}or one state dict")


def _from_first(value: Tensor, device: str, place: Any, group: Any) -> Tensor:
    """The first rank's tensor, on all ranks."""
    import torch

    mine, found = _bytes_of(value), torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
    whole, first = _bytes_of(found), place.me == 0
    for start, stop in _pieces(len(mine)):
        part = mine[start:stop].to(device) if first else torch.empty(0, dtype=torch.uint8, device=device)
        splits = [stop - start] + [0] * (len(group.ranks) - 1)
        whole[start:stop] = place.transport.all_gather(part, splits, group).cpu()
    return found


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE, size)) for start in range(0, size, PIECE))
