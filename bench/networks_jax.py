"""Bytes between ranks, beside XLA's partitioner on the same graph: a small ResNet and a VAE's decoder.

    pip install jax==0.10.2   # beside convgen and torch, in an environment of its own
    python bench/networks_jax.py [--only decoder] [--ranks 2]

A graph that convgen has imported is run call by call in jax; its inputs are split over the ranks' axis, its parameters
copies. Where channels are split parameters and all values lie as in convgen's program (of dimensions that the ranks
divide; XLA splits no others): by itself XLA then gathers everything and computes alike on all ranks. What XLA's program
moves is read from its text and counted as VOLUME counts: all ranks' bytes, a ring's of all-reduces. "forward" is the
loss, "training" the loss and the gradients of all parameters, laid out as these. Halos are collective-permutes there
and exchanges here.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from options import options
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.network_compiler import compile_network
from convgen.program.network import Program
from convgen.spec.exported import graph_of
from convgen.spec.graph import Call, Graph, Ref
from examples.resnet import small_resnet
from examples.vae_decoder import Residual

LETTERS = "NCHW"


# ---------------------------------------------------------------- networks, each with its loss
class Scored(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Decoder(nn.Module):
    """An AutoencoderKL's decoder in small: residual blocks, attention in the middle, nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 64, 3, padding=1)
        self.before, self.after = Residual(64, 64), Residual(64, 64)
        self.norm, self.project = nn.GroupNorm(8, 64), nn.Linear(64, 192)
        self.up1, self.up2 = Residual(64, 32), Residual(32, 32)
        self.wide1, self.wide2 = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def attend(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.project(self.norm(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + y.transpose(1, 2).view(n, c, h, w)

    def forward(self, z: Tensor) -> Tensor:
        x = self.after(self.attend(self.before(self.first(z))))
        x = self.up1(self.wide1(nn.functional.interpolate(x, scale_factor=2.0)))
        x = self.up2(self.wide2(nn.functional.interpolate(x, scale_factor=2.0)))
        return self.last(nn.functional.silu(x))


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small ResNet": (small_resnet, (8, 3, 64, 64)),
    "decoder": (Decoder, (2, 4, 32, 32)),
}


# ---------------------------------------------------------------- a graph in jax
def conv2d(x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    y = jax.lax.conv_general_dilated(
        x, w, stride, [(p, p) for p in padding], rhs_dilation=dilation, feature_group_count=groups,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return y if b is None else y + b[:, None, None]


def normalised(x: Any, dims: tuple[int, ...], eps: float) -> Any:
    mean = x.mean(dims, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(dims, keepdims=True) + eps)


def batch_norm(x: Any, w: Any, b: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float) -> Any:
    return (normalised(x, (0, 2, 3), eps) * w[:, None, None] + b[:, None, None],)


def group_norm(x: Any, groups: int, w: Any, b: Any, eps: float, _: Any) -> Any:
    n, c, *rows = x.shape
    y = normalised(x.reshape(n, groups, c // groups, *rows), tuple(range(2, 3 + len(rows))), eps).reshape(x.shape)
    return y * w.reshape(-1, *[1] * len(rows)) + b.reshape(-1, *[1] * len(rows))


def attention(q: Any, k: Any, v: Any, *_: Any) -> Any:
    weights = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5)
    return weights @ v


def nearest(x: Any, _: Any, factors: Sequence[float]) -> Any:
    for d, factor in enumerate(factors, 2):
        x = jnp.repeat(x, int(factor), d)
    return x


def sliced(x: Any, d: int, start: Any, stop: Any, step: int) -> Any:
    return x[(slice(None),) * (d % x.ndim) + (slice(start, stop, step),)]


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "conv2d": conv2d, "batch_norm": batch_norm, "group_norm": group_norm, "relu": jax.nn.relu, "silu": jax.nn.silu,
    "add.Tensor": lambda a, b, alpha: a + alpha * b, "div.Tensor": lambda a, b: a / b,
    "linear": lambda x, w, b: x @ w.T + b,
    "adaptive_avg_pool2d": lambda x, size: x.mean((2, 3), keepdims=True), "view": jnp.reshape,
    "transpose.int": jnp.swapaxes, "square": jnp.square, "mean": lambda x, _: x.mean(),
    "split.Tensor": lambda x, size, d: tuple(jnp.split(x, x.shape[d] // size, d)), "unsqueeze": jnp.expand_dims,
    "select.int": lambda x, d, i: jnp.take(x, i, d), "upsample_nearest2d.vec": nearest, "slice.Tensor": sliced,
    "scaled_dot_product_attention": attention, "add_.Tensor": lambda a, b, alpha: a + alpha * b,
    "max_pool2d": lambda x, k, s, p, *_: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 1, *k), (1, 1, *s), ((0, 0), (0, 0), *((q, q) for q in p))
    ),
}  # fmt: skip


def in_jax(graph: Graph, given: Mapping[str, Any], stored: Callable[[str, Any], Any]) -> Any:
    """The network's one output; `stored` says of a value how it lies."""
    values = dict(given)

    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        return tuple(map(value, arg)) if isinstance(arg, tuple) else arg

    def made(call: Call) -> tuple[Any, ...]:
        found = OPERATORS[call.op](*map(value, call.args))
        return found if isinstance(found, tuple) else (found,)

    (output,) = (name for _, name in graph.outputs)
    for call in graph.calls:
        if any(r is not None and not r.dtype.startswith("float") for r in call.results):
            continue  # counters of batches
        for result, one in zip(call.results, made(call), strict=False):
            if result is not None:
                values[result.name] = stored(result.name, one)
    return values[output]


# ---------------------------------------------------------------- what XLA moves
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
LINE = re.compile(r"= (.*?) (collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter)(?:-start)?\((.*)")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def moved(text: str, ranks: int) -> Counter[str]:
    """Bytes that all ranks send, by kind of collective, of a compiled program for as many devices."""
    found = Counter[str]()
    for line in text.splitlines():
        match = LINE.search(line)
        if match is None:
            continue
        shapes, kind, rest = match.groups()
        size = sum(BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in SHAPE.findall(shapes))
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
            assert pairs is not None, line
            ends = [pair.strip("{}").split(",") for pair in pairs[1].replace("},{", "};{").split(";")]
            found[kind] += size * sum(a != b for a, b in ends)
            continue
        group = group_size(rest, ranks)
        share = {"all-reduce": 2 / group, "all-gather": 1 / group, "reduce-scatter": 1.0, "all-to-all": 1 / group}
        found[kind] += round(size * share[kind] * (group - 1)) * ranks
    return found


def group_size(text: str, ranks: int) -> int:
    """Ranks of a collective's groups, in any of XLA's three ways to write them."""
    if (listed := re.search(r"replica_groups=\{\{([\d,]*)\}", text)) is not None:
        return len(listed[1].split(","))
    if (iota := re.search(r"replica_groups=\[\d+,(\d+)\]", text)) is not None:
        return int(iota[1])
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text)
    if named is None:
        return ranks
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))


def splitting(devices: Sequence[Any]) -> Callable[[Sequence[Any], int | None], NamedSharding]:
    """How a shape lies whose dimension is split over devices, which divide it."""
    mesh = jax.make_mesh((len(devices),), ("ranks",), (AxisType.Auto,), devices=devices)

    def split(shape: Sequence[Any], d: int | None) -> NamedSharding:
        there = d is not None and shape[d] % len(devices) == 0
        return NamedSharding(mesh, PartitionSpec(*((None,) * (d or 0) + ("ranks",) if there else ())))

    return split


def loss_of(whole: Graph, program: Program, split: Any, buffers: Mapping[str, Any], told: bool) -> Callable[..., Any]:
    """The loss of parameters and an image.

    Args:
        told: XLA is told how every value lies, not the input and parameters alone.
    """

    def lies(name: str, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, split(value.shape, split_of(program, name)))

    def loss(parameters: Mapping[str, Any], x: Any) -> Any:
        values = {**parameters, **buffers, whole.inputs[0].name: x}
        return in_jax(whole, values, lies if told else lambda _, value: value)

    return loss


def xla(graph: Graph, letter: str, ranks: int, program: Program, told: bool) -> list[Counter[str]]:
    """Of the loss, and of the loss with gradients."""
    whole, split = graph.at(graph.batch), splitting(jax.devices()[:ranks])
    shapes = {v.name: jax.ShapeDtypeStruct(v.shape, jnp.float32) for v in whole.parameters}
    x = jax.ShapeDtypeStruct(whole.inputs[0].shape, jnp.float32)
    loss = loss_of(whole, program, split, {v.name: jnp.zeros(v.shape, jnp.float32) for v in whole.buffers}, told)
    stored = {n: split(one.shape, split_of(program, n)) for n, one in shapes.items()}
    given = stored, split(x.shape, LETTERS.index(letter))
    results = split((), None), stored
    both = (
        jax.jit(loss, in_shardings=given),
        jax.jit(jax.value_and_grad(loss), in_shardings=given, out_shardings=results),
    )
    return [moved(f.lower(shapes, x).compile().as_text(), ranks) for f in both]


def here(program: Program) -> list[Counter[str]]:
    found: list[Counter[str]] = []
    steps = volume(program)
    for parts in (("forward",), ("forward", "backward")):
        found.append(Counter())
        for step in (s for part in parts for s in steps[part]):
            found[-1][step["collective"]] += sum(step["bytes_sent_per_rank"])
    return found


def split_of(program: Program, name: str) -> int | None:
    return next((d for d, axes in enumerate(program.values[name].stored) if axes), None)


def main() -> int:
    asked = options(__doc__, only="", ranks=2)
    warnings.simplefilter("ignore")
    more = 0
    print(f"bytes that {asked.ranks} ranks send; halos: collective-permutes in XLA, exchanges in convgen")
    print(
        f"{'network':14}{'grid':6}{'pass':10}{'XLA':>12}{'convgen':>12}{'of XLA':>8}{'halos: XLA':>12}{'convgen':>12}"
    )
    for name, (make, shape) in NETWORKS.items():
        if asked.only not in name:
            continue
        torch.manual_seed(0)
        graph, _ = graph_of(Scored(make()), (torch.zeros(shape),), name="net")
        for letter in "NHC":
            program = compile_network(graph, Grid(((letter, asked.ranks),))).program
            theirs = xla(graph, letter, asked.ranks, program, told=letter == "C")
            for what, xs, ours in zip(("forward", "training"), theirs, here(program), strict=True):
                a, b = xs.total(), ours.total()
                more += b > a
                halos = xs["collective-permute"], ours["exchange"]
                print(
                    f"{name:14}{letter + '=' + str(asked.ranks):6}{what:10}{a:12,}{b:12,}{b / a if a else 1:8.2f}"
                    f"{halos[0]:12,}{halos[1]:12,}",
                    flush=True,
                )
    print(f"{more} with more bytes than XLA")
    return 0


if __name__ == "__main__":
    sys.exit(main())
