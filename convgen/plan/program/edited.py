"""A network's program from its text, as it was printed or as a person has edited it.

What a text decides is how values are stored, ways and roles, which gradients have rows of their own, which blocks are
computed again, which rows are one, what travels in pieces or meanwhile. The rest follows: the program is made of these
as a plan's is, verified, printed, and compared with the text line by line. So what is compiled is what the text says,
or it is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.notation import axes_of, entries_of, is_one_each, roles_of
from convgen.algebra.redistribute import COLLECTIVES, Form
from convgen.errors import InputError, Note
from convgen.free_memory import check_memory
from convgen.operations.bound import Bound
from convgen.operations.fused import Fused
from convgen.passes.bucket_gradients import summed_parameters
from convgen.passes.widen_halos import may_go_ahead
from convgen.plan.parts import Parts
from convgen.plan.program.written import program_of
from convgen.program.again import stretches, with_again
from convgen.program.chunks import chunk_faults
from convgen.program.early import early_faults, interior_rows
from convgen.program.flow import Start, never_asked
from convgen.program.forms import ended, part_faults, rim_faults
from convgen.program.network import Bucket, Moved, Program, Stretch, Value, label
from convgen.program.network_text import BACKWARD, FORWARD, KINDS, PRODUCTS, SECTIONS, head, show
from convgen.program.norms import summed_statistics
from convgen.program.rows import Chunks, PlacedRow, place
from convgen.program.shared import could_hold, shares
from convgen.program.text import grid_of
from convgen.program.verify.network import faults
from convgen.program.wide import Group, among, chains, joined, joined_rows, numbers
from convgen.program.wide import faults as joining_faults
from convgen.spec.graph_edit import check_autocast, check_reduce_dtype
from convgen.spec.graph_parts import check_statistics
from convgen.spec.network_plan import PlanFile, Roles, RowPlan
from convgen.spec.source import KeyPath, Source, locate
from convgen.spec.text import shown

HINT = "convgen compile GRAPH --emit schedule prints a program that is right"
SHOWN = 40  # lines of a difference
_HEAD = re.compile(r"network (\w+) on grid\((.*)\) \{")
_VALUE = re.compile(rf"(?:{'|'.join(KINDS)}) (\S+)\[(.*)\]")
_TYPE = re.compile(r"([^\s,\[\]]+)\[([^\]]*)\]")
_MADE = re.compile(r"(%\S+(?:, %\S+)*) = .* : (.+)")
_MOVE = re.compile(rf"%\S+ = (?:start )?(?:{'|'.join(('slice', *COLLECTIVES))})(?: add| merge)? %.*")
_STARTED = re.compile(r"%(\S+) = start .* : .*")
_FORM = re.compile(r"%([^\s:]+)(?::\d+)? = \w+ .* as=(rim|parts) : .*")
_BUCKET = re.compile(r"%(bucket_\w+) = start all_reduce (%\S+(?:, %\S+)*) over=(\S+)")
_STATISTICS = re.compile(_BUCKET.pattern.replace("bucket_", "statistics_"))
_PART = r"interior|boundary|chunk [0-9]{1,6}/[0-9]{1,6} of \w+"
_ROW = re.compile(rf"(?: way=([0-9]{{1,4}}))?(?: ({_PART}))?(?: \{{(.*)\}})?(?: :.*)?")
_GRADIENT = re.compile(r"%(\S+) = (\S+) gradient((?: .*)?)")

Numbered = tuple[int, str]  # a line, without comments and without the spaces that align it


@dataclass(frozen=True)
class ProgramText:
    """A text, as far as it can be read without the network.

    Attributes:
        values: how each is stored, by name.
        lines: all, and those of each section.
        numbers: by a plan file's path of keys, the number of the line that says the same.
    """

    file: str
    name: str
    grid: Grid
    statistics: str
    reduce_dtype: str
    autocast: str
    tf32: bool
    again: tuple[str, ...]
    values: Mapping[str, tuple[Axes, ...]]
    lines: Sequence[Numbered]
    sections: Mapping[str, Sequence[Numbered]]
    numbers: dict[KeyPath, int]

    def source(self) -> Source:
        return Source(self.file, self.numbers)

    def refused(self, number: int, fact: str, hint: str = HINT, notes: tuple[Note, ...] = ()) -> InputError:
        return InputError(fact, notes=notes, hint=hint, where=f"{self.file}:{number}")


@dataclass(frozen=True, slots=True)
class _Said:
    """What a row's lines say of it.

    Attributes:
        parts: as they are written, such as `chunk 1/2 of N`.
    """

    number: int
    way: int
    roles: Roles
    parts: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A fact that can't be, and the number of the line that says it."""

    number: int
    fact: str


