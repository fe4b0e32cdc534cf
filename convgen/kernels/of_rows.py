"""Kernels of a network's convolutions on a GPU: the three phases of each local convolution of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from convgen.algebra.grid import Grid
from convgen.cost.flight_memory import parts_of
from convgen.kernels.choose import choose
from convgen.kernels.config import Config
from convgen.kernels.epilogues import keeps
from convgen.kernels.families import aten
from convgen.kernels.moments import moments_refusal
from convgen.kernels.norms import last_steps
from convgen.kernels.problem import LocalDim, Problem, Tiled
from convgen.kernels.prologue_gains import prologue_refusal
from convgen.kernels.prologues import Before
from convgen.kernels.source import Kernel, kernel_module
from convgen.operations.convolution import ADD, MAKES, READS, Convolution, LocalConvolution
from convgen.operations.gradient_sums import sums_taken
from convgen.operations.row import Epilogue, Operation
from convgen.program.behind_norms import norms_by_group
from convgen.program.forms import boxes
from convgen.program.lower import lower
from convgen.program.network import Program, label
from convgen.program.nodes import Phase
from convgen.program.norms import norms
from convgen.program.rows import PlacedRow, at_rank, index_sets
from convgen.spec.graph import FLOATS, TFLOAT32
from convgen.spec.target import Target

# The activation that a kernel can read in two places.
RIM_OF: Mapping[Phase, str] = {"forward": "x", "backward_data": "y", "backward_filter": "x"}
BESIDE = "_tf32"  # the end of a file's name whose products are TF32's
Measured = Mapping[tuple[Problem, ...], Config]  # tuned configurations, by the problems of all ranks


@dataclass(frozen=True)
class ConvolutionFile:
    """A file of kernels: those of one convolution, for all ranks.

    Attributes:
        held: the local convolutions of the ranks, those that differ.
        last: whether channels are last in memory.
        problems: for each kernel, its problems: one for each of `held`.
        uses: for each kernel, the rows that run it and its phase; a gradient's phase may have no rows.
        rim: the activation, x or y, that comes as a block and boxes around it; "" for none.
        switched: whether there are two files, with float32's products and with TF32's; torch's switch picks one at each
            call.
        open: whether the kernels take extents as arguments, and so serve ranks at other extents, too.
        epilogue: in a file of one kernel, the steps that it does behind its sum.
        masks: whether that kernel is backward-data's; else it is forward's.
        moments: in a file of forward's kernel alone, the tiles by which it also makes moments.
        before: in a file of one kernel, what it does with its operand before it multiplies.
    """

    name: str
    dtype: str
    held: tuple[LocalConvolution, ...]
    last: bool
    problems: tuple[tuple[Problem, ...], ...]
    uses: tuple[tuple[str, Phase], ...]
    target: Target
    measured: Measured = field(default_factory=dict[tuple[Problem, ...], Config], compare=False)
    epilogue: Epilogue = ()
    masks: bool = False
    rim: str = ""
    switched: bool = False
    open: bool = False
    moments: Tiled = ""
    before: Before | None = None

    @property
    def module(self) -> str:
        """The name by which a package knows the file; two files for float32 have one name."""
        return f"ByProducts({self.name}, {self.name}{BESIDE})" if self.switched else self.name

    @property
    def table(self) -> str:
        """The table (operations/convolution.py) in which a package has the file's kernels."""
        steps = "MASKED" if self.masks else "EPILOGUES" if self.epilogue else "RIMS" if self.rim else "KERNELS"
        return "PROLOGUES" if self.before else "MOMENTS" if self.moments else steps

    @property
    def torch_dtype(self) -> str:
        """The tensors' type, as torch names it."""
        return "float32" if self.dtype == TFLOAT32 else self.dtype

    def multiplied_as_tf32(self) -> ConvolutionFile:
        problems = tuple(tuple(replace(p, dtype=TFLOAT32) for p in one) for one in self.problems)
        return replace(self, dtype=TFLOAT32, problems=problems)

    @property
    def keeps(self) -> bool:
        """Whether a caller may also ask for the sum before the epilogue."""
        return keeps(self.epilogue)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels: measured configurations, else defaults. For any extents none is ATen's, whose algorithm would be
        searched for at each."""
        known = {p: c for p, c in self.measured.items() if not (self.open and c.family == aten.NAME)}
        plain = [tuple(replace(p, moments="") for p in one) for one in self.problems]
        made = (Kernel(p, known[p], self.target) if p in known else choose(p, self.target) for p in plain)
        return tuple(replace(one, problems=of, open=self.open) for one, of in zip(made, self.problems, strict=True))

    @cached_property
    def text(self) -> str:
        p, names = self.kernels[0].problem, "\n".join(str(k.config) for k in self.kernels)
        rows = ", ".join(f"{d.x} rows of x, {d.y} of y, {d.kernel} taps, stride {d.stride}" for d in p.dims)
        groups = f" in each of {p.groups} groups" if p.groups > 1 else ""
        channels, filters = p.channels * p.x_parts, p.filters * p.y_parts
        extents = " Extents are arguments; sizes are for these." if self.open else ""
        said = f"{channels} channels to {filters} filters{groups}; {rows}; {p.dtype}, {p.memory_format}.{extents}"
        head = f'# Generated by convgen for the network beside it.\n"""{said}'
        return f'{head}\n\n{names}\n"""\n\n# ruff: noqa\n{kernel_module(self.kernels)}'


