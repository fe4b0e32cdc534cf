"""Augmentation of blocks: what is drawn is a function of (seed, epoch, sample), so that ranks get the blocks of what
one process would make of the whole sample.

    Blocks({"image": images, "target": masks}, net, mesh,
           augment=[Crop((-2, -1)), Flip(-1), Rotate((-2, -1)), Noise("image", std=0.1)])

Flips, rotations and crops say which region of the file a region of theirs is, and only that is read. Dimensions count
from the last one, -1, -2, ...: an image's and its labels' have those in common.

Source: Philox's counters (operations/dropout.py) for all that is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from convgen.errors import InputError
from convgen.operations.dropout import WORD, philox
from convgen.operations.dropout import Noise as Numbers
from convgen.operations.row import At as Place
from convgen.operations.row import numbered

Region = tuple[slice, ...]
Extents = tuple[int, ...]
Dims = int | tuple[int, ...]
Names = str | tuple[str, ...]
Range = tuple[float, float]
OF_NAMES = 1 << 16  # from here on the draws that each name has its own of


@dataclass(frozen=True)
class Draw:
    """What an augmentation draws for a sample.

    Args:
        number: of the augmentation, in the list of them.
    """

    seed: int
    epoch: int
    sample: int
    number: int

    def words(self, which: int) -> tuple[int, int, int, int]:
        """Words of 32 bits."""
        counter = (self.sample & WORD, self.epoch & WORD, self.number, which)
        return philox(counter, (self.seed & WORD, self.seed >> 32 & WORD))

    def uniform(self, which: int, within: Range = (0.0, 1.0)) -> float:
        """Of [lo, hi)."""
        lo, hi = within
        return lo + (hi - lo) * (self.words(which)[0] / 2**32)

    def chosen(self, which: int, count: int) -> int:
        """One of so many, from 0."""
        return self.words(which)[0] * count >> 32


class At(NamedTuple):
    """A sample that an augmentation comes upon.

    Attributes:
        extents: before it.
        wanted: the network's.
        name: of the value.
    """

    draw: Draw
    extents: Extents
    wanted: Extents
    name: str


class Augmentation:
    """A step of what is done to samples, of the values of `names`; of all, where there are none.

    Extents and regions are a sample's, without the dimension of samples. Its `repr` says all of it: ranks compare it.
    """

    names: Names

    def is_of(self, name: str) -> bool:
        return not self.names or name in names_of(self.names)

    def after(self, extents: Extents, wanted: Extents) -> Extents:
        """The extents of what it makes.

        Raises:
            InputError: it can't be done to such a sample.
        """
        return extents

    def before(self, region: Region, at: At) -> Region:
        """The region of what comes in that a region of what it makes is made of."""
        return region

    def made(self, block: Tensor, region: Region, at: At) -> Tensor:
        """What lies at a region of what it makes, of the block that lies at `before` of it; the first dimension is of
        samples."""
        return block

    def common(self) -> tuple[int, ...]:
        """Dimensions of which all values must have the same extents."""
        return ()


def names_of(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _dims_of(dims: Dims) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _check_dims(dims: Dims, extents: Extents) -> None:
    for d in _dims_of(dims):
        if not -len(extents) <= d < 0 or _dims_of(dims).count(d) > 1:
            fact = f"dimension {d} of a sample of shape {list(extents)}, whose dimensions are -1 to {-len(extents)}"
            raise InputError(fact, hint="each once, from the last one; that of samples is none of them")


def _check_p(p: float) -> None:
    if not 0 <= p <= 1:
        raise InputError(f"p={p} is no probability", hint="from 0 to 1")


def _turned(part: slice, extent: int) -> slice:
    return slice(extent - part.stop, extent - part.start)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Each of some dimensions in reverse, with probability p."""

    dims: Dims
    p: float = 0.5
    names: Names = ()

    def __post_init__(self) -> None:
        _check_p(self.p)

    def after(self, extents: Extents, wanted: Extents) -> Extents:
        _check_dims(self.dims, extents)
        return extents

    def _drawn(self, draw: Draw) -> list[int]:
        return [d for k, d in enumerate(_dims_of(self.dims)) if draw.uniform(k) < self.p]

    def before(self, region: Region, at: At) -> Region:
        found = list(region)
        for d in self._drawn(at.draw):
            found[d] = _turned(found[d], at.extents[d])
        return tuple(found)

    def made(self, block: Tensor, region: Region, at: At) -> Tensor:
        return block.flip(self._drawn(at.draw))


