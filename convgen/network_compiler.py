"""From a network's graph to its package, on one screen.

| stage | in | out |
|---|---|---|
| read (spec/graph_file, spec/exported) | a graph file, or a PyTorch module | Graph: calls of ATen's operators |
| describe (spec/aten) | Graph | rows: operations bound to values |
| lay out (plan/letters, plan/program) | rows, a grid's letters or a machine | Program: roles, storage, what moves |
| overlap (plan/program/overlapped) | Program | communication overlaps where a timeline is shorter; or passes by name |
| fuse (passes/fuse_*) | Program | for a GPU, several rows as one where one kernel does them |
| emit (emit/network) | Program | the package's files |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.emit.network import NetworkInput, Package, Tf32, emit_network
from convgen.errors import InputError
from convgen.kernels.by_network import network_modules
from convgen.kernels.chains import ChainFile, chain_files
from convgen.kernels.config import Config
from convgen.kernels.norms import NormFile, norm_files
from convgen.kernels.of_rows import ConvolutionFile, Measured, convolution_files
from convgen.kernels.problem import Problem
from convgen.knobs import verify_schedules
from convgen.operations.row import Operation
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.bucket_statistics import BucketStatistics
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.contract import After, NetworkPass, run_passes, tell
from convgen.passes.fetch_caches import FetchCaches
from convgen.passes.fusing import FUSING
from convgen.passes.parameters_first import ParametersFirst
from convgen.passes.start_halos import StartHalos
from convgen.passes.widen_halos import WidenHalos
from convgen.plan.collection import without_collection
from convgen.plan.idle import idle_axes, idle_lines
from convgen.plan.letters import lay_out
from convgen.plan.parts import Parts, Tensor
from convgen.plan.program.annealed import further
from convgen.plan.program.by_timeline import by_timeline
from convgen.plan.program.edited import ProgramText, in_flight, laid_out, refuse_forms
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import NetworkPlan, check_ranks, nearer, plan_counted, plan_network, plan_on, scouted_s
from convgen.plan.program.refusal import refusal
from convgen.plan.program.search import TooLittleMemory
from convgen.plan.program.written import program_of
from convgen.plan.setting import Setting
from convgen.program.again import with_again
from convgen.program.network import Program
from convgen.program.other_sizes import for_any_extents, program_like
from convgen.program.verify.network import verify_network
from convgen.program.wide import numbers
from convgen.spec.aten.describe import Described, asks_on
from convgen.spec.aten.responses import with_responses
from convgen.spec.aten.sizes import AnySizes, for_any_sizes
from convgen.spec.graph import FLOATS, TFLOAT32, Graph, Module
from convgen.spec.graph_caches import joined_for_each
from convgen.spec.graph_edit import check_autocast, check_reduce_dtype
from convgen.spec.graph_modes import own_modes
from convgen.spec.graph_parts import check_statistics, normalised, parts_of, with_statistics
from convgen.spec.names import did_you_mean
from convgen.spec.network_plan import PlanFile
from convgen.spec.source import locate
from convgen.spec.target import CPU, KINDS, Target, read_target
from convgen.sw26010.network.refusals import check_mesh, check_whole

LETTERS = {1: ("N",), 2: ("N", "C"), 3: ("N", "C", "W"), 4: ("N", "C", "H", "W"), 5: ("N", "C", "D", "H", "W")}
# Passes for overlap, in an order in which each finds what it needs.
MEANWHILE: tuple[NetworkPass, ...] = (
    WidenHalos(), ChunkCollectives(), StartHalos(), ParametersFirst(), BucketGradients(),
    BucketStatistics(),
)  # fmt: skip
PACKED = (BucketGradients(mebibytes=0),)  # for an SW26010: one all-reduce behind backward ([SW] 5.1)
OVERLAP = "overlap"  # the stage that chooses among these passes by a timeline
PROGRAMS = ("lower", OVERLAP, *(p.name for p in (*MEANWHILE, *FUSING)))  # stages after which there is a program
OF_NUMBERS = {1: ("N",), 2: ("N", "W"), 3: ("N", "H", "W"), 4: ("N", "D", "H", "W")}  # of integers, which have no C


@dataclass(frozen=True)
class CompiledNetwork:
    """A network with every decision made.

    Attributes:
        plain: the program with every collective waited for at once.
        other: the same program at sizes that no other extent has; `more`: at further sizes, for a graph with open
            extents.
        any_sizes: the graph's rows, and the sizes for which they hold.
        measured: configurations of a GPU's kernels from the tuner's databases (tune/apply.py).
        any_extents: whether a GPU's kernels also serve other extents than the graph's; kernels of open extents always
            do.
        of_inputs: whether it was chosen for steps in which inputs want gradients, too.
    """

    graph: Graph
    described: Described
    plain: Program
    program: Program
    other: Program
    any_sizes: AnySizes
    algorithm: str | None
    target: Target = CPU
    command: str = ""
    measured: Measured = field(default_factory=dict[tuple[Problem, ...], Config])
    any_extents: bool = False
    of_inputs: bool = False

    @property
    def dtype(self) -> str:
        return _dtype(self.graph)

    @property
    def types(self) -> str:
        """Its type, and the type of the autocast that it is compiled for, in words."""
        return self.dtype + f" under autocast of {self.program.autocast}" * bool(self.program.autocast)

    @cached_property
    def kernels(self) -> tuple[ConvolutionFile, ...]:
        """Files of convolutions' kernels; none on a CPU, where ATen convolves."""
        if not self.target.is_gpu:
            return ()
        return convolution_files(
            self.program, self.target.known(), self.measured, self.any_extents or bool(self.graph.open)
        )

    @cached_property
    def norm_kernels(self) -> tuple[NormFile, ...]:
        """Files of batch norms' kernels; none on a CPU."""
        return norm_files(self.program) if self.target.is_gpu else ()

    @cached_property
    def chains(self) -> tuple[ChainFile, ...]:
        """Files of kernels for chains of rows element by element; none on a CPU."""
        return chain_files(self.program) if self.target.is_gpu else ()

    @property
    def _tf32(self) -> Tf32:
        """When float32 is multiplied as TF32: always, never, or as torch's switches say."""
        if self.program.tf32:
            return "always" if self.target.is_gpu else "never"
        has_float32 = any(v.dtype == "float32" for v in self.program.values.values())
        return "switches" if has_float32 and self.target.switches_tf32 else "never"

    @property
    def calls(self) -> tuple[int, ...]:
        """By row of the program, the number of the graph's call that it ends with."""
        return tuple(self.described.calls[i] for i in numbers(len(self.described.rows), self.program.joined))

    @property
    def idle_lines(self) -> list[str]:
        """Lines about axes that split nothing (plan/idle.py)."""
        return idle_lines(self.program, network_parts(self.graph, self.described), self.algorithm)

    @property
    def idle_axes(self) -> dict[str, str]:
        """Axes that split nothing, each with the reason."""
        return idle_axes(self.program, network_parts(self.graph, self.described), self.algorithm)

    def package(self, *, constants: bool = False) -> Package:
        """The generated files."""
        g = self.graph
        init = {v.name: v.init for v in (*g.parameters, *g.buffers)} | {v.name: "constant" for v in g.constants}
        norms, moded = own_modes(g)
        known = self.any_sizes
        init |= {n: "seed" for n, v in self.program.values.items() if v.kind == "buffer" and n not in init}
        return emit_network(
            NetworkInput(
                program=self.program,
                others=(self.other, *(program_like(self.program, one) for one in known.more)),
                sizes=known.sizes,
                letters=g.letters,
                extents=known.extents,
                conditions=g.conditions,
                dtype=self.dtype,
                device=self.target.device,
                sums="ordered",
                modes=g.modes,
                inputs=tuple(v.name for v in g.inputs),
                init=init,
                frozen=tuple(v.name for v in g.parameters if v.frozen),
                modules=g.modules or _modules(g),
                norms=norms,
                moded=moded,
                pairs=tuple(v.name for v in (*g.parameters, *g.buffers) if v.pairs),
                aliases=g.aliases,
                source=g.source,
                command=self.command,
                constants=constants,
                asks=asks_on(g, self.described, self.target.device),
                tf32=self._tf32,
                kernels=self.kernels,
                norm_kernels=self.norm_kernels,
                chains=self.chains,
                kernel_modules=network_modules(self.program) if self.target.is_gpu else {},
                last=self.target.memory_format(2) == "channels_last",
                on_mesh=self.target.is_mesh,
            )
        )


DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


def _modules(graph: Graph) -> tuple[Module, ...]:
    """For a file that names no modules: torch's own classes that have parameters or buffers, or drop elements."""
    found = {v.name.rpartition(".")[0]: v.owner for v in (*graph.parameters, *graph.buffers) if v.owner}
    drops = {c.module: c.kind for c in graph.calls if c.kind in DROPOUTS}
    return Module(""), *(Module(path, kind) for path, kind in (found | drops).items() if path)


def compile_network(
    graph: Graph,
    grid: Grid,
    algorithm: str | None = None,
    *,
    machine: Machine | None = None,
    statistics: str = "global",
    reduce_dtype: str = "",
    autocast: str = "",
    again: Collection[str] = (),
    command: str = "",
    of_inputs: bool = False,
    target: Target = CPU,
    passes: Sequence[NetworkPass] | None = None,
    after: Sequence[After] = (),
) -> CompiledNetwork:
    """Lay out a network by the letters of a grid, or by price.

    Args:
        algorithm: a named one; by default the one with the grid's letters; auto: the layout with the least modelled
            seconds that the search finds, whatever the axes are called.
        machine: for which overlap is chosen, and which `auto` models; by default one node of the target's kind.
        target: a CPU, or a GPU, whose convolutions are kernels.
        statistics: which batch norms have in training (spec/graph_parts.py): global, spatial or local.
        reduce_dtype: the type in which parameters' gradients are summed across ranks; by default each parameter's own.
        autocast: bfloat16 or float16: ranks will run it under torch.autocast of this type. The layout is chosen for
            that, and bytes, prices, memory and a GPU's kernels are of these types. It runs right under another, or
            none.
        again: blocks of the source that backward computes again (program/again.py).
        of_inputs: whether it is chosen for steps in which inputs want gradients, too.
        passes: choose the overlap, in this order, instead of the timeline; what they make is verified.
        after: called after each stage.
    Raises:
        InputError: no such algorithm, statistics, reduce_dtype or autocast, an operator that can't be run, or an axis
            that no dimension carries.
    """
    if algorithm not in (None, "auto", *ALGORITHMS):
        names = ("auto", *ALGORITHMS)
        hint = did_you_mean(str(algorithm), names, ", ".join(names))
        raise InputError(f"there is no algorithm {algorithm}", hint=hint)
    check_statistics(statistics)
    check_reduce_dtype(reduce_dtype)
    check_autocast(autocast)
    chosen = machine or load_machine(target.kind)
    graph, described, *_ = _described(joined_for_each(graph), target)
    if algorithm == "auto":
        room = Setting(machine=chosen).bounded
        parts = _parts(graph, described, statistics, target, reduce_dtype, autocast)._replace(of_inputs=of_inputs)
        program = plan_network(parts, [grid], chosen, _dtype(graph), room).program
    else:
        program = lay_out(network_parts(graph, described), grid, algorithm)
    graph, described, program = _with_statistics(graph, described, program, statistics, algorithm, target)
    program = with_again(replace(program, reduce_dtype=reduce_dtype, autocast=autocast), again)
    passes = PACKED if target.is_mesh and passes is None else passes
    meanwhile, named = _overlapping(chosen, _dtype(graph), of_inputs, passes), passes is not None
    made = _compiled(graph, described, program, algorithm, command, meanwhile, target, after, checked=named)
    return replace(made, of_inputs=of_inputs)


