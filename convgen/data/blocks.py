"""Samples of arrays as this rank's blocks, read by region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from convgen.data.augment import Augmentation, Augmented, Draw, names_of
from convgen.data.batches import Batches, whole_number
from convgen.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class Batch(dict[str, "Tensor"]):
    """This rank's blocks of a batch, by name.

    Attributes:
        samples: their numbers, of the whole batch.
        bytes_read: of what this rank has read of arrays.
    """

    samples: tuple[int, ...] = ()
    bytes_read: int = 0


class Blocks(Dataset[Batch]):
    """A dataset whose items are batches: `blocks[3, 1, 2]` reads this rank's blocks of three samples.

    Args:
        source: by name of an input or an output of the network (its target), its samples: an array whose first
            dimension is of samples, or a list of arrays, one a sample.
        net: the network's package, or several, as a criterion's beside the network's: a name is the first one's that
            knows it.
        halo: inputs that are read with the halo that `model(..., halo=...)` takes.
        augment: what is done to samples, in this order (augment.py); of `blocks[...]` itself it is that of epoch 0, of
            seed 0.

    Attributes:
        bytes_read: by this rank, of batches that `loader` has given.

    Raises:
        InputError: a name that the network hasn't, arrays of other shapes, or of other numbers of samples; where one
            rank raises, or can't open a file, all do: every rank makes its own.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        net: Any,
        mesh: DeviceMesh,
        *,
        halo: Sequence[str] = (),
        augment: Sequence[Augmentation] = (),
    ) -> None:
        nets: list[Any] = [*net] if isinstance(net, Sequence) else [net]
        self.net, self.mesh = nets[0], mesh
        self.source, self._nets = dict[str, _Samples](), dict[str, Any]()
        self.halo = frozenset([halo] if isinstance(halo, str) else halo)
        self.bytes_read = 0
        self.augmented = Augmented(())
        self.count, fault = 0, None
        try:
            _refuse_others(source, augment)
            self.augmented = Augmented(tuple(augment))
            self.source = {name: _Samples(name, of) for name, of in source.items()}
            self._nets = {name: next((one for one in nets if name in one.NET.values), nets[0]) for name in source}
            self.count = self._counted()
        except Exception as error:  # of this rank's files, perhaps
            fault = error
        self.net.NET.agree("data", mesh, {"samples": self.count, "arrays": ", ".join(self.source)}, fault)

    def _counted(self) -> int:
        """How many samples there are, of arrays that fit the network and each other."""
        counts = {name: self._count(name, of) for name, of in self.source.items()}
        if len({*counts.values()}) != 1:
            said = ", ".join(f"{name} has {n}" for name, n in counts.items()) or "there is none"
            raise InputError(f"arrays differ in the number of samples: {said}", hint="as many samples of each")
        unknown = self.halo - self.source.keys()
        if unknown:
            raise InputError(f"halo= names {', '.join(sorted(unknown))}, of which there is no array")
        for step in self.augmented.steps:
            if missing := [name for name in names_of(step.names) if name not in self.source]:
                raise InputError(f"{step} names {', '.join(missing)}, of which there is no array")
        self.wanted: dict[str, tuple[int, ...]] = {
            name: tuple(self._nets[name].NET.values[name][0])[1:] for name in self.source
        }
        count = next(iter(counts.values()))
        several = any(of.each is not None for of in self.source.values())
        every = (tuple(of.shape(k) for of in self.source.values()) for k in range(count if several else 1))
        for shapes in dict.fromkeys(every):
            self.augmented.check(dict(zip(self.source, shapes, strict=True)), self.wanted)
        return count

    def _count(self, name: str, of: _Samples) -> int:
        """How many samples there are of a value that has samples."""
        net = self._nets[name]
        known = net.NET.values
        if name not in known:
            raise InputError(f"{net.NAME} has no value {name!r}", hint=f"one of {', '.join(known)}")
        pattern = list(known[name][0])
        if name in net.NET.state or not pattern or pattern[0] not in ("N", net.NET.batch):
            raise InputError(f"{name} has shape {pattern}: its first dimension is not that of samples")
        if of.each is None and not tuple(of.whole.shape):
            raise InputError(f"{name}: an array without dimensions has no samples")
        return of.count

    def __len__(self) -> int:
        """How many samples there are."""
        return self.count

    def __getitem__(self, samples: int | Sequence[int]) -> Batch:
        batch, drawn = Batch(), (getattr(samples, "seed", 0), getattr(samples, "epoch", 0))
        several: Any = samples if hasattr(samples, "__len__") and getattr(samples, "shape", None) != () else (samples,)
        batch.samples = tuple([whole_number("a sample's number", k) for k in several])
        if other := [k for k in batch.samples if not 0 <= k < self.count]:
            raise IndexError(f"there is no sample {other[0]}: there are {self.count}, from 0 on")
        for name, of in self.source.items():
            net = self._nets[name]
            if (fixed := net.NET.values[name][0][0]) != "N" and fixed != len(batch.samples):
                fact = f"{net.NAME} is of {fixed} samples, and a batch has {len(batch.samples)}"
                raise InputError(fact, hint=f"loader({fixed}, drop_last=True)")
            own, *rest = net.region(name, self.mesh, batch=len(batch.samples), halo=name in self.halo)
            mine = batch.samples[own.start : own.stop]
            if self.augmented.steps and mine:
                parts = [self._augmented(name, Draw(*drawn, k, 0), rest) for k in mine]
            else:
                pieces = [*of.pieces(mine)]
                parts = [net.NET.read(array, (there, *rest), name) for array, there in pieces]
            batch[name] = torch.cat(parts)
            batch.bytes_read += batch[name].numel() * of.element_bytes
        return batch

    def _augmented(self, name: str, draw: Draw, region: Sequence[slice]) -> Tensor:
        """What lies at a region of what becomes of a sample; only what that is made of is read."""
        of, net = self.source[name], self._nets[name].NET
        ((array, there),) = of.pieces([draw.sample])
        shape, wanted = of.shape(draw.sample), self.wanted[name]
        return self.augmented.block(
            draw, name, shape, wanted, tuple(region), lambda where: net.read(array, (there, *where), name)
        )

    def loader(
        self,
        size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        workers: int = 0,
        **how: Any,
    ) -> Loader:
        """Batches of so many samples of the whole grid, as blocks on the network's device.

        Args:
            workers: processes that read, forked.
            how: other arguments of torch's DataLoader, as prefetch_factor or pin_memory.
        """
        return Loader(self, Batches(self.count, size, shuffle=shuffle, seed=seed, drop_last=drop_last), workers, how)


