"""Which samples a batch has: the same on all ranks, in one shuffled order from one seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any

import torch

from convgen.errors import InputError


class Samples(tuple[int, ...]):
    """The samples of a batch, and what is drawn of: they travel together to those who read, whenever these began."""

    seed: int = 0
    epoch: int = 0

    @classmethod
    def drawn(cls, samples: Iterable[int], seed: int, epoch: int) -> Samples:
        found = cls(samples)
        found.seed, found.epoch = seed, epoch
        return found


SEEDS = 2**42  # torch's generators take 64 bits, and the order is of a seed times a million, and an epoch


def whole_number(what: str, number: Any, below: int = 2**63) -> int:
    """A whole number as Python's int, whichever type it has. Raises InputError: it is none, or it is too large."""
    try:
        found = index(number)
    except TypeError:
        raise InputError(f"{what} is a whole number, got {number!r}") from None
    if not -below < found < below:
        raise InputError(f"{what} is {found}", hint=f"less than {below}")
    return found


class Batches:
    """Numbers of samples, a tuple a batch of the whole grid.

    Args:
        count: of samples there are; size: of a batch.
        shuffle: by a generator of (seed, epoch), as one process would.
        drop_last: leave out a last batch that is smaller.

    Attributes:
        epoch: from which, with the seed, the order comes.
        done: how many batches of the epoch have been taken; a `Loader` counts them.

    Raises:
        InputError: a size that gives no batch; or what is no whole number, and should be.
    """

    def __init__(self, count: int, size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = True) -> None:
        count, size = whole_number("count=", count), whole_number("the size of a batch", size)
        seed = whole_number("seed=", seed, SEEDS)
        if size < 1 or (drop_last and size > count):
            hint = f"a size from 1 to {count}, or drop_last=False"
            raise InputError(f"batches of {size} samples, of which there are {count}", hint=hint)
        self.count, self.size, self.shuffle, self.seed, self.drop_last = count, size, shuffle, seed, drop_last
        self.epoch = self.done = 0

    def __len__(self) -> int:
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Those of the epoch that are not done."""
        order = list(range(self.count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = [int(k) for k in torch.randperm(self.count, generator=generator)]
        starts, epoch = range(self.done * self.size, len(self) * self.size, self.size), self.epoch
        return (Samples.drawn(order[k : k + self.size], self.seed, epoch) for k in starts)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch; the one that is begun goes on."""
        epoch = whole_number("an epoch", epoch)
        self.done *= epoch == self.epoch
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many batches of it are done, and what makes the order."""
        return {"epoch": self.epoch, "done": self.done, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that are done, on any grid.

        Raises:
            InputError: batches in another order, or of another size; or no state of batches.
        """
        if missing := [what for what in ("epoch", "done", *self._order) if what not in state]:
            raise InputError(f"a state of batches without {missing[0]}", hint="what state_dict() of a loader gave")
        for what, own in self._order.items():
            if state[what] != own:
                raise InputError(f"a state of batches with {what}={state[what]}, and these have {what}={own}")
        epoch, done = whole_number("an epoch", state["epoch"]), whole_number("done=", state["done"])
        if not 0 <= done <= len(self):
            raise InputError(f"a state of batches of which {done} are done, and there are {len(self)}")
        self.epoch, self.done = epoch, done

    @property
    def _order(self) -> dict[str, Any]:
        return {what: getattr(self, what) for what in ("count", "size", "shuffle", "seed", "drop_last")}