def _with_statistics(
    graph: Graph, described: Described, program: Program, statistics: str, algorithm: str | None, target: Target
) -> tuple[Graph, Described, Program]:
    """A graph whose batch norms have such statistics, by parts as the program splits them; and the program for it."""
    if statistics != "global":
        graph, described = _parted(graph, statistics, program, target)
        if algorithm != "auto":  # letters give the same layout, whatever statistics merge
            types = {"reduce_dtype": program.reduce_dtype, "autocast": program.autocast}
            program = replace(lay_out(network_parts(graph, described), program.grid, algorithm), **types)
    return graph, described, replace(program, statistics=statistics)


def _parted(graph: Graph, statistics: str, program: Program, target: Target) -> tuple[Graph, Described]:
    stored = {name: value.stored for name, value in program.values.items()}
    graph, described, *_ = _described(with_statistics(graph, statistics, stored, program.grid), target)
    return graph, described


def _parts(
    graph: Graph, described: Described, statistics: str, target: Target, reduce_dtype: str = "", autocast: str = ""
) -> Parts:
    """What a search is given of a network; it finds a layout, and statistics by parts that follow this layout."""

    known: dict[object, Parts] = {}
    names, types = normalised(graph), {"reduce_dtype": reduce_dtype, "autocast": autocast}

    def parted(program: Program, stays: bool) -> Parts:
        stored = {name: program.values[name].stored for name in names}
        by = tuple(parts_of(statistics, axes, program.grid) for axes in stored.values())
        if by not in known:
            known[by] = network_parts(*_parted(graph, statistics, program, target))
        fixed = {**known[by].fixed, **(stored if stays else {})}
        return known[by]._replace(fixed=fixed, parted=parted, **types)

    follows = statistics != "global" and names
    return network_parts(graph, described)._replace(parted=parted if follows else None, **types)


