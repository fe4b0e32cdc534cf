"""Which samples a batch has: the same on all ranks, in one shuffled order from one seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from convgen.errors import InputError


class Samples(tuple[int, ...]):
    """The samples of a batch, and what is drawn of: they travel together to those who read, whenever these began."""

    seed: int = 0
    epoch: int = 0


class Batches:
    """Numbers of samples, a tuple a batch of the whole grid.

    Args:
        count: of samples there are; size: of a batch.
        shuffle: by a generator of (seed, epoch), as one process would.
        drop_last: leave out a last batch that is smaller.

    Raises:
        InputError: a size that gives no batch.
    """

    def __init__(self, count: int, size: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = True) -> None:
        if size < 1 or (drop_last and size > count):
            hint = f"a size from 1 to {count}, or drop_last=False"
            raise InputError(f"batches of {size} samples, of which there are {count}", hint=hint)
        self.count, self.size, self.shuffle, self.seed, self.drop_last = count, size, shuffle, seed, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        order = list(range(self.count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = [int(k) for k in torch.randperm(self.count, generator=generator)]
        epoch = self.epoch
        for k in range(len(self)):
            samples = Samples(order[k * self.size : (k + 1) * self.size])
            samples.seed, samples.epoch = self.seed, epoch
            yield samples
