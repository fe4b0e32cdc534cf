"""The best layout of a network on a grid: an exact minimum over the candidates of its values and rows.

Variables are how values are stored, tables are rows; eliminated one after the other (plan/exact/eliminate). The
answer is a program, and its price is the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from convgen.algebra.blocks import most_of
from convgen.algebra.grid import Grid
from convgen.cost.every_output import outputs_of_layers
from convgen.cost.machine import Machine
from convgen.cost.network import element_bytes
from convgen.cost.rows import Price, price_on, program_cost
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.plan.exact.bounded import DoesNotFit, solve
from convgen.plan.exact.eliminate import Elimination, Factor, Problem
from convgen.plan.exact.longest_path import Vertex, longest_paths
from convgen.plan.given import given_rows, place_given
from convgen.plan.parts import ANY, Parts, Room
from convgen.plan.program.asking import answered
from convgen.plan.program.candidates import (
    Way,
    made,
    named_alike,
    parameter_stored,
    read_by,
    suggested,
    votes,
    without_idle,
)
from convgen.plan.program.products import MOST, best_ways
from convgen.plan.program.tables import Answer, Choice, Option, Question, Table, choices, fastest, placed
from convgen.program.biases import biased, products_of_biases
from convgen.program.network import Program, Value, asked, differentiable, smooth
from convgen.program.rows import PlacedRow, Stored, kept, serves
from convgen.program.types import RowTypes, types_of_rows, values_under
from convgen.spec.graph import FLOATS
from convgen.spec.text import gib

GIVEN = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class Effort:
    """How much is looked at: ways of a product and of other rows, storages of a value and of a parameter; and whether
    gradients may be rows with roles of their own where the vjp does."""

    ways: int = MOST
    others: int = 12
    stored: int = 7
    parameters: int = 6
    apart: bool = True


THOROUGH = Effort()
LIMIT = 1 << 62  # sums of tables stay below it, so that they and their differences fit into int64
FLAT = 2  # dimensions of values that may always be copies, too: of features and statistics, which are small


@dataclass(frozen=True)
class Found:
    """The best program, its price in picoseconds, what a rank keeps in memory, and how large the search was.

    Attributes:
        heuristic: picoseconds of the plan that the longest paths give, one after the other ([SP] V-C).
        runner_up: by row, the best roles of a product but those that it has, and how much more the best plan with them
            takes, in picoseconds; none where memory decided on the plan.
    """

    program: Program
    time_ps: int
    memory_bytes: int
    variables: int
    cells: int
    runner_up: Mapping[int, tuple[Way, int]]
    heuristic: Callable[[], int] | None = None


@dataclass
class Tables:
    """The problem that is minimised.

    Attributes:
        of: by row its choices, the fastest first.
        which: by row the variable that says which of them, where there are several.
        constant, held: picoseconds and bytes of what no variable decides.
    """

    problem: Problem = field(default_factory=lambda: Problem((), ()))
    of: list[list[Choice]] = field(default_factory=list[list[Choice]])
    which: dict[int, int] = field(default_factory=dict[int, int])
    constant: int = 0
    held: int = 0


@dataclass
class Asked:
    """What all searches with one price have asked, and the answers."""

    questions: dict[object, Question] = field(default_factory=dict[object, Question])
    answers: dict[tuple[Question, bool], Answer] = field(default_factory=dict[tuple[Question, bool], Answer])


@lru_cache(maxsize=2)
def _asked_on(_: Price) -> Asked:
    return Asked()


class TooLittleMemory(InputError):
    """No layout that is searched fits the memory. `convgen plan` says what would do: refusal.py.

    Attributes:
        least: bytes, of all layouts by the search's own count; or of those found, counted row by row, of which
            `nearest` is that with least.
    """

    def __init__(self, name: str, grid: Grid, least: int, given: int, nearest: Program | None = None) -> None:
        self.least, self.given, self.grid, self.nearest = least, given, grid, nearest
        found = ", of the layouts found" if nearest is not None else ""
        fact = f"{name} on {grid} needs at least {gib(least)} GiB a rank{found}, {gib(given)} are given"
        super().__init__(fact, hint="more ranks, a smaller batch, or more memory")


class Search:
    """A network on a grid of a machine's ranks."""

    def __init__(
        self,
        parts: Parts,
        grid: Grid,
        machine: Machine,
        dtype: str,
        effort: Effort = THOROUGH,
        room: Room = ANY,
        price: Price | None = None,
    ) -> None:
        """
        Args:
            room: for values kept for backward, parameters, gradients and optimizer's states.
            price: prices of rows, instead of the machine's.
        """
        self.name, tensors, rows, updates, outputs, fixed, *_ = parts
        self.reduce_dtype, self.autocast, self.of_inputs = parts.reduce_dtype, parts.autocast, parts.of_inputs
        self.rows, self.updates, self.outputs = tuple(rows), tuple(updates), tuple(outputs)
        self.placed = given_rows(self.rows, parts.given, grid)
        self.given = {**fixed, **self.placed.stored}
        self.grid, self.effort, self.room = grid, effort, room
        self.counted = replace(room, memory_bytes=None, regather=False)
        self.bare = grid.bare
        self.price = price or price_on(self.bare, machine, dtype)
        self.tensors = {t.name: t for t in tensors}
        first: dict[str, int] = {}
        readers: dict[str, int] = {}
        for i, bound in enumerate(self.rows):
            for v in bound.reads:
                first.setdefault(v, i)
                readers[v] = readers.get(v, 0) + 1
        # A parameter that one row reads is stored as that row wants it; others are copies.
        free = {n: t.kind for n, t in self.tensors.items() if n not in self.placed.stored}
        self.own = {n for n, kind in free.items() if kind == "parameter" and readers.get(n) == 1}
        self.fixed = {n for n, kind in free.items() if kind in GIVEN and n not in self.own}
        # A buffer lies as what it becomes does: one variable, which is the latter's.
        both = [(b, v) for b, v in self.updates if not {b, v} & self.given.keys() and self.tensors[v].kind == "made"]
        self.becomes = {b: v for b, v in both if readers.get(b) == 1}
        self.fixed |= {v for b, v in self.updates if b not in self.becomes}
        self.asked = _asked_on(self.price) if price is None else Asked()
        kinds = {n: (t.kind, t.dtype in FLOATS) for n, t in self.tensors.items()}
        own = differentiable(kinds, self.rows, of_inputs=parts.of_inputs)
        self.wanted = own & smooth(kinds, self.rows, [v for _, v in self.outputs])
        self.types, self.row_types = self._typed()
        read_behind = {v for _, v in (*self.outputs, *self.updates)}
        own_kinds = {n: t.kind for n, t in self.tensors.items()}
        self.biased = biased(self.rows, products_of_biases(self.rows, own_kinds, read_behind))
        self._bytes: dict[object, Table] = {}
        self.shown = outputs_of_layers(self.rows, self.outputs)
        self.domains = self._domains()
        self.variables = [n for n, d in self.domains.items() if len(d) > 1 and n not in self.becomes]
        self.number = {n: i for i, n in enumerate(self.variables)}
        self.number |= {b: self.number[v] for b, v in self.becomes.items() if v in self.number}

    def _typed(self) -> tuple[Mapping[str, str], tuple[RowTypes, ...]]:
        """Types of values, and of what rows move."""
        own = {n: t.dtype for n, t in self.tensors.items()}
        values = values_under(self.autocast, own, ((bound, 0) for bound in self.rows))
        summed = {n: self.reduce_dtype or t.dtype for n, t in self.tensors.items() if t.kind == "parameter"}
        rows, outputs = [(bound, None) for bound in self.rows], [v for _, v in self.outputs]
        return values, types_of_rows(self.autocast, values, rows, outputs, summed, self.wanted)[0]

    # ---------------------------------------------------------------- candidates
    def _domains(self) -> dict[str, tuple[Stored, ...]]:
        values = {n: t.shape for n, t in self.tensors.items() if n not in self.own and n not in self.fixed}
        self.ways: dict[int, tuple[Way, ...]] = {}
        for i, bound in enumerate(self.rows):
            if said := self.placed.ways.get((i, "forward")):
                self.ways[i] = tuple((way, tuple(roles.items())) for way, roles in said)
            elif bound.operation.is_product:
                types = self.row_types[i]
                parameters = tuple(t if v in self.own else "" for v, t in zip(bound.reads, types.back, strict=True))
                self.ways[i] = best_ways(bound.operation, self.price.of(types.local), parameters, self.effort.ways)
        liked: dict[tuple[int, ...], tuple[Stored, ...]] = {}
        for shape, counted in votes(self.ways, self.rows, values).items():
            best = [s for s, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
            fitting = [s for s in best if without_idle(s, shape, self.bare)]
            more = (((),) * len(shape),) if len(shape) <= FLAT else ()
            liked[shape] = tuple(dict.fromkeys([*(fitting or best)[: self.effort.stored], *more]))
        domains = {n: liked[shape] for n, shape in values.items() if shape in liked}
        for n in self.fixed:
            domains[n] = (((),) * len(self.tensors[n].shape),)
        given = {n: stored for n, stored in self.given.items() if n in values}
        domains |= {n: tuple(dict.fromkeys((stored, *domains.get(n, ())))) for n, stored in given.items()}
        for bound in self.rows:
            self._follow(bound, domains)
        for buffer, value in self.becomes.items():
            copies = ((),) * len(values[value])
            domains[buffer] = domains[value] = tuple(dict.fromkeys((copies, *domains.get(value, ()))))
        domains |= {n: (stored,) for n, stored in given.items()}  # what follows may be stored as if it were not given
        for n, shape in values.items():
            domains.setdefault(n, (((),) * len(shape),))
        return domains

    def _follow(self, bound: Bound, domains: dict[str, tuple[Stored, ...]]) -> None:
        """Results that no product touches are stored as the row makes them from its operands."""
        missing = [v for v in bound.makes if v and v not in domains]
        if not missing:
            return
        found: dict[str, dict[Stored, None]] = {v: {} for v in missing}
        for k, value in enumerate(bound.reads):
            for stored in domains.get(value, ()):
                reads = [stored if j == k else None for j in range(len(bound.reads))]
                for way, roles in suggested(bound.operation, reads, [None] * len(bound.makes)):
                    signature = bound.operation.signatures[way]
                    for result, v in zip(signature.results, bound.makes, strict=True):
                        if v in found:
                            for one in made(result, signature, dict(roles)):
                                found[v][one] = None
        for v, options in found.items():
            shape = self.tensors[v].shape
            fitting = [s for s in options if without_idle(s, shape, self.bare)]
            copies = ((),) * len(shape)
            more = (copies,) if len(shape) <= FLAT else ()
            domains[v] = tuple(dict.fromkeys((*fitting[: self.effort.stored], *more))) or (copies,)

    def question(self, i: int) -> Question:
        """What is asked of a row: one object for all rows that are alike, of other searches too."""
        bound = self.rows[i]
        operands = tuple(None if v in self.own else self.domains[v] for v in bound.reads)
        signature = bound.operation.signatures[0]
        results = tuple(
            self.domains[v] if v else (((),) * len(r.shape),)
            for v, r in zip(bound.makes, signature.results, strict=True)
        )
        wanted = tuple(asked(bound, self.wanted))
        learnt = tuple(self.tensors[v].kind == "parameter" for v in bound.reads)
        types, bias = self.row_types[i], self.biased[i]
        key = bound.operation, operands, results, wanted, learnt, types, bias, self.counted, self.effort
        if (found := self.asked.questions.get(key)) is None:
            ways = self.ways.get(i) or self._ways(bound.operation, operands, results, self.effort.others)
            gradients = tuple(self._gradients(bound.operation, operands, results, ways))
            options = tuple(o for way in ways for o in self._options(bound.operation, operands, way, gradients))
            rest = wanted, learnt, types, self.counted, bias
            found = Question(bound.operation, operands, results, options, gradients, *rest)
            self.asked.questions[key] = found
        return found

    def _gradients(
        self,
        operation: Operation,
        operands: Sequence[tuple[Stored, ...] | None],
        results: Sequence[tuple[Stored, ...]],
        ways: Sequence[Way],
    ) -> Iterator[tuple[str, tuple[Way, ...]]]:
        """By operand, candidate ways of its gradient's row."""
        signature = operation.signatures[0]
        if not self.effort.apart and signature.reduction == "sum":
            return
        made = dict(zip((r.name for r in signature.results), results, strict=True))
        sources = dict(zip((o.name for o in signature.inputs), operands, strict=True))
        sources |= {f"d{name}": stored for name, stored in made.items()}
        sources |= {name: stored for name, stored in made.items() if name not in sources}
        for name, one in operation.gradients.items():
            like = named_alike(one.operation, ways, self.bare) if one.operation.is_product else ()
            reads, makes = [sources[r] for r in one.reads], [sources[name] or ()]
            others = self._ways(one.operation, reads, makes, self.effort.others)
            yield name, tuple(dict.fromkeys([*like, *others]))

    def _options(
        self,
        operation: Operation,
        operands: Sequence[tuple[Stored, ...] | None],
        way: Way,
        gradients: Sequence[tuple[str, tuple[Way, ...]]],
    ) -> Iterator[Option]:
        """A way with its parameters as it wants them, and with the first of them stored otherwise."""
        signature, roles = operation.signatures[way[0]], dict(way[1])
        own = [k for k, candidates in enumerate(operands) if candidates is None]
        as_wanted = {k: kept(signature.inputs[k], signature, roles) for k in own}
        if not own:
            yield Option(way)
            return
        first = signature.inputs[own[0]]
        others = (s for name, ways in gradients for s in read_by(operation.gradients[name], name, first.name, ways))
        stored = dict.fromkeys(parameter_stored(first, signature, roles, others, self.bare))
        for one in list(stored)[: self.effort.parameters]:
            yield Option(way, tuple((as_wanted | {own[0]: one}).items()))

    def _ways(
        self,
        operation: object,
        operands: Sequence[tuple[Stored, ...] | None],
        results: Sequence[tuple[Stored, ...]],
        most: int,
    ) -> tuple[Way, ...]:
        """Candidate ways: those that the storage of one operand or result suggests, each alone; and no roles at all."""
        row: Any = operation
        found: dict[Way, None] = {}
        for k, options in enumerate(operands):
            for stored in options or ():
                reads = [stored if j == k else None for j in range(len(operands))]
                found |= dict.fromkeys(suggested(row, reads, [None] * len(results)))
        for k, options in enumerate(results):
            for stored in options:
                makes = [stored if j == k else None for j in range(len(results))]
                found |= dict.fromkeys(suggested(row, [None] * len(operands), makes))
        usable = [(way, roles) for way, roles in found if serves(row.signatures[way], dict(roles), self.bare)]
        whole = [(w, ()) for w, s in enumerate(row.signatures) if s.reduction != "max"][:1]
        return (*[w for w in usable if w not in whole][:most], *whole)

    # ---------------------------------------------------------------- the search
    def run(self, *, compared: bool = True) -> Found:
        """The best program.

        Args:
            compared: whether runners-up and the heuristic are found too.
        Raises:
            TooLittleMemory: nothing fits.
        """
        tables, values, free = self._best()
        compared = compared and free
        cost, memory = tables.problem.total(values)
        chosen = {n: values[self.number[n]] if n in self.number else 0 for n in self.domains}
        taken = [one[values[tables.which[i]] if i in tables.which else 0] for i, one in enumerate(tables.of)]
        rows = [
            placed(choice, self._cell(i, chosen), bound, self.price)
            for i, (bound, choice) in enumerate(zip(self.rows, taken, strict=True))
        ]
        rows = [place_given(i, row, self.bare, self.placed) for i, row in enumerate(rows)]
        stored = {n: d[chosen[n]] for n, d in self.domains.items()}
        for row in rows:
            stored |= {v: s for v, s in zip(row.bound.reads, row.reads, strict=True) if v in self.own}
        made_values: dict[str, Value] = {}
        for n, t in self.tensors.items():
            made_values[n] = Value(n, t.shape, t.dtype, stored.get(n, ((),) * len(t.shape)), t.kind)  # type: ignore[arg-type]
        program = Program(
            name=self.name,
            grid=self.grid,
            values=made_values,
            rows=tuple(rows),
            updates=self.updates,
            outputs=self.outputs,
            reduce_dtype=self.reduce_dtype,
            autocast=self.autocast,
        )
        problem, constant = tables.problem, tables.constant
        second = self._runners_up(problem, taken, rows, cost) if compared else {}
        cells = sum(f.cost.size for f in problem.factors)

        def heuristic() -> int:
            return constant + problem.total(longest_paths(problem, self._vertices(taken)))[0]

        by_paths = heuristic if compared else None
        takes = constant + cost
        if self.placed.ways or self.autocast:  # tables know nothing of gradients' ways that are given, nor their types
            machine, dtype = self.price.machine, self.price.dtype
            takes = program_cost(program, machine, dtype, of_inputs=self.of_inputs).time_ps
        return Found(program, takes, tables.held + memory, len(problem.sizes), cells, second, by_paths)

    def time_ps(self) -> int:
        """Picoseconds of the best program.

        Raises:
            TooLittleMemory: nothing fits.
        """
        tables, values, _ = self._best()
        return tables.constant + tables.problem.total(values)[0]

    def _best(self) -> tuple[Tables, tuple[int, ...], bool]:
        """The best storage of every variable, and whether it is the best of all, whatever memory that takes."""
        tables, most = self._tables(short=False), self.room.memory_bytes
        problem = tables.problem
        values = Elimination(problem).values if problem.sizes else ()
        if most is None or tables.held + problem.total(values)[1] <= most:
            return tables, values, True
        tables = self._tables(short=True)
        try:
            if not tables.problem.sizes:
                raise DoesNotFit((), 0)
            return tables, solve(tables.problem, most - tables.held).values, False
        except DoesNotFit as error:
            raise TooLittleMemory(self.name, self.grid, error.memory + tables.held, most) from None

    def _tables(self, *, short: bool) -> Tables:
        """
        Args:
            short: whether memory is short: then products have choices, too, that take less of it.
        """
        found = Tables()
        factors: list[Factor] = []
        more: list[int] = []  # sizes of variables that say which choice of a row it is
        choices_of = cache(partial(self._choices, short=short))
        for i in range(len(self.rows)):
            found.of.append(choices_of(self.question(i)))
            tables = [self._factor(i, one.table) for one in found.of[-1]]
            scope, takes = tables[0][0], [self._factor(i, one.memory)[1] for one in found.of[-1]]
            if len(tables) > 1:
                found.which[i] = len(self.variables) + len(more)
                more.append(len(tables))
                scope = (*scope, found.which[i])
                factors.append(Factor(scope, np.stack([t for _, t in tables], -1), np.stack(takes, -1)))
            elif scope:
                factors.append(Factor(scope, tables[0][1], takes[0]))
            else:
                found.constant += int(tables[0][1])
                found.held += int(takes[0])
        for n, domain in self.domains.items():
            t = self.tensors[n]
            bytes_of = self._kept_bytes(t.shape, self.types[n], t.kind == "parameter", self._times(n), domain)
            if n in self.number:
                factors.append(Factor((self.number[n],), np.zeros_like(bytes_of), bytes_of))
            else:
                found.held += int(bytes_of[0])
        self._check_sums(factors)
        found.problem = Problem((*(len(self.domains[n]) for n in self.variables), *more), tuple(factors))
        return found

    def _check_sums(self, factors: Sequence[Factor]) -> None:
        """Raises InputError: picoseconds or bytes that sums in 64 bits would not hold."""
        for unit, tables in (
            ("picoseconds", [f.cost for f in factors]),
            ("bytes", [f.memory for f in factors if f.memory is not None]),
        ):
            if sum(int(table.max()) for table in tables) >= LIMIT or any(int(table.min()) < 0 for table in tables):
                fact = f"a step of {self.name} may take 2**62 {unit} or more"
                raise InputError(fact, ("input",), hint="smaller extents, or fewer samples (--batch)")

    def _choices(self, question: Question, short: bool) -> list[Choice]:
        """Choices of a row: each has an option for every storage of its values."""
        answer = self._answer(question)
        if not short or not question.operation.is_product:
            return [fastest(answer)]
        answers = [answer, self._answer(question, again=True)] if self.room.regather else [answer]
        return choices(answers)

    def _answer(self, question: Question, *, again: bool = False) -> Answer:
        if (known := self.asked.answers.get((question, again))) is None:
            known = answered(replace(question, again=True) if again else question, self.price)
            self.asked.answers[question, again] = known
        return known

    def _vertices(self, of: Sequence[Choice]) -> list[Vertex]:
        """Rows, as the heuristic lays them out."""
        maker = {v: i for i, bound in enumerate(self.rows) for v in bound.makes if v}
        found: list[Vertex] = []
        for i, (bound, choice) in enumerate(zip(self.rows, of, strict=True)):
            variables = frozenset(self.number[v] for v in self.places(i) if v in self.number)
            before = tuple(dict.fromkeys(maker[v] for v in bound.reads if v in maker))
            found.append(Vertex(before, variables, int(choice.table.min())))
        return found

    def _runners_up(
        self, problem: Problem, of: Sequence[Choice], rows: Sequence[PlacedRow], least: int
    ) -> dict[int, tuple[Way, int]]:
        beliefs = dict(Elimination(problem).beliefs()) if problem.sizes else {}
        found: dict[int, tuple[Way, int]] = {}
        for i, row in enumerate(rows):
            ways = of[i].answer.question.ways
            others = [w for w, (_, roles) in enumerate(ways) if roles != row.roles]
            if i not in self.ways or not others:
                continue
            scope, table = self._factor(i, of[i].table)
            tables = np.stack([self._factor(i, of[i].answer.by_way[w])[1] for w in others])
            if scope:
                # The variable of the table that is eliminated first has all others of it in its bucket.
                over, belief = next(beliefs[v] for v in scope if {*scope} <= {*beliefs[v][0]})
                tables = tables + (belief.min(axis=tuple(k for k, v in enumerate(over) if v not in scope)) - table)
            else:
                tables = tables + (least - table)
            totals = tables.reshape(len(others), -1).min(axis=1)
            found[i] = ways[others[int(totals.argmin())]], int(totals.min()) - least
        return found

    def _kept_bytes(
        self, shape: tuple[int, ...], dtype: str, learnt: bool, times: int, domain: tuple[Stored, ...]
    ) -> Table:
        """Bytes of a value on the fullest rank until backward has read it, for each storage."""
        key = shape, dtype, learnt, times, domain
        if (known := self._bytes.get(key)) is None:
            each = times * (self.room.parameter_bytes(dtype) if learnt else element_bytes(dtype))
            parts = (
                [most_of(n, [self.bare.sizes[a] for a in axes]) for n, axes in zip(shape, s, strict=True)]
                for s in domain
            )
            known = self._bytes[key] = np.array([prod(one) * each for one in parts], dtype=np.int64)
        return known

    def _times(self, name: str) -> int:
        """Copies of a value's bytes that a rank keeps: none of a value that nobody differentiates, which is let go."""
        kind = self.tensors[name].kind
        if kind == "input" or kind in GIVEN:
            return 1
        if self.room.keep == "every":
            return 2 * (name in self.shown)
        return int(name in self.wanted)

    def places(self, i: int) -> list[str]:
        """Values of a row's table, in its order."""
        bound = self.rows[i]
        return [self.becomes.get(v, v) for v in bound.reads if v not in self.own] + list(bound.makes)

    def _factor(self, i: int, over: Table) -> tuple[tuple[int, ...], Any]:
        """A row's table over variables, ascending; of a value that is read twice, the diagonal."""
        names = self.places(i)
        scope = sorted({self.number[n] for n in names if n in self.number})
        letters = {n: k for k, n in enumerate(dict.fromkeys(n for n in names if n in self.number))}
        table = over[tuple(slice(None) if n in self.number else 0 for n in names)]
        axes = [letters[n] for n in names if n in self.number]
        wanted_order = [letters[self.variables[v]] for v in scope]
        return tuple(scope), np.einsum(table, axes, wanted_order)

    def _cell(self, i: int, chosen: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(chosen.get(n, 0) for n in self.places(i))
