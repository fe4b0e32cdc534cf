"""Small random networks of rows on ranks, every row with roles of its own and every value stored anywhere.

Values are read by several rows; some rows run whole on every rank; gates, norms and residuals are among them: where
adjoints written by hand go wrong. Backward, a gradient is torch's vjp of local code or a row of its own, by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random

import torch
from brute import Run, Value, gather, gradients, results, run
from operation_cases import a_grid, free_roles, normal, place, stored

from convgen.algebra.conv import SPATIAL_NAMES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.relations import Taps
from convgen.operations.attention import Attention
from convgen.operations.average_pooling import AdaptiveAveragePool, AveragePool
from convgen.operations.averaged import Averaged
from convgen.operations.contraction import linear
from convgen.operations.convolution import Convolution
from convgen.operations.dropout import Dropout
from convgen.operations.losses import SquaredError
from convgen.operations.max_pooling import AdaptiveMaxPool, MaxPool
from convgen.operations.moments import Moments, Normalise
from convgen.operations.pointwise import Pointwise, affine, bias
from convgen.operations.reductions import Reduce
from convgen.operations.row import Operation
from convgen.operations.rows import Concatenate, Wrapped, flipped, padded
from convgen.operations.softmax import Softmax
from convgen.operations.transposed import transposed_convolution
from convgen.operations.upsampling import Upsample
from convgen.operations.views import Permute, View


@dataclass
class Entry:
    """A row that has run: its operands' and results' numbers."""

    done: Run
    reads: list[int]
    makes: list[int]


@dataclass
class Network:
    """Values by number: whole and with autograd's graph, and as they are stored; rows in order."""

    draw: Random
    grid: Grid
    derived: float = 0.5
    whole: list[torch.Tensor] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def leaf(self, tensor: torch.Tensor) -> int:
        self.whole.append(tensor.requires_grad_(tensor.is_floating_point()))
        self.values.append(stored(self.draw, self.grid, tensor))
        return len(self.whole) - 1

    def parameter(self, *shape: int) -> int:
        return self.leaf(normal(self.draw, shape))

    def shape(self, value: int) -> tuple[int, ...]:
        return tuple(self.whole[value].shape)

    def add(self, operation: Operation, *reads: int, on_every_rank: bool = False) -> int:
        """Run a row; the number of its first result."""
        way = self.draw.randrange(len(operation.signatures))
        signature = operation.signatures[way]
        alone = on_every_rank or self.draw.random() < 0.1
        roles = {} if alone else free_roles(self.draw, signature, self.grid)
        done = run(operation, way, roles, [self.values[v] for v in reads])
        makes = list(range(len(self.whole), len(self.whole) + len(signature.results)))
        self.values += results(done, [place(self.draw, self.grid, o) for o in signature.results])
        self.whole += operation.reference(*(self.whole[v] for v in reads))
        self.entries.append(Entry(done, list(reads), makes))
        return makes[0]

    def backward(self, given: dict[int, torch.Tensor]) -> dict[int, Value]:
        """Gradients of all values from those of some, each stored as its value is."""
        found: dict[int, Value] = {}

        def take(value: int, gradient: Value) -> None:
            if value in found:
                pairs = zip(found[value].parts, gradient.parts, strict=True)
                gradient = Value(self.grid, gradient.shape, gradient.axes, [a + b for a, b in pairs])
            found[value] = gradient

        for value, tensor in given.items():
            like = self.values[value]
            take(value, Value(self.grid, like.shape, like.axes, [like.cut(tensor, r) for r in range(self.grid.ranks)]))
        for entry in reversed(self.entries):
            dys = [found.get(v) for v in entry.makes]
            if any(dys):
                for k, gradient in self._gradients(entry, dys).items():
                    take(entry.reads[k], gradient)
        return found

    def _gradients(self, entry: Entry, dys: Sequence[Value | None]) -> dict[int, Value]:
        """Of a row's operands, by their place."""
        done, signature = entry.done, entry.done.signature
        by_vjp = signature.reduction == "sum" or not signature.partial(done.roles)
        chosen = {
            name: row
            for name, row in done.operation.gradients.items()
            if not by_vjp or self.draw.random() < self.derived
        }
        named = {o.name: self.values[v] for o, v in zip(signature.inputs, entry.reads, strict=True)}
        named |= {o.name: self.values[v] for o, v in zip(signature.results, entry.makes, strict=True)}
        named |= {f"d{o.name}": dy for o, dy in zip(signature.results, dys, strict=True) if dy}
        found: dict[int, Value] = {}
        vjps = gradients(done, dys, [self.values[v] for v in entry.reads])
        for k, operand in enumerate(signature.inputs):
            if operand.gradient and operand.name not in chosen:
                assert by_vjp, f"{done.operation}: no gradient of {operand.name}"
                found[k] = vjps[k]
            elif operand.gradient:
                row = chosen[operand.name]
                way = self.draw.randrange(len(row.operation.signatures))
                roles = free_roles(self.draw, row.operation.signatures[way], self.grid)
                ran = run(row.operation, way, roles, [named[t] for t in row.reads])
                found[k] = results(ran, [self.values[entry.reads[k]]])[0]
        return found

    def check(self) -> None:
        """Results and gradients of everything against one device."""
        read = {v for e in self.entries for v in e.reads}
        ends = [v for e in self.entries for v in e.makes if v not in read and self.whole[v].requires_grad]
        for e in self.entries:
            for v in e.makes:
                assert near(gather(self.values[v]), self.whole[v].detach()), e.done.operation
        dys = {v: normal(self.draw, self.shape(v)) for v in ends}
        leaves = [v for v, t in enumerate(self.whole) if t.is_leaf and t.requires_grad]
        right = torch.autograd.grad(
            [self.whole[v] for v in ends], [self.whole[v] for v in leaves], [*dys.values()], allow_unused=True
        )
        found = self.backward(dys)
        for v, wanted in zip(leaves, right, strict=True):
            if wanted is not None:
                assert near(gather(found[v]), wanted), f"gradient of {v}: {[e.done.operation for e in self.entries]}"


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
    return torch.allclose(found.to(right.dtype), right, rtol=0, atol=1e-9 * scale)