def compile_plan(
    graph: Graph,
    plan: PlanFile,
    *,
    overlap: Machine | None = None,
    reduce_dtype: str | None = None,
    autocast: str | None = None,
    command: str = "",
    target: Target = CPU,
    passes: Sequence[NetworkPass] | None = None,
    after: Sequence[After] = (),
) -> CompiledNetwork:
    """A network compiled as a plan's file lays it out.

    Args:
        overlap: the machine for which overlap is chosen.
        reduce_dtype, autocast: take the place of the plan's.
        passes, after: as `compile_network` takes them.
    Raises:
        InputError: the plan is another network's, its layouts can't work, or there is no such reduce_dtype or autocast.
    """
    reduce_dtype = plan.reduce_dtype if reduce_dtype is None else reduce_dtype
    autocast = plan.autocast if autocast is None else autocast
    check_reduce_dtype(reduce_dtype)
    check_autocast(autocast)
    graph = with_statistics(graph, plan.statistics, plan.values, plan.grid)
    graph, described, *_ = _described(graph, target)
    try:
        program = program_of(plan, network_parts(graph, described))
        program = replace(program, reduce_dtype=reduce_dtype, autocast=autocast)
    except InputError as error:
        raise locate(error, plan.source) from None
    passes = PACKED if target.is_mesh and passes is None else passes
    meanwhile = _overlapping(overlap or load_machine(target.kind), _dtype(graph), passes=passes)
    return _compiled(graph, described, program, "plan", command, meanwhile, target, after, checked=passes is not None)


def compile_text(graph: Graph, text: ProgramText, *, command: str = "", target: Target = CPU) -> CompiledNetwork:
    """A network compiled as its program's text says, edited or not (plan/program/edited.py).

    Raises:
        InputError: the text is another network's, can't work, or has a line that doesn't follow from the others.
    """
    try:
        graph = with_statistics(graph, text.statistics, text.values, text.grid)
    except InputError as error:
        raise locate(error, text.source()) from None
    if not target.reads_parts:
        refuse_forms(text)
    graph = replace(graph, tf32=graph.tf32 or (text.tf32 and _dtype(graph) == "float32"))
    graph, described, *_ = _described(graph, target)
    program = laid_out(text, network_parts(graph, described), fuses=target.is_gpu)

    def meanwhile(program: Program, after: Sequence[After]) -> Program:
        return in_flight(text, program)

    return _compiled(graph, described, program, "edited", command, meanwhile, target, fuses=False)


