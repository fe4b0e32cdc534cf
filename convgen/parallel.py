"""Networks from Python: a PyTorch module as a generated package, and as a module that runs on many ranks.

    import convgen
    net = convgen.from_torch(module, (torch.zeros(8, 3, 64, 64),), grid="N=2,H=2")    # as `import resnet18 as net`
    model = convgen.parallelize(module, (torch.zeros(8, 3, 64, 64),), {"N": 2, "H": 2})

Packages are kept in the cache folder (CONVGEN_CACHE), by what they were compiled from and by convgen's own content.
Every rank exports and compiles for itself, with one result: nothing is sent for it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.packages import cached, files_of, keep, key_of, load_package
from convgen.spec.exported import graph_of
from convgen.spec.exported_examples import Examples, examples_of
from convgen.spec.graph import Graph
from convgen.spec.graph_file import write_graph
from convgen.spec.graph_parts import check_statistics
from convgen.spec.target import read_target
from convgen.spec.text import parse_grid, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

Inputs = Sequence[Any] | Mapping[str, Any]
GridLike = Mapping[str, int] | str


def from_torch(
    module: torch.nn.Module,
    example_inputs: Inputs,
    grid: GridLike | None = None,
    algorithm: str | None = None,
    machine: str | None = None,
    *,
    statistics: str = "global",
    recompute: Collection[str] = (),
    target: str = "cpu",
    name: str | None = None,
) -> Any:
    """The generated package of a module, imported: Network, init_mesh, scatter, gather, SPEC, SCHEDULE, VOLUME.

    Args:
        module: its mode and its values stay as they are; none is in the package but constants, and what no
            initialisation of torch's makes.
        example_inputs: the arguments of its forward, by place or by name, whole; extent 0 counts samples.
        grid: axes that are letters N, C, F, D, H, W, and their ranks: {"N": 2, "H": 2}, or "N=2,H=2". By default N over
            all ranks of the default process group.
        algorithm: a named one; auto: every value and row as the search for the least modelled seconds finds, whatever
            the axes are called; by default the named one with the grid's letters.
        machine: what `auto` models: a name, or a machine file; by default cpu.
        statistics: of batch norms in training: of the whole batch (global), of a sample's ranks' samples (spatial), or
            of a rank's block (local); the running ones are the parts' average.
        recompute: modules of the source that backward computes again, so that only what they take is kept.
        target: cpu, or a GPU, as `cuda:sm_90` or `hip:gfx942`, whose convolutions are Triton's.
        name: of the network; by default the module's class's.
    Raises:
        InputError: the module can't be traced, or not be right on many ranks; an axis that is no letter.
    Example:
        >>> import torch
        >>> net = from_torch(torch.nn.Conv2d(3, 8, 3, padding=1), (torch.zeros(4, 3, 8, 8),), grid="N=2,H=2")
        >>> net.NET.values["output"]
        (('N', 8, 8, 8), '[N * H *]')
    """
    _check_machine(machine, algorithm)
    check_statistics(statistics)
    graph, tensors = _graph(module, example_inputs, name)
    return _package(graph, tensors, _axes(grid), algorithm, machine, statistics, recompute, target)


def parallelize(
    module: torch.nn.Module,
    example_inputs: Inputs,
    mesh_or_grid: DeviceMesh | GridLike,
    algorithm: str | None = "auto",
    machine: str | None = None,
    *,
    whole: bool = True,
    parameters: str = "dtensors",
    statistics: str = "global",
    recompute: Collection[str] = (),
    target: str = "cpu",
    name: str | None = None,
) -> torch.nn.Module:
    """A module on many ranks, with the module's weights and in its mode. Every rank calls this.

    Args:
        example_inputs: as of `from_torch`.
        mesh_or_grid: a DeviceMesh whose axes are letters, or a grid, whose mesh is made of the default process group.
        algorithm: as of `from_torch`.
        machine: as of `from_torch`.
        whole: it takes whole tensors on every rank, as the module's forward does, and gives whole tensors; else it is
            the package's Network, which takes and gives this rank's blocks.
        statistics, recompute, target: as of `from_torch`.
    Returns:
        An nn.Module: of every parameter this rank's block, under the module's own names; `load_full`,
        `full_state_dict`, `full_gradients` as of a generated Network; the package is its `package`.
    Raises:
        InputError: as of `from_torch`; or the ranks' modules have different weights.
        RuntimeError: there is no process group.
    """
    _check_machine(machine, algorithm)
    check_statistics(statistics)
    graph, tensors = _graph(module, example_inputs, name)
    given = isinstance(mesh_or_grid, (str, Mapping))
    axes = _axes(mesh_or_grid) if given else _axes_of(mesh_or_grid)
    package = _package(graph, tensors, axes, algorithm, machine, statistics, recompute, target)
    mesh: Any = package.init_mesh() if given else mesh_or_grid
    kind: Any = _whole(package, graph, examples_of(module, example_inputs), module) if whole else package.Network
    kind.package = package
    model: Any = kind(mesh, parameters=parameters)
    state = cast("dict[str, Tensor]", module.state_dict())
    _check_same(package, mesh, state)
    model.load_full(state)
    return model.train(module.training)


def _graph(module: torch.nn.Module, inputs: Inputs, name: str | None) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of training, which is that of evaluation too where that works; else of the module's mode."""
    source = f"{type(module).__module__}.{type(module).__qualname__}"
    if module.training:
        return graph_of(module, inputs, name=name, source=source)
    try:
        found = graph_of(module, inputs, name=name, source=source, training=True)
    except InputError:
        found = None
    if found is not None and "eval" in found[0].modes:
        return found
    return graph_of(module, inputs, name=name, source=source, training=False)


