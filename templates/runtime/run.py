# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""A network's rows in one call of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from convgen.operations.moments import batch_normed
from convgen.operations.part_norm import PartMoments

from .buckets import Buckets
from .checkpoints import kept
from .mesh import Place
from .norms import Alone, Joined, Pair
from .rows import Row

if TYPE_CHECKING:
    from .network import NetworkModule


class BatchNorm(NamedTuple):
    """Rows of a batch norm: moments, coefficients of them, and what is made with these; statistics are of the whole
    batch, or of a rank's block (PartMoments), whose running ones the row `statistics` averages."""

    moments: Row
    coefficients: Row
    centred: Row
    momentum: float
    eps: float
    statistics: Row | None = None


class Called(NamedTuple):
    """A call of a network: this rank's plain blocks of parameters and buffers, and of the seed as it was; and buckets
    for gradients, where there are some. `first`: not one that backward repeats, so that buffers are renewed. `apart`:
    batch norms in the other mode than the network."""

    module: NetworkModule
    place: Place
    batch: int
    blocks: dict[str, Tensor]
    seed: Tensor | None
    buckets: Buckets | None
    training: bool
    apart: frozenset[str] = frozenset()
    first: bool = True


class Run:
    """A network's parameters and rows for one call; `within` a module of the source.

    Attributes:
        prefix: of names of parameters; `start` of names of values.
    """

    def __init__(self, of: Called, prefix: str = "", start: str = "") -> None:
        self.of, self.prefix, self.start = of, prefix, start
        self.net, self.place, self.batch = of.module._net, of.place, of.batch
        self.training, self.seed = of.training, of.seed
        self.name, self.grid, self.sums = self.net.name, self.net.grid, self.net.sums
        self.dtype, self.wide, self.device = self.net.dtype, self.net.wide, self.net.device

    def within(self, prefix: str, start: str) -> Run:
        return Run(self.of, prefix, start)

    @property
    def whole(self) -> Run:
        """The whole network, for parameters of other modules."""
        return self.within("", self.start)

    def __getitem__(self, name: str) -> Tensor:
        """This rank's plain block of a parameter or buffer."""
        return self.of.blocks[f"{self.prefix}{name}"]

    def trains(self, name: str) -> bool:
        """Whether a batch norm computes as in training: a module's name within this one; "" is this one."""
        return self.training != (f"{self.prefix}{name}".removesuffix(".") in self.of.apart)

    def step(self, label: str) -> str:
        """What a row's steps are called in the program: within the module, or of their own name; "" is the module."""
        if label.startswith("/"):
            return label[1:]
        return f"{self.start}{label}" if label else self.start.removesuffix("_")

    def __call__(self, row: Row, label: str, *operands: Tensor) -> Any:
        """What a row makes."""
        made = row.stand(self, self.step(label)).run(self.place, operands, self.of.buckets)
        (first, *others) = made
        return made if others else first

    def checkpoint(self, function: Any, *operands: Tensor) -> Any:
        """torch.utils.checkpoint of a block's function, for a network.py edited by hand: `run.checkpoint(layer1, x)` in
        place of `layer1(run, x)`; all ranks compute again at the same place, those too that keep nothing of it."""
        return _kept_less(lambda: self, function, operands, preserve_rng_state=True)

    def again(self, function: Any, *operands: Tensor) -> Any:
        """A block of which only what it takes is kept: backward computes it again, and leaves buffers as they are."""
        if not torch.is_grad_enabled():
            return function(self, *operands)

        def run() -> Run:
            first = torch._C._current_graph_task_id() == -1
            return Run(self.of._replace(first=first), self.prefix, self.start)

        return _kept_less(run, function, operands, preserve_rng_state=False)

    def update(self, name: str, value: Tensor) -> None:
        """A buffer's new value."""
        if self.of.first and self.trains(name.rpartition(".")[0]):
            if self[name].shape != value.shape:  # copy_ would spread it
                sizes = f"{list(self[name].shape)} here, its new value {list(value.shape)}"
                raise RuntimeError(f"{self.name}: {self.prefix}{name} is {sizes}")
            with torch.no_grad():
                self[name].copy_(value)

    def batch_norm(self, rows: BatchNorm, label: str, x: Tensor, name: str, last: str = "", *others: Tensor) -> Tensor:
        """Batch norm of a module of the source, by statistics of the batch, or running ones in evaluation.

        Args:
            last: the label of the rows behind it that are one row with it, which takes `others`.
        """
        blocks, module = self.of.blocks, f"{self.prefix}{name}".removesuffix(".")
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        w, b, mean, variance, counted = [blocks.get(f"{module}.{n}") for n in names]
        trains = self.trains(name)
        own = trains or mean is None
        step, buckets = self.step(label), self.of.buckets
        stand = rows.moments.stand(self, f"{step}_moments")
        of = cast(Any, stand.operation).of
        if isinstance(stand.operation, PartMoments):
            return self._alone(rows, step, x, (w, b), (mean, variance), counted, trains)
        if trains and of.count == 1:
            shape = list(of.shape)
            raise ValueError(
                f"{self.name}: {module}: expected more than 1 value per channel when training, got input size {shape}"
            )
        renews = trains and self.of.first
        if renews and counted is not None:
            counted.add_(1)
        if stand.joined is None:
            coefficients = rows.coefficients.stand(self, f"{step}_coefficients")
            centred = rows.centred.stand(self, self.step(last) if last else step)
            stand.joined = Joined(stand, coefficients, centred, rows.eps)
        joined: Joined = stand.joined
        if joined.is_silent and x.numel():
            if trains and not renews and mean is not None and variance is not None:
                mean, variance = mean.clone(), variance.clone()
            return batch_normed(x, w, b, mean, variance, own, rows.momentum, rows.eps)
        if own and joined.is_joint:
            y, new, unbiased = joined.run(self.place, x, w, b)
            if renews and mean is not None and variance is not None:
                mean.lerp_(new.to(mean.dtype), rows.momentum)
                variance.lerp_(unbiased.to(variance.dtype), rows.momentum)
            return y
        early = joined.centred.early(self.place, x)  # a halo of x travels while its moments do
        if own:
            (m,) = stand.run(self.place, [x], buckets)
            if renews and mean is not None and variance is not None:
                count, new, m2 = m.detach()
                mean.lerp_(new.to(mean.dtype), rows.momentum)
                variance.lerp_((m2 / (count - 1)).to(variance.dtype), rows.momentum)
        else:
            assert mean is not None and variance is not None
            m = torch.stack([torch.ones_like(mean), mean, variance])
        vectors = [v for v in (w, b) if v is not None]
        operands = [x, *joined.coefficients.run(self.place, [m, *vectors], buckets), *others]
        (made,) = joined.centred.begun(self.place, operands, buckets, early)()
        return made

    def _alone(
        self,
        rows: BatchNorm,
        step: str,
        x: Tensor,
        vectors: Pair,
        running: Pair,
        counted: Tensor | None,
        trains: bool,
    ) -> Tensor:
        """Batch norm of a rank's block by its own statistics."""
        stand = rows.moments.stand(self, f"{step}_moments")
        if stand.joined is None:
            averaged = None if rows.statistics is None else rows.statistics.stand(self, f"{step}_statistics")
            coefficients = rows.coefficients.stand(self, f"{step}_coefficients")
            stand.joined = Alone(stand, coefficients, averaged, rows.eps)
        alone: Alone = stand.joined
        mean, variance = running
        if not trains and mean is not None and variance is not None:
            return alone.evaluated(self.place, x, vectors, (mean, variance), self.of.buckets)
        if trains:
            cast(Any, stand.operation).of.check()
        renews = trains and self.of.first
        if renews and counted is not None:
            counted.add_(1)
        y, own = alone.run(self.place, x, vectors, self.of.buckets)
        if trains and mean is not None and variance is not None:
            with torch.no_grad():
                new = alone.averaged(self.place, own)
                for old, now in zip((mean, variance), new, strict=True) if renews else ():
                    old.lerp_(now.to(old.dtype), rows.momentum)
        return y


def _kept_less(run: Callable[[], Run], function: Any, operands: Sequence[Tensor], *, preserve_rng_state: bool) -> Any:
    """A block's function, called now and again in backward."""
    from torch.utils.checkpoint import checkpoint

    def called(*operands: Tensor) -> Any:
        return kept(function(run(), *operands))

    return checkpoint(called, *operands, use_reentrant=False, preserve_rng_state=preserve_rng_state)