# ---------------------------------------------------------------- without the network
def read_text(text: str, file: str) -> ProgramText:
    """A program's text.

    Raises:
        InputError: it can't be read; says file and line.
    """
    lines = [(n, line) for n, raw in enumerate(text.splitlines(), 1) if (line := _plain(raw))]

    def bad(number: int, line: str, wanted: str) -> InputError:
        return InputError(f"cannot read {shown(line, 300)}", hint=wanted, where=f"{file}:{number}")

    first, opening = lines[0] if lines else (1, "")
    match = _HEAD.fullmatch(opening)
    if match is None:
        raise bad(first, opening, "network NAME on grid(axis=ranks, ...) {: the text of a network's program")
    try:
        grid = grid_of(match[2], first, opening)
    except InputError as error:
        raise bad(first, opening, error.hint) from None
    if len(grid.names) != len(set(grid.names)):
        raise bad(first, opening, "each axis once")
    said, tf32, again, section = (
        {"statistics": "global", "reduce_dtype": "", "autocast": ""},
        False,
        tuple[str, ...](),
        "",
    )
    values: dict[str, tuple[Axes, ...]] = {}
    sections: dict[str, list[Numbered]] = {name: [] for name in SECTIONS}
    numbers: dict[KeyPath, int] = {(): first}

    def stored(number: int, line: str, name: str, entries: str) -> None:
        found = entries_of(entries)
        if found is None or not is_one_each(found, grid.names):
            wanted = f"an entry a dimension, each axis once, as in [a, *, (b,c)]; axes are {', '.join(grid.names)}"
            raise bad(number, line, wanted)
        values[name], numbers["values", name] = found, number

    for number, line in lines[1:]:
        key, _, rest = line.partition(": ")
        if line in SECTIONS:
            section, numbers["sections", line] = line, number
        elif not section and key in said:
            said[key], numbers[key,] = rest, number
        elif not section and line == PRODUCTS.strip():
            tf32 = True
        elif not section and key == "again":
            again, numbers["again",] = tuple(rest.split(", ")), number
        elif not section and (match := _VALUE.fullmatch(line)):
            stored(number, line, match[1], match[2])
        elif section and line.startswith(("%", "wait %")):
            sections[section].append((number, line))
            if section == FORWARD and (match := _MADE.fullmatch(line)):
                made = [v for v in match[1].replace("%", "").split(", ") if v != "_"]
                types = _TYPE.findall(match[2])
                if [name for name, _ in types] == made and made[0] not in values:
                    for name, entries in types:
                        stored(number, line, name, entries)
        elif line != "}" and not (section and line.startswith(("update %", "return "))):
            raise bad(number, line, "a value, a section, or a step of one")
    if lines[-1][1] != "}":
        raise bad(*lines[-1], "a closing brace ends the text")
    checks = check_statistics, check_reduce_dtype, check_autocast
    for (key, word), check in zip(said.items(), checks, strict=True):
        try:
            check(word)
        except InputError as error:
            raise locate(InputError(error.fact, (key,), hint=error.hint), Source(file, numbers)) from None
    try:
        check_memory(64 * grid.ranks**2, f"verifying a program on {grid.ranks} ranks", "a smaller grid")
    except InputError as error:
        raise locate(error, Source(file, numbers)) from None
    return ProgramText(
        file,
        opening.split()[1],
        grid,
        said["statistics"],
        said["reduce_dtype"],
        said["autocast"],
        tf32,
        again,
        values,
        lines,
        sections,
        numbers,
    )