@without_collection()
def plan_graph(
    graph: Graph,
    ranks: int,
    setting: Setting,
    grid: Grid | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> tuple[CompiledNetwork, NetworkPlan]:
    """The layout of least modelled seconds of a training step, over grids of so many ranks or on one.

    Without a given grid, the plan may use fewer ranks and leave copies to the others (plan/fewer.py).

    Args:
        told: is called with each number of ranks that is planned.
    Raises:
        InputError: nothing that is searched fits the memory, or the ranks can't be used.
    """
    check_statistics(setting.statistics)
    if graph.given and setting.layouts:
        fact = f"{graph.name} says how rows are laid out, and no layouts near its plan are looked at"
        raise InputError(fact, graph.given[0].path, hint="without --layouts")
    if graph.given and grid is None:
        axes = sorted({a for one in graph.given for a in one.axes})
        fact = f"{graph.name} says how rows are laid out over {', '.join(axes)}, and not how many ranks these have"
        raise InputError(fact, graph.given[0].path, hint=f"--grid {','.join(f'{a}=2' for a in axes)}")
    machine, room, dtype = setting.machine, setting.bounded, setting.dtype or _dtype(graph)
    made_for = read_target(machine.name if machine.name in KINDS else "cuda") if setting.autocast else CPU
    graph, described, *_ = _described(graph, made_for)
    _refuse_autocast(graph, described, setting.autocast, made_for)
    parts = _parts(graph, described, setting.statistics, made_for, setting.reduce_dtype, setting.autocast)
    check_ranks(parts, grid, ranks)

    def on_one(grid: Grid, machine: Machine) -> NetworkPlan:
        return plan_on(parts, grid, ranks, machine, setting.machine, dtype, room, setting.recompute)

    try:
        if grid is not None:
            told(grid.ranks)
            plan = on_one(grid, machine)
        else:
            plan = plan_counted(parts, ranks, machine, dtype, room, setting.recompute, told)
        if setting.by_step:
            near = partial(nearer, ranks=ranks, machine=machine, dtype=dtype)

            def roughly(grid: Grid, machine: Machine) -> float:
                return scouted_s(parts, grid, machine, dtype, room, setting.recompute)

            plan = by_timeline(plan, on_one, near, roughly, machine, dtype)
            plan = further(plan, ranks, machine, dtype, setting.layouts)
    except TooLittleMemory as error:
        raise refusal(error, parts, ranks, graph.batch, setting, dtype) from None
    graph, described, program = _with_statistics(graph, described, plan.program, setting.statistics, "auto", made_for)
    plan = plan.checked(machine, dtype)
    return _compiled(graph, described, program, "auto", "", _overlapping(machine, dtype)), plan


def sample_parallelism(compiled: CompiledNetwork, ranks: int) -> Program | None:
    """The same network with samples alone split, over so many ranks; None where there are fewer samples than ranks."""
    if compiled.graph.batch < ranks:
        return None
    return by_samples(compiled, ranks)


def on_one_rank(compiled: CompiledNetwork) -> Program:
    """The same network on one rank."""
    return by_samples(compiled, 1)


def by_samples(compiled: CompiledNetwork, ranks: int) -> Program:
    """The same network with samples alone split, over no more ranks than there are samples."""
    grid, statistics = Grid((("N", ranks),)), compiled.program.statistics
    graph = replace(compiled.graph, given=(), stored=())
    program = lay_out(network_parts(graph, compiled.described), grid, "sample")
    of = compiled.program
    program = replace(program, reduce_dtype=of.reduce_dtype, autocast=of.autocast)
    return _with_statistics(graph, compiled.described, program, statistics, "sample", compiled.target)[2]


def _described(graph: Graph, target: Target) -> AnySizes:
    """A graph, and its rows for all sizes."""
    both = sorted({v.name for v in graph.inputs} & {name for name, _ in graph.outputs})
    if both:
        fact = f"{graph.name}: {both[0]} is an input and an output; scatter and gather know them by their names"
        raise InputError(fact, hint="another key in the mapping that forward returns")
    return _rows(graph, target)


def _rows(graph: Graph, target: Target) -> AnySizes:
    """The rows of a graph whose names are right, for all sizes."""
    known = for_any_sizes(graph, target.device)
    if not target.is_mesh:
        return known
    here, many, *more = (with_responses(known.graph, one) for one in (known.here, known.many, *known.more))
    return known._replace(here=here, many=many, more=tuple(more))


def _refuse_autocast(graph: Graph, described: Described, autocast: str, target: Target) -> None:
    """Refuse an autocast under which it is not known what the source computes."""
    if autocast and (why := dict(asks_on(graph, described, target.device)).get(autocast)):
        raise InputError(f"{graph.name}: not under autocast of {autocast}: {why}", hint="without --autocast, autocast=")


def _compiled(
    graph: Graph,
    described: Described,
    program: Program,
    algorithm: str | None,
    command: str,
    meanwhile: Callable[[Program, Sequence[After]], Program],
    target: Target = CPU,
    after: Sequence[After] = (),
    *,
    checked: bool = False,
    fuses: bool = True,
) -> CompiledNetwork:
    """
    Args:
        meanwhile: chooses what travels while ranks compute.
        target: a GPU's kernels take in the rows behind them; `fuses`: whether the program has yet to be fused so.
        checked: whether each stage is verified, whatever CONVGEN_VERIFY says.
    """
    _refuse_autocast(graph, described, program.autocast, target)
    known = _rows(graph, target)
    program = replace(program, tf32=graph.tf32)
    if target.is_mesh:
        check_mesh(program)
    if checked or verify_schedules():
        after = (_verifier(known.many), *(_verifier(one) for one in known.more), *after)
    tell(after, "choose", None)
    program = for_any_extents(program, known)
    program = FetchCaches(",".join(graph.caches)).run(program) if graph.caches else program
    tell(after, "lower", program)
    plain, program = program, meanwhile(program, after)
    if target.is_mesh:
        check_whole(program)
    if target.is_gpu and fuses:
        plain = run_passes(FUSING, plain, _run)
        program = run_passes(FUSING, program, _run, after)
    other = program_like(program, known.many)
    return CompiledNetwork(graph, described, plain, program, other, known, algorithm, target, command)


def _run(one: NetworkPass, program: Program) -> Program:
    return one.run(program)


def _verifier(many: Described) -> After:
    """What verifies the program that each stage leaves, with the blocks that it was laid out for."""

    def check(stage: str, program: Program | None) -> None:
        if program is not None:
            verify_network(program_like(program, many))

    return check


def _overlapping(
    machine: Machine, dtype: str, of_inputs: bool = False, passes: Sequence[NetworkPass] | None = None
) -> Callable[[Program, Sequence[After]], Program]:
    """What chooses overlap: a timeline, or these passes."""

    def meanwhile(program: Program, after: Sequence[After]) -> Program:
        if passes is not None:
            return run_passes(passes, program, _run, after)
        program = overlapped(program, machine, dtype, of_inputs=of_inputs)
        tell(after, OVERLAP, program)
        return program

    return meanwhile


def _dtype(graph: Graph) -> str:
    """The type that a network computes in: its products', or that of its first floating-point parameter or input."""
    if graph.tf32:
        return TFLOAT32
    return next((v.dtype for v in (*graph.parameters, *graph.inputs) if v.dtype in FLOATS), "float32")


def network_parts(graph: Graph, described: Described) -> Parts:
    """A network without a layout, as searches and named algorithms are given it."""
    inputs = {v.name for v in graph.inputs}
    tensors = [
        Tensor(t.name, t.shape, t.dtype, t.kind, _letters(t.shape, t.floats) if t.name in inputs else ())
        for t in described.tensors.values()
    ]
    stored = dict(graph.stored)
    rows = [replace(bound, operation=_one_of(bound.operation)) for bound in described.rows]
    return Parts(graph.name, tensors, rows, graph.updates, graph.outputs, stored, given=graph.given)


@lru_cache(maxsize=1 << 12)
def _one_of(operation: Operation) -> Operation:
    """One object for equal operations: they are keys of every cache, which compares them by their contents."""
    return operation


def _letters(shape: tuple[int, ...], floats: bool) -> tuple[str, ...]:
    found = (LETTERS if floats else OF_NUMBERS).get(len(shape), ())
    return found + ("",) * (len(shape) - len(found))
