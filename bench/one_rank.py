"""One rank's step and inference on a CPU beside the module: the processor's time, and passes over activations.

    python bench/one_rank.py [--networks resnet18 unet ...] [--rounds 15] [--threads 1]

What a rank computes with nobody beside it is what every rank computes between messages. Times are of the processor,
rounds in turn in one process, medians of ratios with the middle half of them. A pass is a call of ATen that makes or
changes a tensor of at least a sixteenth of the network's largest activation; calls that move less, or are views, are
none. Names with more passes than the module has are listed, and those with fewer. ResNet-18 and ConvNeXt are
torchvision's, the decoder is diffusers' (AutoencoderKL), narrowed.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from options import options
from step_traffic import kl_decoder, loss_of, torchvision_model, unet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.packages import files_of, forget_package, load_package, write_package
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

LARGE = 16  # a pass makes at least this share, one of it, of the largest activation

Made = tuple[nn.Module, list[int]]  # a module, and its input's shape


NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet18": partial(torchvision_model, "resnet18", 4, 224),
    "unet": partial(unet, 2, 128),
    "convnext_tiny": partial(torchvision_model, "convnext_tiny", 2, 128),
    "decoder": partial(kl_decoder, 1, 128, (32, 64, 128, 128)),
}


class Passes(TorchDispatchMode):
    """Calls of ATen that make or change a tensor, by name: the largest tensor's elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        several: Sequence[Any] = made if isinstance(made, (tuple, list)) else [made]
        results = [t for t in several if isinstance(t, Tensor)]
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        fresh = any(t.untyped_storage()._cdata not in given for t in results)
        if results and (fresh or func._schema.is_mutable) and "empty" not in (name := func.overloadpacket.__name__):
            self.made.append((name.rstrip("_"), max(t.numel() for t in results)))
        return made

    def large(self, least: int) -> Counter[str]:
        return Counter(name for name, elements in self.made if elements >= least)


def run(model: Any, x: Tensor, training: bool) -> None:
    with nullcontext() if training else torch.no_grad():
        made = model(x)
    if training:
        model.zero_grad()
        loss_of(made).backward()


def seconds(model: Any, x: Tensor, training: bool) -> float:
    start = time.process_time()
    run(model, x, training)
    return time.process_time() - start


def passes(models: Sequence[Any], xs: Sequence[Tensor], training: bool) -> list[Counter[str]]:
    """Of each model, those over large activations."""
    found: list[Passes] = []
    for model, x in zip(models, xs, strict=True):
        found.append(Passes())
        with found[-1]:
            run(model, x, training)
    weights = max(p.numel() for p in models[0].parameters())
    most = max(elements for name, elements in found[0].made if "conv" in name and elements != weights)
    return [one.large(most // LARGE) for one in found]


@contextmanager
def on_one_rank(module: nn.Module, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """A network of one rank with a module's weights, in its mode, and the rank's block of x."""
    graph, constants = graph_of(copy.deepcopy(module), (x,), name="net")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / graph.name
        write_package(path, files_of(compile_network(graph, Grid((("N", 1),))), constants), "the folder")
        net = load_package(path)
        try:
            mesh = net.init_mesh("cpu", transport=VirtualTransport(World(1), 0))
            made = net.Network(mesh).train(module.training)
            made.load_full(module.state_dict())
            yield made, net.scatter(graph.inputs[0].name, x, mesh)
        finally:
            forget_package(net)


def compared(name: str, rounds: int) -> None:
    """Prints a network's two lines."""
    torch.manual_seed(0)
    module, shape = NETWORKS[name]()
    x = torch.randn(shape)
    for training in (True, False):
        with on_one_rank(module.train(training), x) as (ours, block):
            models, xs = (module, ours), (x, block)
            times: list[tuple[float, ...]] = []
            for turn in range(rounds + 2):
                took = tuple(seconds(model, given, training) for model, given in zip(models, xs, strict=True))
                times += [took] * (turn > 1)
            theirs, mine = passes(models, xs, training)
        ratios = sorted(b / a for a, b in times)
        more, fewer = (", ".join(f"{k} {n}" for k, n in sorted(c.items())) for c in (mine - theirs, theirs - mine))
        middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f}"
        print(
            f"{name:<14} {'step' if training else 'inference':<10} {1e3 * statistics.median(a for a, _ in times):8.1f} "
            f"{statistics.median(ratios):6.3f} ({middle})  passes {sum(theirs.values())}, {sum(mine.values())}"
            f"{'; more: ' + more if more else ''}{'; fewer: ' + fewer if fewer else ''}",
            flush=True,
        )


def main() -> None:
    asked = options(__doc__, networks=[*NETWORKS], rounds=15, threads=1)
    torch.set_num_threads(asked.threads)
    print(f"{'network':<14} {'':<10} {'module ms':>8} ratio (middle half)  passes of the module, of a rank")
    for name in asked.networks:
        compared(name, asked.rounds)


if __name__ == "__main__":
    main()