# ---------------------------------------------------------------- pieces of networks: a value's number to another's
def convolution(net: Network, x: int) -> int:
    n, c, *rows = net.shape(x)
    groups = net.draw.choice([g for g in (1, 2, 3, c) if c % g == 0])
    filters = groups * net.draw.randint(1, 3)
    sides = tuple(
        Spatial(name, h, k, net.draw.randint(1, 2), k // 2, k // 2)
        for name, h in zip(SPATIAL_NAMES[len(rows)], rows, strict=True)
        for k in (net.draw.choice((1, 2, 3)),)
    )
    conv = Conv(n, c, filters, sides, groups)
    y = net.add(Convolution("forward", conv), x, net.parameter(filters, c // groups, *(s.kernel for s in sides)))
    return net.add(bias(net.shape(y)), y, net.parameter(filters)) if net.draw.random() < 0.5 else y


def deconvolution(net: Network, x: int) -> int:
    n, c, *rows = net.shape(x)
    filters, s = net.draw.randint(1, 4), net.draw.randint(1, 2)
    sides = tuple(Spatial(i, h, s + 1, s) for i, h in zip(SPATIAL_NAMES[len(rows)], rows, strict=True))
    operation = transposed_convolution((n, c, *rows), filters, sides, (0,) * len(rows))
    return net.add(operation, x, net.parameter(c, filters, *(s + 1 for _ in rows)))


def norm(net: Network, x: int) -> int:
    shape = net.shape(x)
    groups = net.draw.choice([g for g in (1, 2, 3, shape[1]) if shape[1] % g == 0])
    of = net.draw.choice(
        (
            Averaged(shape, (1,)),
            Averaged(shape, (0, 1), shape[1] // groups),
            Averaged(shape, (0,)),
            Averaged(shape, (0, 1)),
        )
    )
    y = net.add(Normalise(of, 0.1, net.draw.random() < 0.2), x, net.add(Moments(of), x))
    return net.add(affine(shape), y, net.parameter(shape[1]), net.parameter(shape[1]))


def activation(net: Network, x: int) -> int:
    return net.add(Pointwise(net.draw.choice(("relu", "silu", "tanh")), net.shape(x), (net.shape(x),)), x)


def pooled(net: Network, x: int) -> int:
    shape = net.shape(x)
    taps = tuple(Taps(2, 2, 0) if n > 1 else Taps() for n in shape[2:])
    out = tuple((n - t.kernel) // t.stride + 1 for n, t in zip(shape[2:], taps, strict=True))
    return net.add(net.draw.choice((MaxPool, AveragePool))(shape, taps, out), x)


def resized(net: Network, x: int) -> int:
    shape = net.shape(x)
    rows = tuple(net.draw.randint(2, 7) for _ in shape[2:])
    return net.add(net.draw.choice((Upsample(shape, rows, "linear"), AdaptiveAveragePool(shape, rows))), x)


def residual(net: Network, x: int) -> int:
    """x is read by two rows, or more."""
    y = activation(net, net.draw.choice((moved, norm, dropped))(net, x))
    return net.add(Pointwise("add", net.shape(x), (net.shape(x),) * 2), x, y)


def gated(net: Network, x: int) -> int:
    """Global pool, linear, sigmoid, multiply; what is small runs on every rank, or doesn't."""
    shape, alone = net.shape(x), net.draw.random() < 0.5
    ones = (1,) * (len(shape) - 2)
    if net.draw.random() < 0.5:
        small = net.add(Reduce("mean", shape, tuple(range(2, len(shape)))), x)
    else:
        small = net.add(AdaptiveMaxPool(shape, ones), x)
        small = net.add(View((*shape[:2], *ones), shape[:2]), small)
    small = net.add(linear(shape[:2], shape[1]), small, net.parameter(shape[1], shape[1]), on_every_rank=alone)
    small = net.add(Pointwise("sigmoid", shape[:2], (shape[:2],)), small, on_every_rank=alone)
    gate = net.add(View(shape[:2], (*shape[:2], *ones)), small, on_every_rank=alone)
    return net.add(Pointwise("mul", shape, (shape, (*shape[:2], *ones))), x, gate)


def attended(net: Network, x: int) -> int:
    """Rows as tokens, channels as their width."""
    n, c, *rows = net.shape(x)
    tokens = prod(rows)
    flat = net.add(View((n, c, *rows), (n, 1, c, tokens)), x)
    q = net.add(Permute((n, 1, c, tokens), (0, 1, 3, 2)), flat)
    y = net.add(Attention(n, 1, 1, tokens, tokens, c, c, causal=net.draw.random() < 0.5), q, q, q)
    back = net.add(Permute((n, 1, tokens, c), (0, 1, 3, 2)), y)
    return net.add(View((n, 1, c, tokens), (n, c, *rows)), back)


def beside(net: Network, x: int) -> int:
    y = activation(net, x)
    return net.add(Concatenate((net.shape(x), net.shape(y)), 1), x, y)


def moved(net: Network, x: int) -> int:
    shape = net.shape(x)
    if net.draw.random() < 0.5:
        return net.add(flipped(shape, net.draw.randrange(len(shape))), x)
    sides = [(0, 0), (0, 0), *((1, 1) for _ in shape[2:])]
    mode = net.draw.choice(("constant", "replicate", "circular"))
    wide = x
    if mode == "circular":
        for d in range(2, len(shape)):
            wide = net.add(Wrapped((net.shape(wide),) * 3, d, 1, 1), wide, wide, wide)
    else:
        wide = net.add(padded(shape, sides, mode), x)
    return net.add(padded(net.shape(wide), [(-a, -b) for a, b in sides], "constant"), wide)


def dropped(net: Network, x: int) -> int:
    return net.add(Dropout(net.shape(x), 0.3, len(net.entries)), x, net.leaf(torch.tensor([7, 1])))


def ended(net: Network, x: int) -> int:
    """A head: features, classes, their softmax whole, an error."""
    shape = net.shape(x)
    features = net.add(View(shape, (shape[0], prod(shape[1:]))), x)
    y = net.add(linear((shape[0], prod(shape[1:])), 3), features, net.parameter(3, prod(shape[1:])))
    y = net.add(Softmax((shape[0], 3), 1), y, on_every_rank=net.draw.random() < 0.5)
    return net.add(SquaredError((shape[0], 3)), y, net.parameter(shape[0], 3))


PIECES: tuple[Callable[[Network, int], int], ...] = (
    convolution, convolution, deconvolution, norm, norm, activation, pooled, resized, residual, gated, gated, attended,
    beside, moved, dropped,
)  # fmt: skip


def a_network(draw: Random) -> Network:
    """Two to five pieces, each behind any value of enough dimensions that is there."""
    net = Network(draw, a_grid(draw), draw.choice((0.0, 0.5, 1.0)))
    rows = draw.choice(((draw.randint(2, 9),), (draw.randint(2, 6), draw.randint(2, 6))))
    there = [net.leaf(normal(draw, (draw.randint(1, 4), draw.choice((2, 3, 4, 6)), *rows)))]
    for _ in range(draw.randint(2, 5)):
        x = there[-1] if draw.random() < 0.7 else draw.choice(there)
        if prod(net.shape(x)) <= 4000:
            there.append(draw.choice(PIECES)(net, x))
    if draw.random() < 0.3 and prod(net.shape(there[-1])) <= 2000:
        ended(net, there[-1])
    return net