class OfRow(NamedTuple):
    """A convolution of a program.

    Attributes:
        row: its name.
        phases: the phases that ranks run.
        held: the ranks' local convolutions, with their numbers of samples.
        steps: the operations behind it that its kernel does, by name.
        masks: whether these are the gradient of the steps before it, behind backward-data.
        rim: the activation that comes as a block and boxes around it, and the most boxes on a rank.
        moments: the tiles by which a norm wants moments of the result, if that stays where it is made.
        before: by phase, a norm's last step on the phase's first operand.
    """

    row: str
    phases: tuple[Phase, ...]
    dtype: str
    held: list[tuple[LocalConvolution, int]]
    epilogue: Epilogue
    steps: str
    masks: bool
    rim: tuple[str, int] = ("", 0)
    moments: Tiled = ""
    before: Mapping[Phase, Before] = MappingProxyType({})


def convolution_files(
    program: Program, target: Target, measured: Measured | None = None, open: bool = False
) -> tuple[ConvolutionFile, ...]:
    """Files for the convolutions of a program on a GPU; convolutions that are alike share one.

    A rank whose block cuts groups has none: ATen convolves there.

    Args:
        measured: tuned configurations, which replace the defaults.
        open: whether the files serve other extents than the program's, too.
    """
    alike: dict[tuple[str, tuple[LocalConvolution, ...], str], list[OfRow]] = {}
    most: dict[str, int] = {}  # kernels that ranks of several rows share take the boxes of any of them
    for one in local_convolutions(program):
        tensor, count = one.rim
        most[tensor] = max(count, most.get(tensor, 0))
        alike.setdefault((one.dtype, tuple(dict.fromkeys(local for local, _ in one.held)), tensor), []).append(one)
    found: list[ConvolutionFile] = []
    for number, ((dtype, held, rim), rows) in enumerate(alike.items(), 1):
        last = target.memory_format(len(held[0].dims)) == "channels_last"
        batch = max(n for row in rows for _, n in row.held)
        # Rows of other extents may share an open file.
        run = {phase for row in rows for phase in row.phases} if rim and not open else {*READS}
        problems: dict[Phase, tuple[Problem, ...]] = {}
        for phase in READS:
            if phase in run:
                count = most[rim] if rim == RIM_OF[phase] else None
                made = (problem_of(one, phase, batch, dtype, last) for one in held)
                problems[phase] = tuple(replace(one, rim=count) for one in made)
        behind: dict[tuple[Epilogue, bool], list[OfRow]] = {}
        plain: list[tuple[str, Phase]] = []
        for row in rows:
            if row.epilogue:
                behind.setdefault((row.epilogue, row.masks), []).append(row)
            own = _with_steps(row.masks) if row.epilogue else ""
            plain.extend((row.row, phase) for phase in row.phases if phase != own)
        name, uses, rest = f"convolution_{number}", tuple(dict.fromkeys(plain)), (target, measured or {})
        found.append(
            ConvolutionFile(name, dtype, held, last, tuple(problems.values()), uses, *rest, rim=rim, open=open)
        )
        for n, ((epilogue, masks), of) in enumerate(behind.items(), 1):
            phase = _with_steps(masks)
            made = (tuple(replace(p, epilogue=epilogue) for p in problems[phase]),)
            rows_of: dict[tuple[str, Phase], None] = {(row.row, phase): None for row in of if phase in row.phases}
            file = f"{name}_{of[-1].steps}_{n}"
            found.append(
                ConvolutionFile(file, dtype, held, last, made, tuple(rows_of), *rest, epilogue, masks, rim, open=open)
            )
        normed: dict[Epilogue, list[OfRow]] = {}
        for row in rows:
            if row.moments and not open:
                normed.setdefault(row.epilogue, []).append(row)
        for n, (epilogue, of) in enumerate(normed.items(), 1):
            tiled: Tiled = "samples" if any(row.moments == "samples" for row in of) else "batch"
            made = (tuple(replace(p, epilogue=epilogue, moments=tiled) for p in problems["forward"]),)
            forward: tuple[tuple[str, Phase], ...] = tuple((row.row, "forward") for row in of)
            file = f"{name}_{of[-1].steps}_moments_{n}" if epilogue else f"{name}_moments"
            one = ConvolutionFile(file, dtype, held, last, made, forward, *rest, epilogue, rim=rim, moments=tiled)
            kernels = [k for file in _by_products(one, target, always=program.tf32) for k in file.kernels]
            found.extend([] if any(moments_refusal(k.problem, k.config) for k in kernels) else [one])
        if not (open or rim):
            of_file = ConvolutionFile(name, dtype, held, last, (), (), *rest)
            found.extend(_behind_norms(of_file, rows, problems, target))
    return tuple(one for file in found for one in _by_products(file, target, always=program.tf32))