def _plain(line: str) -> str:
    return " ".join(line.split("#")[0].split())


# ---------------------------------------------------------------- laid out
def laid_out(text: ProgramText, parts: Parts, *, fuses: bool = False) -> Program:
    """The program with the text's layout, every collective waited for at once.

    Args:
        fuses: whether the target has kernels for a chain of rows element by element as one row.
    Raises:
        InputError: it is another network's, or a layout can't work.
    """
    if text.name != parts.name:
        fact = f"a program of {text.name}, and the network is {parts.name}"
        raise text.refused(text.numbers[()], fact, "the text and the graph of one network")
    each, groups = _rows(text, parts.rows)
    _refuse_apart(text, parts, groups, fuses)
    bounds = joined_rows(parts.rows, list(groups))
    inner = {v for group in groups for i in group[:-1] for v in parts.rows[i].makes}
    own = _gradients(text, bounds)
    rows: list[RowPlan] = []
    for i, (bound, said) in enumerate(zip(bounds, each, strict=True)):
        text.numbers["rows", i] = said.number
        derived = [(name, own[i, name]) for name in bound.operation.gradients if (i, name) in own]
        for name, one in derived:
            text.numbers["rows", i, "gradients", name] = one.number
        rows.append(RowPlan(_label(bound), said.way, said.roles, tuple((n, o.way, o.roles) for n, o in derived)))
    plan = PlanFile(text.name, "", text.grid, text.values, tuple(rows), statistics=text.statistics)
    tensors = [t for t in parts.tensors if t.name not in inner]
    try:
        program = program_of(plan, parts._replace(tensors=tensors, rows=bounds), bare=False)
        again = _again(text, parts, program, [*groups])
    except InputError as error:
        raise locate(InputError(error.fact, error.path, error.notes, error.hint or HINT), text.source()) from None
    joined = tuple(sorted(groups))
    return replace(program, joined=joined, again=again, reduce_dtype=text.reduce_dtype, autocast=text.autocast)


def _again(text: ProgramText, parts: Parts, program: Program, groups: Sequence[Group]) -> tuple[Stretch, ...]:
    """The blocks that are computed again. They are the network's, which are larger where rows are one.

    Raises:
        InputError: the network has no such block.
    """
    left = numbers(len(parts.rows), groups)
    placed = dict(zip(left, program.rows, strict=True))
    inside = {i for group in groups for i in group}
    rows = [_whole(bound, text.grid) if i in inside else placed[i] for i, bound in enumerate(parts.rows)]
    return among(with_again(replace(program, rows=tuple(rows)), text.again).again, left)


def _label(bound: Bound) -> str:
    return next(filter(None, bound.makes), bound.operation.name)