class Loader:
    """Batches, of which each begins with a message: where a rank can't read, or has another order, all ranks raise.

    `state_dict` says which batch is next, and `load_state_dict` goes on there, on any grid, as a checkpoint has it.
    """

    def __init__(self, blocks: Blocks, batches: Batches, workers: int, how: Mapping[str, Any]) -> None:
        self.blocks, self.batches, self._goes_on = blocks, batches, False
        fork = {"multiprocessing_context": "fork"} if workers else {}
        self._torchs: DataLoader[Batch] = DataLoader(
            blocks, batch_size=None, sampler=batches, num_workers=workers, **fork, **how
        )

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """From which, with the seed, the next order comes."""
        self.batches.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """That of the batches that come."""
        return self.batches.epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch and how many batches of it are done, those that are read ahead not among them."""
        return self.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin behind the batches that are done.

        Raises:
            InputError: of batches in another order, or of another size.
        """
        self.batches.load_state_dict(state)
        self._goes_on = True

    def __iter__(self) -> Iterator[Batch]:
        blocks, net = self.blocks, self.blocks.net.NET
        self.batches.done *= self._goes_on
        self._goes_on = False
        order, found = list(self.batches), iter(self._torchs)
        facts = {"epoch": self.batches.epoch, "seed": self.batches.seed, "augmentations": blocks.augmented}
        for samples in order:
            batch, fault = Batch(), None
            try:
                batch = next(found)
            except Exception as error:  # of this rank's files, perhaps
                fault = error
            net.agree("a batch of data", blocks.mesh, {"samples": samples, **facts}, fault)
            blocks.bytes_read += batch.bytes_read
            for name, t in batch.items():
                batch[name] = t.to(net.device, non_blocking=True)
            self.batches.done += 1
            yield batch


def _refuse_others(source: Any, augment: Any) -> None:
    """Raises InputError: the source is no mapping, or augmentations are none."""
    if not isinstance(source, Mapping):
        kind = type(cast("object", source)).__name__
        raise InputError(f"the source is a {kind}", hint="{name: array}, by the network's values")
    steps: list[Any] = [*augment] if isinstance(augment, (list, tuple)) else [None]
    if not all(isinstance(one, Augmentation) for one in steps):
        raise InputError(f"augment={augment!r}", hint="a list of augmentations, as [Flip(-1)]")


class _Samples:
    """The samples of a value: those of one array, or an array each. Raises InputError: something is no array."""

    def __init__(self, name: str, of: Any) -> None:
        self.each: list[Any] | None = [*cast("Sequence[Any]", of)] if isinstance(of, (list, tuple)) else None
        self.whole: Any = of
        arrays: list[Any] = [of] if self.each is None else self.each
        for one in arrays:
            if not hasattr(one, "shape"):
                raise InputError(f"{name}: a {type(one).__name__} is no array", hint="what has a shape and slices")

    @property
    def count(self) -> int:
        return int(self.whole.shape[0]) if self.each is None else len(self.each)

    @property
    def element_bytes(self) -> int:
        first: Any = self.whole if self.each is None else next(iter(self.each), None)
        return int(getattr(getattr(first, "dtype", None), "itemsize", 0))

    def shape(self, sample: int) -> tuple[int, ...]:
        """Of a sample."""
        return tuple(self.whole.shape)[1:] if self.each is None else tuple(self.each[sample].shape)

    def pieces(self, samples: Sequence[int]) -> Iterator[tuple[Any, slice]]:
        """Arrays with a dimension of samples, and which of them: such as lie side by side at once. At least one."""
        if self.each is not None:
            for k in samples:
                yield _OneSample(self.each[k]), slice(0, 1)
        else:
            ends = [k for k, (a, b) in enumerate(pairwise(samples), 1) if b != a + 1]
            for start, stop in pairwise([0, *ends, len(samples)] if samples else []):
                yield self.whole, slice(samples[start], samples[stop - 1] + 1)
        if not samples:
            yield self.whole if self.each is None else _OneSample(self.each[0]), slice(0, 0)


class _OneSample:
    """An array of one sample with a dimension of samples before its own."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, (1, *array.shape), array.dtype

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        return self.array[where[1:]][None]