def _behind_norms(
    of: ConvolutionFile, rows: Sequence[OfRow], problems: Mapping[Phase, tuple[Problem, ...]], target: Target
) -> Iterator[ConvolutionFile]:
    """Files of kernels that also do norms' last steps, where that pays; those of forward make moments of their
    results."""
    alike: dict[tuple[Phase, Epilogue, Tiled, Before], dict[tuple[str, Phase], None]] = {}
    for row in rows:
        for phase, before in row.before.items():
            if (phase == "forward" and row.moments) or phase == "backward_data":
                tiled: Tiled = row.moments if phase == "forward" else ""
                alike.setdefault((phase, row.epilogue, tiled, before), {})[row.row, phase] = None
    for n, ((phase, epilogue, tiled, before), uses) in enumerate(alike.items(), 1):
        made = tuple(replace(p, epilogue=epilogue, moments=tiled, before=before) for p in problems[phase])
        file = replace(
            of, name=f"{of.name}_behind_norm_{n}", problems=(made,), uses=tuple(uses), epilogue=epilogue,
            masks=phase == "backward_data", moments=tiled, before=before,
        )  # fmt: skip
        refused = [prologue_refusal(k.problem, k.config, target) for k in file.kernels]
        refused += [moments_refusal(k.problem, k.config) for k in file.kernels if tiled]
        if not any(refused):
            yield file


def _by_products(file: ConvolutionFile, target: Target, *, always: bool) -> tuple[ConvolutionFile, ...]:
    """The files that ranks choose from.

    Args:
        always: whether float32 is multiplied as TF32 whatever torch's switches say.
    """
    if file.dtype != "float32":
        return (file,)
    tf32 = file.multiplied_as_tf32()
    if always:
        return (tf32,)
    if not target.switches_tf32:
        return (file,)
    return replace(file, switched=True), replace(tf32, name=f"{file.name}{BESIDE}", switched=True)


def _with_steps(masks: bool) -> Phase:
    """The phase whose kernel has steps behind it."""
    return "backward_data" if masks else "forward"