def _rows(text: ProgramText, rows: Sequence[Bound]) -> tuple[list[_Said], dict[Group, int]]:
    """What the text says of each row; and groups of the network's rows that are one in it, each with its line."""
    found: dict[int, _Said] = {}
    groups: dict[Group, int] = {}
    missed: dict[int, Numbered] = {}  # rows that no line is of, with the line behind them
    late = _late(text, rows)
    heads = [head(bound) for bound in rows]
    makes = {start.partition(" = ")[0]: i for i, start in enumerate(heads)}
    at, last = 0, ""  # the next row, and how the line of the last begins
    for number, line in text.sections[FORWARD]:
        i = makes.get(line.partition(" = ")[0], -1)
        group = _group(line, rows, i, at)
        if last and _begins(line, last):
            found[at - 1].parts.extend(_said(text, number, line, line.removeprefix(last)).parts)
        elif i in late and i not in found and _begins(line, heads[i]):
            found[i], last = _said(text, number, line, line.removeprefix(heads[i])), ""
        elif group is not None:
            end = group[-1]
            missed |= {i: (number, line) for i in range(at, end) if i not in late}
            at, last = end + 1, heads[end]
            if len(group) > 1:
                last, groups[group] = head(joined([rows[i] for i in group])), number
            found[end] = _said(text, number, line, line.removeprefix(last))
        elif not line.startswith("wait ") and not _MOVE.fullmatch(line):
            raise _no_row(text, number, line, heads[at] if at < len(rows) else "")
    for i in sorted(set(missed) - {i for group in groups for i in group}):
        raise _no_row(text, *missed[i], heads[i])
    if rest := [i for i in (*range(at, len(rows)), *sorted(late)) if i not in found]:
        number = text.numbers.get(("sections", BACKWARD), text.lines[-1][0])
        fact = f"forward ends before all rows of {text.name} are there"
        raise text.refused(number, fact, f"the next is {heads[rest[0]]!r}")
    return [found[i] for i in sorted(found)], groups


def _late(text: ProgramText, rows: Sequence[Bound]) -> set[int]:
    """Rows that read statistics that travel in forward's buckets: they stand behind all others, after the wait."""
    packed = [m[2] for _, line in text.sections[FORWARD] if (m := _STATISTICS.fullmatch(line))]
    there = {step for steps in packed for step in steps.replace("%", "").split(", ")}
    return {i for i, bound in enumerate(rows) if not there.isdisjoint(bound.reads)}


def _no_row(text: ProgramText, number: int, line: str, following: str) -> InputError:
    there = f"its next row is {following!r}" if following else "all of its rows stand above"
    return text.refused(number, f"no row of {text.name}: {line!r}", f"rows are the graph's, in order: {there}")


def _group(line: str, rows: Sequence[Bound], last: int, least: int) -> Group | None:
    """The row that a line shows, or the rows up to it that are one row there, each reading what the one before makes.

    Args:
        least: the first row that it can end with.
    """
    if last < least:
        return None
    makers = {v: i for i, bound in enumerate(rows[:last]) for v in bound.makes if v}
    open_ones: list[Group] = [(last,)]
    while open_ones:
        group = open_ones.pop()
        one = rows[last] if len(group) == 1 else joined([rows[i] for i in group])
        if _begins(line, head(one)):
            return group
        word = line.partition(" = ")[2].partition(" ")[0]
        if word.endswith(f"_{one.operation.name}"):
            open_ones += [(makers[v], *group) for v in rows[group[0]].reads if v in makers]
    return None


def _refuse_apart(text: ProgramText, parts: Parts, groups: Mapping[Group, int], fuses: bool) -> None:
    """Raises InputError: rows are one in the text that can't be one."""
    if not groups:
        return
    rows = [_whole(bound, text.grid) for bound in parts.rows]
    values = {t.name: Value(t.name, t.shape, t.dtype, ((),) * len(t.shape), t.kind) for t in parts.tensors}  # type: ignore[arg-type]
    program = Program(
        name=text.name, grid=text.grid, values=values, rows=tuple(rows), updates=tuple(parts.updates),
        outputs=tuple(parts.outputs),
    )  # fmt: skip
    again = tuple(s for s in stretches(program) if s.path in text.again)
    known = chains(replace(program, again=again))
    readers = Counter(v for bound in parts.rows for v in bound.reads)
    kept = {v for _, v in (*parts.outputs, *parts.updates)}
    for group, number in groups.items():
        one = joined([parts.rows[i] for i in group])
        assert isinstance(one.operation, Fused)
        if fuses and one.operation.chain is not None:  # element by element
            inner = [parts.rows[i].makes[0] for i in group[:-1]]
            alike, faults = all(readers[v] == 1 and v not in kept for v in inner), iter(())
        else:
            alike = any(group == chain[n : n + len(group)] for chain in known for n in range(len(chain)))
            faults = joining_faults(one.operation)
        found = [] if alike else ["more reads what lies between, or it is no row by row"]
        for fault in found or faults:
            raise text.refused(number, f"rows can't be one: {fault}: {head(one)!r}")