def _axes(grid: GridLike | None) -> dict[str, int]:
    if grid is None:
        import torch.distributed as dist

        return {"N": dist.get_world_size() if dist.is_initialized() else 1}
    if isinstance(grid, str):
        return parse_grid(grid, "N=2,H=2", "grid")
    for axis, ranks in grid.items():
        if type(ranks) is not int or ranks < 1:
            raise InputError(f"grid: axis {axis} can't have {shown(ranks)} ranks", hint="{'N': 2, 'H': 2}")
    return dict(grid)


def _axes_of(mesh: Any) -> dict[str, int]:
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        fact = f"mesh_or_grid is a {type(mesh).__name__} without names of axes"
        raise InputError(fact, hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("N", "H")), or {"N": 2, "H": 2}')
    return dict(zip(names, mesh.shape, strict=True))


def _check_machine(machine: str | None, algorithm: str | None) -> None:
    if machine is not None and algorithm != "auto":
        fact = f"machine={shown(machine)} is what algorithm='auto' models"
        raise InputError(fact, hint="algorithm='auto', or without machine=")


def _package(
    graph: Graph,
    tensors: dict[str, Tensor],
    axes: dict[str, int],
    algorithm: str | None,
    machine: str | None,
    statistics: str,
    recompute: Collection[str],
    target: str,
) -> Any:
    """The package, from the cache or new."""
    made_for = read_target(target).known()
    chosen = load_machine(machine) if machine is not None else None
    key = (write_graph(graph), tuple(axes.items()), algorithm, statistics, *([repr(chosen)] if chosen else []))
    key = (*key, *sorted(recompute), *([str(made_for)] if made_for.is_gpu else []))
    folder = cached(graph.name, key_of(key, tensors))
    if not folder.is_dir():
        said = ", ".join(repr(one) for one in (axes, algorithm, machine) if one)
        said += f", statistics={statistics!r}" * (statistics != "global")
        said += f", recompute={sorted(recompute)}" * bool(recompute) + f", target={target!r}" * made_for.is_gpu
        command = f"convgen.from_torch(module, example_inputs, {said})"
        grid = Grid(tuple(axes.items()))
        compiled = compile_network(
            graph,
            grid,
            algorithm,
            machine=chosen,
            statistics=statistics,
            again=recompute,
            command=command,
            target=made_for,
        )
        keep(folder, files_of(compiled, tensors))
    return load_package(folder)


def _check_same(package: Any, mesh: Any, state: Mapping[str, Tensor]) -> None:
    """Refuse ranks whose modules have different weights: copies would differ from the first step on."""
    import torch

    place, here = package.NET.place(mesh), package.NET.here(mesh)
    if len(place.ranks) == 1:
        return
    digest = hashlib.sha256()
    for name, tensor in state.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(name.encode() + raw.tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(package.NET.device)
    group = here.group(tuple(package.NET.grid))
    found = place.transport.all_gather(mine, [len(mine)] * len(group.ranks), group).view(len(group.ranks), -1)
    others = [rank for rank, one in zip(group.ranks, found, strict=True) if not torch.equal(one, found[0])]
    if others:
        fact = f"{package.NAME}: the modules of ranks {others} have other weights than that of rank {group.ranks[0]}"
        raise InputError(fact, hint="torch.manual_seed alike on all ranks before the module is made, or one state dict")


# ---- Whole tensors in, whole tensors out ----


def _whole(package: Any, graph: Graph, examples: Examples, module: torch.nn.Module) -> type[Any]:
    """The package's Network with the signature of the module's forward."""
    signature = inspect.signature(module.forward)
    take = _taken(graph, examples, signature, type(module).__name__)
    names = [name for name, _ in graph.outputs]
    base: Any = package.Network

    class Whole(base):
        """A network that takes whole tensors on every rank and gives whole tensors; parameters are blocks."""

        def forward(self, *args: Any, **keywords: Any) -> Any:
            inputs = take(args, keywords)
            batch = _batch(package, inputs)
            blocks = [package.scatter(name, x, self._mesh) for name, x in inputs.items()]
            made: Any = base.forward(self, *blocks, batch=batch)
            if names == ["output"]:
                return package.gather("output", made, self._mesh, batch=batch)
            if isinstance(made, tuple):
                several = enumerate(cast("tuple[Tensor, ...]", made))
                return tuple(package.gather(k, y, self._mesh, batch=batch) for k, y in several)
            return {n: package.gather(n, y, self._mesh, batch=batch) for n, y in made.items()}

    Whole.__name__ = Whole.__qualname__ = type(module).__name__
    return Whole


def _batch(package: Any, inputs: Mapping[str, Tensor]) -> int | None:
    """The number of samples, where it is open."""
    for name, x in inputs.items():
        pattern: Sequence[int | str] = package.NET.values[name][0]
        if "N" in pattern and x.dim() == len(pattern):
            return x.shape[pattern.index("N")]
    return None


def _taken(
    graph: Graph, examples: Examples, signature: inspect.Signature, name: str
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Tensor]]:
    """What finds a graph's inputs among the arguments of a call, and refuses other numbers than those built in."""

    def take(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Tensor]:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        found: dict[str, Tensor] = {}
        for key, example in examples.values.items():
            argument, place = examples.place[key]
            whole: Any = bound.arguments[argument]
            value: Any = whole if place is None else whole[place]
            if key in examples.tensors:
                found[key] = value
            elif value != example:
                fact = f"{name}: {key}={shown(value)}, but {shown(example)} of the example inputs is built in"
                raise InputError(fact, hint="parallelize with other example inputs")
        return {value.name: found[value.name] for value in graph.inputs}

    return take