@dataclass(frozen=True)
class Rotate(Augmentation):
    """By 0, 90, 180 or 270 degrees in the plane of two dimensions of equal extents, as torch.rot90."""

    dims: tuple[int, int] = (-2, -1)
    names: Names = ()

    def after(self, extents: Extents, wanted: Extents) -> Extents:
        _check_dims(self.dims, extents)
        a, b = self.dims
        if a == b or extents[a] != extents[b]:
            fact = f"a rotation of dimensions {a} and {b} of a sample of shape {list(extents)}"
            raise InputError(fact, hint="two of equal extents; a crop before it may make them so")
        return extents

    def before(self, region: Region, at: At) -> Region:
        a, b = self.dims
        found, n, turns = list(region), at.extents[a], at.draw.chosen(0, 4)
        one, two = region[a], region[b]
        if turns == 1:
            one, two = two, _turned(one, n)
        elif turns == 2:
            one, two = _turned(one, n), _turned(two, n)
        elif turns == 3:
            one, two = _turned(two, n), one
        found[a], found[b] = one, two
        return tuple(found)

    def made(self, block: Tensor, region: Region, at: At) -> Tensor:
        return torch.rot90(block, at.draw.chosen(0, 4), self.dims)


@dataclass(frozen=True)
class Crop(Augmentation):
    """The network's extents of some dimensions, out of larger samples, of extents of their own.

    Attributes:
        center: from the middle; else from anywhere, alike for all names, which have equal extents there.
    """

    dims: Dims
    center: bool = False
    names: Names = ()

    def after(self, extents: Extents, wanted: Extents) -> Extents:
        _check_dims(self.dims, extents)
        found = list(extents)
        for d in _dims_of(self.dims):
            if wanted[d] > extents[d]:
                fact = f"a crop of {wanted[d]} along dimension {d} of a sample of shape {list(extents)}"
                raise InputError(fact, hint="files at least as large as the network's inputs")
            found[d] = wanted[d]
        return tuple(found)

    def before(self, region: Region, at: At) -> Region:
        found = list(region)
        for k, d in enumerate(_dims_of(self.dims)):
            over = at.extents[d] - at.wanted[d]
            by = over // 2 if self.center else at.draw.chosen(k, over + 1)
            found[d] = slice(found[d].start + by, found[d].stop + by)
        return tuple(found)

    def common(self) -> tuple[int, ...]:
        return _dims_of(self.dims)


