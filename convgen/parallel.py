"""Networks from Python: a PyTorch module as a generated package, and as a module that runs on many ranks.

    import convgen
    net = convgen.from_torch(module, (torch.zeros(8, 3, 64, 64),), grid="N=2,H=2")    # as `import resnet18 as net`
    model = convgen.parallelize(module, (torch.zeros(8, 3, 64, 64),), {"N": 2, "H": 2})

Exports and packages are kept in the cache folder (CONVGEN_CACHE): exports by the module's fingerprint (exports/),
packages by what they were compiled from and by convgen's own content. One rank makes what the cache lacks; the others
take it from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from convgen.agreement import check_weights, meet
from convgen.algebra.blocks import size_text
from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.errors import InputError
from convgen.exports.entry import Answer, Question, answer_of, question_of
from convgen.exports.ranks import Meeting, State, cache_identity
from convgen.network_compiler import compile_network
from convgen.package_cache import cached, keep, kept, key_of
from convgen.packages import IDLE, files_of, load_package, with_constants
from convgen.plan.idle import warn_of_idle_axes
from convgen.spec.exported import Exported, exported
from convgen.spec.exported_examples import Inputs
from convgen.spec.exported_open import Opened
from convgen.spec.graph_edit import check_autocast, check_reduce_dtype
from convgen.spec.graph_parts import check_statistics
from convgen.spec.placement import build_size
from convgen.spec.target import Target, read_target
from convgen.spec.text import parse_grid
from convgen.tune.apply import with_measured_networks
from convgen.tune.lookup import remembered
from convgen.whole import Call, model_class

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

GridLike = Mapping[str, int | Sequence[int]] | str
Found = TypeVar("Found", Answer, Answer | None)


def from_torch(
    module: torch.nn.Module,
    example_inputs: Inputs,
    grid: GridLike | None = None,
    algorithm: str | None = None,
    machine: str | None = None,
    *,
    statistics: str = "global",
    reduce_dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    recompute: Collection[str] = (),
    target: str = "cpu",
    dtype: torch.dtype | str | None = None,
    name: str | None = None,
    open: Opened | None = None,
) -> Any:
    """The generated package of a module, imported: Network, init_mesh, scatter, gather, SPEC, SCHEDULE, VOLUME.

    Args:
        module: its mode and its values stay as they are; the package has none of its values but constants, and those
            that no initialisation of torch makes.
        example_inputs: the arguments of its forward, whole: a tuple, a dict by name, or (args, kwargs); extent 0 of the
            first tensor counts samples. Each tensor in lists, tuples, dicts and dataclasses is an input, such as
            batch_image and xs_0; in what the module gives, an output. Numbers and texts are built in.
        grid: axes, which are letters N, C, F, D, H, W, with their ranks: {"N": 2, "H": 2}, or "N=2,H=2"; or with a
            share for each rank, so that blocks have these proportions: {"H": [3, 5]}, or "H=3:5". By default N over all
            ranks of the default process group.
        algorithm: a named one; auto: the layout with the least modelled seconds that the search finds, whatever the
            axes are called; by default the named one with the grid's letters.
        machine: a name or a machine file, for which overlap is chosen, and which `auto` models; by default one of the
            target's kind.
        statistics: batch norms' statistics in training are of the whole batch (global), of the samples of the ranks
            that share a sample (spatial), or of a rank's block (local); running statistics are the parts' average.
        reduce_dtype: float32, bfloat16 or float16: the type in which parameters' gradients travel to be summed over
            ranks, in float32; by default each parameter's own type. Gradients have the parameter's type in any case.
        autocast: bfloat16 or float16: the network will run under torch.autocast of this type. The layout is chosen for
            that, and VOLUME, prices, memory and a GPU's kernels are of these types; it is right under another, or none.
        recompute: modules of the source that backward computes again, so that only their inputs are kept.
        target: cpu, or a GPU, as `cuda:sm_90` or `hip:gfx942`, whose convolutions are Triton's, tuned where
            `convgen tune` has measured them.
        dtype: a floating-point type in place of all those that the module's parameters, buffers, inputs and casts have;
            by default each keeps its own. "tfloat32" is float32, multiplied as TF32 on a GPU.
        name: the network's; by default that of the module's class.
        open: inputs' extents that are known at run time only: by letter, T, D, H or W, the dimension's number, as
            {"z": {"H": 2, "W": 3}}; calls say them, `model(z, sizes={"H": 33, "W": 20})`, and sizes for which the
            module computes something else are refused.
    Raises:
        InputError: the module can't be traced, or can't be right on many ranks; an axis is no letter; an extent can't
            be open.
    Example:
        >>> import torch
        >>> net = from_torch(torch.nn.Conv2d(3, 8, 3, padding=1), (torch.zeros(4, 3, 8, 8),), grid="N=2,H=2")
        >>> shape, layout = net.NET.values["output"]
        >>> shape, str(layout)
        (('N', 8, 8, 8), '[N * H *]')
    """
    check_statistics(statistics)
    check_reduce_dtype(_name(reduce_dtype))
    check_autocast(_name(autocast))
    types = _name(reduce_dtype), _name(autocast)
    how = How(_axes(grid), algorithm, machine, statistics, *types, tuple(sorted(recompute)), target, _name(dtype))
    _, folder, files = _alone(question_of(module, example_inputs, name, open), how)
    warn_of_idle_axes(files[IDLE].decode())
    return load_package(folder, files=files)


def parallelize(
    module: torch.nn.Module,
    example_inputs: Inputs,
    mesh_or_grid: DeviceMesh | GridLike,
    algorithm: str | None = "auto",
    *,
    machine: str | None = None,
    whole: bool = True,
    parameters: str = "blocks",
    seed: int | None = None,
    weights: str = "same",
    statistics: str = "global",
    reduce_dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    recompute: Collection[str] = (),
    target: str | None = None,
    dtype: torch.dtype | str | None = None,
    name: str | None = None,
    process_group: ProcessGroup | None = None,
    shares: Mapping[str, Sequence[int]] | None = None,
    open: Opened | None = None,
) -> torch.nn.Module:
    """A module on many ranks, with the module's weights and in its mode. Every rank calls this.

    Args:
        example_inputs: as in `from_torch`.
        mesh_or_grid: a DeviceMesh whose axes are letters, or a grid, whose mesh is made of the process group.
        algorithm, machine: as in `from_torch`.
        whole: whether it takes whole tensors on every rank, as the module's forward does, and gives whole tensors, both
            in the module's own containers; else it is the package's Network, which takes and gives this rank's blocks.
        parameters: blocks: Blocks throughout, with which more training scripts run as they are (docs/torch.md, Training
            scripts); or dtensors, and Blocks where DTensor can't say the layout.
        seed: for dropout's masks and for noise; by default drawn from torch's generator of the first rank.
        weights: same: those of every rank's module, which have to be equal; rank 0: those of the mesh's first rank.
        statistics, reduce_dtype, autocast, recompute: as in `from_torch`.
        target: as in `from_torch`; by default what the mesh, or the process group, is for.
        dtype: as in `from_torch`; the module's values are converted when they are taken, the module stays as it is.
        process_group: whose ranks a grid's mesh is made of; by default the default one.
        shares: by axis of a mesh, a share for each rank, so that blocks have these proportions, as in a grid.
        open: as in `from_torch`; the network of a module in evaluation is then for evaluation alone. Whole tensors say
            their sizes themselves.
    Returns:
        An nn.Module with this rank's block of every parameter, under the module's own names; `load_full`,
        `full_state_dict` and `full_gradients` are those of a generated Network; `package` is its package. A call that
        differs from the example inputs in anything but tensors' values, the number of samples and open extents is
        refused.
    Raises:
        InputError: as in `from_torch`; or the ranks' modules have different weights.
        RuntimeError: there is no process group.
    """
    check_statistics(statistics)
    check_reduce_dtype(_name(reduce_dtype))
    check_autocast(_name(autocast))
    check_weights(weights, seed)
    axes, to = _where(mesh_or_grid, process_group, shares, target)
    types = _name(reduce_dtype), _name(autocast)
    how = How(axes, algorithm, machine, statistics, *types, tuple(sorted(recompute)), to, _name(dtype))
    prepared = together(
        question_of(module, example_inputs, name, open), how, ranks_of(mesh_or_grid, axes, process_group)
    )
    warn_of_idle_axes(prepared[2][IDLE].decode())
    mesh = mesh_of(prepared, mesh_or_grid, process_group)
    return on_mesh(module, prepared, how, mesh, whole=whole, parameters=parameters, weights=weights, seed=seed)


def how_of(
    mesh_or_grid: DeviceMesh | GridLike,
    algorithm: str | None,
    target: str | None,
    dtype: torch.dtype | str | None,
    process_group: ProcessGroup | None,
) -> How:
    """What to compile several graphs on one mesh for; arguments are those of `parallelize`."""
    axes, to = _where(mesh_or_grid, process_group, None, target)
    return How(axes, algorithm, None, "global", "", "", (), to, _name(dtype))


def _where(
    mesh_or_grid: DeviceMesh | GridLike,
    process_group: ProcessGroup | None,
    shares: Mapping[str, Sequence[int]] | None,
    target: str | None,
) -> tuple[dict[str, int], str]:
    """The axes, and the target."""
    given = isinstance(mesh_or_grid, (str, Mapping))
    if process_group is not None and not given:
        raise InputError("process_group= is what a grid's mesh is made of, and a mesh is given", hint="one of both")
    axes = _shared(_axes(mesh_or_grid) if given else _axes_of(mesh_or_grid), shares or {})
    return axes, target or target_of(process_group if given else mesh_or_grid)


def mesh_of(prepared: Prepared, mesh_or_grid: Any, process_group: ProcessGroup | None) -> Any:
    """The mesh that is given, or the one of a grid."""
    if not isinstance(mesh_or_grid, (str, Mapping)):
        return mesh_or_grid
    group = {} if process_group is None else {"process_group": process_group}
    return load_package(prepared[1], files=prepared[2]).init_mesh(**group)


Prepared = tuple[Answer, Path, dict[str, bytes]]  # what a module computes, its package's folder, and the files there


def on_mesh(
    module: torch.nn.Module,
    prepared: Prepared,
    how: How,
    mesh: Any,
    *,
    whole: bool = False,
    parameters: str = "blocks",
    weights: str = "same",
    seed: int | None = None,
) -> torch.nn.Module:
    """A package's network on a mesh, with the module's weights and in its mode."""
    made, folder, files = prepared
    package = load_package(folder, files=files)
    values = made.tensors | cast("dict[str, Tensor]", module.state_dict())
    met = meet(package, mesh, made.text, values, weights, seed)
    tensors = {n: met.of_first(t) for n, t in made.tensors.items()}
    if met.differ:
        folder = how.folder(made, tensors)
        files = kept(folder)
        if files is None:
            files = with_constants(package, tensors)
            folder = keep(folder, files)
        package = load_package(folder, files=files)
    call = Call(type(module).__name__, made.arguments, made.inputs, made.outputs, made.results)
    model: Any = model_class(package, call, whole=whole)(mesh, parameters=parameters)
    met.fill(model, values, tensors)
    return model.train(module.training)


def _exported(question: Question) -> Exported:
    """The graph of training, if it is that of evaluation too; else, and with open extents, that of the module's
    mode."""
    module, inputs = question.module, question.inputs
    how: dict[str, Any] = {"name": question.name, "source": f"{type(module).__module__}.{type(module).__qualname__}"}
    how |= {"opened": question.opened} if question.opened else {}
    if module.training or question.opened:
        return exported(module, inputs, **how)
    try:
        found = exported(module, inputs, training=True, **how)
    except InputError:
        found = None
    if found is not None and "eval" in found.graph.modes:
        return found
    return exported(module, inputs, training=False, **how)


def _name(dtype: torch.dtype | str | None) -> str:
    return str(dtype or "").removeprefix("torch.")


def _axes(grid: GridLike | None) -> dict[str, int]:
    if grid is None:
        import torch.distributed as dist

        return {"N": dist.get_world_size() if dist.is_initialized() else 1}
    if isinstance(grid, str):
        return parse_grid(grid, "N=2,H=2", "grid")
    return {axis: build_size(axis, given) for axis, given in grid.items()}


def _axes_of(mesh: Any) -> dict[str, int]:
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        fact = f"mesh_or_grid is a {type(mesh).__name__} without names of axes"
        raise InputError(fact, hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("N", "H")), or {"N": 2, "H": 2}')
    return dict(zip(names, mesh.shape, strict=True))


def _shared(axes: dict[str, int], shares: Mapping[str, Sequence[int]]) -> dict[str, int]:
    for axis, given in shares.items():
        if axis not in axes or axes[axis] != len(given):
            there = ", ".join(f"{a}={size_text(n)}" for a, n in axes.items())
            raise InputError(f"shares: {len(given)} of axis {axis}, and the axes are {there}", hint="a share a rank")
    return axes | {axis: build_size(axis, given) for axis, given in shares.items()}


def target_of(where: Any) -> str:
    """The target that a mesh or a process group is for; without one, the target of the default group."""
    import torch
    import torch.distributed as dist

    kind = getattr(where, "device_type", "")
    if not kind:
        where = where or (dist.group.WORLD if dist.is_initialized() else None)
        kinds = {device.type for device in getattr(where, "_device_types", ())}
        kind = "cuda" if "cuda" in kinds and "cpu" not in kinds else "cpu"
    if kind != "cuda":
        return "cpu"
    cuda: Any = torch.cuda
    found = cuda.get_device_properties()
    return f"hip:{found.gcnArchName.partition(':')[0]}" if torch.version.hip else f"cuda:sm_{found.major}{found.minor}"


def ranks_of(mesh_or_grid: Any, axes: Mapping[str, int], process_group: ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of a mesh, which meet before there is a mesh; none where they can't, or where there can be no mesh."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return ()
    if not isinstance(mesh_or_grid, (str, Mapping)):
        own = hasattr(mesh_or_grid, "_convgen_key")  # on a transport that isn't torch's
        ranks = () if own else tuple(mesh_or_grid.mesh.flatten().tolist())
    elif process_group is None or isinstance(process_group, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        ranks = tuple(dist.get_process_group_ranks(cast("Any", process_group or dist.group.WORLD)))
    else:
        ranks = ()
    return ranks if dist.get_rank() in ranks and len(ranks) == prod(axes.values()) else ()


def together(question: Question, how: How, ranks: Sequence[int]) -> Prepared:
    """Export and compile on one rank of each cache that lacks the answer; other ranks take what that rank has kept.

    Raises:
        InputError: what a rank that worked has found; raised on all ranks.
    """
    if len(ranks) < 2:
        return _alone(question, how)
    known = how.typed(question.known())
    folder = how.folder(known, known.tensors) if known is not None else None
    files = kept(folder) if folder is not None else None
    said = f"{question.key} {type(question.module).__qualname__} {how!r}"
    wanted = hashlib.sha256(said.encode()).hexdigest() if question.key else ""
    meeting = Meeting(question.called, ranks)
    states = meeting.states(State(wanted, files is not None, cache_identity(meeting.rank)))
    workers = meeting.workers(states)
    if meeting.rank in workers:
        found = meeting.work(lambda: _alone(question, how))
        meeting.wait(workers)
        return found
    meeting.wait(workers)
    if known is not None and folder is not None and files is not None:
        return known, folder, files
    return _alone(question, how)


def _alone(question: Question, how: How) -> Prepared:
    """The answer and the package, from the cache or made new."""
    answer = question.known()
    if answer is None:
        answer = answer_of(_exported(question))
        question.keep(answer)
    answer = how.typed(answer)
    folder = how.folder(answer, answer.tensors)
    files = kept(folder)
    if files is None:
        files = how.compiled(answer)
        folder = keep(folder, files)
    return answer, folder, files


@dataclass(frozen=True)
class How:
    """What to compile a graph for.

    Attributes:
        stored: by input, in order, the axes that split its dimensions; (): as the grid's letters say.
        caches: as a graph has them (streams.py).
    """

    axes: dict[str, int]
    algorithm: str | None
    machine: str | None
    statistics: str
    reduce_dtype: str
    autocast: str
    recompute: tuple[str, ...]
    target: str
    dtype: str
    stored: tuple[tuple[tuple[str, ...], ...], ...] = ()
    caches: tuple[str, ...] = ()

    def typed(self, answer: Found) -> Found:
        """The answer in the type that is asked for; None for none."""
        return answer if answer is None or not self.dtype else answer.of_type(self.dtype)

    @property
    def made_for(self) -> Target:
        return read_target(self.target).for_networks()

    def folder(self, answer: Answer, tensors: Mapping[str, Tensor]) -> Path:
        """The folder in which the package is kept."""
        chosen = load_machine(self.machine) if self.machine is not None else None
        key = (answer.text, tuple(self.axes.items()), self.algorithm, self.statistics, self.reduce_dtype, self.autocast)
        key = (*key, *([repr(chosen)] if chosen else []), *self.recompute, *([self.stored] if self.stored else []))
        key = (*key, *([("caches", self.caches)] if self.caches else []))
        target = self.made_for
        key = (*key, *([str(target), remembered(target).identity] if target.is_gpu else []), *["mesh"] * target.is_mesh)
        return cached(answer.name, key_of(key, tensors))

    def compiled(self, answer: Answer) -> dict[str, bytes]:
        """The package's files, with the lines about idle axes."""
        said = ", ".join(repr(one) for one in (self.axes, self.algorithm, self.machine) if one)
        said += f", statistics={self.statistics!r}" * (self.statistics != "global")
        said += f", reduce_dtype={self.reduce_dtype!r}" * bool(self.reduce_dtype)
        said += f", autocast={self.autocast!r}" * bool(self.autocast)
        said += f", recompute={[*self.recompute]}" * bool(self.recompute)
        said += f", target={self.target!r}" * self.made_for.has_programs
        said += f", dtype={self.dtype!r}" * bool(self.dtype)
        maker = (
            "criterion(...)"
            if self.stored
            else "stream(...)"
            if self.caches
            else f"from_torch(module, example_inputs, {said})"
        )
        stored = tuple(zip(answer.inputs, self.stored, strict=True)) if self.stored else ()
        compiled = compile_network(
            replace(answer.graph, stored=stored, caches=self.caches),
            Grid(tuple(self.axes.items())),
            self.algorithm,
            machine=load_machine(self.machine) if self.machine is not None else None,
            statistics=self.statistics,
            reduce_dtype=self.reduce_dtype,
            autocast=self.autocast,
            again=self.recompute,
            command=f"convgen.{maker}",
            target=self.made_for,
        )
        (compiled,), _ = with_measured_networks([compiled])
        return files_of(compiled, answer.tensors) | {IDLE: "\n".join(compiled.idle_lines).encode()}
