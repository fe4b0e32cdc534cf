"""Picture: the mesh at work on one block of a GEMM, as the emulation message by message went.

Above, the eight steps: who sends on which bus, with the messages that the run counted. Below, every CPE over time: what
it waits for, whenever all have run until they stalled. At the right, the registers of one CPE: a block of C, the
vectors of A and the elements of B that a k brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from convgen.errors import InputError
from convgen.pictures.canvas import GREY, INK, PALE, Canvas
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.program import gemm_program
from convgen.sw26010.machine.core_group import CPES, LANES, MESH, REGISTER_COLUMNS, REGISTER_ROWS
from convgen.sw26010.machine.emulator import Cpe, MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.plot import BOTH, COLUMN_BUS, ROW_BUS
from convgen.sw26010.machine.printing import load_program

MOST_FLOPS = 2**20  # of a run that can be drawn: more would be a line of dust
WAITS = {"getr": ROW_BUS, "getc": COLUMN_BUS, "putr": "#225588", "putc": "#aa4422", "": PALE}
NAMES = {"getr": "waits for A", "getc": "waits for B", "putr": "A's receivers are full",
         "putc": "B's receivers are full", "": "has ended"}  # fmt: skip


@dataclass(slots=True)
class Watched:
    """A run: of every moment what each CPE waits for; and in the end what each has sent on both buses."""

    waits: list[list[str]] = field(default_factory=list[list[str]])
    worked: list[list[bool]] = field(default_factory=list[list[bool]])
    sent: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _before: list[int] = field(default_factory=lambda: [0] * CPES)

    def __call__(self, cpes: Sequence[Cpe]) -> None:
        self.waits.append([cpe.waiting for cpe in cpes])
        self.worked.append([cpe.progress > before for cpe, before in zip(cpes, self._before, strict=True)])
        self._before = [cpe.progress for cpe in cpes]
        self.sent = [(cpe.sent["r"], cpe.sent["c"]) for cpe in cpes]


def watch_gemm(plan: GemmPlan) -> Watched:
    """Run it message by message.

    Raises:
        InputError: too large to draw, or more than one block, whose steps would lie on top of each other.
    """
    if plan.issued_flops > MOST_FLOPS or plan.blocks != (1, 1, 1):
        fact = (
            f"a strip is of one block of at most {MOST_FLOPS:,} flops; this is {plan.blocks} of {plan.issued_flops:,}"
        )
        raise InputError(fact, hint="gemm 32 32 32 --blocks 32,32,32")
    watched = Watched()
    rng = np.random.default_rng(0)
    shapes = {"A": (plan.k, plan.m), "B": (plan.n, plan.k), "C": (plan.n, plan.m)}
    operands = [Dram(name, rng.standard_normal(shape).astype(plan.dtype)) for name, shape in shapes.items()]
    MessageMesh(watch=watched).run(load_program(gemm_program(plan, messages=True)), *operands)
    return watched


def strip_page(plan: GemmPlan) -> Canvas:
    """The eight steps, every CPE over time, and the registers of one."""
    watched = watch_gemm(plan)
    canvas = Canvas(13.0, 8.4)
    ml, nl, kl = plan.tile
    title = f"GEMM {plan.m} x {plan.n} x {plan.k} on the mesh, message by message"
    canvas.text(0.3, 0.25, title, 11, bold=True)
    note = f"a tile of {ml} x {nl} x {kl} in each CPE; numbers: messages of 4 doubles that the run counted"
    canvas.text(0.3, 0.5, note, 8, colour=GREY)
    for t in range(MESH):
        _step(canvas, 0.3 + 1.58 * t, 1.0, 1.36, t, watched)
    _over_time(canvas, 0.9, 2.95, 8.2, 4.6, watched)
    _registers(canvas, 9.7, 2.95, plan)
    return canvas


def _step(canvas: Canvas, left: float, top: float, size: float, t: int, watched: Watched) -> None:
    """C(i, j) += A(i, t) B(t, j): column t sends along its rows, row t along its columns."""
    cell = size / MESH
    a, b = watched.sent[t][0], watched.sent[t * MESH][1]
    canvas.text(left, top - 0.14, f"t={t}: {a} of A, {b} of B", 7)
    for i in range(MESH):
        middle = (i + 0.5) * cell
        canvas.line(left, top + middle, left + size, top + middle, colour=ROW_BUS, line=0.8)
        canvas.line(left + middle, top, left + middle, top + size, colour=COLUMN_BUS, line=0.8)
    for i in range(MESH):
        for j in range(MESH):
            sends = (j == t and watched.sent[i * MESH + j][0] > 0, i == t and watched.sent[i * MESH + j][1] > 0)
            fill = {(True, True): BOTH, (True, False): ROW_BUS, (False, True): COLUMN_BUS}.get(sends, "#ffffff")
            canvas.rect(left + (j + 0.2) * cell, top + (i + 0.2) * cell, 0.6 * cell, 0.6 * cell, fill=fill, edge=GREY)


def _over_time(canvas: Canvas, left: float, top: float, width: float, height: float, watched: Watched) -> None:
    """A line a CPE, a column a moment; what it waits for, pale where it had done nothing since the last."""
    moments, line = len(watched.waits), height / CPES
    step = width / max(1, moments)
    canvas.text(left, top - 0.16, f"every CPE over time: {moments} moments at which all of them wait", 9, bold=True)
    for at, (waits, worked) in enumerate(zip(watched.waits, watched.worked, strict=True)):
        for cpe in range(CPES):
            shown = line * (0.86 if worked[cpe] else 0.3)
            y = top + cpe * line + (line - shown) / 2
            canvas.rect(left + at * step, y, step, shown, fill=WAITS[waits[cpe]])
    for i in range(MESH):
        canvas.text(left - 0.08, top + (i + 0.5) * MESH * line, f"row {i}", 7, align="right", colour=GREY)
        canvas.line(left, top + i * MESH * line, left + width, top + i * MESH * line, colour=PALE, line=0.5)
    canvas.rect(left, top, width, height, edge=GREY)
    for place, (wait, name) in enumerate(NAMES.items()):
        x = left + place * width / len(NAMES)
        canvas.rect(x, top + height + 0.14, 0.14, 0.14, fill=WAITS[wait], edge=GREY)
        canvas.text(x + 0.2, top + height + 0.21, name, 7)
    said = "thick: it sent or received since the moment before; thin: it only waited"
    canvas.text(left, top + height + 0.44, said, 7, colour=GREY)


def _registers(canvas: Canvas, left: float, top: float, plan: GemmPlan) -> None:
    """The block of C that a CPE holds in registers while k runs."""
    ml, nl, kl = plan.tile
    vectors, columns = min(REGISTER_ROWS, ml) // LANES, min(REGISTER_COLUMNS, nl)
    canvas.text(left, top - 0.16, "registers of CPE(i, j), step t", 9, bold=True)
    size, x, y = 0.5, left + 0.75, top + 0.75
    for v in range(vectors):
        at = y + v * size
        canvas.rect(left, at, 0.62, size * 0.86, fill=ROW_BUS, edge=INK, line=0.4)
        canvas.text(left + 0.31, at + size * 0.43, f"A {LANES * v}..{LANES * v + 3}", 6, align="center")
    for q in range(columns):
        at = x + q * size
        canvas.rect(at, top + 0.2, size * 0.86, 0.42, fill=COLUMN_BUS, edge=INK, line=0.4)
        canvas.text(at + size * 0.43, top + 0.41, f"B {q}", 6, align="center")
    for v in range(vectors):
        for q in range(columns):
            canvas.rect(x + q * size, y + v * size, size * 0.86, size * 0.86, fill="#ffffff", edge=INK, line=0.4)
            canvas.text(x + (q + 0.43) * size, y + (v + 0.43) * size, "C", 7, align="center")
    blocks = -(-ml // REGISTER_ROWS) * -(-nl // REGISTER_COLUMNS)
    lines = (
        f"{vectors} vector{'s' * (vectors > 1)} of 4 by {columns} columns of C, {vectors * columns} vmad a k",
        "A(i, t): from LDM where j = t, else from the row bus",
        "B(t, j): from LDM where i = t, else from the column bus",
        f"{blocks} such block{'s' * (blocks > 1)} a tile, {kl} k a step;",
        "what is received is never stored in LDM",
    )
    for place, text in enumerate(lines):
        canvas.text(left, y + vectors * size + 0.3 + 0.22 * place, text, 7)