class _OfNumbers(Augmentation):
    """Changes floats where they are."""

    p: float

    def made(self, block: Tensor, region: Region, at: At) -> Tensor:
        if not block.is_floating_point():
            fact = f"{type(self).__name__} changes floats, and {at.name} is of {block.dtype}"
            raise InputError(fact, hint="names= without it")
        return self.changed(block, region, at) if block.numel() and at.draw.uniform(0) < self.p else block

    def changed(self, block: Tensor, region: Region, at: At) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Intensity(_OfNumbers):
    """(x - about) * scale + about + shift, then x ** gamma of `within`, beyond which x is cut; each drawn uniformly.

    Attributes:
        gamma: None leaves x as it is; its logarithm is drawn.
        p: how likely it is done to a sample.
    """

    names: Names
    scale: Range = (1.0, 1.0)
    shift: Range = (0.0, 0.0)
    gamma: Range | None = None
    about: float = 0.0
    within: Range = (0.0, 1.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        _check_p(self.p)
        for lo, hi in (self.scale, self.shift, self.gamma or (1.0, 1.0), self.within):
            if not lo <= hi:
                raise InputError(f"no number is from {lo} to {hi}")
        if self.gamma is not None and not (self.gamma[0] > 0 and self.within[0] < self.within[1]):
            raise InputError(f"gamma={self.gamma} of {self.within}", hint="positive, of a range")

    def changed(self, block: Tensor, region: Region, at: At) -> Tensor:
        y = (block - self.about) * at.draw.uniform(1, self.scale) + (self.about + at.draw.uniform(2, self.shift))
        if self.gamma is None:
            return y
        (lo, hi), (least, most) = self.within, self.gamma
        gamma = least * (most / least) ** at.draw.uniform(3)
        y = ((y - lo) / (hi - lo)).clamp(0, 1)
        # Not `y ** gamma`, which ATen rounds otherwise at a block's end than within.
        return torch.exp(gamma * torch.log(y)) * (hi - lo) + lo


@dataclass(frozen=True)
class Noise(_OfNumbers):
    """Normal numbers of this standard deviation are added, a function of each element's place in the whole sample.

    Attributes:
        p: how likely it is done to a sample.
    """

    names: Names
    std: float
    p: float = 1.0

    def __post_init__(self) -> None:
        _check_p(self.p)

    def changed(self, block: Tensor, region: Region, at: At) -> Tensor:
        low, high, *_ = at.draw.words(OF_NAMES + names_of(self.names).index(at.name))
        blocks = {i: (s.start, s.stop) for i, s in zip(numbered(len(region)), region, strict=True)}
        (noise,) = Numbers(at.extents, "normal").local(
            0, Place(blocks, (), ()), torch.tensor([low | high >> 1 << 32, 0])
        )
        return block + self.std * noise.to(block.dtype)


@dataclass(frozen=True)
class Augmented:
    """What is done to samples of several values, in this order."""

    steps: tuple[Augmentation, ...]

    def check(self, shapes: Mapping[str, Extents], wanted: Mapping[str, Extents]) -> None:
        """Refuse a sample.

        Args:
            shapes: its extents, by name of the value.
            wanted: the network's.

        Raises:
            InputError: it becomes no sample of the network's, or values have other extents where they are cropped.
        """
        now = dict(shapes)
        for step in self.steps:
            those = [name for name in now if step.is_of(name)]
            found = {name: step.after(now[name], wanted[name]) for name in those}
            for d in step.common():
                if len({now[name][d] for name in those}) > 1:
                    said = ", ".join(f"{name} has {now[name][d]}" for name in those)
                    raise InputError(f"a crop along dimension {d}: {said}", hint="equal extents, or names=")
            now |= found
        for name, shape in now.items():
            if shape != wanted[name]:
                became = f", which becomes {list(shape)}" * (shape != shapes[name])
                fact = f"a sample of {name} has shape {list(shapes[name])}{became}"
                raise InputError(fact, hint=f"{list(wanted[name])}, the network's")

    def block(
        self, draw: Draw, name: str, extents: Extents, wanted: Extents, region: Region, read: Callable[[Region], Tensor]
    ) -> Tensor:
        """What lies at a region of what becomes of a sample.

        Args:
            draw: of which the number is each step's.
            extents: of the sample.
            read: a region of it, with a dimension of samples before its own.
        """
        stages: list[tuple[Augmentation, At]] = []
        for number, step in enumerate(self.steps):
            if step.is_of(name):
                stages.append((step, At(replace(draw, number=number), extents, wanted, name)))
                extents = step.after(extents, wanted)
        regions = [region]
        for step, at in reversed(stages):
            regions.append(step.before(regions[-1], at))
        made = read(regions.pop())
        for step, at in stages:
            made = step.made(made, regions.pop(), at)
        return made.contiguous()