def _whole(bound: Bound, grid: Grid) -> PlacedRow:
    """A row that every rank computes whole."""
    signature = bound.operation.signatures[0]
    reads, makes = ([((),) * len(o.shape) for o in side] for side in (signature.inputs, signature.results))
    return place(bound, grid, 0, {}, reads, makes)


def _begins(line: str, start: str) -> bool:
    return line.startswith(f"{start} ")


def _said(text: ProgramText, number: int, line: str, rest: str) -> _Said:
    match = _ROW.fullmatch(rest)
    roles = roles_of((match[3] or "") if match else "")
    if match is None or roles is None:
        raise text.refused(
            number, f"cannot read {shown(line, 300)}", "behind operands way=1, a part, {N=a H=(b,c)}, : and types"
        )
    if not is_one_each([axes for _, axes in roles], text.grid.names):
        raise text.refused(number, f"an axis has one role, axes are {', '.join(text.grid.names)}: {line!r}")
    return _Said(number, int(match[1] or 0), roles, [match[2]] if match[2] else [])


def _gradients(text: ProgramText, rows: Sequence[Bound]) -> dict[tuple[int, str], _Said]:
    """Gradients with rows of their own, by row and operand."""
    known = {f"{_label(b)}.d{name}": (i, name) for i, b in enumerate(rows) for name in b.operation.gradients}
    found: dict[tuple[int, str], _Said] = {}
    for number, line in _later(text):
        if (match := _GRADIENT.fullmatch(line)) is None:
            continue
        of = known.get(match[1])
        operation = rows[of[0]].operation.gradients[of[1]].operation.name if of else ""
        if of is None or operation != match[2]:
            hint = f"%{match[1]} = {operation} gradient" if of else "without it local code's own is taken"
            raise text.refused(number, f"no gradient of a row of {text.name}: {line!r}", hint)
        said = _said(text, number, line, match[3])
        found.setdefault(of, said)
        if found[of] is not said:
            found[of].parts.extend(said.parts)
    return found


def _later(text: ProgramText) -> Iterator[Numbered]:
    """Lines of steps of backward, for inputs' gradients too, and of what is never asked for."""
    yield from (one for name, steps in text.sections.items() if name != FORWARD for one in steps)


def refuse_forms(text: ProgramText) -> None:
    """Raises InputError: a step has a form (as=rim, as=parts) that only a GPU's kernels take."""
    for number, line in text.lines:
        if match := _FORM.fullmatch(line):
            fact = f"as={match[2]} is for a GPU's kernels, ATen's convolutions take tensors: {line!r}"
            raise text.refused(number, fact, f"the line without as={match[2]}; or --target cuda:sm_90")