def local_convolutions(program: Program) -> Iterator[OfRow]:
    """The convolutions of a program, rows of gradients included, whether computed at once or piece by piece, with the
    problems of ranks that have something to convolve."""
    adding, before_norms, behind = _adding(program), _before_norms(program), last_steps(program)
    for row, types in zip(program.rows, program.row_types, strict=True):
        dtype = next(reversed(types.fetch[:2]), "")  # of its weights, as autocast takes them
        if dtype not in FLOATS:
            continue
        of_rows = {conv.phase for _, one in row.derived for conv in _convolutions(one, program.grid)}
        for placed in (row, *(one for _, one in row.derived)):
            operation = placed.bound.operation
            back: list[Phase] = [phase for phase in MAKES if phase not in of_rows and placed is row]
            of_ranks: list[list[tuple[LocalConvolution, int]]] = []
            phases: list[tuple[Phase, ...]] = []
            for rank in range(program.grid.ranks):
                for part in parts_of(placed, program.grid, rank):
                    for k, (conv, way, here) in enumerate(operation.convolutions(placed.way, part.at)):
                        if k == len(of_ranks):
                            of_ranks.append([])
                            phases.append((conv.phase, *(phase for phase in back if phase != conv.phase)))
                        one, (lo, hi) = conv.convolved(way, here), here.inside[0][0]
                        if one is not None and hi > lo and is_something(one):
                            of_ranks[k].append((one, hi - lo))
            done, masks, steps = operation.kernel_steps
            for held, run in zip(of_ranks, phases, strict=True):
                if held:
                    rim = _rim(placed, run[0], program.grid)
                    makes = placed is row and run[0] == "forward" and not masks
                    normed: Tiled = before_norms.get(label(row), "") if makes else ""
                    adds = not rim[0] and _key(row, placed) in adding and not masks
                    before = behind.get(label(row), {}) if makes and not done else {}
                    first: dict[Phase, Before] = {k: of for k, of in before.items() if k == "forward" or not adds}
                    yield OfRow(label(row), run, dtype, held, done, steps, masks, rim, normed, first)
                    if adds:
                        rest: dict[Phase, Before] = {k: of for k, of in before.items() if k != "forward"}
                        yield OfRow(label(row), ("backward_data",), dtype, held, ADD, "sum", True, before=rest)


def _adding(program: Program) -> set[str]:
    """Keys of the steps whose kernels add another gradient to the one that they make."""
    rows: dict[str, tuple[Operation, bool]] = {}
    for row in program.rows:
        rows[label(row)] = row.bound.operation, True
        rows |= {_key(row, one): (one.bound.operation, False) for _, one in row.derived}
    lines = lower(program).backward

    def may_add(n: int) -> bool:
        operation, is_vjp = rows.get(lines[n].key, (None, False))
        kind = "vjp" if is_vjp else "forward"
        return operation is not None and lines[n].kind == kind and not lines[n].again and operation.may_add(is_vjp)

    return {lines[taken.maker].key for taken in sums_taken(lines, may_add)}


def _before_norms(program: Program) -> dict[str, Tiled]:
    """By label of a row, the tiles by which a norm takes moments of its result where that is made."""
    makers = {row.bound.makes[0]: row for row in program.rows if len(row.bound.makes) == 1}
    of_batches = [program.rows[norm.moments] for norm in norms(program)[0].values()]
    of_samples = [moments for moments, _ in norms_by_group(program) if moments.way == 0]
    found: dict[str, Tiled] = {}
    for n, moments in enumerate((*of_batches, *of_samples)):
        maker = makers.get(moments.bound.reads[0])
        if maker is not None and not (moments.fetch[0] or maker.store[0] or maker.is_cut or moments.is_cut):
            found[label(maker)] = "batch" if n < len(of_batches) else "samples"
    return found


def _key(row: PlacedRow, placed: PlacedRow) -> str:
    """The key of the steps of a row, or of its gradient's row."""
    of = next((k for k, one in row.derived if one is placed), None)
    return label(row) if of is None else f"{label(row)}.d{row.signature.inputs[of].name}"


def _rim(row: PlacedRow, phase: Phase, grid: Grid) -> tuple[str, int]:
    """The activation that comes with a rim in a kernel's phase, and the number of boxes on the rank that has most."""
    for c in (chain[-1] for chain in row.fetch if chain and chain[-1].form == "rim"):
        count = boxes(index_sets(row.signature, grid), c.src, c.dst, c.over)
        assert count is not None
        return RIM_OF[phase], int(count.max())
    return "", 0


def _convolutions(row: PlacedRow, grid: Grid) -> Iterator[Convolution]:
    return (conv for conv, *_ in row.bound.operation.convolutions(row.way, at_rank(row, grid, 0)))


def is_something(one: LocalConvolution) -> bool:
    return min(one.channels, one.filters, one.groups, *(min(d[:2]) for d in one.dims)) > 0


def problem_of(one: LocalConvolution, phase: Phase, batch: int, dtype: str, last: bool) -> Problem:
    """A phase of a local convolution as kernels take it."""
    names = "DHW"[-len(one.dims) :]
    return Problem(
        phase=phase,
        batch=batch,
        channels=one.channels // one.x_parts,
        filters=one.filters // one.y_parts,
        groups=one.groups,
        dims=tuple(LocalDim(name, *d[:5], below=d[5]) for name, d in zip(names, one.dims, strict=True)),
        dtype=dtype,
        memory_format="channels_last" if last else "contiguous",
        x_parts=one.x_parts,
        y_parts=one.y_parts,
    )
