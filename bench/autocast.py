"""Models of the zoo under torch.autocast on virtual ranks beside the model on one process.

    python bench/autocast.py [--library written] [--grid N=1] [--dtype bfloat16] [--only NAME] [--models 0]

A step of training each: types of outputs and of parameters' gradients are the model's own, and all gradients together
are no further from those of float64 than thrice what the model's are, with 0.02 beside. A model that torch itself can't
run under autocast, or that isn't there, is left out. Exit code 1: a type or a number is wrong.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from options import options
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from networks_on_ranks import package
from zoo import LIBRARIES

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.spec.text import parse_grid
from convgen.verify.virtual import World

Step = tuple[list[Tensor], dict[str, Tensor]]


def tensors(made: Any) -> list[Tensor]:
    return [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]


def step(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Step:
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        ys = tensors(model(x))
    backward(ys)
    return [y.detach() for y in ys], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def backward(ys: list[Tensor]) -> None:
    smooth = [y for y in ys if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in smooth]
    torch.autograd.backward(smooth, dys)


def far(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    a, b = (torch.cat([of[n].flatten().double() for n in exact]) for of in (found, exact))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check(model: nn.Module, x: Tensor, axes: dict[str, int], dtype: torch.dtype) -> str:
    """What is wrong, or how far gradients are."""
    model.train()
    graph, constants = graph_of(deepcopy(model), (x,), name="net")
    state = deepcopy(model.state_dict()) | constants
    torch.manual_seed(0)
    exact = step(deepcopy(model).double(), x.double(), None)
    wanted = step(model, x, dtype)
    with package(compile_network(graph, Grid(tuple(axes.items()))).package().files) as net:

        def program(end: Any) -> Step:
            mesh = net.init_mesh("cpu", transport=end)
            of = net.Network(mesh)
            of.load_full({n: t for n, t in state.items() if n in of._known or n in of._aliases})
            with torch.autocast("cpu", dtype):
                ys = tensors(of(net.scatter(graph.inputs[0].name, x, mesh)))
            whole = [net.gather(name, y, mesh) for (name, _), y in zip(graph.outputs, ys, strict=True)]
            backward(whole)
            return [y.detach() for y in whole], of.full_gradients()

        ys, grads = World(Grid(tuple(axes.items())).ranks).run(program)[0]
    said = [str(y.dtype) for y in ys], [str(y.dtype) for y in wanted[0]]
    if said[0] != said[1]:
        return f"WRONG types of outputs: {said[0]}, torch's {said[1]}"
    kinds = [n for n, g in wanted[1].items() if n in grads and grads[n].dtype != g.dtype]
    if kinds:
        return f"WRONG types of gradients: {', '.join(kinds[:3])}"
    known = {n: g for n, g in exact[1].items() if n in grads}
    ours, theirs = far(grads, known), far(wanted[1], known)
    return f"{'' if ours <= 3 * theirs + 0.02 else 'WRONG '}{ours:.2g}, torch's {theirs:.2g}"


def main() -> None:
    asked = options(__doc__, library="written", grid="N=1", dtype="bfloat16", only="", models=0)
    torch.set_num_threads(1)
    axes, dtype = parse_grid(asked.grid, "N=2", "grid"), getattr(torch, asked.dtype)
    found: dict[str, int] = {}
    for name, make in list(LIBRARIES[asked.library].items())[: asked.models or None]:
        if asked.only not in name:
            continue
        torch.manual_seed(0)
        try:
            model, shape = make()
            x = torch.randn(shape)
            step(deepcopy(model), x, dtype)
        except Exception as error:
            said = f"left out: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
        else:
            try:
                said = check(model, x, axes, dtype)
            except InputError as error:
                said = f"refused: {error.fact}"
            except Exception as error:
                said = f"WRONG {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
        kind = next((k for k in ("left out", "refused", "WRONG") if said.startswith(k)), "right")
        found[kind] = found.get(kind, 0) + 1
        print(f"{name:<32} {said}", flush=True)
    print(f"{asked.library} on {asked.grid} in {asked.dtype}: " + ", ".join(f"{n} {k}" for k, n in found.items()))
    sys.exit("WRONG" in found)


if __name__ == "__main__":
    main()