# ---------------------------------------------------------------- in flight
def in_flight(text: ProgramText, program: Program) -> Program:
    """The program with what the text starts early, in pieces and in buckets. Printed, it is the text.

    Raises:
        InputError: with the first line that is wrong, or that doesn't follow.
    """
    started = {
        match[1]: number
        for steps in text.sections.values()
        for number, line in steps
        if (match := _STARTED.fullmatch(line))
    }
    moved = {line[1:].partition(" = ")[0].removesuffix(".1") for _, line in _later(text)}
    bounds = [row.bound for row in program.rows]
    wrong: list[_Wrong] = []
    (said, _), own = _rows(text, bounds), _gradients(text, bounds)
    ahead = may_go_ahead(program)
    rows: list[PlacedRow] = []
    for i, row in enumerate(program.rows):
        base, names = label(row), row.signature.inputs
        derived: list[tuple[int, PlacedRow]] = []
        for k, one in row.derived:
            of = own[i, names[k].name]
            pieces = any(p in ("interior", "boundary") for p in of.parts)
            name = f"{base}.d{names[k].name}"
            derived.append((k, _flying(wrong, name, one, program.grid, of, started, pieces)))
        held = (f"{base}.d{names[k].name}.{dict(derived)[k].signature.inputs[j].name}" for k, j in could_hold(row))
        row = replace(row, derived=tuple(derived), holds=any(step not in moved for step in held))
        early = ahead.get(i, 0) if names and f"{base}.{names[0].name}" in started else 0
        pieces = not early or any(p in ("interior", "boundary") for p in said[i].parts)
        row = _flying(wrong, base, row, program.grid, said[i], started, pieces)
        rows.append(row if row.early is None else replace(row, ahead=early))
    program = _with_forms(text, replace(program, rows=tuple(rows)), wrong)
    gradients, what = summed_parameters(program), "parameter's gradient"
    buckets = tuple(_buckets(text.sections[BACKWARD], _BUCKET, gradients, what, program, wrong))
    statistics, what = summed_statistics(program), "batch norm's running statistics"
    late = tuple(_buckets(text.sections[FORWARD], _STATISTICS, statistics, what, program, wrong))
    program = replace(program, buckets=buckets, forward_buckets=late)
    _refuse_faults(text, program)
    _refuse_differing(text, program, wrong)
    return program


def _flying(
    wrong: list[_Wrong], base: str, row: PlacedRow, grid: Grid, said: _Said, started: Mapping[str, int], pieces: bool
) -> PlacedRow:
    """A row, or a gradient's row, with the collectives that the text starts early.

    Args:
        wrong: the list that takes what can't be.
        pieces: whether the row has an interior and a boundary where its halo is early.
    """
    inputs, results = row.signature.inputs, row.signature.results
    own = dict(row.derived)
    chunk = next((p.split() for p in said.parts if p.startswith("chunk")), None)
    if chunk is not None:
        operands = [
            k
            for k, o in enumerate(inputs)
            if f"{base}.{o.name}:1" in started or (k not in own and f"{base}.d{o.name}:1" in started)
        ]
        result = f"{base}:1" in started or any(f"{base}.d{r.name}:1" in started for r in results)
        count = int(chunk[1].split("/")[1])
        cut = replace(row, chunks=Chunks(chunk[3], count, next(iter(operands), None), result))
        found = [f"{base} can't be cut into {count} chunks of {chunk[3]}: {fault}" for fault in chunk_faults(cut, grid)]
        wrong += [_Wrong(said.number, fact) for fact in found]
        row = row if found else cut
    early = [k for k, o in enumerate(inputs) if f"{base}.{o.name}" in started]
    if not early:
        return row
    k = early[0]
    name = f"{base}.{inputs[k].name}"
    found = ["it is in chunks"] if row.chunks is not None else [*early_faults(row, k)]
    if not found and pieces and not (interior_rows(row, k, grid) > 0).all():
        found = ["some rank has no interior"]
    wrong += [_Wrong(started[name], f"%{name} can't be started early: {fault}") for fault in found]
    return row if found else replace(row, early=k, split=pieces)


def _with_forms(text: ProgramText, program: Program, wrong: list[_Wrong]) -> Program:
    """The program with the forms that the text gives; the line of an operand or of its gradient gives both theirs."""
    forms: dict[str, tuple[int, Form]] = {}
    for number, line in text.lines:
        if match := _FORM.fullmatch(line):
            forms[match[1]] = number, "rim" if match[2] == "rim" else "parts"
    flow = (*program.forward(), *program.backward(of_inputs=True), *never_asked(program))
    by_chunks = [m for start in flow if isinstance(start, Start) and start.chunk == 1 for m in start.moved]
    rows = [*program.rows]
    for m in (m for m in (*flow, *by_chunks) if isinstance(m, Moved) and m.step in forms):
        (number, form), (*of, side), k, row = forms[m.step], m.chain[0].split(), m.chain[1], rows[m.row]
        one, made = dict(row.derived)[int(of[1])] if of else row, side in ("store", "given")
        found = part_faults(one, k, program.grid, made=made) if form == "parts" else rim_faults(one, k, program.grid)
        faults = ["it is no operand's"] if form == "rim" and side != "fetch" else [*found]
        faults += ["gradients of its row share what they fetch"] * shares(program.rows[m.row])
        how = "in parts" if form == "parts" else "as a rim"
        wrong += [_Wrong(number, f"%{m.step} can't come {how}: {fault}") for fault in faults]
        if not faults:
            one = ended(one, k, form, made=made)
            derived = tuple((n, one if of and n == int(of[1]) else other) for n, other in row.derived)
            rows[m.row] = replace(row, derived=derived) if of else one
    return replace(program, rows=tuple(rows))


def _buckets(
    lines: Sequence[Numbered],
    pattern: re.Pattern[str],
    summed: Sequence[Moved],
    what_of: str,
    program: Program,
    wrong: list[_Wrong],
) -> Iterator[Bucket]:
    """The text's buckets of these all-reduces, of a `what_of` each; `wrong` takes whatever else stands in a bucket."""
    sums = {m.step: m for m in summed}
    for number, line in lines:
        if (match := pattern.fullmatch(line)) is None:
            continue
        name, over = match[1], axes_of(match[3])
        steps = [sums.get(step, step) for step in match[2].replace("%", "").split(", ")]
        there = [m for m in steps if isinstance(m, Moved) and m.conversion.over == over]
        for step in steps:
            if step not in there:
                what = f"%{step}" if isinstance(step, str) else f"%{step.step}"
                fact = f"%{name}: {what} is no all_reduce over {match[3]} of a {what_of}"
                wrong.append(_Wrong(number, fact))
        if there:
            yield Bucket(name, over, program.dtype_of(there[0]), tuple(m.step for m in there))


def _refuse_faults(text: ProgramText, program: Program) -> None:
    """Raises InputError: the verifier finds a fault; on the line of the row or the bucket that has it."""
    for fault in faults(program):
        of = re.split(r"[:. ]", fault)[0]
        rows = [("rows", i) for i, row in enumerate(program.rows) if label(row) == of]
        lines = (*text.sections[FORWARD], *text.sections[BACKWARD])
        buckets = [n for n, line in lines if line.startswith(f"%{of} = start all_reduce")]
        number = text.numbers[rows[0]] if rows else next(iter(buckets), text.numbers[()])
        raise text.refused(number, f"the program is wrong: {fault}")


def _refuse_differing(text: ProgramText, program: Program, wrong: Sequence[_Wrong]) -> None:
    """Raises InputError: a line does not follow from what the text decides, or one that follows is missing.

    Args:
        wrong: what the text says that can't be, so that the program lacks it.
    """
    given = [line for _, line in text.lines]
    derived = [line for raw in show(program).splitlines() if (line := _plain(raw))]
    if given == derived and not wrong:
        return
    notes: list[Note] = []
    first = wrong[0] if wrong else None
    for kind, a, b, c, d in SequenceMatcher(None, given, derived, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        number = text.lines[min(a, len(given) - 1)][0]
        if first is None:
            fact = f"{given[a]!r} does not follow" if a < b else f"{derived[c]!r} is missing here"
            first = _Wrong(number, fact)
        notes += [Note(f"{n} -", line) for n, line in text.lines[a:b]]
        notes += [Note(f"{number} +", line) for line in derived[c:d]]
    assert first is not None
    more = (Note("more", f"lines that differ: {len(notes) - SHOWN}"),) if len(notes) > SHOWN else ()
    hint = "the lines with +, which follow from storage, ways, roles and pieces as they stand; or edit these"
    raise text.refused(first.number, first.fact, hint, (*notes[:SHOWN], *more))
